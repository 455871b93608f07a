from __future__ import annotations

import numpy as np
from engine.harness import free_queue
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replay.engine.pool import BlockPool
from replay.engine.pool_kernel import BEFORE_RESET, NEVER, STORED

BLOCKS, SIZE = 12, 2


def check(pool: BlockPool) -> None:
    """Every block but the null block is either in the free queue or held, and what is cached can be found."""
    queue = free_queue(pool)
    assert len(queue) == len(set(queue)) == pool.free
    held = set(np.flatnonzero(pool._place < 0).tolist()) - {0}
    assert held.isdisjoint(queue)
    assert held | set(queue) == set(range(1, pool.blocks))
    found = set()
    for name in np.flatnonzero(pool.first >= 0).tolist():
        block = int(pool.first[name])
        while block >= 0:
            assert pool._key[block] == name
            assert pool.history[name] == STORED
            assert block not in found
            found.add(block)
            block = int(pool._twin[block])
    assert found == set(np.flatnonzero(pool._key >= 0).tolist())


class PoolMachine(RuleBasedStateMachine):
    """Requests of a few families of prompts come, grow and go; a list-and-dict model runs beside."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.free: list[list[int]] = [[-1] for _ in range(BLOCKS - 1)]
        self.cached: dict[int, list[list[int]]] = {}
        self.users: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.lengths: dict[int, tuple[list[int], int]] = {}

    @rule(family=st.integers(0, 2), blocks=st.integers(1, 8), rest=st.integers(0, 1), share=st.integers(0, 3))
    def arrive(self, family: int, blocks: int, rest: int, share: int) -> None:
        """A prompt of `blocks` full blocks, the first `share` of them common to all families."""
        tokens = blocks * SIZE + rest
        ids = [index if index < share else 10 + 10 * family + 40 * share + index for index in range(blocks)]
        slot = self.pool.open(np.array(ids, np.int32), self.pool.blocks_for(tokens))
        hits, idle = self.pool.match(slot, (tokens - 1) // SIZE)
        table = []
        for name in ids[: (tokens - 1) // SIZE]:
            if not self.cached.get(name):
                break
            table.append(self.cached[name][0])
        assert hits == len(table)
        assert idle == sum(self.users.get(id(block), 0) == 0 for block in table)
        if self.pool.blocks_for(tokens) - hits + idle > self.pool.free:
            self.pool.close(slot)
            return
        self.pool.hold(slot, hits)
        for block in table:
            self.free = [other for other in self.free if other is not block]
            self.users[id(block)] = self.users.get(id(block), 0) + 1
        self.tables[slot] = table
        self.lengths[slot] = (ids, hits)
        self.extend(slot, tokens)

    def extend(self, slot: int, tokens: int) -> None:
        self.pool.extend(slot, tokens)
        self.mirror(slot, tokens)

    def mirror(self, slot: int, tokens: int) -> None:
        table, (ids, labelled) = self.tables[slot], self.lengths[slot]
        while len(table) * SIZE < tokens:
            block = self.free.pop(0)
            if block[0] >= 0:
                self.cached[block[0]] = [other for other in self.cached[block[0]] if other is not block]
            block[0] = -1
            self.users[id(block)] = 1
            table.append(block)
        for index in range(labelled, min(tokens // SIZE, len(ids))):
            table[index][0] = ids[index]
            self.cached.setdefault(ids[index], []).append(table[index])
        self.lengths[slot] = (ids, max(labelled, min(tokens // SIZE, len(ids))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.tables)))
        self.pool.close(slot)
        unnamed: list[list[int]] = []
        for block in reversed(self.tables.pop(slot)):
            self.users[id(block)] -= 1
            if not self.users[id(block)] and block[0] >= 0:
                self.free.append(block)
            elif not self.users[id(block)]:
                unnamed.append(block)
        self.free[:0] = unnamed

    @rule()
    def reset(self) -> None:
        if self.tables:
            return
        before = self.pool.history.copy()
        self.pool.forget()
        for block in self.free:
            block[0] = -1
        self.cached.clear()
        assert ((before == NEVER) == (self.pool.history == NEVER)).all()
        assert (self.pool.history[before == STORED] == BEFORE_RESET).all()

    @invariant()
    def agrees(self) -> None:
        check(self.pool)
        assert self.pool.free == len(self.free)
        for name in range(200):
            assert (self.pool.first[name] >= 0) == bool(self.cached.get(name))
        assert self.pool._key[free_queue(self.pool)].tolist() == [block[0] for block in self.free]


TestPool = PoolMachine.TestCase


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_decoding_many_steps_equals_decoding_one_by_one(prompts: list[int], steps: int) -> None:
    pools = [BlockPool(200, SIZE), BlockPool(200, SIZE)]
    taken: list[list[int]] = [[], []]
    for pool, slots_of in zip(pools, taken, strict=True):
        for number, tokens in enumerate(prompts):
            ids = np.arange(100 * number, 100 * number + (tokens + steps) // SIZE, dtype=np.int32)
            slot = pool.open(ids, pool.blocks_for(tokens + steps))
            pool.extend(slot, tokens)
            slots_of.append(slot)
    assert taken[0] == taken[1]
    slots = np.array(taken[0], np.int32)
    needed = pools[0].needed(slots, steps)
    before = pools[0].free
    pools[0].decode(slots, steps)
    assert before - pools[0].free == needed
    for _ in range(steps):
        pools[1].decode(slots, 1)
    for pool in pools:
        check(pool)
    assert (pools[0].first >= 0).tolist() == (pools[1].first >= 0).tolist()
    assert pools[0].free == pools[1].free


def test_tables_grow_with_requests_and_ids() -> None:
    pool = BlockPool(5000, SIZE)
    pool.know(4000)
    slots = []
    for number in range(100):
        slots.append(pool.open(np.arange(40 * number, 40 * number + 40, dtype=np.int32), 40))
        pool.extend(slots[-1], 80)
    wide = pool.open(np.arange(300, dtype=np.int32), 300)
    assert pool.match(wide, 300)[0] == 300
    assert len(set(slots)) == 100
    check(pool)


def test_without_caching_nothing_is_ever_found() -> None:
    pool = BlockPool(20, SIZE, caching=False)
    ids = np.arange(5, dtype=np.int32)
    slot = pool.open(ids, 5)
    pool.extend(slot, 10)
    pool.close(slot)
    assert pool.match(pool.open(ids, 5), 5) == (0, 0)
    assert pool.history[0] == NEVER
