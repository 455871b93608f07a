"""Loops of `replay.engine.pool` over blocks, compiled."""

from __future__ import annotations

import numba

NEVER, STORED, BEFORE_RESET, UNFINISHED = 0, 1, 2, 3
"""History of a block id: never stored; stored since the last reset; only before it; computed but for
its last token, which a model samples last and never computes."""


@numba.njit(cache=True)
def match(first, place, ids, limit):  # type: ignore[no-untyped-def]  # pragma: no cover
    hit = idle = 0
    while hit < limit:
        block = first[ids[hit]]
        if block < 0:
            break
        idle += place[block] >= 0
        hit += 1
    return hit, idle


@numba.njit(cache=True)
def hold(first, place, queue, counts, ids, table, hits):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(hits):
        block = first[ids[index]]
        if place[block] >= 0:
            queue[place[block]] = -1
            place[block] = 0
            counts[0] -= 1
        place[block] -= 1
        table[index] = block


@numba.njit(cache=True)
def take(  # type: ignore[no-untyped-def]  # pragma: no cover
    queue, place, key, twin, first, counts, leaf, gone, table, begin, end
):
    # One loop without calls: a call costs reference counts of every array.
    head = counts[2]
    for index in range(begin, end):
        while queue[head] < 0:
            head += 1
        block = queue[head]
        head += 1
        place[block] = -1
        table[index] = block
        name = key[block]
        if name >= 0:
            counts[1] += 1
            other, rest = first[name], twin[block]
            if other == block:
                first[name] = rest
            else:
                while twin[other] != block:
                    other = twin[other]
                twin[other] = rest
            key[block] = -1
            if rest >= 0:
                twin[block] = -1
            if len(gone) and first[name] < 0:
                gone[counts[4]] = name
                counts[4] += 1
            if len(leaf):
                drop_leaf(queue, key, twin, first, counts, leaf, gone, head, name)
    counts[0] -= end - begin
    counts[2] = head


@numba.njit(cache=True)
def drop_leaf(queue, key, twin, first, counts, leaf, gone, head, last):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Evicts, without taking them, the blocks at the queue's head that belong to the leaf whose `last` block went."""
    place, end = head, counts[3]
    while place < end and leaf[last]:
        block = queue[place]
        place += 1
        if block < 0:
            continue
        name = key[block]
        if name < 0 or leaf[name] != leaf[last]:
            return
        if first[name] == block:
            first[name] = twin[block]
        key[block] = twin[block] = -1
        counts[1] += 1
        if len(gone) and first[name] < 0:
            gone[counts[4]] = name
            counts[4] += 1


@numba.njit(cache=True)
def share(queue, place, key, twin, first, counts, table, held):  # type: ignore[no-untyped-def]  # pragma: no cover
    if counts[2] < held:
        centre(queue, place, counts)
    for index in range(held):
        block = table[index]
        name = key[block]
        if name < 0 or first[name] == block:
            continue
        other = first[name]
        while twin[other] != block:
            other = twin[other]
        twin[other] = twin[block]
        key[block] = twin[block] = -1
        place[block] += 1
        if place[block] == 0:
            counts[2] -= 1
            queue[counts[2]] = block
            place[block] = counts[2]
            counts[0] += 1
        kept = first[name]
        if place[kept] >= 0:
            queue[place[kept]] = -1
            place[kept] = 0
            counts[0] -= 1
        place[kept] -= 1
        table[index] = kept


@numba.njit(cache=True)
def label(key, twin, first, history, ids, table, begin, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(begin, end):
        name, block = ids[index], table[index]
        key[block] = name
        history[name] = STORED
        if first[name] < 0:
            first[name] = block
            continue
        last = first[name]
        while twin[last] >= 0:
            last = twin[last]
        twin[last] = block


@numba.njit(cache=True)
def release(queue, place, key, counts, table, held):  # type: ignore[no-untyped-def]  # pragma: no cover
    if counts[2] < held or counts[3] + held > len(queue):
        centre(queue, place, counts)
    # Blocks without an id can never be hit: vLLM (0.26 to 0.33, `BlockPool.free_blocks`) takes them first.
    head, tail = counts[2], counts[3]
    for index in range(held):
        block = table[held - 1 - index]
        place[block] += 1
        if place[block] == 0 and key[block] >= 0:
            queue[tail] = block
            place[block] = tail
            tail += 1
            counts[0] += 1
    for index in range(held):
        block = table[index]
        if place[block] == 0:
            head -= 1
            queue[head] = block
            place[block] = head
            counts[0] += 1
    counts[2], counts[3] = head, tail


@numba.njit(cache=True)
def centre(queue, place, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    blocks = queue[counts[2] : counts[3]]
    blocks = blocks[blocks >= 0]
    start = len(queue) // 4
    queue[:] = -1
    for index in range(len(blocks)):
        queue[start + index] = blocks[index]
        place[blocks[index]] = start + index
    counts[2], counts[3] = start, start + len(blocks)


@numba.njit(cache=True)
def needed(slots, tokens, held, size, steps):  # type: ignore[no-untyped-def]  # pragma: no cover
    total = 0
    for slot in slots:
        total += max(0, (tokens[slot] + steps + size - 1) // size - held[slot])
    return total


@numba.njit(cache=True)
def grow(  # type: ignore[no-untyped-def]  # pragma: no cover
    queue,
    place,
    key,
    twin,
    first,
    history,
    counts,
    leaf,
    gone,
    ids,
    table,
    tokens,
    held,
    labelled,
    slot,
    more,
    size,
    caching,
):
    tokens[slot] += more
    blocks = (tokens[slot] + size - 1) // size
    if blocks > held[slot]:
        take(queue, place, key, twin, first, counts, leaf, gone, table[slot], held[slot], blocks)
        held[slot] = blocks
    full = tokens[slot] // size
    if caching and full > labelled[slot]:
        label(key, twin, first, history, ids[slot], table[slot], labelled[slot], full)
        labelled[slot] = full


@numba.njit(cache=True)
def decode(  # type: ignore[no-untyped-def]  # pragma: no cover
    queue,
    place,
    key,
    twin,
    first,
    history,
    counts,
    leaf,
    gone,
    ids,
    table,
    tokens,
    held,
    labelled,
    slots,
    steps,
    size,
    caching,
):
    for slot in slots:
        grow(
            queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled, slot,
            steps, size, caching,
        )  # fmt: skip


@numba.njit(cache=True)
def prefill(  # type: ignore[no-untyped-def]  # pragma: no cover
    queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled, slots, long,
    chunk, steps, size, caching,
):  # fmt: skip
    for _ in range(steps):
        for slot in slots:
            # Within a block that it holds already, a token changes nothing but their count.
            if tokens[slot] % size and (tokens[slot] + 1) % size:
                tokens[slot] += 1
            else:
                grow(
                    queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled,
                    slot, 1, size, caching,
                )  # fmt: skip
        grow(
            queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled, long,
            chunk, size, caching,
        )  # fmt: skip
