"""Hosted services (OpenAI, DeepSeek, Anthropic, ...): they say how much was cached, not where."""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution.served import Served, Usage
from replay.backends.preset import Preset


def tiers(preset: Preset, counts: Usage, extra: dict[str, Any]) -> Served:
    """Cached tokens count as ``external``: served by a tier that the service does not name."""
    prompt, _, cached = counts
    if prompt is None or cached is None:
        return Served()
    return Served(external=cached, computed=max(0, prompt - cached), source="usage")
