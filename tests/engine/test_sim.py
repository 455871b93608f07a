"""The simulated engine as a backend: end to end, on the virtual clock, against naive caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.backends import preset as presets
from replay.backends.preset import GpuTier, LowerTier, Preset, Tiers
from replay.backends.sim import SimBackend
from replay.engine.engine import Engine
from replay.errors import ReplayError
from replay.load.clock import RunClock, run
from replay.load.outcome import Outcome, Request
from replay.trace import ROOT, PrefixTree, Tip, Turn
from doubles import NaivePool, NaiveTiers

KV = 147_456
"""KV bytes of a Qwen3-8B token."""


@dataclass
class Ask:
    """One request of a test: continue what `parent` said (or start), append `tokens` of `segment`, generate."""

    parent: int
    keep: float
    segment: str
    tokens: int
    output: int
    pause: float = 100.0


def backend(connector: str = "none", gpu: int = 256, block: int = 4, chunk: int | None = None, **settings: object) -> SimBackend:
    """A backend on a Qwen3-8B on an H200 with tiers of a few tokens; lower tiers by name, in tokens."""
    lower = {name: LowerTier(gib=(settings.pop(name) + 0.5) * KV / 2**30) for name in ("cpu", "disk", "remote") if name in settings}
    preset = Preset(
        name="test", connector=connector, tiers=Tiers(gpu=GpuTier(tokens=gpu), **lower), block_tokens=block, chunk_tokens=chunk, **settings
    )  # fmt: skip
    return SimBackend(preset, "qwen3-8b", "h200", RunClock())


class Session:
    """Sends requests as a driver would, and keeps what was said."""

    def __init__(self, backend: SimBackend):
        self.backend = backend
        self.tree = PrefixTree()
        self.contexts: list[Tip] = []
        self.prompts: list[Tip] = []

    def place(self, ask: Ask) -> Request:
        number = len(self.contexts)
        start = ROOT
        if ask.parent >= 0 and self.contexts:
            parent = self.contexts[ask.parent % len(self.contexts)]
            start = self.tree.cut(parent, round(parent.depth * ask.keep))
        tip = self.tree.extend(start, ask.segment, ask.tokens)
        context = self.tree.extend(tip, ("output", number), ask.output) if ask.output else tip
        self.contexts.append(context)
        self.prompts.append(tip)
        ideal = self.tree.longest_sent(tip)
        self.tree.mark_sent(context)
        turn = Turn(session="s", turn=number)
        return Request(turn, "s", f"s/{number}", self.tree, tip, context, ask.output, ideal)

    async def ask(self, ask: Ask) -> Outcome:
        return await self.backend.send(self.place(ask))

    def tokens(self, tip: Tip) -> list[object]:
        return [(segment, offset + k) for segment, offset, count in self.tree.pieces(tip) for k in range(count)]


ASKS = st.lists(
    st.builds(
        Ask,
        parent=st.integers(-1, 30),
        keep=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.9]),
        segment=st.sampled_from("abcdef"),
        tokens=st.integers(1, 40),
        output=st.integers(0, 20),
        pause=st.sampled_from([0.0, 0.0, 0.01, 0.3, 30.0]),
    ),
    min_size=1,
    max_size=25,
)
CONNECTORS = st.sampled_from(
    [
        {},
        {"prefix_caching": False},
        {"connector": "offload", "cpu": 80},
        {"connector": "lmcache", "chunk": 8, "cpu": 96},
        {"connector": "lmcache", "chunk": 8, "cpu": 48, "disk": 160},
        {"connector": "lmcache", "chunk": 12, "cpu": 36, "disk": 72, "remote": 240},
        {"connector": "lmcache", "chunk": 8, "disk": 160},
        {"connector": "lmcache", "chunk": 8, "cpu": 96, "prefix_caching": False},
    ]
)


def in_turn(asks: list[Ask], make: Callable[[], SimBackend], between: Callable[[Session, Outcome], None] | None = None) -> tuple[Session, list[Outcome]]:
    """Asks one after the other, with a pause long enough for every store to end."""

    async def main() -> tuple[Session, list[Outcome]]:
        outcomes = []
        async with make() as sim:
            session = Session(sim)
            for ask in asks:
                outcomes.append(await session.ask(ask))
                if between:
                    between(session, outcomes[-1])
                await asyncio.sleep(100)
        return session, outcomes

    return run(main(), virtual=True)


def fits(asks: list[Ask], most: int = 180) -> list[Ask]:
    """Leaves out requests whose context grew beyond the smallest GPU tier of these tests."""
    kept: list[Ask] = []
    depths: list[int] = []
    for ask in asks:
        start = round(depths[ask.parent % len(depths)] * ask.keep) if ask.parent >= 0 and depths else 0
        if start + ask.tokens + ask.output <= most:
            kept.append(ask)
            depths.append(start + ask.tokens + ask.output)
    return kept


@settings(max_examples=60, deadline=None)
@given(ASKS, CONNECTORS, st.sampled_from([200, 256, 400, 4000]))
def test_serial_traces_agree_with_naive_caches(asks: list[Ask], how: dict[str, object], gpu: int) -> None:
    asks = fits(asks)
    session, outcomes = in_turn(asks, lambda: backend(gpu=gpu, **how))
    pool = NaivePool(gpu // 4, 4)
    lower = {name: how[name] for name in ("cpu", "disk", "remote") if name in how}
    tiers = NaiveTiers(lower, how.get("chunk", 4), how["connector"]) if lower else None
    for ask, outcome, prompt, context in zip(asks, outcomes, session.prompts, session.contexts, strict=True):
        tokens = session.tokens(context) + [] if ask.output else [*session.tokens(prompt), "the one token"]
        if how.get("prefix_caching", True):
            gpu_tokens = pool.serve(tokens, prompt.depth)
        else:
            gpu_tokens = 0
        expected = {"cpu": 0, "disk": 0, "remote": 0, "gpu": gpu_tokens}
        expected |= tiers.serve(tokens, prompt.depth, gpu_tokens) if tiers else {}
        assert {name: getattr(outcome, name) for name in expected} == expected


def check_engine(engine: Engine) -> None:
    """No tier above its capacity, no block both free and held."""
    pool = engine.pool
    queue = []
    block = int(pool._after[0])
    while block:
        queue.append(block)
        block = int(pool._after[block])
    assert len(set(queue)) == len(queue) == pool.free
    assert all(pool._refs[block] == 0 for block in queue)
    assert int((pool._refs > 0).sum()) + len(queue) == pool.usable
    for tier in engine.tiers.tiers if engine.tiers else []:
        cache = tier.cache
        assert cache.used == int((cache._state == 1).sum()) <= cache.capacity
        assert (cache._pins >= 0).all()


@settings(max_examples=60, deadline=None)
@given(ASKS, CONNECTORS, st.sampled_from([188, 256, 400]), st.sampled_from([8, 24, 512]), st.sampled_from([1, 2, 8]))
def test_concurrent_requests_all_end_and_add_up(
    asks: list[Ask], how: dict[str, object], gpu: int, batched: int, seqs: int
) -> None:
    asks = fits(asks)
    steps: list[float] = []

    async def main() -> list[tuple[Outcome, Request]]:
        sim = backend(gpu=gpu, max_batched_tokens=batched, max_seqs=seqs, **how)
        engine = sim.engine
        begin, finish = engine.scheduler.begin, engine.scheduler.finish

        def checked_begin(now: float) -> float | None:
            assert not steps or now >= steps[-1]
            steps.append(now)
            end = begin(now)
            check_engine(engine)
            assert end is None or end > now
            return end

        def checked_finish() -> object:
            done = finish()
            check_engine(engine)
            return done

        engine.scheduler.begin, engine.scheduler.finish = checked_begin, checked_finish
        async with sim:
            session = Session(sim)

            async def one(ask: Ask) -> tuple[Outcome, Request]:
                request = session.place(ask)
                return await sim.send(request), request

            tasks = []
            for ask in asks:
                tasks.append(asyncio.ensure_future(one(ask)))
                await asyncio.sleep(ask.pause)
            results = await asyncio.gather(*tasks)
            await asyncio.sleep(1000)
            assert engine.pool.free == engine.pool.usable or not engine.scheduler._releases
            if not engine.scheduler._releases:
                assert engine.pool.free == engine.pool.usable
            if engine.tiers:
                assert all((tier.cache._pins == 0).all() for tier in engine.tiers.tiers)
        return results

    for outcome, request in run(main(), virtual=True):
        assert outcome.status == "ok"
        parts = [outcome.gpu, outcome.cpu, outcome.disk, outcome.remote, outcome.external, outcome.computed]
        assert sum(parts) == request.prompt == outcome.prompt_tokens
        assert outcome.computed >= 1
        assert all(part >= 0 for part in parts)
        served = request.prompt - outcome.computed
        assert sum(outcome.lost.values()) == request.ideal - served
        assert all(tokens >= 0 for tokens in outcome.lost.values())
        assert outcome.sent <= outcome.first_token <= outcome.last_token <= outcome.closed
        assert outcome.output_tokens == max(1, request.output)
        assert outcome.recompute_s >= 0
        if how.get("prefix_caching", True) is False and "cpu" not in how:
            assert outcome.lost["evicted"] == 0


@settings(max_examples=30, deadline=None)
@given(ASKS)
def test_a_larger_gpu_tier_never_hits_less_on_a_serial_trace(asks: list[Ask]) -> None:
    asks = fits(asks)
    hits = [[outcome.gpu for outcome in in_turn(asks, lambda gpu=gpu: backend(gpu=gpu))[1]] for gpu in (188, 240, 320, 480, 4000)]
    for smaller, larger in zip(hits, hits[1:], strict=False):
        assert all(few <= many for few, many in zip(smaller, larger, strict=True))


@settings(max_examples=30, deadline=None)
@given(ASKS)
def test_an_unbounded_cache_loses_only_to_granularity(asks: list[Ask]) -> None:
    _, outcomes = in_turn(asks, lambda: backend(gpu=40_000))
    for outcome in outcomes:
        assert outcome.lost["granularity"] < 2 * 4
        assert sum(outcome.lost.values()) == outcome.lost["granularity"]


@settings(max_examples=20, deadline=None)
@given(ASKS)
def test_tiers_below_serve_the_same_whatever_the_gpu_holds(asks: list[Ask]) -> None:
    asks = fits(asks)
    served = [
        [outcome.prompt_tokens - outcome.computed for outcome in in_turn(asks, lambda gpu=gpu: backend("offload", gpu=gpu, cpu=40_000))[1]]
        for gpu in (188, 400, 40_000)
    ]
    assert served[0] == served[1] == served[2]


@pytest.mark.parametrize(
    ("name", "tier"), [("vllm", None), ("lmcache-cpu", "cpu"), ("lmcache-disk", "disk"), ("vllm-offload-cpu", "cpu")]
)
def test_a_document_comes_back_from_where_it_survived(name: str, tier: str | None) -> None:
    """One document of 16k tokens, again, 36 others, the first again; 388,560 tokens of GPU tier."""

    async def main() -> list[Outcome]:
        sim = SimBackend(presets.load(name, ["tiers.gpu.tokens=388560"]), "qwen3-8b", "h100", RunClock())
        documents = ["first", "first", *(f"other {n}" for n in range(36)), "first"]
        outcomes = []
        async with sim:
            session = Session(sim)
            for number, document in enumerate(documents):
                tip = session.tree.extend(ROOT, document, 16_384)
                tip = session.tree.extend(tip, ("question", number), 32)
                context = session.tree.extend(tip, ("answer", number), 1)
                ideal = session.tree.longest_sent(tip)
                session.tree.mark_sent(context)
                turn = Turn(session="s", turn=number)
                outcomes.append(await sim.send(Request(turn, "s", f"s/{number}", session.tree, tip, context, 1, ideal)))
                await asyncio.sleep(0.5)
        return outcomes

    outcomes = run(main(), virtual=True)
    first, again, *others, back = outcomes
    ttft = [outcome.first_token - outcome.sent for outcome in outcomes]
    assert first.computed == 16_416
    assert again.gpu == 16_384
    assert all(other.computed == 16_416 for other in others)
    if tier is None:
        assert back.computed == 16_416
        assert back.lost["evicted"] == 16_384
        assert back.recompute_s == pytest.approx(ttft[-1], rel=0.1)
        assert ttft[-1] == pytest.approx(ttft[0])
    else:
        assert getattr(back, tier) == 16_384
        assert sum(back.lost.values()) == 0
        assert back.load_s > 0
        assert ttft[1] < ttft[-1] < ttft[0]


def test_what_a_reset_took_is_cold() -> None:
    async def main() -> tuple[Outcome, Outcome]:
        async with backend("offload", gpu=400, cpu=400) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1, "a", 40, 1))
            await asyncio.sleep(10)
            await sim.restart()
            after_restart = await session.ask(Ask(-1, 1, "a", 41, 1))
            await asyncio.sleep(10)
            sim.reset(cold=False)
            return after_restart, await session.ask(Ask(-1, 1, "a", 41, 1))

    cold, warm = run(main(), virtual=True)
    assert (cold.lost["cold"], cold.cpu) == (40, 0)
    assert (warm.cpu, sum(warm.lost.values())) == (40, 1)


def test_a_restart_keeps_disk_and_remote() -> None:
    async def main() -> Outcome:
        async with backend("lmcache", gpu=400, cpu=400, disk=400) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1, "a", 40, 1))
            await asyncio.sleep(10)
            await sim.restart()
            return await session.ask(Ask(-1, 1, "a", 45, 1))

    assert run(main(), virtual=True).disk == 40


def test_requests_in_flight_fail_when_the_engine_restarts() -> None:
    async def main() -> Outcome:
        async with backend(gpu=400) as sim:
            session = Session(sim)
            task = asyncio.ensure_future(session.ask(Ask(-1, 1, "a", 40, 100)))
            await asyncio.sleep(0.1)
            await sim.restart()
            outcome = await task
            assert sim.engine.pool.free == sim.engine.pool.usable
            assert (await session.ask(Ask(-1, 1, "b", 40, 5))).status == "ok"
            return outcome

    outcome = run(main(), virtual=True)
    assert outcome.status == "error"
    assert outcome.error == "the engine was restarted"


def test_a_turn_that_comes_before_the_store_has_ended_finds_nothing() -> None:
    """A second copy of a prompt, while the first one is still being computed in chunks."""

    async def main() -> list[Outcome]:
        async with backend(gpu=40_000, max_batched_tokens=256) as sim:
            session = Session(sim)
            asks = [session.ask(Ask(-1, 1, "a", 2000, 1)), session.ask(Ask(-1, 1, "a", 2000, 1))]
            return list(await asyncio.gather(*asks))

    first, second = run(main(), virtual=True)
    assert first.computed == 2000
    assert second.lost["never_stored"] == 2000 - second.gpu - second.lost["granularity"]


@pytest.mark.parametrize(
    ("prompt", "output", "gpu", "words"),
    [(40_000, 1_000, 100_000, "exceed the 40,960 tokens of qwen3-8b"), (300, 200, 400, "exceed the GPU tier of 396 tokens")],
)
def test_what_can_never_fit_is_an_error_and_does_not_hang(prompt: int, output: int, gpu: int, words: str) -> None:
    async def main() -> Outcome:
        async with backend(gpu=gpu) as sim:
            return await Session(sim).ask(Ask(-1, 1, "a", prompt, output))

    outcome = run(main(), virtual=True)
    assert outcome.status == "error"
    assert words in outcome.error


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("vllm", "engine=sglang", "engine sglang"),
        ("lmcache-cpu", "connector=mooncake", "connector mooncake"),
        ("lmcache-disk", "connector=offload", "disk or remote tier under connector offload"),
        ("lmcache-cpu", "tiers.cpu.policy=lfu", "tiers.cpu.policy lfu"),
        ("lmcache-cpu", "tiers.cpu.watermark=0.8", "tiers.cpu.watermark"),
        ("lmcache-cpu", "tiers.cpu.ttl_s=60", "tiers.cpu.ttl_s"),
        ("lmcache-cpu", "tiers.cpu.staging=true", "tiers.cpu.staging"),
        ("vllm", "instances=2", "more than one instance"),
        ("vllm", "max_batched_tokens=100", "must be at least max_seqs"),
    ],
)
def test_what_is_not_modelled_is_refused(name: str, override: str, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        SimBackend(presets.load(name, [override]), "qwen3-8b", "h200", _Clock())


class _Clock:
    def now(self) -> float:
        return 0.0
