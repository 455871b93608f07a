"""`replay serve`, the engine model over HTTP: its replies name every tier."""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution.served import Served, Usage, count
from replay.load.outcome import LOSSES, Outcome


def tiers(counts: Usage, extra: dict[str, Any]) -> Served | None:
    """Tokens by tier as the engine model says; null for replies of any other server."""
    said = extra.get("replay")
    found = said.get("tiers") if isinstance(said, dict) else None
    prompt, _, cached = counts
    if not isinstance(found, dict) or prompt is None or cached is None:
        return None
    gpu, cpu, disk, remote = (count(found, name) for name in ("gpu", "cpu", "disk", "remote"))
    return Served(gpu, cpu, disk, remote, computed=max(0, prompt - cached), source="simulated")


def take_model(extra: dict[str, Any], outcome: Outcome) -> bool:
    """Puts what only the engine model knows into an outcome; false for replies of any other server."""
    said = extra.get("replay")
    lost = said.get("lost") if isinstance(said, dict) else None
    if not isinstance(said, dict) or not isinstance(lost, dict):
        return False
    outcome.lost = {cause: tokens for cause in LOSSES if (tokens := count(lost, cause)) is not None}
    outcome.preemptions = count(said, "preemptions")
    outcome.recompute_s, outcome.load_s = (_seconds(said, name) for name in ("recompute_s", "load_s"))
    return True


def _seconds(fields: dict[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, (int, float)) else None
