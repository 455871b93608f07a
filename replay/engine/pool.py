"""The GPU tier: vLLM's block pool, or SGLang's radix tree, and block tables, on arrays.

Semantics are those of vLLM v1 (``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py``): a fixed set
of physical blocks, of which block 0 is the null block and never used; a full block carries the
chained hash of its tokens (here a dense id, see `replay.trace.BlockIds`), a partial one carries none;
several blocks may carry the same id, since running requests never share what they computed
themselves; free blocks wait in the order in which they were freed and keep their id until they are
allocated again, which is LRU; a hit takes its block out of that queue; a request frees its tail first.

SGLang's radix tree (0.5.23, ``srt/mem_cache/unified_radix_cache.py``) holds pages as blocks, with three differences.
A leaf, which is what one prefill chunk or one output added as far as later requests have used it alike, is evicted
whole, the one used longest ago first: in the queue its pages follow each other. Pages that a running request
computed although the tree had them are freed after its prefill, for the tree's own. No page is set aside.
"""

from __future__ import annotations

from collections.abc import Iterable

import numba
import numpy as np
import numpy.typing as npt

from replay.engine.lru import Int32s

NEVER, STORED, BEFORE_RESET, UNFINISHED = 0, 1, 2, 3
"""History of a block id: never stored; stored since the last reset; only before it; computed but for
its last token, which a model samples last and never computes."""


