"""Simulates many points at once: on this machine's cores, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, cast

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


def _on_cores(trace: Trace, todo: Sequence[Task], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """A pipe to each worker, and nothing that workers share: any may be killed at any time."""
    # Spawned, not forked: a fork would copy the locks of DuckDB's and polars' threads.
    context = multiprocessing.get_context("spawn")
    tasks = iter(enumerate(todo))
    busy: dict[Connection, int] = {}
    workers = []

    def give(pipe: Connection) -> None:
        for index, task in itertools.islice(tasks, 1):
            pipe.send(task)
            busy[pipe] = index

    try:
        for _ in range(jobs):
            pipe, theirs = context.Pipe()
            with _no_interrupt():
                worker = context.Process(target=_work, args=(theirs, trace), daemon=True)
                worker.start()
                workers.append(worker)
            theirs.close()
            give(pipe)
        while busy:
            for ready in multiprocessing.connection.wait(list(busy)):
                pipe = cast("Connection", ready)
                outcome = _received(pipe)
                index = busy.pop(pipe)
                give(pipe)
                yield index, outcome
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back until the block has ended: a process half started could be neither used nor killed.

    What the block starts never sees Ctrl-C, which reaches it too while it still imports what it needs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # else started within the block, it would let the signal through
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))  # other threads may get it
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _received(pipe: Connection) -> Outcome:
    try:
        outcome: Outcome = pipe.recv()
    except (EOFError, OSError):
        raise ReplayError(
            "a worker process died, perhaps for want of memory; points that are done are stored: "
            "run the same command again with fewer --jobs"
        ) from None
    return outcome


def _work(pipe: Connection, trace: Trace) -> None:
    """A worker process: simulates what the pipe brings until it is closed or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which kills its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(simulate(trace, *pipe.recv()))
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a run takes the signal over and gives back the default


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _on_ray(trace: Trace, todo: Sequence[Task], address: str) -> Iterator[tuple[int, Outcome]]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ReplayError("--ray needs Ray: pip install 'kvcache-replay[ray]'") from None
    _check_reachable(address)
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


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if match is None:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ReplayError(f"--ray {address}: nothing answers there: {error}; `ray start --head` prints it") from None
