"""Mooncake traces: JSON Lines, one request a line, its prompt as ids of blocks of 512 tokens.

The format (https://github.com/kvcache-ai/Mooncake, "FAST25-release"): `timestamp` (ms, arrival),
`input_length`, `output_length` and `hash_ids`, whose scope is the whole file. Whether a last, partial
block has an id (the published traces: yes) is read off each file and must hold for all its rows.

NVIDIA's AIPerf adds conversations (https://github.com/ai-dynamo/aiperf, docs/benchmark-modes): rows of
one `session_id`, of which the later ones hold only what they add to the prompt and answer before, and
`delay` (ms from that answer).

Each block is a segment of its own, named by its id, so equal ids are equal tokens wherever they stand: also
in AIPerf's files, where an id may stand behind different blocks or be cut to different lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

from replay.errors import ReplayError
from replay.trace.importers.sources import Notes, read_bytes
from replay.trace.model import FORMAT, VERSION, Count, Header, Seconds, Turn

NAME = "mooncake"
ABOUT = "JSON Lines with 'timestamp', 'input_length', 'output_length' and 'hash_ids'"

BLOCK = 512
"""Tokens a block has."""
BRANCHES = 16
"""More requests than this do not continue one conversation from one point: they share a beginning, such as a
system prompt. The conversation trace of 2025 has at most 9."""


class _Row(msgspec.Struct, gc=False):
    """One line. Times in milliseconds."""

    input_length: Count
    output_length: Count | None = None
    hash_ids: list[int] | None = None
    timestamp: Seconds | None = None
    session_id: str | None = None
    delay: Seconds | None = None

    @property
    def full(self) -> int:
        """Full blocks of the prompt."""
        return self.input_length // BLOCK


@dataclass(slots=True, eq=False)
class _Request:
    """A row on its way to a `Turn`."""

    row: _Row
    line: int
    at: float
    """Arrival in seconds from the first one; rows without a timestamp arrive at 0."""
    session: str = ""
    number: int = 0
    parent: _Request | None = None
    """The request whose prompt this one starts with; in a recorded session, the one before."""

    @property
    def ref(self) -> str:
        return f"{self.session}/{self.number}"


def matches(head: bytes) -> bool:
    """Whether a file that begins so is a Mooncake trace."""
    first = head.lstrip().partition(b"\n")[0]
    has_lengths = first.startswith(b"{") and b'"input_length"' in first
    return has_lengths and (b'"hash_ids"' in first or b'"output_length"' in first)


def load(
    paths: list[Path], keep_text: bool, progress: Callable[[int, int], None]
) -> tuple[Header, list[Turn], list[str]]:
    """Reads Mooncake traces; each starts at 0 seconds. They hold no text, so `keep_text` changes nothing.

    Rows without a session start at their own recorded time and wait for nothing: how long a request took is
    not recorded. Rows of a session wait for the one before.

    Raises:
        ReplayError: a row is malformed or has another number of ids than its length asks for; names file
            and line.
    """
    notes = Notes()
    turns: list[Turn] = []
    for done, path in enumerate(paths, 1):
        turns.extend(_turns(path, "" if len(paths) == 1 else f"{done}:", notes))
        progress(done, len(paths))
    if not turns:
        raise ReplayError(f"{paths[0]}: no request with a prompt in it; name a trace that has some")
    header = Header(
        format=FORMAT,
        version=VERSION,
        name=NAME,
        origin="Requests recorded as block hashes, in Mooncake's format.",
        block_tokens=BLOCK,
    )
    return header, turns, notes.lines()


def _turns(path: Path, scope: str, notes: Notes) -> list[Turn]:
    """The turns of one file in order of arrival; `scope` keeps its names apart from other files'."""
    rows = _read(path)
    if _last_has_id(path, rows):
        notes.say(f"last, partial blocks of {BLOCK} tokens have ids: 'replay plan --partial-blocks' counts them")
    requests = _requests(rows, notes)
    _count_oddities(requests, notes)
    recorded = [request for request in requests if request.row.session_id is not None]
    inferred = [request for request in requests if request.row.session_id is None]
    _link_recorded(recorded, scope)
    _link_inferred(inferred, scope, notes)
    last: dict[str, _Request] = {}
    turns = []
    for request in requests:
        previous = last.get(request.session)
        last[request.session] = request
        if request.row.session_id is None:
            turns.append(_arriving(request, previous, scope))
        else:
            turns.append(_waiting(request, scope, notes))
    return turns


