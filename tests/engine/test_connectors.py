"""What connectors do with lower tiers: when these are written, what leaves them, what they hold beside the GPU."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from engine.harness import ASKS, EXCLUSIVE, HICACHE, Ask, Session, backend, check_engine, fits, in_turn
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.backends import preset as presets
from replay.backends.preset import LowerTier
from replay.backends.sim import SimBackend
from replay.engine import tiers as lower_tiers
from replay.engine.connectors import warnings
from replay.engine.engine import Engine
from replay.engine.profiles import Link
from replay.engine.tiers import TierStack
from replay.errors import ReplayError
from replay.load.clock import run
from replay.load.outcome import Outcome

MIB = 2**20
ALL = np.arange(20, dtype=np.int32)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def stack(connector: str, load_mib: float = 100.0, **tiers: dict[str, object]) -> TierStack:
    """Tiers of so many chunks of 64 tokens, each 1 MiB, on links of 100 MiB/s."""
    link = Link(load_gbps=load_mib * MIB / 1e9, store_gbps=100 * MIB / 1e9)
    lower = [(name, LowerTier(gib=tier.pop("chunks") / 1024, **tier)) for name, tier in tiers.items()]
    made = TierStack(lower, {name: link for name, _ in lower}, connector, 64, MIB / 64)
    made.know(100)
    return made


def held(tiers: TierStack, name: str) -> list[int]:
    cache = next(tier.cache for tier in tiers.tiers if tier.name == name)
    return (np.flatnonzero(cache._state == 1) - 1).tolist()


def resident(engine: Engine) -> set[int]:
    return set(np.flatnonzero(engine.pool.first >= 0).tolist())


def in_cpu(engine: Engine) -> set[int]:
    return set(held(engine.tiers, "cpu"))


@pytest.mark.parametrize("how", [{"connector": "offload"}, {"connector": "hicache", "engine": "sglang"}], ids=str)
@settings(max_examples=30, deadline=None)
@given(asks=ASKS)
def test_write_back_stores_nothing_but_what_the_gpu_has_evicted(how: dict[str, object], asks: list[Ask]) -> None:
    before: set[int] = set()

    def check(session: Session, _: Outcome) -> None:
        engine = session.backend.engine
        assert bool(in_cpu(engine)) <= (engine.pool.evicted > 0)
        assert in_cpu(engine) <= before
        before.update(resident(engine))

    in_turn(fits(asks), lambda: backend(gpu=188, cpu=120, cpu_tier={"write": "back"}, **how), check)


@settings(max_examples=40, deadline=None)
@given(ASKS, st.sampled_from([188, 256]))
def test_an_exclusive_tier_holds_nothing_that_the_gpu_holds(asks: list[Ask], gpu: int) -> None:
    def check(session: Session, _: Outcome) -> None:
        engine = session.backend.engine
        assert not in_cpu(engine) & resident(engine)
        check_engine(engine)

    in_turn(fits(asks), lambda: backend("offload", gpu=gpu, cpu=120, cpu_tier=EXCLUSIVE), check)


@settings(max_examples=40, deadline=None)
@given(ASKS)
def test_nothing_is_left_behind_in_an_exclusive_tier_by_requests_at_once(asks: list[Ask]) -> None:
    async def main() -> None:
        async with backend("offload", gpu=188, cpu=120, max_batched_tokens=24, max_seqs=4, cpu_tier=EXCLUSIVE) as sim:
            session = Session(sim)
            await asyncio.gather(*[session.ask(ask) for ask in fits(asks)])
            await asyncio.sleep(1000)
            assert not in_cpu(sim.engine) & resident(sim.engine)

    run(main(), virtual=True)


def test_what_a_preempted_request_computed_does_not_stay_in_an_exclusive_tier() -> None:
    """Another request's copy was evicted before this one had computed the same; then it was preempted, and resumed."""
    asks = [
        Ask(parent=0, keep=1.0, segment="a", tokens=tokens, output=output, pause=pause)
        for tokens, output, pause in ((1, 0, 0.0), (1, 84, 0.0), (1, 6, 0.0), (9, 84, 0.0), (1, 0, 0.0), (1, 0, 0.01))
    ]
    asks[3].parent = 2
    asks += [
        Ask(parent=10, keep=1.0, segment="a", tokens=5, output=4, pause=30.0),
        Ask(parent=3, keep=1.0, segment="a", tokens=1, output=0, pause=0.0),
        Ask(parent=0, keep=1.0, segment="a", tokens=1, output=0, pause=30.0),
    ]

    async def main() -> None:
        async with backend("offload", gpu=188, cpu=120, max_batched_tokens=24, max_seqs=4, cpu_tier=EXCLUSIVE) as sim:
            session = Session(sim)
            await asyncio.gather(*[session.ask(ask) for ask in fits(asks)])
            assert not in_cpu(sim.engine) & resident(sim.engine)

    run(main(), virtual=True)


