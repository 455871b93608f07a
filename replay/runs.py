"""One run, end to end: a trace, a backend and a results file become a stored, judged run.

The command line, `sweep` and `plan` all go through `execute`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import platform
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import replay
from replay.backends.connect import Where, connect
from replay.backends.preset import Preset
from replay.errors import ReplayError
from replay.load import clock
from replay.load.driver import Driver, Progress
from replay.load.events import CacheEvent
from replay.load.outcome import Backend
from replay.load.schedule import Schedule, Settings
from replay.results.recorder import Recorder
from replay.results.store import Store
from replay.trace import Trace
from replay.trace.describe import timestamp_quantum
from replay.trace.files import open_input

Watch = Callable[[Progress], None]
_OWN_VERSIONS = {"replay": replay.__version__, "python": platform.python_version()}


def sha256(path: str | Path) -> str:
    """SHA-256 of a file's decompressed content, so that a compressed copy counts as the same trace."""
    digest = hashlib.sha256()
    with open_input(path) as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def execute(
    trace: Trace,
    where: Where,
    settings: Settings,
    store: Store | Recorder,
    *,
    name: str | None = None,
    notes: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda line: None,
    starts: Callable[[], None] = lambda: None,
) -> str:
    """Replays a trace and stores the run; returns the run's id.

    Args:
        trace: what to ask.
        where: who answers.
        settings: how to ask.
        store: gets the run.
        name: of the run; null: the backend's.
        notes: further entries of the run's `settings`.
        watch: called after each row.
        say: gets a line now and then while an engine starts.
        starts: called once trace, model and settings are known to fit together, before anything is asked.

    Ctrl-C ends the run early: what was measured is stored and the run is marked partial.

    Raises:
        ReplayError: the backend, model or trace do not fit together, or the results file cannot be written.
    """
    if settings.restart_at is not None and where.target not in ("sim", "launch"):
        raise ReplayError(f"--restart-at: {where.target} is not ours to restart; use --target launch or sim")
    run = _Run(trace, where, settings, store, name, notes, watch, say, starts)
    return clock.run(run.play(), virtual=where.simulated)


def simulate(trace: Trace, where: Where, settings: Settings | None = None) -> list[dict[str, Any]]:
    """The rows of a simulated run that is not stored, in the order in which they ended.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM ended it early.
        ReplayError: the target is not ``sim``, or trace, backend and model do not fit together.
    """
    if not where.simulated:
        raise ReplayError("predictions come from the engine model; use --target sim")
    settings = settings or Settings()
    rows: list[dict[str, Any]] = []

    async def play() -> None:
        run_clock = clock.RunClock()
        schedule = Schedule(trace, settings, where.max_context(), where.gpu_tokens())
        async with connect(where, run_clock, seed=settings.seed, outputs=settings.outputs) as backend:
            driver = Driver(schedule, backend, rows.append)
            with _interrupts(driver):  # raised in the middle of a task, Ctrl-C would leave that task's traceback
                if (await driver.run(run_clock)).stopped:
                    raise KeyboardInterrupt

    clock.run(play(), virtual=True)
    return rows


def predict(trace: Trace, where: Where, settings: Settings) -> dict[str, float | None]:
    """TTFT percentiles and the served share of a simulated run that is not stored; see `simulate`.

    Returns:
        ``ttft_p50``, ``ttft_p90``, ``ttft_p95``, ``ttft_p99`` in seconds, from sent, linearly interpolated;
        ``served_share``: prompt tokens of answered requests that were not computed, as a share of 1. Null if
        nothing was answered.
    """
    answered = [row for row in simulate(trace, where, settings) if row["status"] == "ok"]
    waits = [row["first_token"] - row["sent"] for row in answered]
    prompt = sum(row["prompt_tokens"] for row in answered)
    served = 1 - sum(row["computed_tokens"] for row in answered) / prompt if prompt else None
    times = {f"ttft_p{p}": float(np.percentile(waits, p)) if waits else None for p in (50, 90, 95, 99)}
    return {**times, "served_share": served}


