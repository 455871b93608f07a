from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.preset import LowerTier
from replay.engine.chunks import ChunkCache
from replay.engine.profiles import Link
from replay.engine.tiers import TierStack

MIB = 2**20


def marks(tier: ChunkCache, ids: np.ndarray, now: float) -> tuple[np.ndarray, np.ndarray]:
    served, late = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
    tier.on_the_way(ids, now, served, late)
    return served, late


def served(tier: ChunkCache, ids: np.ndarray, now: float) -> np.ndarray:
    return marks(tier, ids, now)[0]


def late(tier: ChunkCache, ids: np.ndarray, now: float) -> np.ndarray:
    return marks(tier, ids, now)[1]


def chunks(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def cache(capacity: int, policy: str = "lru") -> ChunkCache:
    tier = ChunkCache("cpu", capacity, policy)
    tier.know(100)
    return tier


def stack(links: dict[str, Link], connector: str = "lmcache", cpu: int = 4, disk: int | None = None) -> TierStack:
    """Tiers of so many chunks, each chunk 1 MiB."""
    tiers = [("cpu", LowerTier(gib=cpu / 1024))]
    if disk:
        tiers.append(("disk", LowerTier(gib=disk / 1024)))
    tiers_of = TierStack(tiers, links, connector, 256, MIB / 256)
    tiers_of.know(100)
    return tiers_of


def link(load_mib: float = 100.0, store_mib: float = 100.0, **others: object) -> Link:
    """A link whose bandwidths are in MiB/s."""
    return Link(load_gbps=load_mib * MIB / 1e9, store_gbps=store_mib * MIB / 1e9, **others)


@given(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=9, unique=True), max_size=20), st.integers(1, 8))
def test_never_holds_more_than_fits(stores: list[list[int]], capacity: int) -> None:
    tier = cache(capacity)
    for now, ids in enumerate(stores):
        tier.insert(chunks(*ids), 0, len(ids), float(now), now + 0.5)
        assert tier.used == sum(served(tier, chunks(*range(21)), np.inf)) <= capacity


def test_pinned_chunks_and_those_on_their_way_do_not_give_way() -> None:
    tier = cache(3)
    tier.insert(chunks(0, 1, 2), 0, 3, 0.0, 1.0)
    tier.insert(chunks(3), 0, 1, 0.5, 1.5)
    assert not served(tier, chunks(3), 9.0)[0]
    assert late(tier, chunks(3), 9.0)[0]
    tier.pin(chunks(0), 0, 1, 1)
    tier.insert(chunks(3), 0, 1, 2.0, 3.0)
    assert served(tier, chunks(0, 1, 2, 3), 9.0).tolist() == [True, False, True, True]
    assert not late(tier, chunks(3), 9.0)[0]


@pytest.mark.parametrize(("policy", "left"), [("lru", [0, 2, 3]), ("fifo", [1, 2, 3])])
def test_a_hit_moves_a_chunk_only_under_lru(policy: str, left: list[int]) -> None:
    tier = cache(3, policy)
    tier.insert(chunks(0, 1, 2), 0, 3, 0.0, 0.0)
    tier.touch(chunks(0), 0, 1, 0.0)
    tier.insert(chunks(3), 0, 1, 1.0, 1.0)
    assert np.flatnonzero(served(tier, chunks(0, 1, 2, 3), 1.0)).tolist() == left


def test_touching_leaves_the_first_chunk_newest() -> None:
    tier = cache(4)
    tier.insert(chunks(0, 1, 2, 3), 0, 4, 0.0, 0.0)
    tier.touch(chunks(0, 1, 2, 3), 0, 4, 0.0)
    tier.insert(chunks(4, 5), 0, 2, 1.0, 1.0)
    assert tier.prefix(chunks(0, 1, 2, 3), 0, 1.0) == 2


def test_a_store_is_visible_when_it_has_ended() -> None:
    tiers = stack({"cpu": link()}, cpu=4)
    ids = chunks(0, 1)
    held_up, complete = tiers.store(ids, 0, 2, 5.0)
    assert held_up == complete == pytest.approx(5.02)
    assert tiers.lookup(ids, 0, 5.01).parts == []
    assert tiers.lookup(ids, 0, 5.03).chunks == 2


def test_loads_queue_on_a_link() -> None:
    tiers = stack({"cpu": link(latency_s=0.001, per_chunk_s=0.002)}, cpu=4)
    ids = chunks(0, 1)
    tiers.store(ids, 0, 2, 0.0)
    hit = tiers.lookup(ids, 0, 1.0)
    assert tiers.load(ids, hit, 1.0) == pytest.approx(1.025)
    assert tiers.load(ids, hit, 1.0) == pytest.approx(1.05)
    assert tiers.load(ids, hit, 2.0) == pytest.approx(2.025)