def _read(path: Path) -> list[tuple[int, _Row]]:
    decode = msgspec.json.Decoder(_Row).decode
    rows = []
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if line.strip():
            try:
                rows.append((number, decode(line)))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ReplayError(f"{path}:{number}: not a row of a Mooncake trace: {error}") from None
    return rows


def _last_has_id(path: Path, rows: list[tuple[int, _Row]]) -> bool:
    """Whether partial blocks have ids in this file: the rule of most rows, which the others must obey too."""
    up = down = 0
    for _, row in rows:
        if row.hash_ids is not None and row.input_length % BLOCK:
            up += len(row.hash_ids) == row.full + 1
            down += len(row.hash_ids) == row.full
    partial = up >= down
    for line, row in rows:
        expected = -(-row.input_length // BLOCK) if partial else row.full
        if row.hash_ids is not None and len(row.hash_ids) != expected:
            rule = "each last, partial block has" if partial else "no last, partial block has"
            raise ReplayError(
                f"{path}:{line}: {len(row.hash_ids):,} block ids for {row.input_length:,} tokens; blocks of {BLOCK} "
                f"tokens, of which in this file {rule} an id, make {expected:,}; correct or remove the row"
            )
    return bool(up) and partial


def _requests(rows: list[tuple[int, _Row]], notes: Notes) -> list[_Request]:
    """Rows that have a prompt, in order of arrival; later rows of a session follow its earlier ones."""
    times = [row.timestamp for _, row in rows if row.timestamp is not None]
    first = min(times, default=0.0)
    requests = []
    reached: dict[str, float] = {}
    for line, row in rows:
        if not row.input_length:
            notes.count("requests without a prompt, dropped")
            continue
        at = 0.0 if row.timestamp is None else round((row.timestamp - first) / 1000, 6)
        if row.session_id is not None:
            at = reached[row.session_id] = max(at, reached.get(row.session_id, 0.0))
        elif row.timestamp is None:
            notes.count("requests without a timestamp, started at 0 seconds")
        requests.append(_Request(row, line, at))
    requests.sort(key=lambda request: request.at)
    _say_ticks(times, notes)
    return requests


def _say_ticks(times: list[float], notes: Notes) -> None:
    distinct = sorted(set(times))
    repeated = len(times) - len(distinct)
    if len(times) >= 10 and repeated > len(times) / 10:
        gaps = [after - before for before, after in pairwise(distinct)]
        every = f" every {median(gaps) / 1000:g} s" if gaps else ""
        notes.say(
            f"timestamps are quantised: {repeated:,} of {len(times):,} repeat another, stamps come{every}; "
            "bursts at one instant are the recording's, not the users'"
        )


def _count_oddities(requests: list[_Request], notes: Notes) -> None:
    """Ids that are not hashes of a whole prefix: what they say of content still holds."""
    before: dict[int, int | None] = {}
    sizes: dict[int, int] = {}
    moved, cut = set(), set()
    for request in requests:
        previous = None
        left = request.row.input_length
        for block in request.row.hash_ids or []:
            if before.setdefault(block, previous) != previous:
                moved.add(block)
            if sizes.setdefault(block, min(left, BLOCK)) != min(left, BLOCK):
                cut.add(block)
            previous = block
            left -= BLOCK
        notes.count("requests without an output_length, taken as 0", request.row.output_length is None)
        notes.count("requests without hash_ids, taken as sharing nothing", request.row.hash_ids is None)
    notes.count("block ids that stand behind different blocks: equal content, no common prefix", len(moved))
    notes.count("block ids of different lengths: equal as far as both go", len(cut))


def _link_recorded(requests: list[_Request], scope: str) -> None:
    last: dict[str, _Request] = {}
    for request in requests:
        request.session = f"{scope}{request.row.session_id}"
        request.parent = last.get(request.session)
        request.number = request.parent.number + 1 if request.parent else 0
        last[request.session] = request


def _link_inferred(requests: list[_Request], scope: str, notes: Notes) -> None:
    """Finds conversations: a request that starts with all full blocks of an earlier one continues it.

    One that shares less (a system prompt, a document) shares those blocks and is no continuation. The first
    request to continue another joins its session, a later one forks it.
    """
    _find_parents(requests)
    children = Counter(request.parent for request in requests if request.parent)
    last: dict[str, _Request] = {}
    for request in requests:
        parent = request.parent
        if parent and children[parent] > BRANCHES:
            parent = request.parent = None
        if parent and last[parent.session] is parent:
            request.session, request.number = parent.session, parent.number + 1
        else:
            request.session = f"{scope}row-{request.line}"
            notes.count("requests that fork a conversation", parent is not None)
        last[request.session] = request
        notes.count("requests that start with a whole earlier prompt, taken to continue it", parent is not None)
    if requests:
        notes.say("requests arrive at their recorded times and wait for no answer: durations are not recorded")


def _find_parents(requests: list[_Request]) -> None:
    """A trie of blocks, with the request that ends in each node: of those on its path, the deepest is parent."""
    child: dict[tuple[int, int], int] = {}
    ends: dict[int, _Request] = {}
    for request in requests:
        node = -1
        full = request.row.full
        for depth, block in enumerate(request.row.hash_ids or [], 1):
            found = child.get((node, block))
            if found is None:
                found = child[node, block] = len(child)
                if depth == full:
                    ends[found] = request
            elif depth <= full and found in ends:
                request.parent = ends[found]
            node = found


def _arriving(request: _Request, previous: _Request | None, scope: str) -> Turn:
    """A turn of an inferred conversation: it arrives when it did, whatever became of its parent."""
    parent = request.parent
    keep = parent.row.full if parent else 0
    return Turn(
        session=request.session,
        turn=request.number,
        at=request.at,
        parent=parent.ref if parent and parent is not previous else None,
        after=[],
        keep=keep * BLOCK if parent else None,
        append=_append(request, keep, scope),
        output=request.row.output_length or 0,
        cause="" if parent else "start",
    )


def _waiting(request: _Request, scope: str, notes: Notes) -> Turn:
    """A turn of a recorded session: its prompt holds the answer before it, so it waits for that."""
    row, parent = request.row, request.parent
    pause = (row.delay or 0.0) / 1000 if parent else 0.0
    if parent and row.delay is None:
        notes.count("pauses unknown (no delay), taken as the time between arrivals or 0")
        pause = request.at - parent.at
    return Turn(
        session=request.session,
        turn=request.number,
        at=None if parent and row.timestamp is None else request.at,
        pause=round(pause, 6),
        append=_append(request, 0, scope),
        output=row.output_length or 0,
        cause="" if parent else "start",
    )


def _append(request: _Request, kept: int, scope: str) -> list[tuple[str, int]]:
    """The blocks after the kept ones; tokens that no id covers are the request's own."""
    left = request.row.input_length - kept * BLOCK
    pieces = []
    for block in (request.row.hash_ids or [])[kept:]:
        pieces.append((f"{scope}{block}", min(left, BLOCK)))
        left -= pieces[-1][1]
    if left:
        pieces.append((f"{request.ref}+", left))
    return pieces
