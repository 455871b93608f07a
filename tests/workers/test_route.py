"""Several instances behind the client's own router: who is asked, what that reuses, what the rows say of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.choice import Choice, Taken
from replay.backends.connect import Where
from replay.backends.preset import load
from replay.backends.route import Router, explain
from replay.errors import ReplayError
from replay.load.outcome import Outcome, Request
from replay.load.schedule import Schedule, Settings
from replay.results.store import Store


def with_router(policy: str, **more: Any) -> Any:
    return msgspec.structs.replace(load("vllm"), router=policy, **more)


def chosen(policy: str, trace: Any, instances: int = 3) -> list[tuple[str, int]]:
    """Session and instance of a trace's turns, sent turn by turn, each answered before the next is sent."""
    schedule = Schedule(trace, Settings())
    choice = Choice(instances, policy)
    found = []
    for step in sorted(schedule.steps, key=lambda step: (step.position, step.family)):
        instance = choice.take(schedule.request(step, 0)).instance
        choice.done(instance)
        found.append((step.session, instance))
    return found


def test_round_robin_takes_the_instances_in_turn(kit: Any) -> None:
    assert [instance for _, instance in chosen("round-robin", kit.agents(4, turns=2))] == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("policy", ["session", "prefix"])
def test_sessions_stay_where_they_began_and_spread(kit: Any, policy: str) -> None:
    found = chosen(policy, kit.agents(6))
    assert len(set(found)) == 6, "one instance a session"
    assert sorted(instance for _, instance in set(found)) == [0, 0, 1, 1, 2, 2], (
        "a system prompt that all share draws nobody to the first instance"
    )


def test_a_session_that_continues_another_goes_to_its_prefix(kit: Any) -> None:
    trace = kit.agents(2, turns=2)
    child = kit.Turn(session="child", turn=0, parent="s1/1", append=[("task", 50)], output=8)
    trace = kit.Trace(trace.header, [*trace.turns, child])
    schedule = Schedule(trace, Settings())
    choice = Choice(2, "prefix")
    homes = {}
    for step in schedule.steps:
        homes[step.session], held, _ = choice.take(schedule.request(step, 0))
        choice.done(homes[step.session])
    assert homes["child"] == homes["s1"] != homes["s0"]
    assert held == schedule.steps[-1].tip.depth - 50


def test_prefix_and_session_routing_reuse_more_than_round_robin(kit: Any, engines: Any, play: Any) -> None:
    urls = engines(2)
    served, lost = {}, {}
    for policy in ("round-robin", "session", "prefix"):
        # Three turns each and an odd number of sessions: taken in turn, no session stays where it was.
        results = play(kit.agents(5), urls, preset=with_router(policy), concurrency=1)
        rows = results.rows("prompt_tokens - computed_tokens, lost_never_stored, instance, status")
        assert {(instance, status) for *_, instance, status in rows} == {(0, "ok"), (1, "ok")}
        served[policy] = sum(row[0] for row in rows)
        lost[policy] = sum(row[1] for row in rows)
        assert results.about("verdict") != "invalid", results.about("reasons")
        assert not [reason for reason in results.about("reasons") if "add up" in reason]
        settings = results.about("settings")
        assert (settings["router"], settings["instances"], settings["urls"]) == (policy, 2, urls.split(","))
        counts = [sum(row[2] == number for row in rows) for number in (0, 1)]
        assert results.about("self_check")["requests_per_instance"] == counts
    assert min(served["session"], served["prefix"]) > 1.2 * served["round-robin"], served
    assert lost["round-robin"] > lost["session"] > 0, "what only the other instance had was never stored on this one"


def test_each_instances_metrics_are_labelled(kit: Any, engines: Any, play: Any) -> None:
    results = play(kit.agents(2), engines(2), preset=with_router("session"))
    labels = results.rows("DISTINCT regexp_extract(labels, 'instance=\"(\\d+)\"', 1)", "scrapes")
    assert labels == [("0",), ("1",)]
    capacity = results.about("settings")["capacity_tokens"]["gpu"]
    alone = play(kit.agents(2), engines(1)).about("settings")["capacity_tokens"]["gpu"]
    assert capacity == 2 * alone


def test_workers_route_as_one_process_does(kit: Any, engines: Any, play: Any) -> None:
    urls, preset = engines(2), with_router("round-robin")
    alone = play(kit.agents(4), urls, preset=preset, concurrency=1)
    shared = play(kit.agents(4), urls, preset=preset, concurrency=1, workers=2)
    columns = f"{kit.EXACT}, instance"
    assert shared.rows(columns) == alone.rows(columns)
    assert len(shared.rows("DISTINCT worker, instance")) == 4


