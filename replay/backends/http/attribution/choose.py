"""Picks the module that reads a preset's replies."""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution import hosted, lmcache, sglang, simulated, vllm
from replay.backends.http.attribution.served import Served, Usage
from replay.backends.preset import Preset


def tiers(preset: Preset, counts: Usage, extra: dict[str, Any]) -> Served:
    """Tokens by tier of one reply.

    Args:
        preset: names engine, connector and the tiers that exist.
        counts: what the reply's usage says.
        extra: the reply's `kv_transfer_params`, `sglext` and, from an LMCache server's event bus, `lookup`.
    """
    if "replay" in extra:
        model = simulated.tiers(counts, extra)
        if model is not None:
            return model
    if preset.engine == "sglang":
        return sglang.tiers(preset, counts, extra)
    if preset.engine != "vllm":
        return hosted.tiers(preset, counts, extra)
    if preset.connector.startswith("lmcache"):
        return lmcache.tiers(preset, counts, extra)
    return vllm.tiers(preset, counts, extra)