def test_an_exclusive_tier_adds_its_whole_size_to_the_gpu() -> None:
    """Forty documents of ten blocks in turn, over tiers of 200 blocks each: an inclusive tier holds half of them."""

    def served(tier: dict[str, object]) -> int:
        asks = [Ask(-1, 1, f"document {n % 38}", 41, 1) for n in range(76)]
        outcomes = in_turn(asks, lambda: backend("offload", gpu=804, cpu=800, cpu_tier=tier))[1]
        return sum(outcome.prompt_tokens - outcome.computed for outcome in outcomes)

    assert served(EXCLUSIVE) == 38 * 40
    assert served({}) == 0


@settings(max_examples=25, deadline=None)
@given(ASKS, st.sampled_from([{"connector": "offload"}, {"connector": "lmcache", "chunk": 8}]))
def test_a_larger_cpu_tier_never_serves_less_on_a_serial_trace(asks: list[Ask], how: dict[str, object]) -> None:
    asks = fits(asks)
    served = [
        [o.prompt_tokens - o.computed for o in in_turn(asks, lambda cpu=cpu: backend(gpu=188, cpu=cpu, **how))[1]]
        for cpu in (200, 320, 480, 4000)
    ]
    for smaller, larger in pairwise(served):
        assert sum(smaller) <= sum(larger)


@settings(max_examples=30, deadline=None)
@given(ASKS, st.sampled_from(HICACHE))
def test_what_sglang_evicts_from_cpu_memory_the_gpu_does_not_hold(asks: list[Ask], how: dict[str, object]) -> None:
    """Written through, a page leaves CPU memory only after it has left the GPU."""
    before: set[int] = set()

    def check(session: Session, _: Outcome) -> None:
        engine = session.backend.engine
        check_engine(engine)
        if engine.tiers.write == "through":
            assert not (before - in_cpu(engine)) & resident(engine) or engine.tiers.tiers[0].cache.counts[2]
        before.clear()
        before.update(in_cpu(engine) & resident(engine))

    in_turn(fits(asks), lambda: backend(gpu=188, engine="sglang", **how), check)


def test_a_leaf_of_the_radix_tree_is_evicted_whole() -> None:
    def back(engine: str) -> Outcome:
        asks = [Ask(-1, 1, "a", 100, 1), Ask(-1, 1, "b", 60, 1), Ask(-1, 1, "c", 40, 1), Ask(-1, 1, "a", 100, 1)]
        return in_turn(asks, lambda: backend(gpu=188, engine=engine))[1][-1]

    assert (back("vllm").gpu, back("sglang").gpu) == (84, 0)


def test_selective_writing_stores_what_a_second_request_uses() -> None:
    async def main() -> list[int]:
        how = {"connector": "hicache", "cpu": 4000, "cpu_tier": {"write": "through_selective"}}
        async with backend(gpu=4000, engine="sglang", **how) as sim:
            session, used = Session(sim), []
            for ask in (Ask(-1, 1, "a", 40, 1), Ask(0, 1, "b", 20, 1), Ask(1, 1, "c", 20, 1)):
                await session.ask(ask)
                await asyncio.sleep(10)
                used.append(4 * len(in_cpu(sim.engine)))
        return used

    assert run(main(), virtual=True) == [0, 40, 60]


def test_a_step_of_sglang_waits_for_what_it_evicts_and_vllm_for_nothing() -> None:
    def first_token(write: str, **how: object) -> float:
        asks = [Ask(-1, 1, "a", 8000, 1), Ask(-1, 1, "b", 8000, 1)]
        make = lambda: backend(gpu=10_000, block=16, cpu=90_000, cpu_tier={"write": write}, **how)  # noqa: E731
        outcome = in_turn(asks, make)[1][-1]
        return outcome.first_token - outcome.sent

    sglang = {"connector": "hicache", "engine": "sglang"}
    seconds = 8000 * 147_456 / 55e9
    assert first_token("back", **sglang) - first_token("through", **sglang) == pytest.approx(seconds, rel=0.1)
    assert first_token("back", connector="offload") == first_token("through", connector="offload")


