"""From a preset and a target to a backend that answers: the engine model, a launched engine, or a URL."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay.backends.preset import Preset
from replay.errors import ReplayError
from replay.load.outcome import Backend, Outcome, Request

if TYPE_CHECKING:
    from replay.backends.clients import Servers
    from replay.backends.http import HttpBackend
    from replay.backends.launch.launcher import Launched
    from replay.backends.route import Router
    from replay.backends.sim import SimBackend
    from replay.backends.sim_router import SimRouter
    from replay.backends.workers import Workers
    from replay.load.clock import RunClock
    from replay.load.events import CacheEvent
    from replay.load.schedule import Schedule

DEFAULT_MODEL = "qwen2.5-7b-1m"
DEFAULT_GPU = "h200"
_RECORDER = Path(__file__).with_name("lmcache_recorder.py")
_OF_SERVERS = ("api_key_env", "headers", "endpoint", "tokenizer", "kv_events", "dummy_weights", "max_model_len")
"""Fields that mean nothing to the engine model."""


@dataclass(frozen=True, slots=True)
class Where:
    """Who answers, and on what."""

    preset: Preset
    target: str = "sim"
    """``sim``, ``launch`` or the URL of a running server; several with commas between them are instances of one
    backend, among which the preset's `router` chooses."""
    model: str | None = None
    """Model profile for ``sim``; what the engine loads for ``launch``; the name that a server at a URL
    serves (null: the first that it lists)."""
    gpu: str | None = None
    """GPU profile for ``sim``; a remark stored with the run otherwise."""
    api_key_env: str | None = None
    """Environment variable that holds the API key of a server at a URL."""
    headers: tuple[tuple[str, str], ...] = ()
    """Further headers of every request, such as a router's."""
    endpoint: str | None = None
    """``completions``, ``chat`` or ``messages``; null: token ids if the engine takes them, else messages."""
    tokenizer: str | None = None
    """Whose words make up chat text: a tiktoken encoding or a path to a ``tokenizer.json``."""
    kv_events: str | None = None
    """ZMQ address at which the engine publishes its cache events; null: it does not."""
    isolation: str = "salt"
    """How the run is kept apart from earlier ones: ``salt``, ``reset`` or ``none``."""
    dummy_weights: bool = False
    """Launch with random weights."""
    max_model_len: int | None = None
    """Launch with this longest prompt plus output; null: the model's own."""
    workers: int = 1
    """Processes that send; they share the run's schedule and its rows."""
    logs: Path = Path("replay-logs")
    """Folder for the logs of launched processes."""
    engine: Launched | None = None
    """A launched engine of this preset that runs already, for several runs on one; null: start and stop one."""

    def __post_init__(self) -> None:
        if self.target not in ("sim", "launch") and not self.target.startswith(("http://", "https://")):
            raise ReplayError(f"--target {self.target}: must be sim, launch or a URL that starts with http")
        if self.workers < 1:
            raise ReplayError(f"--workers must be at least 1, not {self.workers}")
        if self.workers > 1 and self.simulated:
            raise ReplayError("--workers: the engine model has one virtual clock; use it with a URL or --target launch")
        if self.kv_events and ("," in self.target or (self.target == "launch" and self.preset.instances > 1)):
            raise ReplayError("--kv-events is the address of one engine; leave it out with several instances")
        for name in ("dummy_weights",) if not self.simulated else _OF_SERVERS:
            if getattr(self, name) and self.target != "launch":
                raise ReplayError(f"{_option(name)} means nothing for --target {self.target}; leave it out")
        if self.simulated and self.isolation != "salt":
            raise ReplayError("--isolation means nothing for --target sim, whose cache is always empty; leave it out")
        if self.target == "launch" and not self.model:
            raise ReplayError("--target launch needs --model, a model's folder or a name that the engine can load")

    @property
    def simulated(self) -> bool:
        """True if no engine runs and every figure comes from the engine model."""
        return self.target == "sim"

    @property
    def default_outputs(self) -> str:
        """``live`` where the engine returns what it generated as token ids, else ``recorded``."""
        return "live" if self.preset.engine == "vllm" and not self.simulated else "recorded"

    def announce(self) -> str:
        """The first line of a run's output: what runs where."""
        if self.simulated:
            model, gpu = self.model or DEFAULT_MODEL, self.gpu or DEFAULT_GPU
            return f"Simulating {self.preset.name} with {model} on {gpu}; no engine runs."
        if self.target == "launch":
            return f"Launching {self.preset.name} with {self.model} on this machine."
        return f"Asking {self.target}, taken to be {self.preset.name}."

    def check(self) -> None:
        """Looks up the profiles that ``sim`` needs.

        Raises:
            ReplayError: there is no such model or GPU.
        """
        if self.simulated:
            from replay.engine import profiles

            profiles.model(self.model or DEFAULT_MODEL)
            profiles.gpu(self.gpu or DEFAULT_GPU)

    def max_context(self) -> int | None:
        """Longest prompt and output together, where it is known before the run."""
        if not self.simulated:
            return self.max_model_len
        from replay.engine import profiles

        return profiles.model(self.model or DEFAULT_MODEL).max_context

    def gpu_tokens(self) -> int | None:
        """Tokens that requests can hold in the engine model's GPU tier; null for real engines, which know their own.

        Raises:
            ReplayError: see `replay.engine.profiles.gpu_kv_tokens`.
        """
        if not self.simulated:
            return None
        from replay.engine import profiles
        from replay.engine.engine import request_tokens

        model, gpu = profiles.model(self.model or DEFAULT_MODEL), profiles.gpu(self.gpu or DEFAULT_GPU)
        return request_tokens(self.preset, profiles.gpu_kv_tokens(model, gpu, self.preset))


