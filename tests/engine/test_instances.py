"""Several instances behind a router: what they share, and that everything still adds up."""

from __future__ import annotations

import asyncio

import pytest
from engine.harness import ASKS, Ask, Session, backend, check_engine, fits
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from replay.backends.choice import Choice
from replay.load.clock import run
from replay.load.outcome import Outcome

SHARED = [
    {},
    {"connector": "offload", "cpu": 80},
    {"connector": "lmcache", "chunk": 8, "cpu": 96, "remote": 240},
    {"connector": "lmcache-mp", "chunk": 8, "cpu": 160, "remote": 240, "tier": {"watermark": 0.8}},
]


@settings(max_examples=40, deadline=None)
@given(ASKS, st.sampled_from(SHARED), st.sampled_from(["round-robin", "session", "prefix"]), st.integers(2, 3))
def test_requests_to_several_instances_all_end_and_add_up(
    asks: list[Ask], how: dict[str, object], router: str, instances: int
) -> None:
    asks = fits(asks)

    async def main() -> list[Outcome]:
        async with backend(
            gpu=188, max_batched_tokens=24, max_seqs=4, router=router, instances=instances, **how
        ) as sim:
            session = Session(sim)
            tasks = []
            for ask in asks:
                tasks.append(asyncio.ensure_future(session.ask(ask)))
                await asyncio.sleep(ask.pause)
            outcomes = list(await asyncio.gather(*tasks))
            await asyncio.sleep(1000)
            for instance in sim.instances:
                check_engine(instance.engine)
            assert sum(sim.self_check()["requests_per_instance"]) == len(outcomes)
        return outcomes

    for outcome in run(main(), virtual=True):
        assert outcome.status == "ok"
        parts = (outcome.gpu, outcome.cpu, outcome.disk, outcome.remote, outcome.computed)
        assert sum(part for part in parts if part is not None) == outcome.prompt_tokens
        assert outcome.instance in range(instances)
        assert all(tokens >= 0 for tokens in outcome.lost.values())


def twice(how: dict[str, object]) -> Outcome:
    """The same prompt to one instance and then to the other; what the second says."""

    async def main() -> Outcome:
        async with backend(gpu=4000, router="round-robin", instances=2, **how) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1.0, "a", 100, 4))
            await asyncio.sleep(100)
            return await session.ask(Ask(-1, 1.0, "a", 100, 4))

    return run(main(), virtual=True)


def test_an_instance_finds_what_another_stored_in_the_shared_tiers_and_nowhere_else() -> None:
    remote = twice({"connector": "lmcache", "chunk": 8, "cpu": 4000, "remote": 4000})
    assert (remote.gpu, remote.cpu, remote.remote) == (0, 0, 96)
    server = twice({"connector": "lmcache-mp", "chunk": 8, "cpu": 4000, "remote": 4000})
    assert (server.gpu, server.cpu, server.remote) == (0, 96, 0)
    apart = twice({"connector": "lmcache", "chunk": 8, "cpu": 4000})
    assert apart.computed == 100
    assert apart.lost["never_stored"] == 96


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("round-robin", [0, 1, 0, 1, 0, 1]), ("session", [0, 1, 0, 1, 1, 0]), ("prefix", [0, 1, 0, 1, 1, 0])],
)
def test_a_router_takes_instances_in_turn_by_session_or_by_prefix(policy: str, expected: list[int]) -> None:
    async def main() -> list[int]:
        async with backend() as sim:
            session = Session(sim)
            choice = Choice(2, policy)
            chosen = []
            for name, parent in (("a", -1), ("b", -1), ("a", 0), ("b", 1), ("b", 3), ("a", 2)):
                request = session.place(Ask(parent, 1.0, name, 20, 4))
                instance = choice.take(replace(request, session=name)).instance
                chosen.append(instance)
                choice.done(instance)
        return chosen

    assert run(main(), virtual=True) == expected
