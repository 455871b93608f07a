"""What a trace asks of a cache: lengths, pauses, ideal reuse, working set, broken prefixes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from replay.trace.model import Trace
from replay.trace.order import Contexts, Nominal, contexts, nominal
from replay.trace.tree import BlockIds

PERCENTILES = (10, 50, 90, 99)
WINDOWS = (60.0, 300.0, 3600.0)
"""Seconds for which the working set is given."""
BLOCK = 64
"""Tokens to which the working set of a window is rounded."""
WORST = 5


class Percentiles(msgspec.Struct, frozen=True):
    """Of one quantity over all turns (or sessions); linear between values."""

    n: int
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A cache that forgets what was not used for so long, and is otherwise unbounded."""

    seconds: float
    tokens: int
    """Most tokens that it holds at once."""
    gib: float | None
    """The same for the model asked about; null without a model."""
    hit_share: float
    """Share of prompt tokens that it serves."""


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that keeps less than half of its session's context."""

    turn: str
    cause: str
    pause: float
    context_tokens: int
    lost_tokens: int


class Breaks(msgspec.Struct, frozen=True, kw_only=True):
    """Turns that keep less than half of what their session had before (not where a sub-agent starts)."""

    turns: int
    lost_tokens: int
    causes: dict[str, int]
    worst: list[Break]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the recorded server read from its cache, over the turns where it said so."""

    turns: int
    cached_share: float
    ideal_share: float
    """Ideal reuse of the same turns."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What `describe` finds; `msgspec.to_builtins` gives the JSON of ``replay inspect --json``."""

    name: str
    origin: str
    synthetic: bool
    sessions: int
    families: int
    """Groups of sessions that wait for or continue each other: a session and its sub-agents."""
    turns: int
    prompt_tokens: int
    output_tokens: int
    ideal_tokens: int
    ideal_share: float
    """Share of prompt tokens that an unbounded cache would serve."""
    shared_share: float
    """Share of prompt tokens that an unbounded cache has from another session."""
    duration_s: float
    """When the last turn is sent, if answers are instant."""
    causes: dict[str, int]
    percentiles: dict[str, Percentiles]
    """By quantity; without those that the trace has no value of."""
    unique_tokens: int
    """Distinct tokens (each with all before it): what a cache that never evicts holds in the end."""
    unique_gib: float | None
    windows: list[Window]
    breaks: Breaks
    recorded: Recorded | None
    warnings: list[str]
    notes: list[str]
    """The trace's own notes: what its source estimated or left out."""


def describe(trace: Trace, kv_bytes_per_token: int | None = None) -> Description:
    """Measures a trace on its nominal schedule: recorded starts and pauses, answers without service time.

    Prefix is a turn's ideal reuse on that schedule (see `replay.trace.order.contexts`), append the rest
    of its prompt. Window figures are rounded down to blocks of 64 tokens.

    Args:
        trace: the trace.
        kv_bytes_per_token: of the model whose working set is asked for.
    """
    schedule = nominal(trace)
    found = contexts(trace, schedule.order)
    prompt_tokens, ideal_tokens = trace.prompt_tokens, sum(found.ideal)
    unique = sum(found.tree.length)
    usage = _usage(trace, schedule, found)
    peaks = [min(peak, unique) for peak in usage.peaks]  # whole blocks can count a little more

    def gib(tokens: int) -> float | None:
        return None if kv_bytes_per_token is None else tokens * kv_bytes_per_token / 2**30

    return Description(
        name=trace.header.name,
        origin=trace.header.origin,
        synthetic=trace.header.synthetic,
        sessions=len(trace.sessions),
        families=len(trace.families),
        turns=len(trace),
        prompt_tokens=prompt_tokens,
        output_tokens=trace.output_tokens,
        ideal_tokens=ideal_tokens,
        ideal_share=ideal_tokens / prompt_tokens,
        shared_share=usage.foreign / prompt_tokens,
        duration_s=max(schedule.sent),
        causes={cause or "unknown": count for cause, count in trace.causes.most_common()},
        percentiles=_percentiles(trace, schedule, found.ideal),
        unique_tokens=unique,
        unique_gib=gib(unique),
        windows=[
            Window(seconds=seconds, tokens=peak, gib=gib(peak), hit_share=hits / prompt_tokens)
            for seconds, peak, hits in zip(WINDOWS, peaks, usage.hits, strict=True)
        ],
        breaks=_breaks(trace),
        recorded=_recorded(trace, found.ideal),
        warnings=_warnings(trace),
        notes=list(trace.header.notes),
    )


