"""The nominal schedule of a trace: when its turns would be sent if every answer were instant."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

from replay.trace.model import Trace
from replay.trace.tree import ROOT, PrefixTree, Tip


class Nominal(NamedTuple):
    """A trace's turns on the nominal schedule."""

    order: list[int]
    """Indices of the turns in the order in which they are sent."""
    sent: list[float]
    """When each turn (by its index in the trace) is sent, in seconds from the trace's start."""


def nominal(trace: Trace) -> Nominal:
    """Orders turns by what the trace alone says: start times and pauses, with a service time of zero.

    A turn is sent `pause` after everything in its `after`, which answers at once; a turn that waits for
    nothing is sent at its `at`. Recorded times of turns that do wait are not used, as in the driver.
    A turn is never ordered before its parent, and turns of the same time stand in file order.
    """
    needs = [
        {*after, parent} if parent >= 0 else set(after)
        for after, parent in zip(trace.after, trace.parents, strict=True)
    ]
    waiting: list[list[int]] = [[] for _ in needs]
    missing = [len(own) for own in needs]
    for index, own in enumerate(needs):
        for need in own:
            waiting[need].append(index)
    sent = [0.0] * len(needs)
    ready = []
    for index, turn in enumerate(trace.turns):
        if not needs[index]:
            sent[index] = turn.at or 0.0
            ready.append((sent[index], index))
    heapify(ready)
    order = []
    while ready:
        _, index = heappop(ready)
        order.append(index)
        for follower in waiting[index]:
            missing[follower] -= 1
            if not missing[follower]:
                sent[follower] = _due(trace, follower, sent)
                heappush(ready, (sent[follower], follower))
    return Nominal(order, sent)


def _due(trace: Trace, index: int, sent: list[float]) -> float:
    turn, after, parent = trace.turns[index], trace.after[index], trace.parents[index]
    due = max(sent[need] for need in after) + turn.pause if after else turn.at or 0.0
    return max(due, sent[parent]) if parent >= 0 else due


class Contexts(NamedTuple):
    """A trace's prompts in one prefix tree; lists have one entry a turn."""

    tree: PrefixTree
    prompt: list[Tip]
    """Where each prompt ends."""
    context: list[Tip]
    """Where each prompt and its output end."""
    ideal: list[int]
    """Tokens of the longest prefix of each prompt that a turn sent before it shares (ideal reuse)."""


def contexts(trace: Trace, order: list[int]) -> Contexts:
    """Places all prompts in a prefix tree and finds each turn's ideal reuse when they are sent in `order`.

    Ideal reuse is what an unbounded cache that computes at once would serve: the longest prefix shared
    with any earlier turn's prompt and output.

    Args:
        trace: the trace.
        order: indices of all turns, parents before children, e.g. of `nominal`.
    """
    tree = PrefixTree()
    prompt = [ROOT] * len(order)
    context = [ROOT] * len(order)
    ideal = [0] * len(order)
    for index in order:
        turn, parent = trace.turns[index], trace.parents[index]
        tip = tree.cut(context[parent], trace.keep[index]) if parent >= 0 else ROOT
        for segment, tokens in turn.append:
            tip = tree.extend(tip, segment, tokens)
        prompt[index] = tip
        context[index] = tree.extend(tip, ("output", index), turn.output)
        ideal[index] = tree.longest_sent(tip)
        tree.mark_sent(context[index])
    return Contexts(tree, prompt, context, ideal)
