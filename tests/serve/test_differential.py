"""The same trace on the engine model: over HTTP in real time, and on the virtual clock."""

from __future__ import annotations

from typing import Any

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


async def play(backend: Backend, clock: RunClock, outputs: str) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    schedule = Schedule(agents(), Settings(outputs=outputs))

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