def test_a_server_that_is_not_there_is_named(kit: Any, engines: Any, play: Any) -> None:
    with pytest.raises(ReplayError, match=r"--target http://127\.0\.0\.1:9: "):
        play(kit.agents(1), engines(1) + ",http://127.0.0.1:9", workers=2)


def test_secrets_in_the_addresses_of_several_servers_are_not_stored(tmp_path: Path) -> None:
    target = "http://a:1/v1?key=secret,https://user:secret@b:2,http://c:3"
    with Store.create_or_open(tmp_path / "r.duckdb") as store:
        run = store.begin_run({"backend": "vllm", "target": target, "simulated": False})
        with store.reader() as con:
            found = con.execute("SELECT target FROM runs WHERE id = ?", [run]).fetchall()
    assert found == [("http://a:1/v1,https://b:2,http://c:3",)]


def test_events_of_one_engine_and_several_instances_do_not_go_together() -> None:
    with pytest.raises(ReplayError, match="--kv-events"):
        Where(load("vllm"), "http://a:1,http://b:2", kv_events="tcp://a:3")


class Client:
    """Answers what it is told to."""

    def __init__(self, preset: Any, outcome: Outcome):
        self.preset, self.outcome = preset, outcome

    restarts = 0

    async def send(self, request: Request) -> Outcome:
        return self.outcome

    async def restarted(self) -> None:
        self.restarts += 1


@pytest.mark.parametrize(("remote", "cause"), [(False, "never_stored"), (True, "unknown")])
def test_what_another_instance_was_sent_explains_a_loss_unless_they_share_tiers(
    kit: Any, remote: bool, cause: str
) -> None:
    preset = load("lmcache-remote") if remote else load("vllm")
    outcomes = [Outcome("ok", prompt_tokens=800, computed=800, lost={"unknown": 600}) for _ in range(2)]
    router = Router([Client(preset, outcome) for outcome in outcomes], "round-robin")  # type: ignore[list-item]
    schedule = Schedule(kit.agents(1, turns=2), Settings())
    first, second = schedule.steps

    async def main() -> Outcome:
        await router.send(schedule.request(first, 0))
        return await router.send(schedule.request(second, 600))

    lost = asyncio.run(main()).lost
    assert lost is not None and {name: n for name, n in lost.items() if n} == {cause: 600}


@given(st.data())
def test_an_explained_loss_sums_to_the_same(data: Any) -> None:
    prompt = data.draw(st.integers(1, 500))
    ideal, held, computed, warm = (data.draw(st.integers(0, prompt)) for _ in range(4))
    taken = Taken(0, held, data.draw(st.sampled_from([None, min(warm, held)])))
    total = max(0, ideal - (prompt - computed))
    granularity = data.draw(st.integers(0, total))
    outcome = Outcome("ok", prompt_tokens=prompt, computed=computed)
    cold = data.draw(st.integers(0, total - granularity)) if taken.warm is not None else 0
    outcome.lost = {"granularity": granularity, "cold": cold, "unknown": total - granularity - cold}
    explain(outcome, ideal, taken, data.draw(st.sampled_from([1, 16, 128])))
    assert sum(outcome.lost.values()) == total
    assert min(outcome.lost.values()) >= 0
    assert outcome.lost["never_stored"] == 0 or held < ideal
    assert outcome.lost["cold"] == 0 or (taken.warm is not None and taken.warm < held)


def test_what_a_restart_took_is_told_for_each_instance(kit: Any) -> None:
    outcomes = [Outcome("ok", prompt_tokens=900, computed=900, lost={"cold": 300, "unknown": 300}) for _ in range(2)]
    clients = [Client(load("vllm"), outcome) for outcome in outcomes]
    router = Router(clients, "session")  # type: ignore[arg-type]
    schedule = Schedule(kit.agents(2, turns=2), Settings())
    steps = {step.id: step for step in schedule.steps}

    async def main() -> Outcome:
        for first in ("s0/0", "s1/0"):
            await router.send(schedule.request(steps[first], 0))
        await router.restarted()
        # The other instance has the common system prompt again; this one has nothing.
        await router.send(schedule.request(steps["s0/1"], 0))
        outcomes[1].lost = {"cold": 300, "unknown": 300}
        return await router.send(schedule.request(steps["s1/1"], 537))

    lost = asyncio.run(main()).lost
    assert lost is not None and {name: n for name, n in lost.items() if n} == {"cold": 537}
    assert [client.restarts for client in clients] == [1, 1]