def test_only_what_the_gpu_lacks_is_loaded() -> None:
    tiers = stack({"cpu": link()}, cpu=4)
    ids = chunks(0, 1, 2)
    tiers.store(ids, 0, 3, 0.0)
    hit = tiers.lookup(ids, 300, 1.0)
    assert [(tier.name, begin, end) for tier, begin, end in hit.parts] == [("cpu", 1, 3)]
    assert tiers.load(ids, hit, 1.0) == pytest.approx(1.02)


def test_the_disk_continues_where_the_cpu_ends_and_its_chunks_return_to_the_cpu() -> None:
    tiers = stack({"cpu": link(), "disk": link(load_mib=10)}, cpu=2, disk=9)
    ids = chunks(0, 1, 2, 3)
    tiers.store(ids, 2, 4, 0.0)
    tiers.store(ids, 0, 2, 0.5)
    hit = tiers.lookup(ids, 0, 1.0)
    assert [(tier.name, begin, end) for tier, begin, end in hit.parts] == [("cpu", 0, 2), ("disk", 2, 4)]
    assert tiers.load(ids, hit, 1.0) == pytest.approx(1.22)
    again = tiers.lookup(chunks(2, 3), 0, 2.0)
    assert [tier.name for tier, _, _ in again.parts] == ["cpu"]


def staging() -> TierStack:
    """Two chunks fit; the disk takes one every 0.1 s, and the CPU tier keeps each until it has."""
    return stack({"cpu": link(), "disk": link(store_mib=1e6, drain_gbps=10 * MIB / 1e9)}, cpu=2, disk=9)


def test_what_finds_no_room_in_the_staging_buffer_is_stored_nowhere() -> None:
    tiers = staging()
    first, complete = tiers.store(chunks(0, 1), 0, 2, 0.0)
    assert (first, complete) == (pytest.approx(0.02, abs=1e-3), pytest.approx(0.22, abs=1e-3))
    assert tiers.store(chunks(2, 3), 0, 2, 0.05)[0] == 0.05
    assert tiers.store(chunks(4, 5), 0, 2, 0.15)[0] == pytest.approx(0.16, abs=1e-3), "one chunk has left"
    assert [tier.cache.used for tier in tiers.tiers] == [2, 3]
    assert not tiers.lookup(chunks(2, 3), 0, 9.0).parts
    assert tiers.lookup(chunks(4, 5), 0, 9.0).chunks == 1


def test_a_load_from_disk_looks_for_room_in_the_staging_buffer_every_tenth_of_a_second() -> None:
    tiers = staging()
    tiers.store(chunks(0, 1), 0, 2, 0.0)
    tiers.store(chunks(2, 3), 0, 2, 1.0)
    hit = tiers.lookup(chunks(0, 1), 0, 1.05)
    assert [tier.name for tier, _, _ in hit.parts] == ["disk"]
    assert tiers.load(chunks(0, 1), hit, 1.05) == pytest.approx(1.25 + 0.02, abs=1e-3)


def test_writing_back_makes_steps_that_store_wait_and_stops_the_drain() -> None:
    every = {"flush_every_gb": 2.5 * MIB / 1e9, "flush_s": 1.0, "flush_pause_s": 0.75}
    tiers = stack({"cpu": link(), "disk": link(store_mib=1e9, **every)}, cpu=9, disk=9)
    ids = chunks(*range(6))
    waits = [tiers.store(ids, n, n + 1, 10.0 * n)[0] - 10.0 * n for n in range(6)]
    assert waits == [pytest.approx(0.01 + pause, abs=1e-3) for pause in (0, 0, 0.75, 0.25, 0, 0.75)]


def test_a_chunk_costs_more_where_another_has_to_leave_the_staging_buffer() -> None:
    tiers = stack({"cpu": link(), "disk": link(store_mib=1e9, crowded_store_s=0.5)}, cpu=1, disk=9)
    ids = chunks(0, 1)
    assert tiers.store(ids, 0, 1, 0.0)[0] == pytest.approx(0.01, abs=1e-3)
    assert tiers.store(ids, 1, 2, 9.0)[0] == pytest.approx(9.51, abs=1e-3)


def test_a_store_that_does_not_block_holds_up_no_step() -> None:
    tiers = stack({"cpu": link(blocking_store=False)}, "offload", cpu=4)
    held_up, complete = tiers.store(chunks(0), 0, 1, 1.0)
    assert (held_up, complete) == (1.0, pytest.approx(1.01))
    assert tiers.store(chunks(0, 1), 0, 2, 1.0)[1] == pytest.approx(1.02)
