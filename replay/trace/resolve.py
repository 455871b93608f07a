"""Checks a list of turns and links it: parents, dependencies, prompt lengths, families."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from replay.errors import ReplayError
from replay.trace.model import Ref, Turn

Fail = Callable[[int, str], ReplayError]
"""Makes the error for the turn of that index."""


class Links(NamedTuple):
    """What `resolve` finds; each list has one entry a turn."""

    parents: list[int]
    after: list[tuple[int, ...]]
    keep: list[int]
    prompt: list[int]
    family: list[int]


def resolve(turns: list[Turn], *, source: str, lines: list[int] | None = None) -> Links:
    """Links turns by index and checks them.

    Args:
        turns: in file order.
        source: file name for messages.
        lines: line number of each turn for messages; counted from the first turn if absent.

    Raises:
        ReplayError: a duplicate, missing or circular reference, `keep` beyond the parent's context,
            a first turn without a start time, a time or count that is negative or not finite, an empty
            prompt, or no turns at all. Names file and line.
    """

    def fail(index: int, problem: str) -> ReplayError:
        line = lines[index] if lines else index + 2
        return ReplayError(f"{source}:{line}: turn {turns[index].ref}: {problem}")

    if not turns:
        raise ReplayError(f"{source}: the trace has no turns")
    index_of, previous = _index(turns, fail)
    parents: list[int] = []
    after: list[tuple[int, ...]] = []
    for i, turn in enumerate(turns):
        _check_values(turn, i, fail)
        parent = previous[i]
        if turn.parent is not None:
            parent = _lookup(turn.parent, "parent", index_of, i, fail)
        parents.append(parent)
        if turn.after is not None:
            after.append(tuple(_lookup(ref, "after", index_of, i, fail) for ref in turn.after))
        else:
            after.append((parent,) if parent >= 0 else ())
    order = _topological(parents, after, fail)
    keep, prompt = _lengths(turns, parents, order, fail)
    for i, turn in enumerate(turns):
        if not after[i] and turn.at is None:
            raise fail(i, "it waits for nothing, so it needs a start time 'at'")
    return Links(parents, after, keep, prompt, _families(turns, parents, after))


def _index(turns: list[Turn], fail: Fail) -> tuple[dict[Ref, int], list[int]]:
    """The index of each turn by name, and for each turn the index of the one before it in its session."""
    index_of: dict[Ref, int] = {}
    last: dict[str, int] = {}
    previous = []
    for i, turn in enumerate(turns):
        before = last.get(turn.session, -1)
        if turn.ref in index_of:
            raise fail(i, "this turn occurs twice")
        if before >= 0 and turns[before].turn > turn.turn:
            number = turns[before].turn
            raise fail(i, f"comes after turn {number} of the same session; keep turns in rising order")
        index_of[turn.ref] = i
        previous.append(before)
        last[turn.session] = i
    return index_of, previous


def _check_values(turn: Turn, i: int, fail: Fail) -> None:
    """What the reader's schema holds, for turns that were built in Python (an importer's, a user's)."""
    for field, seconds in (("at", turn.at), ("pause", turn.pause)):
        if seconds is not None and not 0 <= seconds < inf:
            raise fail(i, f"{field} is {seconds}; times are finite seconds, zero or more")
    for field, count in (("output", turn.output), ("keep", turn.keep)):
        if count is not None and count < 0:
            raise fail(i, f"{field} is {count}; token counts are zero or more")
    for segment, tokens in turn.append:
        if tokens < 1:
            raise fail(i, f"append of segment {segment!r} has {tokens} tokens; leave empty segments out")


def _lookup(text: str, field: str, index_of: dict[Ref, int], i: int, fail: Fail) -> int:
    try:
        found = index_of.get(Ref.parse(text))
    except ValueError as error:
        raise fail(i, f"{field}: {error}") from None
    if found is None:
        raise fail(i, f"{field} {text!r} does not exist in this trace")
    return found


def _topological(parents: list[int], after: list[tuple[int, ...]], fail: Fail) -> list[int]:
    """Order in which every turn comes after its parent and what it waits for (Kahn's algorithm)."""
    children: list[list[int]] = [[] for _ in parents]
    missing = [0] * len(parents)
    for i, parent in enumerate(parents):
        needs = {*after[i], parent} if parent >= 0 else set(after[i])
        missing[i] = len(needs)
        for need in needs:
            children[need].append(i)
    order = [i for i, count in enumerate(missing) if count == 0]
    for i in order:
        for child in children[i]:
            missing[child] -= 1
            if missing[child] == 0:
                order.append(child)
    if len(order) < len(parents):
        problem = "waits for itself through 'parent' or 'after' (a cycle); remove one link"
        raise fail(_in_cycle(parents, after, missing), problem)
    return order


def _in_cycle(parents: list[int], after: list[tuple[int, ...]], missing: list[int]) -> int:
    """A turn of a cycle: whoever is stuck waits for someone stuck, so following that ends in a cycle."""
    turn = next(i for i, count in enumerate(missing) if count)
    seen: set[int] = set()
    while turn not in seen:
        seen.add(turn)
        turn = next(need for need in (*after[turn], parents[turn]) if need >= 0 and missing[need])
    return turn


def _lengths(turns: list[Turn], parents: list[int], order: list[int], fail: Fail) -> tuple[list[int], list[int]]:
    """Kept and prompt tokens of each turn."""
    keep = [0] * len(turns)
    prompt = [0] * len(turns)
    for i in order:
        turn, parent = turns[i], parents[i]
        context = prompt[parent] + turns[parent].output if parent >= 0 else 0
        keep[i] = context if turn.keep is None else turn.keep
        if keep[i] > context:
            owner = f"its parent {turns[parent].ref} has {context:,}" if parent >= 0 else "it has no parent"
            raise fail(i, f"keep is {keep[i]:,} tokens but {owner}")
        prompt[i] = keep[i] + turn.appended
        if prompt[i] == 0:
            raise fail(i, "the prompt is empty (keep and append add up to zero tokens)")
    return keep, prompt


def _families(turns: list[Turn], parents: list[int], after: list[tuple[int, ...]]) -> list[int]:
    """Connected sessions (union-find over sessions), numbered by first appearance."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for turn, parent, needs in zip(turns, parents, after, strict=True):
        own = find(turn.session)
        for other in (parent, *needs):
            if other >= 0:
                root[find(turns[other].session)] = own
                own = find(own)
    number: dict[str, int] = {}
    return [number.setdefault(find(turn.session), len(number)) for turn in turns]