def _percentiles(trace: Trace, schedule: Nominal, ideal: list[int]) -> dict[str, Percentiles]:
    starts = sorted(schedule.sent[turns[0]] for turns in trace.sessions.values() if not trace.after[turns[0]])
    values: dict[str, Any] = {
        "turns_per_session": [len(turns) for turns in trace.sessions.values()],
        "prompt": trace.prompt,
        "prefix": ideal,
        "append": np.subtract(trace.prompt, ideal),
        "output": [turn.output for turn in trace.turns],
        "inter_arrival": np.diff(np.sort(schedule.sent)),
        "session_inter_arrival": np.diff(starts),
    }
    pauses: dict[str, list[float]] = {}
    for turn, after in zip(trace.turns, trace.after, strict=True):
        if after:
            pauses.setdefault(turn.cause or "unknown", []).append(turn.pause)
    values["pause"] = [pause for each in pauses.values() for pause in each]
    values.update({f"pause_{cause}": pauses[cause] for cause in sorted(pauses)})
    return {name: _percentile(each) for name, each in values.items() if len(each)}


def _percentile(values: Any) -> Percentiles:
    found = np.percentile(np.asarray(values, float), (*PERCENTILES, 100))
    return Percentiles(len(values), *(round(float(value), 3) for value in found))


class _Usage(NamedTuple):
    foreign: int
    """Prompt tokens first sent by another session."""
    hits: list[int]
    """Prompt tokens served, for each of `WINDOWS`."""
    peaks: list[int]
    """Tokens held at once, for each of `WINDOWS`."""


def _usage(trace: Trace, schedule: Nominal, found: Contexts) -> _Usage:
    """Follows each block's last use. Along a context it never gets later: whoever used a block used
    everything before it. So what a window still holds of a context is a prefix, found by bisection."""
    number = {session: index for index, session in enumerate(trace.sessions)}
    blocks = BlockIds(found.tree, BLOCK)
    blocks(found.context[0])  # numbers all blocks of the finished tree
    age = np.full(blocks.count, np.inf)
    """Minus the time of each block's last use, so that it rises along a context."""
    owner = np.full(blocks.count, -1, np.int32)
    holds = [_Holds(window) for window in WINDOWS]
    foreign = 0
    for index in schedule.order:
        now, session = schedule.sent[index], number[trace.turns[index].session]
        ids = blocks(found.context[index])
        before, in_prompt = age[ids], trace.prompt[index] // BLOCK
        known = int(np.searchsorted(before, np.inf))
        foreign += int(np.count_nonzero(owner[ids[: min(known, in_prompt)]] != session))
        for hold in holds:
            hold.use(now, before, known, in_prompt)
        age[ids] = -now
        owner[ids[known:]] = session
    return _Usage(foreign * BLOCK, [hold.hits * BLOCK for hold in holds], [hold.peak(age) * BLOCK for hold in holds])


