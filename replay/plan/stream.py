"""The block stream of a trace: its prompts in the order in which N live sessions would send them."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from heapq import heappop, heappush

import numpy as np

from replay.load.schedule import Schedule, Settings, Step
from replay.plan.curve import HitCurve, hit_curve
from replay.trace import Trace
from replay.trace.tree import BlockIds, Ids


def interleaved(schedule: Schedule, live: int | None = None) -> list[Step]:
    """The steps of a schedule in the order in which they are sent, answers taking no time of their own.

    Recorded times are used where a step has one, else the end of what it waits for plus its pause. With
    `live`, that many families (sessions with their sub-agents) run at once and the next starts when one ends;
    null: each starts at its recorded time. Steps of one time come in the order of the trace, to a microsecond.
    """
    begins, offsets = _offsets(schedule)
    if live is not None:
        begins = _starts(begins, offsets, schedule, live)
    times = [begins[step.family] + offset for step, offset in zip(schedule.steps, offsets, strict=True)]
    number = {turn.ref: index for index, turn in enumerate(schedule.trace.turns)}
    lines = np.array([number[step.turn.ref] for step in schedule.steps])
    return [schedule.steps[index] for index in np.lexsort((lines, np.round(times, 6)))]


def _offsets(schedule: Schedule) -> tuple[list[float], list[float]]:
    """-> when each family starts, and each step's seconds from its family's start."""
    steps = schedule.steps
    begins = [float("inf")] * schedule.families
    for step in steps:
        begins[step.family] = min(begins[step.family], step.at if step.at is not None else float("inf"))
    offsets = [0.0] * len(steps)
    for index in TopologicalSorter({k: step.needs for k, step in enumerate(steps)}).static_order():
        step = steps[index]
        ready = max((offsets[need] for need in step.needs), default=0.0)
        offsets[index] = ready + step.pause if step.at is None else max(ready, step.at - begins[step.family])
    return begins, offsets


def _starts(begins: list[float], offsets: list[float], schedule: Schedule, live: int) -> list[float]:
    length = [0.0] * len(begins)
    for step, offset in zip(schedule.steps, offsets, strict=True):
        length[step.family] = max(length[step.family], offset)
    starts = [0.0] * len(begins)
    running: list[float] = []
    for family in sorted(range(len(begins)), key=begins.__getitem__):
        if len(running) == live:
            starts[family] = heappop(running)
        heappush(running, starts[family] + length[family])
    return starts


def prompts(schedule: Schedule, steps: list[Step], block_tokens: int, partial: bool) -> Iterator[tuple[Ids, int]]:
    """``(block ids, prompt tokens)`` of each step; `partial` counts a last, partial block too."""
    ids = BlockIds(schedule.tree, block_tokens, partial)
    for step in steps:
        yield ids(step.tip), step.tip.depth


def trace_curve(trace: Trace, block_tokens: int, *, sessions: int | None = None, partial: bool = False) -> HitCurve:
    """The hit curve of a trace with `sessions` of its families live at once.

    Asked for more than the trace has, families are cloned as a run would clone them. Outputs are not
    inserted: what a turn reuses is what earlier prompts held.
    """
    families = len(trace.families)
    schedule = Schedule(trace, Settings(sessions=max(sessions, families) if sessions else None))
    return hit_curve(prompts(schedule, interleaved(schedule, sessions), block_tokens, partial), block_tokens)
