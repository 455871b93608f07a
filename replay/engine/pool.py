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

import numpy as np
import numpy.typing as npt

from replay.engine import pool_kernel as kernel
from replay.engine.lru import Int32s
from replay.engine.pool_kernel import BEFORE_RESET, STORED


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
        hit, idle = kernel.match(self.first, self._place, self._ids[slot], limit)
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
        kernel.hold(self.first, self._place, self._queue, self._counts, self._ids[slot], self._table[slot], hits)
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
        kernel.take(
            self._queue, self._place, self._key, self._twin, self.first, self._counts, self.leaf, self._gone,
            self._table[slot], self.held[slot], blocks,
        )  # fmt: skip
        self.held[slot] = blocks

    def label(self, slot: int) -> None:
        """Gives every full block of the slot its id: from now on it can be hit."""
        full = self.tokens[slot] // self.block_tokens
        if self.caching and full > self._labelled[slot]:
            kernel.label(
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
        return int(kernel.needed(slots, self.tokens, self.held, self.block_tokens, steps))

    def decode(self, slots: Int32s, steps: int) -> None:
        """Decodes `steps` tokens in each of `slots`; the caller has checked `needed`."""
        kernel.decode(
            self._queue, self._place, self._key, self._twin, self.first, self.history, self._counts, self.leaf,
            self._gone, self._ids, self._table, self.tokens, self.held, self._labelled, slots, steps, self.block_tokens,
            self._labels_output,
        )  # fmt: skip

    def prefill(self, slot: int, chunk: int, slots: Int32s, steps: int) -> None:
        """Takes steps that each decode one token in every one of `slots`, then extend `slot` by `chunk` tokens.

        The caller has checked that enough blocks are free.
        """
        if steps:
            kernel.prefill(
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
        kernel.share(
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
        kernel.release(self._queue, self._place, self._key, self._counts, self._table[slot], self.held[slot])
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
