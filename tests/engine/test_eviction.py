"""Which chunks a tier gives up: LFU, a time-to-live, and the loop of LMCache's server."""

from __future__ import annotations

import numpy as np
import pytest

from replay.backends import preset as presets
from replay.backends.preset import LowerTier
from replay.engine import profiles
from replay.engine.chunks import ChunkCache
from replay.engine.connectors import check
from replay.engine.cost import cost_model
from replay.engine.profiles import Link
from replay.engine.tiers import TierStack
from replay.errors import ReplayError

MIB = 2**20


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def held(tier: ChunkCache, now: float = 1e9) -> list[int]:
    served, late = np.zeros(50, np.bool_), np.zeros(50, np.bool_)
    tier.on_the_way(ids(*range(50)), now, served, late)
    return np.flatnonzero(served).tolist()


def cache(capacity: int, *numbers: int, **settings: object) -> ChunkCache:
    """A tier that got these chunks at time 0."""
    tier = ChunkCache("cpu", capacity, **settings)
    tier.know(50)
    tier.insert(ids(*numbers), 0, len(numbers), 0.0, 0.0)
    return tier


def test_the_least_used_chunk_gives_way_and_among_equals_the_one_not_used_for_longest() -> None:
    tier = cache(4, 1, 2, 3, 4, policy="lfu")
    tier.touch(ids(1, 3), 0, 2, 1.0)
    tier.touch(ids(2), 0, 1, 2.0)
    tier.insert(ids(5), 0, 1, 3.0, 3.0)
    assert held(tier) == [1, 2, 3, 5]
    tier.insert(ids(6), 0, 1, 4.0, 4.0)
    assert held(tier) == [1, 2, 3, 6]


def test_what_left_has_lost_its_count_of_uses() -> None:
    tier = cache(2, 1, 2, policy="lfu")
    for number in (1, 1, 2, 2, 2):
        tier.touch(ids(number), 0, 1, 1.0)
    tier.insert(ids(3), 0, 1, 2.0, 2.0)
    assert held(tier) == [2, 3]
    tier.insert(ids(1), 0, 1, 3.0, 3.0)
    tier.insert(ids(4), 0, 1, 4.0, 4.0)
    assert held(tier) == [2, 4]


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_a_chunk_goes_when_its_time_is_over_counted_from_its_last_use(policy: str) -> None:
    tier = cache(10, 1, 2, 3, policy=policy, ttl_s=10.0)
    tier.touch(ids(2), 0, 1, 6.0)
    tier.pass_time(9.9)
    assert held(tier) == [1, 2, 3]
    tier.pass_time(10.0)
    assert held(tier) == [2]
    tier.pass_time(16.0)
    assert held(tier) == []
    assert tier.counts.tolist() == [0, 3, 0]


def test_the_loop_frees_a_share_once_a_second_while_use_is_above_the_watermark() -> None:
    tier = cache(10, *range(10), watermark=0.6, evict_ratio=0.2)
    tier.pass_time(0.9)
    assert tier.used == 10
    tier.pass_time(1.0)
    assert held(tier) == list(range(2, 10))
    tier.pass_time(1.9)
    assert tier.used == 8
    tier.pass_time(50.0)
    assert tier.used == 6


def test_the_loop_leaves_pinned_chunks_and_those_on_their_way() -> None:
    tier = cache(4, 1, 2, watermark=0.5, evict_ratio=1.0)
    tier.insert(ids(3), 0, 1, 0.0, 5.0)
    tier.pin(ids(1), 0, 1, 1)
    tier.pass_time(1.0)
    assert held(tier) == [1, 3]


def test_the_server_drops_a_store_that_does_not_fit_and_no_tier_gets_it() -> None:
    link = Link(load_gbps=1e6, store_gbps=1e6, blocking_load=False, blocking_store=False)
    tiers = [("cpu", LowerTier(gib=10 / 1024, watermark=0.9)), ("disk", LowerTier(gib=100 / 1024))]
    stack = TierStack(tiers, {"cpu": link, "disk": link}, "lmcache-mp", 256, MIB / 256)
    stack.know(50)
    stack.store(ids(*range(8)), 0, 8, 0.0)
    stack.store(ids(*range(20, 23)), 0, 3, 0.5)
    assert [tier.cache.used for tier in stack.tiers] == [8, 8]
    assert stack.on_the_way(ids(20, 21, 22), 0.6).all()
    stack.store(ids(30, 31), 0, 2, 0.7)
    assert [tier.cache.used for tier in stack.tiers] == [10, 10]


def test_the_server_reads_the_disk_again_each_time() -> None:
    link = Link(load_gbps=1.0, store_gbps=1e6, blocking_load=False, blocking_store=False)
    tiers = [("cpu", LowerTier(gib=4 / 1024, watermark=0.5, evict_ratio=1.0)), ("disk", LowerTier(gib=100 / 1024))]
    stack = TierStack(tiers, {"cpu": link, "disk": link}, "lmcache-mp", 256, MIB / 256)
    stack.know(50)
    stack.store(ids(0, 1, 2), 0, 3, 0.0)
    for now in (10.0, 20.0):
        hit = stack.lookup(ids(0, 1, 2), 0, now)
        assert [(tier.name, begin, end) for tier, begin, end in hit.parts] == [("disk", 0, 3)]
        stack.load(ids(0, 1, 2), hit, now)


def test_a_watermark_is_refused_where_no_loop_runs() -> None:
    with pytest.raises(ReplayError, match="watermark under connector lmcache is"):
        check(presets.load("lmcache-cpu", ["tiers.cpu.watermark=0.8"]))


def test_the_server_moves_kv_beside_the_steps() -> None:
    preset = presets.load("lmcache-remote", ["instances=1"])
    links = cost_model(profiles.model("qwen3-8b"), profiles.gpu("h200"), preset).links
    assert not any(link.blocking_load or link.blocking_store for link in links.values())


def test_half_the_bytes_of_a_token_hold_twice_the_tokens() -> None:
    model, gpu = profiles.model("qwen3-8b"), profiles.gpu("h200")
    assert model.kv_bytes_per_token("fp16") == 2 * model.kv_bytes_per_token("fp8")
    sizes = [profiles.gpu_kv_tokens(model, gpu, presets.load("vllm", [f"kv_dtype={kind}"])) for kind in ("fp16", "fp8")]
    assert sizes[1] == pytest.approx(2 * sizes[0], rel=0.001)


def test_tensor_parallel_splits_the_kv_heads_as_far_as_there_are_any() -> None:
    model, gpu = profiles.model("qwen3-8b"), profiles.gpu("h200")
    assert [model.kv_copies(ranks) for ranks in (1, 8, 16)] == [1, 1, 2]
    sizes = [profiles.gpu_kv_tokens(model, gpu, presets.load("vllm", [f"tensor_parallel={n}"])) for n in (1, 2)]
    assert sizes[1] > 2 * sizes[0]
