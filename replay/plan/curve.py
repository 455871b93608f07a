"""The hit curve: how many prompt tokens an LRU prefix cache serves, for every capacity in one pass.

A cache of C blocks under LRU holds the C most recently touched blocks, whatever C is (Mattson et al.,
"Evaluation techniques for storage hierarchies", 1970), so a block's stack distance says which capacities
hit it. Engines touch a prompt's tail before its head (vLLM frees blocks in reverse order), so that heads
outlive tails.

What makes the pass fast: a block stands for its whole prefix, so touching it touches all blocks before
it. The blocks last touched by one request are therefore one contiguous stretch of its prompt, the stack
is a list of such stretches, and a Fenwick tree with one entry a request (not a block) gives distances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numba
import numpy as np
import numpy.typing as npt

from replay.trace.tree import Ids

Counts = npt.NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.int64)


@dataclass(frozen=True)
class HitCurve:
    """Hits of one block stream at every capacity."""

    block_tokens: int
    prompt_tokens: int
    """Tokens of all prompts, those outside full blocks included."""
    blocks: Counts
    """``blocks[c]``: hit blocks with a cache of c blocks, c from 0 to the number of distinct blocks."""
    tokens: Counts
    """``tokens[c]``: hit tokens with a cache of c blocks."""

    def hit_blocks(self, capacity_tokens: float) -> int:
        """Blocks served by a cache of this many tokens (whole blocks of it)."""
        return int(self.blocks[self._index(capacity_tokens)])

    def hit_tokens(self, capacity_tokens: float) -> int:
        """Tokens served by a cache of this many tokens."""
        return int(self.tokens[self._index(capacity_tokens)])

    def hit_share(self, capacity_tokens: float) -> float:
        """Share of all prompt tokens served by a cache of this many tokens."""
        return self.hit_tokens(capacity_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def working_set(self) -> int:
        """Smallest capacity in tokens that serves as much as an unlimited cache."""
        return int(np.searchsorted(self.tokens, self.tokens[-1])) * self.block_tokens

    @property
    def ceiling(self) -> int:
        """Tokens served by an unlimited cache."""
        return int(self.tokens[-1])

    def _index(self, capacity_tokens: float) -> int:
        return int(min(max(capacity_tokens, 0) // self.block_tokens, len(self.blocks) - 1))


class CurveBuilder:
    """Takes prompts in the order in which they are sent; `curve` gives the result so far.

    A prompt is looked up, then touched, at one instant. Ids are dense from 0 and name whole prefixes, as
    those of `replay.trace.BlockIds`.
    """

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        self.prompt_tokens = 0
        self._requests = 0
        self._owner: Ids = np.full(1024, -1, np.int32)
        self._before: Ids = np.full(1024, -2, np.int32)
        self._owned: Counts = np.zeros(1024, np.int64)
        self._tree: Counts = np.zeros(1025, np.int64)
        self._counts: Counts = np.zeros(1026, np.int64)
        self._short: Counts = np.zeros(1026, np.int64)

    def add(self, ids: Ids, prompt_tokens: int) -> None:
        """One prompt: its block ids from the start, int32 (n,), and its length in tokens.

        With ``n * block_tokens > prompt_tokens`` the last block is a partial one and counts with the tokens
        that it has; tokens beyond the last id are never hits.

        Raises:
            ValueError: an id stands behind two different prefixes, or there are more ids than tokens.
        """
        short = max(0, len(ids) * self.block_tokens - prompt_tokens)
        if short >= self.block_tokens:
            raise ValueError(f"{len(ids)} blocks of {self.block_tokens} tokens for a prompt of {prompt_tokens}")
        self.prompt_tokens += prompt_tokens
        if len(ids):
            self._reserve(int(ids.max()) + 1)
            arrays = (self._owner, self._before, self._owned, self._tree, self._counts, self._short)
            if not _touch(ids, self._requests, short, *arrays):
                raise ValueError("an id stands behind two different prefixes; block ids must name whole prefixes")
            self._requests += 1

    def _reserve(self, ids: int) -> None:
        if ids > len(self._owner):
            size = max(ids, 2 * len(self._owner))
            self._owner = _grown(self._owner, size, -1)
            self._before = _grown(self._before, size, -2)
            self._counts = _grown(self._counts, size + 2, 0)
            self._short = _grown(self._short, size + 2, 0)
        if self._requests == len(self._owned):
            self._owned = _grown(self._owned, 2 * len(self._owned), 0)
            self._tree = np.zeros(len(self._owned) + 1, np.int64)
            _plant(self._tree, self._owned)

    def curve(self) -> HitCurve:
        """The hit curve of all prompts added so far."""
        distinct = int(np.count_nonzero(self._owner >= 0))
        blocks = np.cumsum(np.cumsum(self._counts))[: distinct + 1]
        tokens = blocks * self.block_tokens - np.cumsum(self._short)[: distinct + 1]
        return HitCurve(self.block_tokens, self.prompt_tokens, blocks, tokens)


def hit_curve(prompts: Iterable[tuple[Ids, int]], block_tokens: int) -> HitCurve:
    """The hit curve of ``(block ids, prompt tokens)`` pairs in the order in which they are sent."""
    builder = CurveBuilder(block_tokens)
    for ids, prompt_tokens in prompts:
        builder.add(ids, prompt_tokens)
    return builder.curve()


def _grown(values: npt.NDArray[Number], size: int, fill: int) -> npt.NDArray[Number]:
    grown = np.full(size, fill, values.dtype)
    grown[: len(values)] = values
    return grown


@numba.njit(cache=True)
def _touch(ids, request, short, owner, before, owned, tree, counts, shorts):  # type: ignore[no-untyped-def]
    """Looks a prompt up and touches it.

    ``owner[b]``: request that touched block b last; ``owned[r]``: blocks of which r is the owner, and `tree`
    their Fenwick sums; ``counts``: second differences of hits by distance; ``shorts[d]``: tokens that partial
    blocks hit at distance d lack. False if an id's predecessor differs from the one seen before.
    """
    size, last, end = len(ids), -1, len(owned)
    for index in range(size):
        block = ids[index]
        if before[block] == -2:
            before[block] = last
        elif before[block] != last:
            return False
        last = block
    total = _sum(tree, end)
    first = 0
    while first < size and owner[ids[first]] >= 0:
        old = owner[ids[first]]
        stop = first
        while stop < size and owner[ids[stop]] == old:
            owner[ids[stop]] = request
            stop += 1
        # Blocks of newer owners lie above; those that this prompt has just taken over among them did too.
        nearest = total - _sum(tree, old + 1) + 1
        counts[nearest] += 1
        counts[nearest + stop - first] -= 1
        if stop == size:
            shorts[nearest + stop - first - 1] += short
        _add(tree, owned, old, first - stop)
        first = stop
    for index in range(first, size):
        owner[ids[index]] = request
    _add(tree, owned, request, size)
    return True


@numba.njit(cache=True)
def _sum(tree, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Sum of the first `end` entries of a Fenwick tree."""
    total = np.int64(0)
    while end > 0:
        total += tree[end]
        end &= end - 1
    return total


@numba.njit(cache=True)
def _add(tree, values, index, change):  # type: ignore[no-untyped-def]  # pragma: no cover
    values[index] += change
    node = index + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@numba.njit(cache=True)
def _plant(tree, values):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Builds the Fenwick tree of `values`."""
    for index in range(len(values)):
        node = index + 1
        tree[node] += values[index]
        above = node + (node & -node)
        if above < len(tree):
            tree[above] += tree[node]
