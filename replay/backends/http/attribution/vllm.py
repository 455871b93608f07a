"""vLLM without LMCache.

``usage.prompt_tokens_details.cached_tokens`` (with ``--enable-prompt-tokens-details``) is the sum of
GPU hits and of what a connector loaded (vLLM's ``v1/metrics/stats.py``, PrefillStats): without a
connector it is the GPU's; with one, only the sum is known. The field is null where nothing was cached
in some versions, so null beside other details means unknown, never 0.
"""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution.served import Served, Usage, total_only
from replay.backends.preset import Preset


def tiers(preset: Preset, counts: Usage, extra: dict[str, Any]) -> Served:
    """GPU tokens where no connector can have served any; else the computed tokens alone."""
    if counts.prompt is None or counts.cached is None:
        return Served()
    if preset.connector != "none":
        return total_only(counts)
    return Served(gpu=counts.cached, computed=max(0, counts.prompt - counts.cached), source="usage")
