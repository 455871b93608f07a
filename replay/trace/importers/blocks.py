"""Block-hash traces of Claude Code (kv-cache-tester, "weka"): one JSON object a conversation.

The format (https://github.com/callanjfox/kv-cache-tester): `requests[]` with start `t`, prompt length
`in`, output length `out`, `api_time` (duration), `think_time` (the client's pause before the call) and
`hash_ids`, an id for each block of `block_size` tokens; a last, partial block has none. Entries of type
``subagent`` hold the requests of a sub-agent. Ids mean nothing outside their file.

Times of sub-agents: the inner `t` count from the agent's start, or (later sets) from the trace's start:
the first one tells. The entry's own `t` is the moment at which the agent *ended* where it also has a
`duration_ms` that leads back to the call that launched it, else the moment at which it started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from replay.errors import ReplayError
from replay.trace.importers.sources import Notes, read_bytes
from replay.trace.model import FORMAT, VERSION, Count, Header, Turn

NAME = "claude-code-blocks"
ABOUT = "block-hash traces, one JSON object with 'block_size' and 'requests'"

SLACK_S = 1.0
"""Starts are recorded in whole seconds: a call may seem to start this long before the last one ended."""
SHRUNK = 0.8
"""A prompt below this share of the chain's previous one, by the same model, is a compaction."""

Ids = npt.NDArray[np.int64]


class _Entry(msgspec.Struct, gc=False):
    """A request, or a sub-agent with its requests."""

    t: float
    type: str = ""
    model: str = ""
    input: Count = msgspec.field(name="in", default=0)
    output: Count = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    input_types: list[str] | None = None
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str = ""
    status: str = ""
    duration_ms: float | None = None
    requests: list[_Entry] | None = None


class _File(msgspec.Struct, gc=False):
    block_size: int
    requests: list[_Entry]
    id: str = ""


@dataclass(slots=True, eq=False)
class _Call:
    """One request on its way to a `Turn`."""

    entry: _Entry
    session: str
    number: int
    recorded: float
    """Start as the file has it: the order in which requests count as earlier."""
    start: float
    previous: _Call | None = None
    end: float | None = None
    after: list[_Call] = field(default_factory=list)
    joins: list[_Call] = field(default_factory=list)
    overlaps: bool = False
    spawned: bool = False
    shared: int = 0
    """Leading blocks that an earlier request has too."""
    parent: _Call | None = None
    nodes: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    """Trie node of each block."""
    ids: Ids = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.array(self.entry.hash_ids, np.int64)

    @property
    def ref(self) -> str:
        return f"{self.session}/{self.number}"


def matches(head: bytes) -> bool:
    """Whether a file that begins so is a block-hash trace."""
    return head.lstrip().startswith(b"{") and b'"block_size"' in head and b'"requests"' in head


def load(
    paths: list[Path], keep_text: bool, progress: Callable[[int, int], None]
) -> tuple[Header, list[Turn], list[str]]:
    """Reads block-hash traces; each starts at 0 seconds. They hold no text, so `keep_text` changes nothing.

    Raises:
        ReplayError: a file is not of this format or its ids contradict its lengths.
    """
    notes = Notes()
    turns: list[Turn] = []
    seen: dict[bytes, str] = {}
    names: set[str] = set()
    sizes: set[int] = set()
    for done, path in enumerate(paths, 1):
        trace = _read(path)
        name = trace.id or f"trace-{done}"
        digest = hashlib.blake2b(msgspec.json.encode([trace.block_size, trace.requests])).digest()
        if digest in seen:
            other = "an earlier file" if name == seen[digest] else seen[digest]
            notes.say(f"{name} is an exact copy of {other} and was imported once")
        else:
            seen[digest] = name
            session = _unique(name, names)
            turns.extend(_turns(trace, session, path, notes))
            sizes.add(trace.block_size)
        progress(done, len(paths))
    if not turns:
        raise ReplayError(f"{paths[0]}: no request with a prompt in it; name a trace that has some")
    header = Header(
        format=FORMAT,
        version=VERSION,
        name=NAME if len(seen) != 1 else next(iter(names)),
        origin="Claude Code API traffic recorded as block hashes.",
        block_tokens=sizes.pop() if len(sizes) == 1 else None,
    )
    return header, turns, notes.lines()


