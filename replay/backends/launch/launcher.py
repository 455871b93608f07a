"""`Launched`: a preset's engine and the services beside it, on this machine, while a block lasts."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from replay.backends.launch import control, sglang, vllm
from replay.backends.launch import services as beside
from replay.backends.launch.command import LOOPBACK, Command, Options, environment, free_port
from replay.backends.launch.probe import Probe, probe
from replay.backends.launch.process import Process, remove, stop, temporary_folder
from replay.backends.preset import Preset
from replay.engine import profiles
from replay.errors import ReplayError

_DEGRADED = "System will operate in degraded mode"  # lmcache's v1/manager.py
_ENGINES = {"vllm": vllm.serve, "sglang": sglang.serve}


class Launched:
    """Starts a preset's engine and services, and stops them on every way out of the ``async with`` block.

    Everything listens on 127.0.0.1 on free ports. What was not there before is gone after: processes, shared
    memory, temporary folders; a disk tier stays only where the preset names its folder.

    Raises (on entering and from `restart`):
        ReplayError: something is missing, does not fit this machine, or ended while starting; the message has
            the last error of its log.
    """

    def __init__(
        self,
        preset: Preset,
        options: Options,
        *,
        log_dir: Path,
        python: str | None = None,
        recorder: Path | None = None,
        progress: Callable[[str], None] | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self.preset = preset
        """The preset; its disk tier's path is filled in once started."""
        self.options = options
        self.log_dir = log_dir
        self.urls: list[str] = []
        """Base URL of each instance."""
        self.lmcache_url: str | None = None
        """HTTP URL of LMCache's server (``/metrics``, ``/status``, ``/cache/clear``); null without one."""
        self.events: Path | None = None
        """File of what LMCache says of each request, for `attribution.lookups.Lookups`; null without LMCache."""
        self.probe: Probe | None = None
        self.capacity: dict[str, int | None] = {}
        """GPU tier in tokens, of all instances together, as the engine reports; null if it does not."""
        self._python, self._recorder = python, recorder
        self._progress = progress or (lambda line: None)
        self._timeout_s = timeout_s
        self._services: list[tuple[Command, Process]] = []
        self._engines: list[tuple[Command, Process]] = []
        self._engine_commands: list[Command] = []
        self._scratch: Path | None = None
        self._cache_state = "empty: new engine"
        self._previous_sigterm: Any = None

    async def __aenter__(self) -> Launched:
        self._watch_sigterm()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._previous_sigterm is not None:
            signal.signal(signal.SIGTERM, self._previous_sigterm)
            self._previous_sigterm = None
        # In a thread, and waited for even if cancelled again: Ctrl-C twice must not orphan an engine.
        ending = asyncio.ensure_future(asyncio.to_thread(self._end))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    def _end(self) -> None:
        stop(process for _, process in [*self._engines, *self._services])
        self._engines, self._services = [], []
        if self._scratch is not None:
            remove(self._scratch)

    async def _start(self) -> None:
        if self.preset.engine not in _ENGINES:
            raise ReplayError(
                f"backend {self.preset.name}: engine {self.preset.engine} cannot be launched; "
                "give its URL with --target"
            )
        self.probe = await asyncio.to_thread(probe, self._python)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = scratch = temporary_folder()
        self.preset = beside.with_disk_folder(self.preset, scratch)
        self._look_at_disk()
        services, commands = beside.plan(self.preset, self.probe, scratch, self._recorder)
        if services.lmcache_http:
            self.lmcache_url = f"http://{LOOPBACK}:{services.lmcache_http}"
        if self.preset.connector.startswith("lmcache"):
            self.events = services.events
        serve = _ENGINES[self.preset.engine]
        for instance in range(self.preset.instances):
            port = free_port()
            self.urls.append(f"http://{LOOPBACK}:{port}")
            self._engine_commands.append(
                serve(
                    beside.of_instance(self.preset, instance),
                    self.options,
                    self.probe,
                    services,
                    port=port,
                    instance=instance,
                )
            )
        for command in commands:
            self._services.append((command, self._spawn(command)))
            await self._healthy([self._services[-1]])
        await self._start_engines()

    async def _start_engines(self) -> None:
        for command in self._engine_commands:
            self._engines.append((command, self._spawn(command)))
        await self._healthy(self._engines)
        self._check_lmcache()
        try:
            self.capacity = {"gpu": await control.gpu_tokens(self.urls)}
            await control.warm_up(self.urls, self.preset.engine, self.options.served_name)
        except (OSError, aiohttp.ClientError, asyncio.TimeoutError) as error:
            said = self.failure() or f"the engine does not answer its first request: {error or type(error).__name__}"
            raise ReplayError(f"{said} (logs: {self.log_dir})") from None

    def _spawn(self, command: Command) -> Process:
        assert self._scratch is not None
        log = self.log_dir / f"{command.name}.log"
        with log.open("a") as file:
            file.write(f"# {command.shown()}\n")
        return Process(command.name, command.argv, environment(command.env, self._scratch), log)

    async def _healthy(self, started: list[tuple[Command, Process]]) -> None:
        begin = time.monotonic()
        waiting = list(started)
        async with aiohttp.ClientSession(timeout=control.REQUEST) as http:
            while waiting:
                for command, process in list(waiting):
                    if process.exit_code is not None:
                        raise ReplayError(
                            f"{command.name} ended with exit code {process.exit_code} while starting: "
                            f"{process.last_error()} (log: {process.log})"
                        )
                    process.note_shared_memory()
                    # Of a port that something else listens at, another server, or one not quite gone, may answer.
                    if await control.ready(http, command.ready) and process.listens(urlsplit(command.ready).port or 0):
                        waiting.remove((command, process))
                    elif time.monotonic() - begin > self._timeout_s:
                        raise ReplayError(
                            f"{command.name} did not answer within {self._timeout_s:.0f} s; its log "
                            f"({process.log}) ends with: {process.last_line()[:200]}"
                        )
                if waiting:
                    command, process = waiting[0]
                    elapsed = time.monotonic() - begin
                    self._progress(f"starting {command.name}: {elapsed:.0f} s, {process.last_line()[:80]}")
                    await asyncio.sleep(control.POLL_S)

    async def restart(self) -> None:
        """Ends the engine, all its instances, and starts it again with the same settings and ports.

        Its GPU and in-process caches are lost; LMCache's server, a remote store and files on disk are kept.
        """
        await asyncio.to_thread(stop, [process for _, process in self._engines])
        self._engines = []
        await self._start_engines()

    async def reset(self) -> bool:
        """Empties the caches of running servers; False if one refused or has no such call.

        Requests must have ended. In-process LMCache has no reset, and files of a disk tier stay: there a
        fresh ``cache_salt`` isolates a run.
        """
        done = self.preset.connector in ("none", "hicache", "lmcache-mp") and self.preset.tiers.disk is None
        path = "flush_cache" if self.preset.engine == "sglang" else "reset_prefix_cache"
        async with aiohttp.ClientSession(timeout=control.REQUEST) as http:
            for url in self.urls:
                done &= await control.post_until(http, f"{url}/{path}", {})
            if self.lmcache_url:
                body = {"tier": "l1", "force": False}
                done &= await control.post_until(http, f"{self.lmcache_url}/cache/clear", body)
        lower = "" if done else "; lower tiers hold earlier runs"
        self._cache_state = f"reset{lower}"
        return done

    @property
    def engine_logs(self) -> list[Path]:
        """Log file of each instance."""
        return [process.log for _, process in self._engines]

    def failure(self) -> str | None:
        """What ended meanwhile, as one line with the last error of its log; null while everything runs."""
        for command, process in [*self._services, *self._engines]:
            if process.exit_code is not None:
                return f"{command.name} ended with exit code {process.exit_code}: {process.last_error()}"
        return None

    def describe(self) -> dict[str, Any]:
        """What is stored with a run: versions, devices, commands without secrets, capacity, cache state."""
        assert self.probe is not None
        disk = self.preset.tiers.disk
        return {
            "versions": self.probe.versions,
            "device": self.probe.device,
            "gpu": self.probe.gpus[0].name if self.probe.device == "cuda" else "CPU",
            "instances": len(self.urls),
            "model": Path(self.options.model).name,
            "kv_bytes_per_token": self._kv_bytes(),
            "dummy_weights": self.options.dummy_weights,
            "commands": {c.name: c.shown() for c, _ in [*self._services, *self._engines]},
            "environment": sorted(self.preset.launch.env),
            "capacity_tokens": self.capacity | self._lower_tokens(),
            "disk_filesystem": beside.filesystem(Path(disk.path)) if disk and disk.path else None,
            "cache_before": self._cache_state,
        }

    def _kv_bytes(self) -> int | None:
        if not (Path(self.options.model) / "config.json").exists():
            return None  # a name that the engine looks up: what it loads is not ours to guess
        return profiles.model(self.options.model).kv_bytes_per_token(self.preset.kv_dtype)

    def _lower_tokens(self) -> dict[str, int | None]:
        """Tokens that the sizes of the lower tiers hold, of all instances together; a shared tier counts once."""
        kv_bytes = self._kv_bytes()
        return {
            name: int(tier.gib * beside.GIB) // kv_bytes * beside.copies(self.preset, name) if kv_bytes else None
            for name, tier in self.preset.lower()
        }

    def _look_at_disk(self) -> None:
        disk = self.preset.tiers.disk
        if disk is None or disk.path is None:
            return
        path = Path(disk.path)
        kept = sum(1 for file in path.rglob("*") if file.is_file())
        if kept:
            self._cache_state += f"; the disk tier holds {kept} files of earlier runs"
        if beside.in_memory(path):
            self._progress(f"the disk tier's folder {path} lies in memory (tmpfs), not on a disk")

    def _watch_sigterm(self) -> None:
        # Python ends at once on SIGTERM; as an exit it unwinds this block first.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            if previous == signal.SIG_DFL:
                self._previous_sigterm = previous
                signal.signal(signal.SIGTERM, _exit_on_sigterm)

    def _check_lmcache(self) -> None:
        """LMCache that fails to start inside vLLM lets it run without a cache, and says so in the log alone."""
        for command, process in self._engines:
            if self.preset.connector == "lmcache" and _DEGRADED in process.text():
                raise ReplayError(
                    f"LMCache did not start in {command.name}, which would run without it: {process.last_error()} "
                    f"(log: {process.log})"
                )


def _exit_on_sigterm(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