class _Holds:
    """Blocks held by a cache that forgets after `window` seconds without use."""

    def __init__(self, window: float):
        self.window = window
        self.hits = 0
        self._changes: Counter[float] = Counter()

    def use(self, now: float, before: npt.NDArray[np.float64], known: int, in_prompt: int) -> None:
        held = int(np.searchsorted(before, self.window - now, side="right"))
        self.hits += min(held, in_prompt)
        self._changes[now] += len(before) - held
        if held < known:
            self._expire(before[held:known])

    def _expire(self, age: npt.NDArray[np.float64]) -> None:
        for each, count in zip(*np.unique(age, return_counts=True), strict=True):
            self._changes[self.window - float(each)] -= int(count)

    def peak(self, age: npt.NDArray[np.float64]) -> int:
        """Most blocks held at once, given all blocks' ages at the end."""
        self._expire(age)
        level = peak = 0
        for _, change in sorted(self._changes.items()):
            level += change
            peak = max(peak, level)
        return peak


def _breaks(trace: Trace) -> Breaks:
    found = []
    for index, (turn, parent) in enumerate(zip(trace.turns, trace.parents, strict=True)):
        if parent < 0 or trace.turns[parent].session != turn.session:
            continue
        context = trace.prompt[parent] + trace.turns[parent].output
        lost = context - trace.keep[index]
        if lost > context / 2:
            cause = turn.cause or "unknown"
            name = str(turn.ref)
            found.append(Break(turn=name, cause=cause, pause=turn.pause, context_tokens=context, lost_tokens=lost))
    return Breaks(
        turns=len(found),
        lost_tokens=sum(each.lost_tokens for each in found),
        causes=dict(Counter(each.cause for each in found).most_common()),
        worst=sorted(found, key=lambda each: -each.lost_tokens)[:WORST],
    )


def _recorded(trace: Trace, ideal: list[int]) -> Recorded | None:
    known = [index for index, turn in enumerate(trace.turns) if turn.cached is not None]
    if not known:
        return None
    prompt = sum(trace.prompt[index] for index in known)
    cached = sum(trace.turns[index].cached or 0 for index in known)
    return Recorded(
        turns=len(known),
        cached_share=cached / prompt,
        ideal_share=sum(ideal[index] for index in known) / prompt,
    )


def timestamp_quantum(trace: Trace) -> float | None:
    """Seconds of which the recorded times look like multiples, where that is coarse; null otherwise.

    Either many start times coincide (the quantum is then the least gap between two), or all pauses are
    whole seconds.
    """
    starts = [
        turn.at for turn, needs in zip(trace.turns, trace.after, strict=True) if turn.at is not None and not needs
    ]
    distinct = sorted(set(starts))
    if len(starts) >= 10 and len(distinct) > 1 and len(starts) - len(distinct) > len(starts) / 10:
        return min(late - early for early, late in pairwise(distinct))
    pauses = [turn.pause for turn in trace.turns if turn.pause]
    return 1.0 if len(pauses) >= 10 and all(pause == int(pause) for pause in pauses) else None


def _warnings(trace: Trace) -> list[str]:
    """What makes figures of this trace less certain than they look."""
    found = []
    starts = [turn.at for turn in trace.turns if turn.at is not None]
    equal = len(starts) - len(set(starts))
    if len(starts) >= 10 and equal > len(starts) / 10:
        found.append(f"{equal:,} of {len(starts):,} recorded times repeat another: timestamps are quantised")
    if quantum := timestamp_quantum(trace):
        found.append(f"recorded times are multiples of {quantum:g} s: what is shorter was not measured")
    silent = sum(not turn.output for turn in trace.turns)
    if silent:
        found.append(f"{silent:,} turns have no output: failed or not recorded")
    over = sum((turn.cached or 0) > prompt for turn, prompt in zip(trace.turns, trace.prompt, strict=True))
    if over:
        found.append(f"{over:,} turns report more cached tokens than their prompt has")
    if trace.header.block_tokens:
        found.append(f"prefixes are known only to blocks of {trace.header.block_tokens} tokens")
    return found


def render(description: Description) -> Any:
    """The description as a `rich` renderable of at most 80 columns."""
    from replay.trace.table import render as tables

    return tables(description)