def test_a_load_layer_by_layer_takes_time_only_where_the_step_is_shorter() -> None:
    def back(question: int) -> Outcome:
        asks = [Ask(-1, 1, "a", 30_000, 1), Ask(-1, 1, "b", 30_000, 1), Ask(0, 1, "q", question, 1)]
        how = {"connector": "hicache", "cpu": 90_000, "engine": "sglang"}
        return in_turn(asks, lambda: backend(gpu=36_000, block=16, **how))[1][-1]

    short, long = back(16), back(4_000)
    assert short.cpu == long.cpu == 30_000
    assert short.first_token - short.sent == pytest.approx(short.load_s, abs=0.03)
    assert long.first_token - long.sent > 1.5 * long.load_s


def test_storage_sends_what_a_waiting_request_needs_to_cpu_memory() -> None:
    """The CPU tier of 2,000 tokens has lost the first document, the disk has it."""

    def back(policy: str | None, load: float = 11.0) -> Outcome:
        asks = [Ask(-1, 1, name, 900, 1) for name in "abcd"] + [Ask(-1, 1, "a", 901, 1)]
        how = {"connector": "hicache", "cpu": 2000, "disk": 9000, "storage": {"prefetch": policy, "gbps": load}}
        return in_turn(asks, lambda: backend(gpu=1000, block=4, engine="sglang", **how))[1][-1]

    outcome = back(None)
    assert (outcome.gpu, outcome.cpu, outcome.disk, outcome.computed) == (0, 0, 900, 1)
    assert outcome.load_s > 900 * 147_456 / 11e9
    assert back("best_effort").disk == 0
    slow = 900 * 147_456 / 1e9 / 2  # twice as long as a request waits
    assert back("wait_complete", slow / 1.22).disk == 900
    assert back("timeout", slow / 1.22).disk == pytest.approx(450, abs=8)
    assert back("timeout", slow / 1.22).load_s == pytest.approx(1.22, abs=0.02)


def test_requests_that_wait_for_storage_let_others_pass() -> None:
    async def main() -> tuple[Outcome, Outcome]:
        how = {"connector": "hicache", "cpu": 2000, "disk": 9000, "storage": {"gbps": 0.1}}
        async with backend(gpu=1000, block=4, engine="sglang", **how) as sim:
            session = Session(sim)
            for name in "abcd":
                await session.ask(Ask(-1, 1, name, 900, 1))
                await asyncio.sleep(100)
            return tuple(
                await asyncio.gather(session.ask(Ask(-1, 1, "a", 901, 1)), session.ask(Ask(-1, 1, "e", 40, 1)))
            )

    waits, passes = run(main(), virtual=True)
    assert waits.first_token > passes.first_token + 1


def test_fewer_tokens_than_sglang_prefetches_stay_in_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = stack("hicache", cpu={"chunks": 10}, disk={"chunks": 50})
    tiers.store(ALL, 0, 8, 0.0)
    tiers.clear("cpu")
    assert tiers.prefetch(ALL[:3], 0, 1.0) is None
    assert tiers.prefetch(ALL[:4], 0, 1.0).end == 4
    monkeypatch.setattr(lower_tiers, "PREFETCH_TOKENS", 64)
    assert tiers.prefetch(ids(7), 0, 2.0).end == 1


def test_a_staging_buffer_serves_nothing_and_is_empty_afterwards() -> None:
    for connector in ("lmcache", "lmcache-mp"):
        tiers = stack(connector, cpu={"chunks": 4, "staging": True}, disk={"chunks": 50})
        tiers.store(ALL, 0, 3, 0.0)
        assert held(tiers, "cpu") == held(tiers, "disk") == [0, 1, 2]
        hit = tiers.lookup(ALL, 0, 1.0)
        assert [(tier.name, begin, end) for tier, begin, end in hit.parts] == [("disk", 0, 3)]
        done = tiers.load(ALL, hit, 1.0)
        tiers.store(ALL, 10, 11, done + 1)
        assert held(tiers, "cpu") == [10]
        assert tiers.tiers[0].cache.counts[1] == 0, "nothing was evicted"


def test_a_load_that_lmcache_would_wait_for_for_ever_is_an_error() -> None:
    tiers = stack("lmcache", cpu={"chunks": 2, "staging": True}, disk={"chunks": 50})
    for chunk in range(3):
        tiers.store(ALL, chunk, chunk + 1, float(chunk))
    with pytest.raises(ReplayError, match=r"192 tokens exceeds the staging buffer of 128 tokens.*raise tiers.cpu.gib"):
        tiers.load(ALL, tiers.lookup(ALL, 0, 9.0), 9.0)