class BlockPool:
    """Blocks of GPU memory, and the block table of every request that may hold some.

    A request has a *slot* from `open` to `close`: a row of the block table. `tokens[slot]` counts the
    tokens whose KV it holds, `held[slot]` the blocks.
    """

    def __init__(
        self, blocks: int, block_tokens: int, caching: bool = True, radix: bool = False, note_evicted: bool = False
    ):
        """A pool in which nothing is cached.

        Args:
            blocks: physical blocks, the null block among them.
            block_tokens: tokens of one block.
            caching: False: no block ever gets an id.
            radix: True: SGLang's radix tree; False: vLLM's block pool.
            note_evicted: keep the ids of what is evicted for `take_evicted`.
        """
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.caching = caching
        self.usable = blocks - 1
        """Blocks that requests can hold."""
        # The free queue: blocks in `queue[head:tail]`, -1 where one was taken out. `place` is a free block's index
        # there, else minus its references. Read and written in order, it costs fewer cache misses than a list.
        self._queue = np.full(4 * blocks, -1, np.int32)
        self._queue[blocks : 2 * blocks - 1] = np.arange(1, blocks)
        self._place = np.arange(blocks - 1, 2 * blocks - 1, dtype=np.int32)
        self._place[0] = -1
        self._key = np.full(blocks, -1, np.int32)
        self._twin = np.full(blocks, -1, np.int32)
        self._counts = np.array([self.usable, 0, blocks, 2 * blocks - 1, 0], np.int64)
        """Free blocks, evicted so far, head and tail of the queue, ids in `_gone`."""
        self.first: Int32s = np.full(1024, -1, np.int32)
        """The block that a hit on an id finds, or -1; grows with the ids."""
        self.history: npt.NDArray[np.int8] = np.zeros(1024, np.int8)
        """What became of each id: `NEVER`, `STORED`, `BEFORE_RESET` or `UNFINISHED`."""
        self.radix = radix
        self._labels_output = caching and not radix
        self.leaf: Int32s = np.zeros(1024 if radix else 0, np.int32)
        """The leaf of the radix tree with which each id came into it; 0: none yet."""
        self._leaves = 0
        self._gone: Int32s = np.empty(2 * blocks if note_evicted else 0, np.int32)
        self._table = np.zeros((64, 256), np.int32)
        self._ids = np.zeros((64, 256), np.int32)
        self.tokens = np.zeros(64, np.int64)
        self.held = np.zeros(64, np.int32)
        self._labelled = np.zeros(64, np.int32)
        self._free_slots = list(range(63, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return int(self._counts[0])

    @property
    def evicted(self) -> int:
        """Cached blocks that gave way so far."""
        return int(self._counts[1])

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def know(self, count: int) -> None:
        """Makes room for block ids below `count`."""
        if count > len(self.first):
            more = max(count, 2 * len(self.first)) - len(self.first)
            self.first = np.concatenate([self.first, np.full(more, -1, np.int32)])
            self.history = np.concatenate([self.history, np.zeros(more, np.int8)])
            if self.radix:
                self.leaf = np.concatenate([self.leaf, np.zeros(more, np.int32)])

    def open(self, ids: Int32s, blocks: int) -> int:
        """A slot for a request.

        Args:
            ids: ids of the full blocks of its prompt and output.
            blocks: most blocks that it will hold, at least `len(ids)`.
        """
        if not self._free_slots:
            self._more_slots()
        if blocks > self._table.shape[1]:
            width = max(blocks, 2 * self._table.shape[1]) - self._table.shape[1]
            self._table = np.pad(self._table, ((0, 0), (0, width)))
            self._ids = np.pad(self._ids, ((0, 0), (0, width)))
        slot = self._free_slots.pop()
        self._ids[slot, : len(ids)] = ids
        self.tokens[slot] = self.held[slot] = self._labelled[slot] = 0
        return slot

    def _more_slots(self) -> None:
        count = len(self.tokens)
        self._table = np.pad(self._table, ((0, count), (0, 0)))
        self._ids = np.pad(self._ids, ((0, count), (0, 0)))
        self.tokens = np.pad(self.tokens, (0, count))
        self.held = np.pad(self.held, (0, count))
        self._labelled = np.pad(self._labelled, (0, count))
        self._free_slots.extend(range(2 * count - 1, count - 1, -1))

    def ids(self, slot: int) -> Int32s:
        """The row of block ids of a slot (as long as the widest request; only the request's own count)."""
        return np.asarray(self._ids[slot])

    def table(self, slot: int) -> Int32s:
        """The physical blocks that a slot holds, in order."""
        return np.asarray(self._table[slot, : self.held[slot]])

    def match(self, slot: int, limit: int) -> tuple[int, int]:
        """The longest resident prefix of at most `limit` blocks.

        Returns:
            Its blocks, and how many of them are free: taking those uses up free blocks too.
        """
        if not self.caching:
            return 0, 0
        hit, idle = _match(self.first, self._place, self._ids[slot], limit)
        return int(hit), int(idle)

    def comes_closer(self, slot: int, block: int, slots: Int32s) -> bool:
        """Whether one of `slots` still has to compute block number `block` of the request in `slot`, which may hit it.

        SGLang puts an output into its tree only when its request ends.
        """
        if self.radix:
            return False
        same = self._ids[slots, block] == self._ids[slot, block]
        return self.caching and bool((same & (self._labelled[slots] <= block)).any())

    def hold(self, slot: int, hits: int) -> None:
        """Takes the first `hits` blocks, which `match` found, out of the free queue."""
        _hold(self.first, self._place, self._queue, self._counts, self._ids[slot], self._table[slot], hits)
        self.held[slot] = self._labelled[slot] = hits
        self.tokens[slot] = hits * self.block_tokens

    def extend(self, slot: int, tokens: int, label: bool = True) -> None:
        """Allocates until the slot holds `tokens` tokens, evicting what was freed longest ago.

        The caller has checked that enough blocks are free. Blocks get their ids as soon as their tokens
        are scheduled, as in vLLM, unless `label` is false (their KV is still on its way).
        """
        blocks = self.blocks_for(tokens)
        if blocks > self.held[slot]:
            self._take(slot, blocks)
        self.tokens[slot] = tokens
        if label:
            self.label(slot)

    def _take(self, slot: int, blocks: int) -> None:
        _take(
            self._queue, self._place, self._key, self._twin, self.first, self._counts, self.leaf, self._gone,
            self._table[slot], self.held[slot], blocks,
        )  # fmt: skip
        self.held[slot] = blocks

    def label(self, slot: int) -> None:
        """Gives every full block of the slot its id: from now on it can be hit."""
        full = self.tokens[slot] // self.block_tokens
        if self.caching and full > self._labelled[slot]:
            _label(
                self._key, self._twin, self.first, self.history, self._ids[slot], self._table[slot],
                self._labelled[slot], full,
            )  # fmt: skip
            self._labelled[slot] = full

    def remember(self, slot: int, tokens: int) -> None:
        """Notes that something below the GPU stores the first `tokens` tokens, where the GPU caches nothing."""
        if not self.caching:
            self.history[self._ids[slot, : tokens // self.block_tokens]] = STORED

    def needed(self, slots: Int32s, steps: int) -> int:
        """Blocks that decoding `steps` tokens in each of `slots` allocates."""
        return int(_needed(slots, self.tokens, self.held, self.block_tokens, steps))

    def decode(self, slots: Int32s, steps: int) -> None:
        """Decodes `steps` tokens in each of `slots`; the caller has checked `needed`."""
        _decode(
            self._queue, self._place, self._key, self._twin, self.first, self.history, self._counts, self.leaf,
            self._gone, self._ids, self._table, self.tokens, self.held, self._labelled, slots, steps, self.block_tokens,
            self._labels_output,
        )  # fmt: skip

    def prefill(self, slot: int, chunk: int, slots: Int32s, steps: int) -> None:
        """Takes steps that each decode one token in every one of `slots`, then extend `slot` by `chunk` tokens.

        The caller has checked that enough blocks are free.
        """
        if steps:
            _prefill(
                self._queue, self._place, self._key, self._twin, self.first, self.history, self._counts, self.leaf,
                self._gone, self._ids, self._table, self.tokens, self.held, self._labelled, slots, slot, chunk, steps,
                self.block_tokens, self._labels_output,
            )  # fmt: skip
            if self.radix:
                self.label(slot)

    def grow_tree(self, slot: int, known: int, met: int, ends: Iterable[int]) -> None:
        """Puts what a slot has computed into the radix tree, and has the slot hold the tree's blocks where it had them.

        Args:
            slot: of a request.
            known: tokens that it found in the tree or loaded.
            met: tokens that were in the tree, some of them below and not loaded.
            ends: where leaves end, in tokens; what is not yet a whole block is left out.
        """
        self.label(slot)
        row, size, full = self._ids[slot], self.block_tokens, int(self._labelled[slot])
        own = self.first[row[:full]] == self._table[slot, :full]
        begin = met // size
        self._split(row[: known // size])
        self._split(row[:begin])
        for end in ends:
            page = min(end // size, full)
            if begin < page:
                self._leaves += 1
                self.leaf[row[begin:page][own[begin:page]]] = self._leaves
                begin = page
            self._split(row[:page])
        _share(
            self._queue, self._place, self._key, self._twin, self.first, self._counts, self._table[slot],
            self.held[slot],
        )  # fmt: skip

    def _split(self, ids: Int32s) -> None:
        """Lets a leaf end where `ids`, a path from the root, ends."""
        if len(ids):
            others = np.flatnonzero(self.leaf[ids] != self.leaf[ids[-1]])
            self._leaves += 1
            self.leaf[ids[others[-1] + 1 if len(others) else 0 :]] = self._leaves

    def take_evicted(self) -> Int32s:
        """Ids of what has been evicted since the last call, where nothing of the same id is left."""
        count = int(self._counts[4])
        self._counts[4] = 0
        gone = self._gone[:count]
        return gone[self.first[gone] < 0]

    def release(self, slot: int) -> None:
        """Frees all blocks of a slot, those without an id to be used first, the others' last one first."""
        _release(self._queue, self._place, self._key, self._counts, self._table[slot], self.held[slot])
        self.held[slot] = self._labelled[slot] = self.tokens[slot] = 0

    def close(self, slot: int) -> None:
        """Frees all blocks of a slot and the slot itself."""
        self.release(slot)
        self._free_slots.append(slot)

    def forget(self, slots: Iterable[int] = ()) -> None:
        """Empties the cache after closing `slots`: no id is resident, and what was stored is remembered as such."""
        for slot in slots:
            self.close(slot)
        self._key[:] = self._twin[:] = self.first[:] = -1
        self.history[self.history == STORED] = BEFORE_RESET


@numba.njit(cache=True)
def _match(first, place, ids, limit):  # type: ignore[no-untyped-def]  # pragma: no cover
    hit = idle = 0
    while hit < limit:
        block = first[ids[hit]]
        if block < 0:
            break
        idle += place[block] >= 0
        hit += 1
    return hit, idle


@numba.njit(cache=True)
def _hold(first, place, queue, counts, ids, table, hits):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(hits):
        block = first[ids[index]]
        if place[block] >= 0:
            queue[place[block]] = -1
            place[block] = 0
            counts[0] -= 1
        place[block] -= 1
        table[index] = block


@numba.njit(cache=True)
def _take(  # type: ignore[no-untyped-def]  # pragma: no cover
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
                _drop_leaf(queue, key, twin, first, counts, leaf, gone, head, name)
    counts[0] -= end - begin
    counts[2] = head


@numba.njit(cache=True)
def _drop_leaf(queue, key, twin, first, counts, leaf, gone, head, last):  # type: ignore[no-untyped-def]  # pragma: no cover
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
def _share(queue, place, key, twin, first, counts, table, held):  # type: ignore[no-untyped-def]  # pragma: no cover
    if counts[2] < held:
        _centre(queue, place, counts)
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
def _label(key, twin, first, history, ids, table, begin, end):  # type: ignore[no-untyped-def]  # pragma: no cover
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
def _release(queue, place, key, counts, table, held):  # type: ignore[no-untyped-def]  # pragma: no cover
    if counts[2] < held or counts[3] + held > len(queue):
        _centre(queue, place, counts)
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
def _centre(queue, place, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    blocks = queue[counts[2] : counts[3]]
    blocks = blocks[blocks >= 0]
    start = len(queue) // 4
    queue[:] = -1
    for index in range(len(blocks)):
        queue[start + index] = blocks[index]
        place[blocks[index]] = start + index
    counts[2], counts[3] = start, start + len(blocks)


@numba.njit(cache=True)
def _needed(slots, tokens, held, size, steps):  # type: ignore[no-untyped-def]  # pragma: no cover
    total = 0
    for slot in slots:
        total += max(0, (tokens[slot] + steps + size - 1) // size - held[slot])
    return total


@numba.njit(cache=True)
def _grow(  # type: ignore[no-untyped-def]  # pragma: no cover
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
        _take(queue, place, key, twin, first, counts, leaf, gone, table[slot], held[slot], blocks)
        held[slot] = blocks
    full = tokens[slot] // size
    if caching and full > labelled[slot]:
        _label(key, twin, first, history, ids[slot], table[slot], labelled[slot], full)
        labelled[slot] = full


@numba.njit(cache=True)
def _decode(  # type: ignore[no-untyped-def]  # pragma: no cover
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
        _grow(
            queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled, slot,
            steps, size, caching,
        )  # fmt: skip


@numba.njit(cache=True)
def _prefill(  # type: ignore[no-untyped-def]  # pragma: no cover
    queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled, slots, long,
    chunk, steps, size, caching,
):  # fmt: skip
    for _ in range(steps):
        for slot in slots:
            # Within a block that it holds already, a token changes nothing but their count.
            if tokens[slot] % size and (tokens[slot] + 1) % size:
                tokens[slot] += 1
            else:
                _grow(
                    queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled,
                    slot, 1, size, caching,
                )  # fmt: skip
        _grow(
            queue, place, key, twin, first, history, counts, leaf, gone, ids, table, tokens, held, labelled, long,
            chunk, size, caching,
        )  # fmt: skip
