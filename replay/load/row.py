"""The one flat row of a turn: its step, its outcome, and what follows from both."""

from __future__ import annotations

from typing import Any

from replay.load.outcome import LOSSES, Outcome
from replay.load.schedule import Step

_SLOWEST_FIRST = ("remote", "external", "disk", "cpu", "gpu")
_LOST = [f"lost_{cause}" for cause in LOSSES]


def row(step: Step, outcome: Outcome, *, due: float | None, ideal: int | None) -> dict[str, Any]:
    """Values of a row of the table `requests`, without `run_id`; null where unknown.

    Args:
        step: what was to be sent.
        outcome: what came of it.
        due: seconds from the run's start at which it was due; null if it never was.
        ideal: tokens of its prompt that an earlier request shared; null if it was never sent.
    """
    lost = _lost(outcome, ideal)
    return {
        "session": step.session,
        "turn": step.turn.turn,
        "position": step.position,
        "cause": step.turn.cause or None,
        "pause": step.pause if step.needs else None,
        "due": due,
        "sent": outcome.sent,
        "first_byte": outcome.first_byte,
        "first_token": outcome.first_token,
        "last_token": outcome.last_token,
        "closed": outcome.closed,
        "status": outcome.status,
        "error": outcome.error,
        "planned_tokens": step.tip.depth,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "ideal_tokens": ideal,
        "gpu_tokens": outcome.gpu,
        "cpu_tokens": outcome.cpu,
        "disk_tokens": outcome.disk,
        "remote_tokens": outcome.remote,
        "external_tokens": outcome.external,
        "computed_tokens": outcome.computed,
        **dict(zip(_LOST, map(lost.get, LOSSES), strict=True)),
        "served_from": _served_from(outcome),
        "tier_source": outcome.tier_source,
        "recompute_s": outcome.recompute_s,
        "load_s": outcome.load_s,
        "preemptions": outcome.preemptions,
        "attempts": outcome.attempts,
        "worker": outcome.worker,
        "instance": outcome.instance,
    }


def _served(outcome: Outcome) -> int | None:
    """Prompt tokens that came from any tier."""
    if outcome.computed is None or outcome.prompt_tokens is None:
        return None
    return outcome.prompt_tokens - outcome.computed


def _lost(outcome: Outcome, ideal: int | None) -> dict[str, int]:
    if outcome.lost is not None:
        return outcome.lost
    served = _served(outcome)
    if served is None or ideal is None:
        return {}
    return {"unknown": max(0, ideal - served)}


def _served_from(outcome: Outcome) -> str | None:
    for tier in _SLOWEST_FIRST:
        if getattr(outcome, tier):
            return tier
    # Tokens from a tier that nobody names came from somewhere.
    return "none" if _served(outcome) == 0 else None
