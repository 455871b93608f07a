"""The simulated engine as a backend: what comes back from where, what is refused, what fails."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine.harness import Ask, Session, backend

from replay.backends import preset as presets
from replay.backends.sim import SimBackend
from replay.errors import ReplayError
from replay.load.clock import RunClock, run
from replay.load.outcome import Outcome, Request
from replay.trace import ROOT, Turn


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("vllm", None),
        ("lmcache-cpu", "cpu"),
        ("lmcache-disk", "disk"),
        ("vllm-offload-cpu", "cpu"),
        ("sglang", None),
        ("sglang-hicache", "cpu"),
        ("mooncake", "remote"),
    ],
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


@pytest.mark.parametrize(
    ("connector", "tiers", "after"),
    [
        ("lmcache", ("cpu", "disk"), None),  # its index of the disk is in memory
        ("lmcache", ("cpu", "remote"), "remote"),
        ("lmcache-mp", ("cpu", "disk"), "disk"),
        ("offload", ("cpu", "disk"), "disk"),
        ("mooncake", ("remote",), None),  # the pool is memory of the instances
    ],
)
def test_what_a_restart_leaves(connector: str, tiers: tuple[str, ...], after: str | None) -> None:
    async def main() -> Outcome:
        async with backend(connector, gpu=400, **dict.fromkeys(tiers, 400)) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1, "a", 40, 1))
            await asyncio.sleep(10)
            await sim.restart()
            return await session.ask(Ask(-1, 1, "a", 45, 1))

    outcome = run(main(), virtual=True)
    assert outcome.computed == (5 if after else 45)
    assert after is None or getattr(outcome, after) == 40


@pytest.mark.parametrize(("connector", "lower"), [("none", ()), ("offload", ("cpu",)), ("lmcache", ("cpu", "disk"))])
def test_stores_less_evictions_are_what_a_tier_holds_after_every_reading(
    connector: str, lower: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with backend(connector, gpu=200, **dict.fromkeys(lower, 300)) as sim:
            session = Session(sim)
            for number in range(60):
                await session.ask(Ask(-1, 1, f"document {number}", 100, 2, 0))
                await asyncio.sleep(1)
            events = list(sim.cache_events())
            assert [event.at for event in events] == sorted(event.at for event in events)
            assert len({event.at for event in events}) > 3, "spread over the run"
            evicted = {
                tier: sum(e.blocks for e in events if (e.tier, e.kind) == (tier, "evict")) for tier in ("gpu", *lower)
            }
            assert evicted["gpu"] == sim.engine.pool.evicted > 0
            for tier in sim.engine.tiers.tiers if sim.engine.tiers else ():
                stored = sum(event.blocks for event in events if (event.tier, event.kind) == (tier.name, "store"))
                assert stored - evicted[tier.name] == tier.cache.used > 0
                assert evicted[tier.name] > 0
            assert all(event.tokens == 4 * event.blocks > 0 for event in events)

    run(main(), virtual=True)


def test_a_restart_is_a_reset_of_the_tiers_that_it_empties_and_no_eviction() -> None:
    async def main() -> list[tuple[str, str | None]]:
        async with backend("lmcache", gpu=400, cpu=400, remote=400) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1, "a", 40, 1))
            await asyncio.sleep(10)
            await sim.restart()
            return [(event.kind, event.tier) for event in sim.cache_events()]

    assert run(main(), virtual=True) == [("store", "cpu"), ("store", "remote"), ("reset", "gpu"), ("reset", "cpu")]


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


def test_what_is_still_being_stored_was_never_stored() -> None:
    """The GPU has given the document up before the disk has it: 4,096 tokens take it 0.8 s."""

    async def main() -> Outcome:
        async with backend("lmcache", gpu=5000, block=16, chunk=256, disk=100_000) as sim:
            session = Session(sim)
            for document in "ab":
                await session.ask(Ask(-1, 1, document, 4096, 1))
            return await session.ask(Ask(-1, 1, "a", 4097, 1))

    outcome = run(main(), virtual=True)
    assert outcome.lost["never_stored"] > 2000
    assert outcome.lost["never_stored"] + outcome.gpu + outcome.disk == 4096


def test_lmcache_serves_nothing_behind_a_first_chunk_that_is_gone() -> None:
    """The GPU still holds the head, the CPU tier has lost it and kept the rest."""

    async def main() -> Outcome:
        async with backend("lmcache", gpu=188, chunk=8, cpu=160) as sim:
            session = Session(sim)
            await session.ask(Ask(-1, 1, "a", 144, 1))
            await session.ask(Ask(-1, 1, "b", 40, 1))
            await session.ask(Ask(-1, 1, "c", 40, 1))
            return await session.ask(Ask(-1, 1, "a", 145, 1))

    outcome = run(main(), virtual=True)
    assert 0 < outcome.gpu < 144
    assert outcome.cpu == 0
    assert outcome.lost["evicted"] == 144 - outcome.gpu


def test_the_request_admitted_last_is_preempted_and_ends_all_the_same() -> None:
    async def main() -> list[Outcome]:
        async with backend(gpu=188) as sim:
            session = Session(sim)
            asks = [session.ask(Ask(-1, 1, name, 60, 90)) for name in "ab"]
            return list(await asyncio.gather(*asks))

    first, second = run(main(), virtual=True)
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert second.last_token > first.last_token
    assert (second.status, second.output_tokens, second.computed) == ("ok", 90, 60)


@pytest.mark.parametrize(
    ("prompt", "output", "gpu", "words"),
    [
        (40_000, 1_000, 100_000, "exceed the 40,960 tokens of qwen3-8b"),
        (300, 200, 400, "exceed the GPU tier of 396 tokens"),
    ],
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
        ("vllm", "engine=openai", "engine openai is not modelled"),
        ("lmcache-cpu", "engine=sglang", "connector lmcache under engine sglang .* use hicache"),
        (
            "sglang-hicache",
            "engine=vllm",
            "connector hicache under engine vllm .* use lmcache or lmcache-mp or offload",
        ),
        ("lmcache-cpu", "connector=mooncake", "tiers.cpu under connector mooncake .* use tiers.remote"),
        ("lmcache-cpu", "tiers.cpu.watermark=0.8", "tiers.cpu.watermark"),
        ("lmcache-cpu", "tiers.cpu.staging=true", "tiers.cpu.staging"),
        ("sglang-hicache", "tiers.cpu.staging=true", "tiers.cpu.staging"),
        ("vllm-offload-cpu", "tiers.cpu.policy=lfu", "tiers.cpu.policy lfu under connector offload .* or use lru"),
        ("vllm-offload-cpu", "tiers={disk: {gib: 9}}", "tiers.disk without tiers.cpu .* set tiers.cpu.gib"),
        ("vllm-offload-cpu", "tiers.disk={gib: 9, policy: lru}", "tiers.disk.policy lru .* or use none"),
        ("vllm-offload-cpu", "tiers.disk={gib: 9, write: back}", "tiers.disk.write back .* or use through"),
        ("vllm-offload-cpu", "tiers={cpu: {gib: 9, write: back}, disk: {gib: 9}}", "with tiers below"),
        ("vllm-offload-cpu", "tiers.cpu.inclusion=exclusive", "inclusion exclusive .* with write: back"),
        ("lmcache-cpu", "tiers.cpu.write=back", "tiers.cpu.write back under connector lmcache .* or use through"),
        ("lmcache-disk", "tiers.disk.prefetch=timeout", "tiers.disk.prefetch under connector lmcache"),
        ("sglang-hicache", "chunk_tokens=128", "chunk_tokens under engine sglang"),
        ("sglang-hicache", "tiers={cpu: {gib: 9}, disk: {gib: 9}, remote: {gib: 9}}", "one storage backend"),
        ("sglang-hicache", "prefix_caching=false", "prefix_caching: false under HiCache"),
        ("vllm", "instances=2", "more than one instance"),
        ("vllm", "max_batched_tokens=100", "must be at least max_seqs"),
        ("vllm", "connector=lmcache", "connector lmcache without tiers .* set tiers.cpu.gib"),
        ("vllm", "connector=mooncake", "connector mooncake without tiers .* set tiers.remote.gib"),
        (
            "lmcache-cpu",
            "tiers.cpu.gib=0.001",
            "holds no entry of 256 tokens, which takes 0.035 GiB; raise it",
        ),
    ],
)
def test_what_is_not_modelled_is_refused(name: str, override: str, words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        SimBackend(presets.load(name, [override]), "qwen3-8b", "h200", _Clock())


@pytest.mark.parametrize("value", ["0", "-3", ".nan", ".inf", "much"])
def test_a_tier_or_bandwidth_that_is_no_size_is_refused(value: str) -> None:
    for field in ("gib", "gbps", "ttl_s"):
        with pytest.raises(ReplayError, match=rf"tiers\.cpu\.{field}"):
            presets.load("lmcache-cpu", [f"tiers.cpu.{field}={value}"])


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("tiers.disk.gibs=5", "did you mean tiers.disk.gib?"),
        ("tier.disk.gib=5", "did you mean tiers.disk.gib?"),
        ("watermark=0.5", "did you mean tiers.cpu.watermark?"),
        ("zzz=1", "schemas/backend.schema.json has them all"),
        ("tiers.cpu.gib.more=1", "did you mean tiers.cpu.gib?"),
    ],
)
def test_an_override_of_an_unknown_field_names_the_nearest(override: str, near: str) -> None:
    with pytest.raises(ReplayError, match="there is no field") as raised:
        presets.load("lmcache-disk", [override])
    assert near in str(raised.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tiers.cpu.gib=-1", "tiers.cpu.gib must be > 0"),
        ("tiers.cpu.gib=1e12", "tiers.cpu.gib must be <= 1e+09"),
        ("max_seqs=0", "max_seqs must be >= 1"),
        ("max_seqs=many", "max_seqs must be int, not str"),
        ("router=sesion", "router must be one of round-robin, session, prefix"),
        ("tiers.cpu.policy=mru", "tiers.cpu.policy must be one of lru, fifo, lfu, none"),
        ("tiers.disk.path=/tmp", "tiers.disk: object missing required field gib"),
    ],
)
def test_a_value_that_does_not_fit_is_told_in_words_and_without_a_path(override: str, said: str) -> None:
    with pytest.raises(ReplayError) as raised:
        presets.load("lmcache-cpu", [override])
    assert str(raised.value) == f"backend lmcache-cpu with --set {override}: {said}"


def test_a_value_that_is_no_yaml_is_one_line() -> None:
    with pytest.raises(ReplayError, match=r"^--set launch.args=\[: '\[' is not a value in YAML; quote it$"):
        presets.load("vllm", ["launch.args=["])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chunk_tokenz: 256", "there is no field 'chunk_tokenz'; did you mean chunk_tokens?"),
        ("tiers: {cpu: {gibs: 3}}", "there is no field 'tiers.cpu.gibs'; did you mean tiers.cpu.gib?"),
        ("max_seqs: -1", "max_seqs must be >= 1"),
        ("tiers: 5", "tiers must be object, not int"),
    ],
)
def test_a_field_of_a_file_is_told_with_the_files_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text + "\nlaunch: {env: {A: b}}\n")
    with pytest.raises(ReplayError) as raised:
        presets.load(str(path))
    assert str(raised.value) == f"{path}: {said}"


def test_names_of_the_users_own_go_below_where_the_preset_takes_them() -> None:
    assert presets.load("vllm", ["launch.env.A=b"]).launch.env == {"A": "b"}


class _Clock:
    def now(self) -> float:
        return 0.0
