"""Real engines for tests: started once a module on a tiny random-weight model, asked through replay's own driver."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replay.backends.http.attribution.lookups import Lookups
from replay.backends.http.client import HttpBackend
from replay.backends.launch import Launched
from replay.backends.launch.command import Options
from replay.backends.preset import Preset, load
from replay.backends.sim import SimBackend
from replay.load.clock import RunClock, run
from replay.load.content import Content
from replay.load.driver import Driver
from replay.load.outcome import Backend, Outcome, Request
from replay.load.schedule import Schedule, Settings
from replay.trace import Header, Trace, Turn

ROOT = Path(__file__).resolve().parents[2]
BLOCK, CHUNK = 128, 256
# Every prompt fits; three sessions of the traces below do not, so that the GPU tier must evict.
RECORDER = ROOT / "replay/backends/lmcache_recorder.py"
GPU_TOKENS, MAX_LEN = 4096, 3968
SYSTEM = 600
SETTINGS = Settings(outputs="live")

Rows = list[dict[str, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture(scope="session")
def engine_python() -> str:
    """The interpreter of the engines' environment. With REPLAY_ENGINES=1 its absence is a failure."""
    found = subprocess.run([ROOT / "scripts/engines.sh", "--find"], capture_output=True, text=True, check=False)
    if found.returncode:
        if os.environ.get("REPLAY_ENGINES") == "1":
            pytest.fail(f"REPLAY_ENGINES=1, but {found.stderr.strip()}")
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@pytest.fixture(scope="session")
def model(engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([engine_python, ROOT / "tests/engines/tiny_model.py", folder], check=True)
    return folder


class Alternating:
    """Sends the turns of a run to several servers in turn, so that what one computed the other needs."""

    def __init__(self, backends: list[HttpBackend]) -> None:
        self._backends = backends
        self._sent = 0

    async def send(self, request: Request) -> Outcome:
        self._sent += 1
        return await self._backends[self._sent % len(self._backends)].send(request)


class Bench:
    """A launched preset and the loop that it lives on."""

    def __init__(self, launched: Launched, loop: asyncio.AbstractEventLoop) -> None:
        self.launched = launched
        self.loop = loop

    @property
    def preset(self) -> Preset:
        return self.launched.preset

    def wait(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def reset(self, *, l1: bool = True) -> None:
        """Empties the GPU tier, and LMCache's memory where there is one."""
        self.wait(_reset(self.launched, l1))

    def play(self, trace: Trace, salt: str, instances: slice = slice(0, 1)) -> Rows:
        """Rows of a run through the driver and the HTTP client, in the trace's order."""
        return self.wait(self._play(trace, salt, instances))

    async def _play(self, trace: Trace, salt: str, instances: slice) -> Rows:
        clock = RunClock()
        backends = []
        for url in self.launched.urls[instances]:
            events = self.launched.events
            lookups = Lookups(events) if events else None
            options: dict[str, Any] = {"salt": salt, "outputs": "live", "lookups": lookups}
            content = Content(0) if not backends else backends[0].content
            backend = HttpBackend(url, self.preset, content, clock, scrape_s=None, **options)
            backends.append(await backend.__aenter__())
        try:
            return await _drive(trace, Alternating(backends) if len(backends) > 1 else backends[0], clock)
        finally:
            for backend in backends:
                await backend.__aexit__(None, None, None)


async def _reset(launched: Launched, l1: bool) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as http:
        for url in launched.urls:
            answer: dict[str, Any] = {}
            while not answer.get("success"):  # refused while a save is in flight
                async with http.post(f"{url}/reset_prefix_cache") as reply:
                    answer = await reply.json()
        if l1 and launched.lmcache_url:
            async with http.post(f"{launched.lmcache_url}/cache/clear", json={"tier": "l1"}) as reply:
                assert reply.status == 200, await reply.text()


async def _drive(trace: Trace, backend: Backend | Alternating, clock: RunClock) -> Rows:
    rows: Rows = []
    driver = Driver(Schedule(trace, SETTINGS), backend, rows.append)  # type: ignore[arg-type]
    await driver.run(clock)
    failed = [row["error"] for row in rows if row["status"] != "ok"]
    assert not failed, failed
    return rows


def simulate(preset: Preset, model: Path, trace: Trace) -> Rows:
    """Rows of the same run on the engine model, in virtual time."""

    async def main() -> Rows:
        clock = RunClock()
        async with SimBackend(preset, str(model / "config.json"), "h200", clock) as backend:
            return await _drive(trace, backend, clock)

    return run(main(), virtual=True)


def agents(seed: int, sessions: int = 4, turns: int = 16, pause: float = 0.0) -> Trace:
    """Agent sessions that share a system prompt and whose turns follow each other strictly, in a random order.

    Serial, so that what each tier holds when a prompt arrives does not depend on timing.
    """
    rng = random.Random(seed)
    done: list[Turn] = []
    positions = [0] * sessions
    length = [0] * sessions
    for _ in range(turns):
        who = rng.randrange(sessions)
        append, output = rng.randint(90, 500), rng.randint(2, 12)
        shared = [] if positions[who] else [("system", SYSTEM)]
        if length[who] + SYSTEM + append + output > MAX_LEN - BLOCK:
            continue
        turn = Turn(
            session=f"agent{who}",
            turn=positions[who],
            at=0.0 if not positions[who] else None,
            after=[f"{done[-1].session}/{done[-1].turn}"] if done else [],
            pause=pause,
            append=[*shared, (f"step{len(done)}", append)],
            output=output,
        )
        positions[who] += 1
        length[who] += append + output
        done.append(turn)
    return Trace(Header(format="replay-trace", version=1, name="agents", synthetic=True, seed=seed), done)


@contextmanager
def launch(preset: Preset, model: Path, python: str, log_dir: Path) -> Iterator[Bench]:
    loop = asyncio.new_event_loop()
    options = Options(str(model), "tiny", max_model_len=MAX_LEN, dummy_weights=True)
    launched = Launched(preset, options, log_dir=log_dir, python=python, recorder=RECORDER)
    try:
        loop.run_until_complete(launched.__aenter__())
        try:
            yield Bench(launched, loop)
        finally:
            loop.run_until_complete(launched.__aexit__())
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def preset(name: str, *overrides: str) -> Preset:
    """A bundled preset with the sizes of these tests."""
    sizes = (f"block_tokens={BLOCK}", f"tiers.gpu.tokens={GPU_TOKENS}", "launch.args=[--enforce-eager]")
    return load(name, [*sizes, *overrides])


@pytest.fixture(scope="module")
def bench(
    request: pytest.FixtureRequest, model: Path, engine_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """The module's `PRESET`, running."""
    chosen: tuple[str, ...] = request.module.PRESET
    with launch(preset(*chosen), model, engine_python, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="session")
def trace_of() -> Callable[..., Trace]:
    """See `agents`."""
    return agents


@pytest.fixture
def trace(trace_of: Callable[..., Trace]) -> Callable[..., Trace]:
    return trace_of


@pytest.fixture
def simulated(model: Path) -> Callable[[Preset, Trace], Rows]:
    return lambda preset, trace: simulate(preset, model, trace)


@pytest.fixture
def stored_prefix() -> Callable[[Rows], list[int]]:
    """For each row of a run of `agents`, tokens of its prompt that an earlier prompt began with.

    LMCache stores prompts, not what is generated: of the parent's output nothing is there yet.
    """

    def prefixes(rows: Rows) -> list[int]:
        prompts: dict[str, int] = {}
        found = []
        for row in rows:
            found.append(prompts.get(row["session"], SYSTEM if prompts else 0))
            prompts[row["session"]] = row["prompt_tokens"]
        return found

    return prefixes


@pytest.fixture
def counters() -> Callable[[Bench], dict[str, float]]:
    """Counters of the first instance, summed over labels."""

    def read(bench: Bench) -> dict[str, float]:
        page = urllib.request.urlopen(f"{bench.launched.urls[0]}/metrics").read().decode()
        totals: dict[str, float] = {}
        for name, value in re.findall(r"^(vllm:\w+_total)(?:\{.*\})? (\S+)$", page, re.MULTILINE):
            totals[name] = totals.get(name, 0) + float(value)
        return totals

    return read
