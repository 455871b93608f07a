"""The engine model on random traces: it agrees with naive caches, and what must hold always holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import pytest
from engine.harness import ASKS, CONNECTORS, SETTINGS, Ask, Session, backend, check_engine, fits, in_turn
from engine.naive import NaivePool, NaiveRadix, NaiveTiers
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.engine import tiers
from replay.load.clock import run
from replay.load.outcome import Outcome, Request


@pytest.fixture(autouse=True, scope="module")
def short_prefetches() -> Iterator[None]:
    """SGLang leaves fewer than 256 tokens in storage; prompts are shorter here."""
    usual, tiers.PREFETCH_TOKENS = tiers.PREFETCH_TOKENS, 16
    yield
    tiers.PREFETCH_TOKENS = usual


@settings(max_examples=60, deadline=None)
@given(ASKS, CONNECTORS, st.sampled_from([200, 256, 400, 4000]))
def test_serial_traces_agree_with_naive_caches(asks: list[Ask], how: dict[str, object], gpu: int) -> None:
    asks = fits(asks)
    session, outcomes = in_turn(asks, lambda: backend(gpu=gpu, **how))
    pool = NaivePool(gpu // 4, 4)
    lower = {name: how[name] for name in ("cpu", "disk", "remote") if name in how}
    tiers = NaiveTiers(lower, how.get("chunk", 4), how["connector"]) if lower else None
    for ask, outcome, prompt, context in zip(asks, outcomes, session.prompts, session.contexts, strict=True):
        tokens = session.tokens(context) if ask.output else [*session.tokens(prompt), "the one token"]
        gpu_tokens = pool.serve(tokens, prompt.depth) if how.get("prefix_caching", True) else 0
        expected: dict[str, int | None] = {"cpu": None, "disk": None, "remote": None, "gpu": gpu_tokens}
        expected |= tiers.serve(tokens, prompt.depth, gpu_tokens) if tiers else {}
        assert {name: getattr(outcome, name) for name in expected} == expected


@settings(max_examples=100, deadline=None)
@given(ASKS, st.sampled_from([1, 4]), st.sampled_from([184, 256, 400]), st.sampled_from([0, 700]))
def test_serial_traces_agree_with_a_naive_radix_tree(asks: list[Ask], page: int, gpu: int, cpu: int) -> None:
    asks = fits(asks)
    how = {"connector": "hicache", "cpu": cpu} if cpu else {}
    session, outcomes = in_turn(
        asks, lambda: backend(gpu=gpu, block=page, engine="sglang", max_batched_tokens=24, max_seqs=4, **how)
    )
    tree = NaiveRadix(gpu // page, page, 24, cpu // page)
    for ask, outcome, prompt, context in zip(asks, outcomes, session.prompts, session.contexts, strict=True):
        tokens = session.tokens(context) if ask.output else [*session.tokens(prompt), "the one token"]
        on_gpu, on_cpu = tree.serve(tokens, prompt.depth)
        assert (outcome.gpu, outcome.cpu) == (on_gpu, on_cpu if cpu else None)


@settings(max_examples=60, deadline=None)
@given(ASKS, SETTINGS, st.sampled_from([188, 256, 400]), st.sampled_from([8, 24, 512]), st.sampled_from([1, 2, 8]))
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
            held = sum(int(engine.pool.held[job.slot]) for _, job in engine.scheduler._releases)
            assert engine.pool.free + held >= engine.pool.usable
            if engine.tiers:
                assert all((tier.cache._pins == 0).all() for tier in engine.tiers.tiers)
        return results

    for outcome, request in run(main(), virtual=True):
        assert outcome.status == "ok"
        tiers = (outcome.gpu, outcome.cpu, outcome.disk, outcome.remote, outcome.external, outcome.computed)
        parts = [tokens for tokens in tiers if tokens is not None]
        assert sum(parts) == request.prompt == outcome.prompt_tokens
        assert outcome.computed >= 1
        assert all(part >= 0 for part in parts)
        served = request.prompt - outcome.computed
        assert sum(outcome.lost.values()) == max(0, request.ideal - served)
        assert served <= request.ideal or "storage" in how or "remote" in how or "disk" in how
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
    hits = [
        [outcome.gpu for outcome in in_turn(asks, lambda gpu=gpu: backend(gpu=gpu))[1]]
        for gpu in (188, 240, 320, 480, 4000)
    ]
    for smaller, larger in pairwise(hits):
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
        [
            outcome.prompt_tokens - outcome.computed
            for outcome in in_turn(asks, lambda gpu=gpu: backend("offload", gpu=gpu, cpu=40_000))[1]
        ]
        for gpu in (188, 400, 40_000)
    ]
    assert served[0] == served[1] == served[2]


def together(asks: list[Ask], gpu: int, how: dict[str, object], one_by_one: bool) -> list[Outcome]:
    """Sends requests on their own time; with `one_by_one` no two steps are taken together."""

    async def main() -> list[Outcome]:
        async with backend(gpu=gpu, max_batched_tokens=24, max_seqs=4, **how) as sim:
            sim.engine.scheduler.skip = not one_by_one
            session = Session(sim)
            tasks = []
            for ask in asks:
                tasks.append(asyncio.ensure_future(session.ask(ask)))
                await asyncio.sleep(ask.pause)
            return list(await asyncio.gather(*tasks))

    return run(main(), virtual=True)


def served(outcome: Outcome) -> tuple[object, ...]:
    return outcome.gpu, outcome.cpu, outcome.disk, outcome.remote, outcome.lost


@settings(max_examples=150, deadline=None)
@given(ASKS, SETTINGS, st.sampled_from([188, 256]))
def test_steps_taken_together_change_nothing(asks: list[Ask], how: dict[str, object], gpu: int) -> None:
    asks = fits(asks)
    skipping, stepping = (together(asks, gpu, how, one_by_one) for one_by_one in (False, True))
    for fast, slow in zip(skipping, stepping, strict=True):
        assert served(fast) == served(slow)
        assert fast.preemptions == slow.preemptions
        assert abs(fast.first_token - slow.first_token) < 1e-6
        assert abs(fast.last_token - slow.last_token) < 1e-6
