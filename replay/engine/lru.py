"""Recency order in arrays: a doubly linked list for caches, and a whole-trace LRU for one capacity.

A list is two int32 arrays `after` and `before` with entry 0 as its sentinel: `after[0]` is the entry
that is evicted first, `before[0]` the one used last. Entries are array indices, so moving one costs
four writes and no allocation.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@numba.njit(cache=True)
def unlink(after, before, entry):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Takes an entry out of its list."""
    older, newer = before[entry], after[entry]
    after[older] = newer
    before[newer] = older


@numba.njit(cache=True)
def append(after, before, entry):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Makes an entry the one used last."""
    newest = before[0]
    after[newest] = entry
    before[entry] = newest
    after[entry] = 0
    before[0] = entry


def serial_hits(ids: Int32s, ends: Int64s, capacity: int) -> Int64s:
    """Hits of an LRU prefix cache that serves one request after another.

    A request hits its longest resident prefix; all its blocks become the newest, its head newer than
    its tail, which is what vLLM's order of freeing gives without concurrency.

    Args:
        ids: block ids of all requests, one after the other; dense from 0.
        ends: where each request ends in `ids`.
        capacity: blocks that fit.

    Returns:
        Blocks hit by each request.
    """
    hits = np.zeros(len(ends), np.int64)
    blocks = int(ids.max()) + 1 if len(ids) else 0
    _serial_hits(ids, np.asarray(ends, np.int64), capacity, np.full(blocks, -1, np.int32), hits)
    return hits


@numba.njit(cache=True)
def _serial_hits(ids, ends, capacity, used_by, hits):  # type: ignore[no-untyped-def]  # pragma: no cover
    # Instead of a linked list: `used_by` holds the last request that used a block (-1: not resident).
    # The order of eviction is then the trace itself, oldest request first and its tail before its
    # head; a block that a later request used is passed over, and so is a whole request once later
    # ones have used all its blocks (`left` is 0), which is the rule where prompts grow turn by turn.
    held = 0
    left = np.zeros(len(ends), np.int64)
    victim, position = 0, (ends[0] - 1 if len(ends) else -1)
    start = 0
    for request in range(len(ends)):
        end = ends[request]
        hit = -1
        place = start
        while place < end:
            owner = used_by[ids[place]]
            begin = place
            while place < end and used_by[ids[place]] == owner:
                used_by[ids[place]] = request
                place += 1
            if owner >= 0:
                left[owner] -= place - begin
            else:
                held += place - begin
                if hit < 0:
                    hit = begin - start
            left[request] += place - begin
        hits[request] = hit if hit >= 0 else end - start
        while held > capacity:
            while left[victim] > 0 and held > capacity:
                if used_by[ids[position]] == victim:
                    used_by[ids[position]] = -1
                    left[victim] -= 1
                    held -= 1
                position -= 1
            if left[victim] == 0:
                victim += 1
                if victim > request:
                    break
                position = ends[victim] - 1
        start = end