def _option(name: str) -> str:
    return "--header" if name == "headers" else "--" + name.replace("_", "-")


def parse_headers(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Headers from ``Name: value`` texts.

    Raises:
        ReplayError: not of that form.
    """
    headers = []
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ReplayError(f"--header {name.strip()}: write it as 'Name: value'")
        headers.append((name.strip(), value.strip()))
    return tuple(headers)


def default_target() -> str:
    """``launch`` where a GPU and vLLM are present, else ``sim``."""
    if shutil.which("nvidia-smi") is None:
        return "sim"
    from replay.backends.launch.probe import can_launch

    return "launch" if can_launch("vllm") else "sim"


def _simulated(where: Where, clock: RunClock) -> SimBackend | SimRouter:
    from replay.backends.sim import SimBackend
    from replay.backends.sim_router import SimRouter

    make = SimRouter if where.preset.instances > 1 else SimBackend
    return make(where.preset, where.model or DEFAULT_MODEL, where.gpu or DEFAULT_GPU, clock)


@contextlib.asynccontextmanager
async def connect(
    where: Where,
    clock: RunClock,
    *,
    seed: int,
    outputs: str,
    say: Callable[[str], None] = lambda line: None,
    schedule: Schedule | None = None,
) -> AsyncIterator[Backend]:
    """The backend, started and with its cache in a known state.

    Args:
        where: who answers.
        clock: the run's clock; starts again once an engine that must be launched, or workers, are there.
        seed: of token content.
        outputs: ``live`` or ``recorded``.
        say: gets a line now and then while an engine starts.
        schedule: of the run; only workers need it.
    """
    if where.simulated:
        async with _simulated(where, clock) as sim:
            yield sim
    elif where.target == "launch":
        async with _engine(where, say) as engine:
            from replay.backends.clients import Servers

            lookups, in_logs = _lookups(engine)
            model = engine.options.served_name
            servers = Servers(where, tuple(engine.urls), model, seed, outputs, lookups, in_logs)
            async with _asked(servers, clock, schedule) as http:
                yield LaunchedBackend(engine, http)
    else:
        from replay.backends.clients import Servers, addresses

        servers = Servers(where, addresses(where.target), where.model, seed, outputs)
        async with _asked(servers, clock, schedule) as http:
            yield http


@contextlib.asynccontextmanager
async def _asked(
    servers: Servers, clock: RunClock, schedule: Schedule | None
) -> AsyncIterator[HttpBackend | Router | Workers]:
    """The client of running servers: behind a router where there are several, through workers where wanted."""
    from replay.backends.route import Router

    where = servers.where
    async with contextlib.AsyncExitStack() as stack:
        workers = None
        if where.workers > 1 and schedule is not None:
            from replay.backends.workers import Workers

            workers = Workers(where.workers, servers, schedule, where.max_context())
            await stack.enter_async_context(workers)
        clock.restart()
        clients = servers.clients(clock)
        front = Router(clients, where.preset.router) if len(clients) > 1 else clients[0]
        await stack.enter_async_context(front)
        if workers is None:
            yield front
        else:
            await workers.serve(front, clients, clock)
            try:
                yield workers
            finally:
                await workers.end()  # before the last reading of the metrics


@contextlib.asynccontextmanager
async def _engine(where: Where, say: Callable[[str], None]) -> AsyncIterator[Launched]:
    if where.engine is not None:
        yield where.engine
        return
    async with _launched(where, say) as engine:
        yield engine


def _launched(where: Where, say: Callable[[str], None]) -> Launched:
    from replay.backends.launch.command import Options
    from replay.backends.launch.launcher import Launched

    options = Options(model=str(where.model), dummy_weights=where.dummy_weights, max_model_len=where.max_model_len)
    return Launched(where.preset, options, log_dir=where.logs, recorder=_RECORDER, progress=say)


def _lookups(engine: Launched) -> tuple[tuple[Path, ...], bool]:
    """Where LMCache says what it served to which request, and whether that is logs: its server's events, or the
    log of its connector in each instance."""
    if engine.events is not None:
        return (engine.events,), False
    if engine.preset.connector == "lmcache":
        return tuple(engine.engine_logs), True
    return (), False


class LaunchedBackend:
    """A launched engine and the client that asks it."""

    def __init__(self, engine: Launched, http: HttpBackend | Router | Workers):
        self.engine = engine
        self.http = http

    async def __aenter__(self) -> LaunchedBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing: `connect` owns both parts."""

    async def send(self, request: Request) -> Outcome:
        """Sends one request; says so if it failed because the engine ended."""
        outcome = await self.http.send(request)
        if outcome.status == "error" and (failure := self.engine.failure()):
            outcome.error = f"{outcome.error}; {failure}"
        return outcome

    async def restart(self) -> None:
        """Restarts the engine, all its instances; their disk tiers and LMCache's server stay."""
        await self.http.restarting()
        await self.engine.restart()
        await self.http.restarted()

    @property
    def scraper(self) -> Any:
        """The client's readings of the engine's metrics."""
        return self.http.scraper

    def cache_events(self) -> list[CacheEvent]:
        """What the engine and LMCache published about their caches."""
        return self.http.cache_events()

    @property
    def incomplete(self) -> str | None:
        """Why the run lacks something; null if it does not."""
        return getattr(self.http, "incomplete", None)

    def describe(self) -> dict[str, Any]:
        """What is stored with the run."""
        return {**self.http.describe(), **self.engine.describe()}

    def self_check(self) -> dict[str, Any]:
        """What the client noticed."""
        return self.http.self_check()