class _Run:
    """The parts of one run and their order."""

    def __init__(
        self,
        trace: Trace,
        where: Where,
        settings: Settings,
        store: Store | Recorder,
        name: str | None,
        notes: Mapping[str, Any] | None,
        watch: Watch | None,
        say: Callable[[str], None],
        starts: Callable[[], None],
    ):
        self.trace, self.where, self.settings, self.store = trace, where, settings, store
        self.name, self.notes, self.watch, self.say = name, notes or {}, watch, say
        self.starts = starts

    async def play(self) -> str:
        run_clock = clock.RunClock()
        schedule = Schedule(self.trace, self.settings, self.where.max_context(), self.where.gpu_tokens())
        if not self.where.simulated:
            self.starts()  # an engine may take minutes to come
        async with self._connect(run_clock, schedule) as backend:
            if self.where.simulated:
                self.starts()
            run_id = self.store.begin_run(self._description(schedule, backend))
            driver = Driver(schedule, backend, lambda row: self.store.add(row, run_id=run_id), self.watch)
            try:
                with _interrupts(driver):
                    progress = await driver.run(run_clock)
            except BaseException:
                self.store.finish_run(run_id, status="partial", duration_s=run_clock.now())
                raise
        self._store_scrapes(run_id, backend)
        self._store_events(run_id, backend)
        self_check = self._self_check(schedule, backend, progress)
        self.store.finish_run(
            run_id,
            status="partial" if progress.stopped or self_check["incomplete"] else "complete",
            duration_s=progress.now,
            self_check=self_check,
        )
        return run_id

    def _connect(
        self, run_clock: clock.RunClock, schedule: Schedule
    ) -> contextlib.AbstractAsyncContextManager[Backend]:
        seed, outputs = self.trace.header.seed + self.settings.seed, self.settings.outputs
        return connect(self.where, run_clock, seed=seed, outputs=outputs, say=self.say, schedule=schedule)

    def _store_scrapes(self, run_id: str, backend: Backend) -> None:
        scraper = getattr(backend, "scraper", None)
        for at, name, labels, value in scraper.samples if scraper is not None else ():
            self.store.add_scrapes(run_id, at, [(name, labels, value)])

    def _store_events(self, run_id: str, backend: Backend) -> None:
        events: Callable[[], list[CacheEvent]] | None = getattr(backend, "cache_events", None)
        if events is not None:
            self.store.add_cache_events(run_id, (event._asdict() for event in events()))

    def _description(self, schedule: Schedule, backend: Backend) -> dict[str, Any]:
        where, settings, trace = self.where, self.settings, self.trace
        about = backend.describe()
        tiers = about.get("tiers") or {}
        capacity = {tier: size["tokens"] for tier, size in tiers.items()} or about.get("capacity_tokens")
        return {
            "name": self.name,
            "backend": where.preset.name,
            "target": where.target,
            "simulated": where.simulated or bool(about.get("simulated")),  # a URL may be `replay serve`
            "model": about.get("model", where.model),
            "gpu": about.get("gpu", where.gpu),
            "trace": trace.header.name,
            "trace_sha256": sha256(trace.source) if trace.source else None,
            "synthetic": trace.header.synthetic,
            "sessions": len({step.session for step in schedule.steps}),
            "families": schedule.families,
            "turns": len(schedule.steps),
            "seed": settings.seed,
            "speed": settings.speed,
            "scale_tokens": settings.scale_tokens,
            "skip_idle": settings.skip_idle,
            "concurrency": settings.concurrency,
            "outputs": settings.outputs,
            "duplication": schedule.duplication,
            "settings": {
                **about,
                "kv_bytes_per_token": about.get("kv_bytes_per_token"),
                "capacity_tokens": capacity,
                "preset": _plain(where.preset),
                "replay": settings.as_dict(),
                "versions": {**(about.get("versions") or {}), **_OWN_VERSIONS},
                **self.notes,
            },
        }

    def _self_check(self, schedule: Schedule, backend: Backend, progress: Progress) -> dict[str, Any]:
        own: dict[str, Any] = getattr(backend, "self_check", dict)()
        lag = own.pop("loop_lag_p99_s", None)  # of worker processes
        about = backend.describe()
        warnings = [*own.pop("warnings", []), *(about.get("warnings") or [])]
        if schedule.duplication > 1:
            warnings.append(f"sessions are clones: each family of the trace is played {schedule.duplication:.3g} times")
        if schedule.settings.skip_idle and progress.skipped_s > 0:
            warnings.append(f"{progress.skipped_s:,.0f} idle seconds were skipped; caches saw shorter pauses")
        return {
            **own,
            "loop_lag_p99_s": max((p for p in (_p99(progress.lag), lag) if p is not None), default=None),
            "peak_in_flight": progress.peak_in_flight,
            "dropped_turns": progress.dropped,
            "incomplete": None if progress.stopped else getattr(backend, "incomplete", None),
            "skipped_idle_s": max(0.0, progress.skipped_s),
            "restarted_at_s": progress.restarted_at,
            "cache_before": about.get("cache_state_before_run") or about.get("cache_before") or "unknown",
            "timestamp_quantum_s": timestamp_quantum(self.trace),
            "warnings": warnings,
        }


@contextlib.contextmanager
def _interrupts(driver: Driver) -> Any:
    """Ctrl-C and SIGTERM stop the driver instead of tearing down the loop; a second one does what it did before."""
    loop = asyncio.get_running_loop()
    before: dict[int, Any] = {}

    def give_back(number: int) -> None:
        # Asyncio would leave the system's default, which for SIGTERM ends the process with an engine launched.
        loop.remove_signal_handler(number)
        signal.signal(number, before.pop(number) or signal.SIG_DFL)

    def stop(number: int) -> None:
        give_back(number)
        driver.stop()

    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
        handler = signal.getsignal(number)
        try:
            loop.add_signal_handler(number, stop, number)
            before[number] = handler
        except (ValueError, RuntimeError, NotImplementedError):
            pass  # not the main thread (a sweep's worker): the parent handles signals
    try:
        yield
    finally:
        for number in list(before):
            give_back(number)


def _plain(preset: Preset) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(preset)
    return plain


def _p99(values: list[float]) -> float | None:
    return float(np.percentile(values, 99)) if values else None
