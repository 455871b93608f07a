"""The same trace on the engine model: over HTTP in real time, and on the virtual clock."""

from __future__ import annotations

import asyncio
import statistics
from itertools import pairwise
from typing import Any

import pytest

from replay.backends.http import HttpBackend
from replay.backends.preset import load
from replay.backends.sim import SimBackend
from replay.load.clock import RunClock, run
from replay.load.content import Content
from replay.load.driver import Driver
from replay.load.outcome import Backend
from replay.load.schedule import Schedule, Settings
from replay.trace import Header, Trace, Turn

# A GPU tier of 4,000 tokens and a CPU tier of 2,100 for sessions of up to 3,000: the disk must serve the rest.
PRESET = load("lmcache-disk", ["tiers.gpu.tokens=4000", "tiers.cpu.gib=0.3", "tiers.disk.gib=2"])
EXACT = [f"{tier}_tokens" for tier in ("prompt", "output", "gpu", "cpu", "disk", "remote", "external", "computed")]
EXACT += [f"lost_{cause}" for cause in ("evicted", "granularity", "never_stored", "cold")]


def agents() -> Trace:
    """Three sessions that share a system prompt and take turns, each when the one before has ended."""
    turns = []
    before = None
    for number in range(3):
        for session in range(3):
            start = [("system", 1_000)] if number == 0 else []
            append = [*start, (f"{session}/{number}", 650 - 37 * number)]
            at = 0.0 if before is None else None
            after = None if before is None else [before]
            name = f"s{session}"
            turns.append(Turn(session=name, turn=number, at=at, after=after, pause=0.15, append=append, output=20))
            before = f"{name}/{number}"
    return Trace(Header(format="replay-trace", version=1, name="agents"), turns)


async def play(
    backend: Backend, clock: RunClock, outputs: str, trace: Trace | None = None
) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    schedule = Schedule(trace or agents(), Settings(outputs=outputs))

    def take(row: dict[str, Any]) -> None:
        rows[f"{row['session']}/{row['turn']}"] = row

    await Driver(schedule, backend, take).run(clock)
    return rows


def on_the_virtual_clock() -> dict[str, dict[str, Any]]:
    async def main() -> dict[str, dict[str, Any]]:
        clock = RunClock()
        async with SimBackend(PRESET, "qwen3-8b", "h200", clock) as backend:
            return await play(backend, clock, "recorded")

    return run(main(), virtual=True)


def test_http_in_real_time_gives_the_same_tokens_per_tier_and_the_same_waits(serving: Any) -> None:
    async def use(url: str, _: Any) -> dict[str, dict[str, Any]]:
        clock = RunClock()
        async with HttpBackend(url, PRESET, Content(0), clock, outputs="live", scrape_s=None) as backend:
            return await play(backend, clock, "live")

    real, virtual = serving(use, preset=PRESET), on_the_virtual_clock()
    assert set(real) == set(virtual)
    for name, expected in virtual.items():
        got = real[name]
        assert got["status"] == "ok", got["error"]
        assert {k: got[k] or 0 for k in EXACT} == {k: expected[k] or 0 for k in EXACT}, name
        assert got["tier_source"] == expected["tier_source"] == "simulated"
    assert sum(row["disk_tokens"] + row["cpu_tokens"] for row in virtual.values()) > 2_000
    waits = {
        kind: sorted(row["first_token"] - row["sent"] for row in rows.values())
        for kind, rows in (("real", real), ("virtual", virtual))
    }
    middle = len(real) // 2
    assert 0 <= waits["real"][middle] - waits["virtual"][middle] < 0.1


# Steps of about 20 ms: slow enough for a busy machine to keep their pace.
SLOW = "qwen3-32b"
VLLM = load("vllm")


def decoders() -> Trace:
    """Six sessions that decode at the same time, each joining the others in their midst."""
    turns = [
        Turn(session=f"s{n}", turn=0, at=0.15 * n, append=[(f"{n}", 400 + 50 * n)], output=30 + 4 * n) for n in range(6)
    ]
    return Trace(Header(format="replay-trace", version=1, name="decoders"), turns)


def median_itl(rows: dict[str, dict[str, Any]]) -> float:
    """Median over requests of the mean time between their tokens, in seconds."""
    return statistics.median(
        (row["last_token"] - row["first_token"]) / (row["output_tokens"] - 1) for row in rows.values()
    )


def test_the_time_between_tokens_over_http_is_that_of_the_virtual_clock(serving: Any) -> None:
    async def over_http(url: str, _: Any) -> dict[str, dict[str, Any]]:
        clock = RunClock()
        async with HttpBackend(url, VLLM, Content(0), clock, outputs="recorded", scrape_s=None) as backend:
            return await play(backend, clock, "recorded", decoders())

    async def virtual() -> dict[str, dict[str, Any]]:
        clock = RunClock()
        async with SimBackend(VLLM, SLOW, "h200", clock) as backend:
            return await play(backend, clock, "recorded", decoders())

    real, model = median_itl(serving(over_http, preset=VLLM, model=SLOW)), median_itl(run(virtual(), virtual=True))
    assert 0.01 < model < 0.05
    assert real == pytest.approx(model, rel=0.15)


def test_a_streamed_output_comes_token_by_token_at_the_models_pace(serving: Any, arrivals: Any) -> None:
    async def use(url: str, _: Any) -> tuple[list[float], list[float]]:
        async def later(number: int) -> list[float]:
            await asyncio.sleep(0.2 * number)
            return await arrivals(url, [number] * 300, 40)

        return tuple(await asyncio.gather(later(0), later(1)))  # the second cuts into the steps of the first

    for times in serving(use, preset=VLLM, model=SLOW):
        assert len(times) == 40
        even = (times[-1] - times[0]) / 39
        gaps = [after - before for before, after in pairwise(times)]
        assert 0.01 < even < 0.05
        assert even / 2 < statistics.median(gaps) < even * 2
        # Of a burst at the end nothing has come by then.
        assert sum(at < times[0] + (times[-1] - times[0]) / 2 for at in times) > 10