def _read(path: Path) -> _File:
    try:
        trace = msgspec.json.decode(read_bytes(path), type=_File)
    except msgspec.DecodeError as error:
        raise ReplayError(f"{path}: not a block-hash trace: {error}") from None
    if trace.block_size < 1:
        raise ReplayError(f"{path}: block_size is {trace.block_size}; it must be at least 1")
    return trace


def _unique(name: str, names: set[str]) -> str:
    unique, copy = name, 1
    while unique in names:
        copy += 1
        unique = f"{name}~{copy}"
    names.add(unique)
    return unique


def _turns(trace: _File, session: str, path: Path, notes: Notes) -> Iterable[Turn]:
    calls = _calls(trace, session, notes)
    for call in calls:
        _check(call.entry, trace.block_size, path, notes)
    # Earlier = recorded earlier; the sort is stable, so equal times keep the file's order.
    calls.sort(key=lambda call: call.recorded)
    recurring = _share(calls)
    if recurring:
        notes.count("blocks that recur behind different prefixes, as segments of their own", len(recurring))
    return [_turn(call, trace.block_size, session, recurring, notes) for call in calls]


def _check(entry: _Entry, size: int, path: Path, notes: Notes) -> None:
    full, blocks = entry.input // size, len(entry.hash_ids)
    if blocks > -(-entry.input // size):
        raise ReplayError(
            f"{path}: the request at t={entry.t:g} has {blocks:,} block ids for {entry.input:,} tokens; "
            f"blocks of {size} tokens allow {-(-entry.input // size):,}"
        )
    notes.count("requests whose number of ids is not that of their full blocks", blocks != full)


def _time(entry: _Entry) -> float:
    return entry.t


def _calls(trace: _File, session: str, notes: Notes) -> list[_Call]:
    """All requests with what they wait for; sub-agents hang between two requests of the main chain."""
    main = _Chain(session)
    calls: list[_Call] = []
    waiting: list[_Call] = []
    agents: set[str] = set()
    for entry in sorted(trace.requests, key=_time):
        if entry.requests is not None:
            agent = _unique(f"{session}/{entry.agent_id or 'agent'}", agents)
            chain = _subagent(entry, agent, main.last, notes)
            calls.extend(chain.calls)
            if entry.status != "async_launched":
                waiting.extend(chain.open)
        elif entry.input < 1:
            notes.count("requests without a prompt, dropped")
        else:
            call = main.add(entry, entry.t, entry.t)
            call.joins, waiting = waiting, []
            calls.append(call)
    return calls


def _subagent(entry: _Entry, session: str, launcher: _Call | None, notes: Notes) -> _Chain:
    inner = sorted((request for request in entry.requests or [] if request.input > 0), key=_time)
    notes.count("requests without a prompt, dropped", len(entry.requests or []) - len(inner))
    chain = _Chain(session)
    if not inner:
        return chain
    relative = inner[0].t < entry.t
    begin = entry.t if relative else 0.0
    start = entry.t - (entry.duration_ms or 0) / 1000
    ended_at_t = launcher is not None and start < entry.t and start >= (launcher.end or launcher.start) - SLACK_S
    notes.count("sub-agents recorded by their end, started earlier by their duration", ended_at_t)
    shift = start - entry.t if ended_at_t else 0.0
    for request in inner:
        call = chain.add(request, begin + request.t, begin + request.t + shift)
        if len(chain.calls) == 1:
            call.spawned = True
            call.after = [launcher] if launcher else []
    return chain


class _Chain:
    """Requests of one agent, in order of start, and which of them nobody has waited for yet."""

    def __init__(self, session: str):
        self.session = session
        self.calls: list[_Call] = []
        self.open: list[_Call] = []

    @property
    def last(self) -> _Call | None:
        return self.calls[-1] if self.calls else None

    def add(self, entry: _Entry, recorded: float, start: float) -> _Call:
        previous = self.last
        call = _Call(entry, self.session, len(self.calls), recorded, start, previous)
        if entry.api_time is not None:
            call.end = start + entry.api_time
        if previous is not None:
            if previous.end is None and entry.think_time is not None:
                previous.end = max(previous.start, start - entry.think_time)
            done = [other for other in self.open if other.end is None or other.end <= start + SLACK_S]
            call.overlaps = previous not in done
            # A call that starts while others still run waits for what those have waited for.
            call.after = done or list(previous.after)
            self.open = [other for other in self.open if other not in done]
        self.open.append(call)
        self.calls.append(call)
        return call


def _share(calls: list[_Call]) -> set[int]:
    """Finds each call's longest shared prefix and its parent; returns ids that recur beyond a prefix.

    A trie of blocks, but walked only where a prompt leaves the one before it in its session.
    """
    child: dict[tuple[int, int], int] = {}
    last = np.zeros(0, np.int64)
    seen: set[int] = set()
    recurring: set[int] = set()
    for number, call in enumerate(calls):
        ids, previous = call.ids, call.previous
        at = _common(ids, previous.ids) if previous else 0
        path = [] if not at or previous is None else [previous.nodes[:at]]
        node = int(previous.nodes[at - 1]) if at and previous else -1
        rest = ids[at:].tolist()
        known: list[int] = []
        for block in rest:
            found = child.get((node, block), -1)
            if found < 0:
                break
            node = found
            known.append(node)
        call.shared = at + len(known)
        owner = last[node] if call.shared else -1
        call.parent = _parent(call, node, calls[owner] if owner >= 0 else None)
        first = len(child)
        for block in rest[len(known) :]:
            child[node, block] = node_new = len(child)
            node = node_new
            if block in seen:
                recurring.add(block)
            seen.add(block)
        call.nodes = np.concatenate([*path, np.array(known, np.int64), np.arange(first, len(child))])
        if len(last) < len(child):
            last = np.concatenate([last, np.full(len(child), -1, np.int64)])
        last[call.nodes] = number
    return recurring


def _common(a: Ids, b: Ids) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _parent(call: _Call, node: int, latest: _Call | None) -> _Call | None:
    """The call whose prompt is continued: of equally good ones, the previous of the same session."""
    previous = call.previous
    if previous and (
        call.shared == 0 or (len(previous.nodes) >= call.shared and previous.nodes[call.shared - 1] == node)
    ):
        return previous
    return latest


def _turn(call: _Call, size: int, trace: str, recurring: set[int], notes: Notes) -> Turn:
    entry, parent = call.entry, call.parent
    keep = min(call.shared * size, entry.input, parent.entry.input) if parent else None
    after = call.after + call.joins
    return Turn(
        session=call.session,
        turn=call.number,
        at=round(max(0.0, call.start), 3),
        parent=parent.ref if parent and parent is not call.previous else None,
        after=None if after == [parent] or not (after or parent) else [other.ref for other in after],
        pause=round(_pause(call, notes), 3),
        keep=keep,
        append=_append(call, size, keep or 0, trace, recurring),
        output=entry.output,
        cause=_cause(call),
    )


def _append(call: _Call, size: int, keep: int, trace: str, recurring: set[int]) -> list[tuple[str, int]]:
    """Fresh tokens as one segment; a block that recurs elsewhere is a segment that all its places share."""
    prompt = call.entry.input
    pieces: list[tuple[str, int]] = []
    start = keep
    for index, block in enumerate(call.ids[keep // size :].tolist() if recurring else [], keep // size):
        if block in recurring and index * size >= keep:
            if index * size > start:
                pieces.append((f"{call.ref}+{start}", index * size - start))
            start = min((index + 1) * size, prompt)
            pieces.append((f"{trace}#{block}", start - index * size))
    if prompt > start:
        pieces.append((call.ref if start == keep else f"{call.ref}+{start}", prompt - start))
    return pieces


def _pause(call: _Call, notes: Notes) -> float:
    think = call.entry.think_time
    if not call.after and not call.joins:
        return 0.0
    if call.after == [call.previous] and not call.joins and think is not None:
        pause = think
    else:
        ends = [other.end for other in call.after + call.joins if other.end is not None]
        if not ends:
            notes.count("pauses unknown (no think_time, no api_time before), set to 0")
            return 0.0
        pause = call.start - max(ends)
    if pause < -SLACK_S:
        notes.count("pauses negative, set to 0")
    return max(0.0, pause)


def _cause(call: _Call) -> str:
    entry, previous = call.entry, call.previous
    if previous is None:
        return "subagent" if call.spawned else "start"
    if not call.overlaps and entry.model == previous.entry.model and entry.input < SHRUNK * previous.entry.input:
        return "compaction"
    return "tool" if "tool_result" in (entry.input_types or ()) else "human"
