"""The prefix tree of a trace: which token prefixes are equal, at the cost of what is appended.

Prompts are sequences of pieces ``(segment, tokens)``; a piece is always the start of its segment's
token stream. Two prompts share a prefix exactly as far as their pieces agree. The tree stores each
distinct appended piece once, as a *run* of tokens below its parent, so a context of 200,000 tokens
is one small `Tip` and continuing it costs what is appended, not what is kept.

Block ids follow from the tree without hashing: the token in which a block ends identifies the block
and everything before it, which is what an engine's chained block hash does (vLLM's
``hash_block_tokens``; its hashes chain over the parent block). `BlockIds` numbers them densely, so
caches can keep their state in arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]


class Tip(NamedTuple):
    """The end of a context in a `PrefixTree`: the run it ends in, and its length in tokens."""

    run: int
    depth: int


ROOT = Tip(-1, 0)


class PrefixTree:
    """All prefixes of a set of prompts. Deterministic: the same calls give the same numbers."""

    def __init__(self) -> None:
        self.start = array("q")
        """Depth in tokens at which each run starts."""
        self.length = array("q")
        """Tokens in each run."""
        self.parent = array("q")
        """The run that each run hangs from (it starts after `start` tokens of that run's path)."""
        self.segments: list[Hashable] = []
        """Segment that each run holds a part of."""
        self.offset = array("q")
        """Position in the segment at which the run starts: non-zero where a longer piece continues a run."""
        self._sent = array("q")
        self._children: dict[tuple[int, int, Hashable, int], int] = {}

    def __len__(self) -> int:
        return len(self.start)

    def extend(self, tip: Tip, segment: Hashable, tokens: int) -> Tip:
        """The context `tip` followed by the first `tokens` tokens of `segment`."""
        offset = 0
        while offset < tokens:
            run = self._children.get((*tip, segment, offset), -1)
            if run < 0:
                run = self._add(tip, segment, offset, tokens - offset)
            used = min(self.length[run], tokens - offset)
            tip = Tip(run, tip.depth + used)
            offset += used
        return tip

    def _add(self, tip: Tip, segment: Hashable, offset: int, tokens: int) -> int:
        run = len(self.start)
        key = (tip.run, tip.depth, segment, offset)
        self.start.append(tip.depth)
        self.length.append(tokens)
        self.parent.append(tip.run)
        self.offset.append(offset)
        self._sent.append(0)
        self.segments.append(segment)
        self._children[key] = run
        return run

    def cut(self, tip: Tip, tokens: int) -> Tip:
        """The first `tokens` tokens of the context `tip`.

        Raises:
            ValueError: the context is shorter.
        """
        if tokens > tip.depth:
            raise ValueError(f"cannot keep {tokens} tokens of a context of {tip.depth}")
        run = tip.run
        while run >= 0 and self.start[run] >= tokens:
            run = self.parent[run]
        return Tip(run, tokens)

    def pieces(self, tip: Tip) -> list[tuple[Hashable, int, int]]:
        """The context as ``(segment, offset, tokens)`` from its start; tokens of all add up to its length."""
        found = [(self.segments[run], self.offset[run], used) for run, used in self._up(tip)]
        found.reverse()
        return found

    def _up(self, tip: Tip) -> Iterator[tuple[int, int]]:
        """Runs of a path from its end to its start, each with how many of its tokens the path uses."""
        run, end = tip
        while run >= 0:
            yield run, end - self.start[run]
            end = self.start[run]
            run = self.parent[run]

    def mark_sent(self, tip: Tip) -> None:
        """Records that a request with this context was sent; `longest_sent` then finds it."""
        for run, used in self._up(tip):
            if self._sent[run] >= used:
                return
            self._sent[run] = used

    def longest_sent(self, tip: Tip) -> int:
        """Tokens of the longest prefix of this context that was sent before (the ideal reuse)."""
        for run, used in self._up(tip):
            if self._sent[run]:
                return self.start[run] + min(self._sent[run], used)
        return 0


class BlockIds:
    """Numbers the blocks of `block_tokens` tokens of a `PrefixTree` densely from 0.

    Two contexts have the same id at block index k exactly if their first ``(k + 1) * block_tokens``
    tokens are equal. Ids are given when a context is first asked for and never change.

    With `partial`, a last, partial block has an id too, and a block is named by the prefix up to its *first*
    token: right where content differs at block boundaries alone, as in a trace recorded as block hashes.
    """

    def __init__(self, tree: PrefixTree, block_tokens: int, partial: bool = False):
        if block_tokens < 1:
            raise ValueError("a block has at least one token")
        self.tree = tree
        self.block_tokens = block_tokens
        self._lead = block_tokens - 1 if partial else 0
        """Added to a depth, makes division by the block size count blocks begun instead of blocks ended."""
        # Only the engine model numbers blocks; the HTTP client starts faster without numba.
        from replay.trace.kernel import fill

        self._fill = fill
        self._base = array("q")
        self.count = 0
        """Ids given so far."""

    def __call__(self, tip: Tip) -> Ids:
        """Ids of a context's blocks, in order: int32, ``depth // block_tokens`` of them (`partial`: rounded up)."""
        self._number_new_runs()
        out = np.empty((tip.depth + self._lead) // self.block_tokens, np.int32)
        if len(out):
            tree = self.tree
            arrays = _view(tree.start), _view(tree.parent), _view(self._base)
            self._fill(tip.run, tip.depth, self.block_tokens, self._lead, *arrays, out)
        return out

    def _number_new_runs(self) -> None:
        tree, size = self.tree, self.block_tokens
        for run in range(len(self._base), len(tree)):
            self._base.append(self.count)
            start = tree.start[run] + self._lead
            self.count += (start + tree.length[run]) // size - start // size


def _view(values: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(values, np.int64)
