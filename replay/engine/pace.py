"""When a request's next tokens come, as far as the steps under way tell: for whoever hands them out one by one."""

from __future__ import annotations

from typing import NamedTuple

from replay.engine.engine import Engine
from replay.engine.job import Job


class Pace(NamedTuple):
    """The steps under way, as one request sees them. Times are seconds on the event loop."""

    start: float
    before: int
    """Tokens that it had at `start`, generated ones only; fewer than before while it is computed again."""
    end: float
    after: int
    """Tokens that it has at `end`, unless something that arrives ends the steps sooner."""


def pace(engine: Engine, job: Job) -> Pace | None:
    """The pace of a request; null while the engine does nothing, and once it has ended."""
    scheduler = engine.scheduler
    stretch = scheduler._now
    if stretch is None or job.slot < 0 or job.last_token is not None:
        return None
    # A step's first token of KV is counted when it starts, and gives one output token when it ends.
    before = int(engine.pool.tokens[job.slot]) - job.prompt
    return Pace(stretch.start, before, stretch.end, before + stretch.steps)