def test_vllms_disk_gets_what_cpu_memory_has_evicts_nothing_and_serves_through_it() -> None:
    tiers = stack("offload", cpu={"chunks": 3}, disk={"chunks": 5})
    for chunk in range(7):
        tiers.store(ids(chunk), 0, 1, 10.0 * chunk)
    assert (held(tiers, "cpu"), held(tiers, "disk")) == ([4, 5, 6], [0, 1, 2, 3, 4])
    hit = tiers.lookup(ids(0, 1), 0, 100.0)
    assert [(tier.name, begin, end) for tier, begin, end in hit.parts] == [("disk", 0, 2)]
    tiers.load(ids(0, 1), hit, 100.0)
    assert set(held(tiers, "cpu")) >= {0, 1}


def test_the_gpu_gives_up_a_block_when_cpu_memory_has_it_though_the_disk_has_not() -> None:
    tiers = stack("offload", cpu={"chunks": 3}, disk={"chunks": 5})
    assert tiers.store(ids(0, 1), 0, 2, 5.0) == (5.0, pytest.approx(5.02))
    assert tiers.tiers[1].cache.prefix(ids(0, 1), 0, 5.03) == 0
    assert tiers.tiers[1].cache.prefix(ids(0, 1), 0, 5.05) == 2


def test_mooncake_evicts_down_to_below_its_watermark_and_nothing_that_was_just_found() -> None:
    tiers = stack("mooncake", remote={"chunks": 100})
    tiers.know(300)
    many = np.arange(91, dtype=np.int32)
    tiers.store(many, 0, 85, 0.0)
    tiers.lookup(ids(0, 1), 0, 5.0)
    tiers.store(many, 85, 91, 6.0)
    tiers.lookup(ids(100), 0, 7.0)
    assert len(held(tiers, "remote")) == 91 - int(91 * (0.91 - 0.9 + 0.05))
    assert held(tiers, "remote")[:3] == [0, 1, 7]
    tiers = stack("mooncake", remote={"chunks": 4})
    tiers.store(ids(0, 1, 2), 0, 3, 0.0)
    tiers.lookup(ids(0, 1, 2), 0, 1.0)
    tiers.store(ids(5, 6), 0, 2, 1.1)
    assert held(tiers, "remote") == [0, 1, 2, 5]
    assert tiers.on_the_way(ids(6), 2.0)[0]
    tiers.lookup(ids(9), 0, 10.9)
    assert held(tiers, "remote") == [0, 1, 2], "what nobody read goes first"
    tiers.lookup(ids(9), 0, 60.0)
    assert held(tiers, "remote") == [0, 1, 2], "at the watermark and no higher"


def test_instances_share_mooncakes_pool() -> None:
    async def main() -> Outcome:
        async with backend("mooncake", gpu=4000, remote=4000, router="round-robin", instances=2) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1.0, "a", 100, 4))
            await asyncio.sleep(100)
            return await session.ask(Ask(-1, 1.0, "a", 100, 4))

    outcome = run(main(), virtual=True)
    assert (outcome.gpu, outcome.remote, outcome.computed) == (0, 99, 1)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("sglang", (), "SGLang is not validated"),
        ("sglang-hicache", (), "SGLang is not validated"),
        ("mooncake", (), "Mooncake is not validated"),
        ("vllm-offload-cpu", ("tiers.cpu.write=back",), "and nothing else"),
        ("vllm-offload-cpu", ("tiers.cpu.write=back", "tiers.cpu.inclusion=exclusive"), "what-if"),
    ],
)
def test_a_run_says_what_was_never_compared_with_a_real_engine(
    name: str, override: tuple[str, ...], words: str
) -> None:
    preset = presets.load(name, override)
    assert any(words in text for text in warnings(preset))
    sim = SimBackend(preset, "qwen3-8b", "h200", _Clock())
    assert set(warnings(preset)) <= set(sim.describe()["warnings"])


@pytest.mark.parametrize(("gib", "write", "warned"), [(5, "through", True), (5, "back", False), (90, "through", False)])
def test_a_run_says_that_sglangs_cpu_memory_holds_little_but_what_the_gpu_holds(
    gib: int, write: str, warned: bool
) -> None:
    preset = presets.load("sglang-hicache", [f"tiers.cpu.gib={gib}", f"tiers.cpu.write={write}", "tiers.gpu.gib=60"])
    about = SimBackend(preset, "qwen3-8b", "h200", _Clock()).describe()
    assert any("CPU memory of 36,352 tokens is no larger" in text for text in about["warnings"]) == warned


@pytest.mark.parametrize("name", ["vllm", "vllm-no-cache", "vllm-offload-cpu", "lmcache-cpu", "lmcache-disk"])
def test_what_was_compared_needs_no_warning(name: str) -> None:
    assert warnings(presets.load(name)) == []


class _Clock:
    def now(self) -> float:
        return 0.0
