"""Simulates many points at once: on this machine's cores, or on a Ray cluster."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from replay import runs
from replay.backends.connect import Where
from replay.errors import ReplayError
from replay.load.schedule import Settings
from replay.results.recorder import Recorder
from replay.trace import Trace


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    where: Where
    settings: Settings
    overrides: tuple[str, ...] = ()
    """Fields of the preset that this point changes, as ``field=value``."""

    @property
    def name(self) -> str:
        """Name of its run, e.g. ``lmcache-cpu/c4/tiers.cpu.gib=200``; without ``c4`` at recorded start times."""
        sessions = [f"c{self.settings.concurrency}"] if self.settings.concurrency else []
        return "/".join([self.where.preset.name, *sessions, *self.overrides])


Task = tuple[Point, dict[str, Any]]
"""A point, and further entries of its run's `settings`."""
Outcome = Recorder | str
"""A finished run, or why there is none."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate(trace: Trace, point: Point, notes: dict[str, Any]) -> Outcome:
    """Runs one simulated point; the same anywhere."""
    recorder = Recorder()
    try:
        runs.execute(trace, point.where, point.settings, recorder, name=point.name, notes=notes)
    except ReplayError as error:
        return str(error)
    return recorder


def simulate_all(trace: Trace, todo: Sequence[Task], *, jobs: int, ray: str | None) -> Iterator[tuple[int, Outcome]]:
    """Runs simulated points and yields each one's index and outcome as soon as it is there.

    Args:
        trace: what to ask.
        todo: points with the target ``sim``, with further entries of their run's `settings`.
        jobs: processes; 1: in this one.
        ray: address of a Ray cluster, or ``local`` to start one here; null: processes.

    Raises:
        ReplayError: no Ray, no cluster at that address, or a worker process died.
    """
    trace = copy.copy(trace)
    trace.source = ""  # a worker elsewhere may not have the file; whoever stores the run knows its hash
    if not todo:
        return
    if ray is not None:
        yield from _on_ray(trace, todo, ray)
    elif jobs > 1 and len(todo) > 1:
        yield from _on_cores(trace, todo, min(jobs, len(todo)))
    else:
        for index, each in enumerate(todo):
            yield index, simulate(trace, *each)


_trace: Trace | None = None


def _start_worker(trace: Trace) -> None:
    """Gives a worker process the trace, leaves Ctrl-C to its parent, and ends it should the parent be killed."""
    global _trace  # noqa: PLW0603
    _trace = trace
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(point: Point, notes: dict[str, Any]) -> Outcome:
    assert _trace is not None
    outcome = simulate(_trace, point, notes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run takes the signal over and gives back the default
    return outcome


def _on_cores(trace: Trace, todo: Sequence[Task], jobs: int) -> Iterator[tuple[int, Outcome]]:
    others = set(multiprocessing.active_children())
    # Spawned, not forked: a fork would copy the threads' locks of DuckDB and polars.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(trace,))
    try:
        futures = {pool.submit(_work, *each): index for index, each in enumerate(todo)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ReplayError(
            "a worker process died, perhaps for want of memory; points that are done are stored: "
            "run the same command again with fewer --jobs"
        ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _on_ray(trace: Trace, todo: Sequence[Task], address: str) -> Iterator[tuple[int, Outcome]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ReplayError("--ray needs Ray: pip install 'kvcache-replay[ray]'") from None
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ReplayError(f"--ray {address}: no such cluster: {first}") from None
    try:
        run, shared = ray.remote(simulate), ray.put(trace)
        waiting = {run.remote(shared, *each): index for index, each in enumerate(todo)}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            yield waiting.pop(done), ray.get(done)
    finally:
        ray.shutdown()
