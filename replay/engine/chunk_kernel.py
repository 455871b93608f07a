"""Loops of `replay.engine.chunks` over chunks, compiled.

Entry ``id + 1`` of each array belongs to chunk `id`; entry 0 is the list's sentinel.
"""

from __future__ import annotations

import numba
import numpy as np

from replay.engine.lru import append, unlink

ABSENT, PRESENT = 0, 1
KEPT, DROPPED = 1, 2


@numba.njit(cache=True)
def prefix(state, ready, ids, start, now):  # type: ignore[no-untyped-def]  # pragma: no cover
    end = start
    while end < len(ids) and state[ids[end] + 1] == PRESENT and ready[ids[end] + 1] <= now:
        end += 1
    return end


@numba.njit(cache=True)
def touch(after, before, state, ids, start, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(end - 1, start - 1, -1):
        entry = ids[index] + 1
        if state[entry] == PRESENT:
            unlink(after, before, entry)
            append(after, before, entry)


@numba.njit(cache=True)
def missing(state, ids, start, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    count = 0
    for index in range(start, end):
        count += state[ids[index] + 1] == ABSENT
    return count


@numba.njit(cache=True)
def insert(  # type: ignore[no-untyped-def]  # pragma: no cover
    after, before, state, fate, pins, ready, busy, counts, ids, start, end, now, first, each, capacity, evict,
    above, leaf,
):  # fmt: skip
    time = first
    candidate = after[0]
    own = -1
    tree = len(above) > 0
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT:
            continue
        if counts[0] >= capacity:
            if not evict:
                candidate = 0
            while (
                candidate > 0
                and candidate != own
                and (pins[candidate] > 0 or busy[candidate] > now or (tree and above[candidate - 1] >= 0))
            ):
                candidate = after[candidate]
            if candidate in (0, own):
                counts[2] += 1
                fate[entry] = DROPPED
                continue
            whole = leaf[candidate - 1] if tree else 0
            while True:
                victim, candidate = candidate, after[candidate]
                unlink(after, before, victim)
                state[victim] = ABSENT
                counts[0] -= 1
                counts[1] += 1
                if not whole or candidate in (0, own) or leaf[candidate - 1] != whole:
                    break
                if pins[candidate] > 0 or busy[candidate] > now or above[candidate - 1] >= 0:
                    break
        append(after, before, entry)
        if own < 0:
            own = entry
        state[entry], fate[entry] = PRESENT, KEPT
        ready[entry] = busy[entry] = time
        counts[0] += 1
        time += each
    return time - each if time > first else first


@numba.njit(cache=True)
def take_out(  # type: ignore[no-untyped-def]  # pragma: no cover
    after, before, state, pins, busy, counts, times, until, most, now
):
    taken, entry = 0, after[0]
    while entry > 0 and taken < most:
        following = after[entry]
        if pins[entry] <= 0 and busy[entry] <= now and times[entry] <= until:
            unlink(after, before, entry)
            state[entry] = ABSENT
            taken += 1
        entry = following
    counts[0] -= taken
    counts[1] += taken
    return taken


@numba.njit(cache=True)
def rare_first(after, before, pins, busy, uses, count, held, now):  # type: ignore[no-untyped-def]  # pragma: no cover
    entries, size = np.empty(held, np.int32), 0
    entry = after[0]
    while entry > 0:
        if pins[entry] <= 0 and busy[entry] <= now:
            entries[size] = entry
            size += 1
        entry = after[entry]
    order = np.argsort(uses[entries[:size]], kind="mergesort")
    for index in range(min(count, size) - 1, -1, -1):
        entry = entries[order[index]]
        unlink(after, before, entry)
        oldest = after[0]
        before[oldest], after[entry] = entry, oldest
        before[entry], after[0] = 0, entry


@numba.njit(cache=True)
def evictable(after, pins, busy, now, most, above):  # type: ignore[no-untyped-def]  # pragma: no cover
    count, entry = 0, after[0]
    while entry > 0 and count < most:
        count += pins[entry] <= 0 and busy[entry] <= now and (len(above) == 0 or above[entry - 1] < 0)
        entry = after[entry]
    return count


@numba.njit(cache=True)
def give_up(after, before, state, pins, counts, ids, start, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    gone = 0
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT and pins[entry] <= 0:
            unlink(after, before, entry)
            state[entry] = ABSENT
            gone += 1
    counts[0] -= gone
    return gone


@numba.njit(cache=True)
def evict_doubles(  # type: ignore[no-untyped-def]  # pragma: no cover
    after, before, state, pins, busy, counts, above, most, now
):
    taken, entry = 0, after[0]
    while entry > 0 and taken < most:
        following = after[entry]
        if pins[entry] <= 0 and busy[entry] <= now and above[entry - 1] >= 0:
            unlink(after, before, entry)
            state[entry] = ABSENT
            taken += 1
        entry = following
    counts[0] -= taken
    counts[1] += taken


@numba.njit(cache=True)
def on_the_way(state, fate, ready, ids, now, served, late):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(len(ids)):
        entry = ids[index] + 1
        here = state[entry] == PRESENT
        served[index] |= here and ready[entry] <= now
        late[index] |= fate[entry] == DROPPED or (here and ready[entry] > now)


@numba.njit(cache=True)
def keep_until(state, busy, ids, start, end, lower_state, lower_ready):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT and lower_state[entry] == PRESENT:
            busy[entry] = max(busy[entry], lower_ready[entry])
