"""Checks a list of turns and links it: parents, dependencies, prompt lengths, families."""

from __future__ import annotations

from typing import NamedTuple

from replay.errors import ReplayError
from replay.trace.model import Ref, Turn


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
            a first turn without a start time, an empty prompt, or no turns at all. Names file and line.
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
        parents.append(_lookup(turn.parent, "parent", index_of, i, fail) if turn.parent else previous[i])
        if turn.after is not None:
            after.append(tuple(_lookup(ref, "after", index_of, i, fail) for ref in turn.after))
        else:
            after.append((parents[i],) if parents[i] >= 0 else ())
    order = _topological(parents, after, fail)
    keep, prompt = _lengths(turns, parents, order, fail)
    for i, turn in enumerate(turns):
        if not after[i] and turn.at is None:
            raise fail(i, "it waits for nothing, so it needs a start time 'at'")
    return Links(parents, after, keep, prompt, _families(turns, parents, after))


def _index(turns, fail):  # type: ignore[no-untyped-def]
    index_of: dict[Ref, int] = {}
    last: dict[str, int] = {}
    previous = []
    for i, turn in enumerate(turns):
        before = last.get(turn.session, -1)
        if turn.ref in index_of:
            raise fail(i, "this turn occurs twice")
        if before >= 0 and turns[before].turn > turn.turn:
            raise fail(i, f"comes after turn {turns[before].turn} of the same session; keep turns in rising order")
        index_of[turn.ref] = i
        previous.append(before)
        last[turn.session] = i
    return index_of, previous


def _lookup(text, field, index_of, i, fail):  # type: ignore[no-untyped-def]
    try:
        found = index_of.get(Ref.parse(text))
    except ValueError as error:
        raise fail(i, f"{field}: {error}") from None
    if found is None:
        raise fail(i, f"{field} {text!r} does not exist in this trace")
    return found


def _topological(parents: list[int], after: list[tuple[int, ...]], fail) -> list[int]:  # type: ignore[no-untyped-def]
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
        stuck = next(i for i, count in enumerate(missing) if count)
        raise fail(stuck, "waits for itself through 'parent' or 'after' (a cycle); remove one link")
    return order


def _lengths(turns, parents, order, fail):  # type: ignore[no-untyped-def]
    keep = [0] * len(turns)
    prompt = [0] * len(turns)
    for i in order:
        turn, parent = turns[i], parents[i]
        context = prompt[parent] + turns[parent].output if parent >= 0 else 0
        keep[i] = context if turn.keep is None else turn.keep
        if keep[i] > context:
            where = f"its parent {turns[parent].ref} has {context:,} tokens" if parent >= 0 else "it has no parent"
            raise fail(i, f"keep is {keep[i]:,} tokens but {where}")
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
