"""`Workers`: several processes send one run's requests, each the families of sessions that were given to it.

The driver stays in one process, with the schedule, the prefix tree's marks, the slots of ``--concurrency``,
the rows and the metrics; so a run is the same whatever the number of workers. What costs time beside a busy
server, composing prompts and reading streams, is done by the workers: each has the same schedule and clients,
gets the name of a step when it is due, and answers with its outcome.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import signal
import socket
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from replay.backends.clients import Servers
from replay.backends.http import HttpBackend
from replay.backends.http.check import SelfCheck, percentiles
from replay.backends.pipe import Pipe, frame
from replay.backends.route import Router
from replay.backends.worker import Report, work
from replay.errors import ReplayError
from replay.load.clock import RunClock
from replay.load.events import CacheEvent
from replay.load.outcome import Outcome, Request
from replay.load.schedule import Schedule

_PATIENCE_S = 5.0
"""Seconds that a worker gets to report and end."""


class Worker:
    """The sending process's side of a worker process."""

    def __init__(self, number: int, of: int):
        self.number = number
        self.name = f"worker {number} of {of}"
        self.lost: str | None = None
        """Why it is gone; null while it works."""
        self.report: Report | None = None
        """What it noticed; null before it ended."""
        self.waiting: dict[int, asyncio.Future[Outcome]] = {}
        self.turns = 0
        """Turns to come of the families that it was given."""
        self.families = 0
        """Families that it was given."""
        self.pipe: Pipe
        self.process: BaseProcess
        self.listener: asyncio.Task[None]

    async def start(self, plan: bytes) -> None:
        """Starts the process and hands it the run's plan, a `pipe.frame`.

        It cannot be reached by Ctrl-C or a SIGTERM to the whole group, which are this process's to handle: it ends
        when told to, or when this process is gone.
        """
        mine, theirs = socket.socketpair()
        # Spawned, not forked: a fork would copy the locks of DuckDB's and polars' threads.
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=work, args=(theirs, self.number), daemon=True)
        resource_tracker.ensure_running()  # starting it, as the first spawn would, unblocks these signals
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()
        self.pipe = await Pipe.over(mine)
        self.pipe.write(plan)

    async def expect(self, word: str) -> None:
        """Waits until it says that it is so far.

        Raises:
            ReplayError: it cannot do what it was told to, or it died.
        """
        try:
            kind, what = await self.pipe.receive()
        except (EOFError, OSError):
            raise ReplayError(f"{await self._death()}; run with fewer --workers") from None
        if kind != word:
            raise ReplayError(str(what))

    async def listen(self) -> None:
        """Takes outcomes until the worker has reported or is gone; then nobody waits for it any more."""
        try:
            while True:
                kind, *rest = await self.pipe.receive()
                if kind == "report":
                    self.report = rest[0]
                    return
                number, outcome = rest
                if (future := self.waiting.get(number)) is not None and not future.done():
                    future.set_result(outcome)
        except (EOFError, OSError):
            self.lost = await self._death()
        finally:
            for future in self.waiting.values():
                if not future.done():
                    future.set_result(Outcome("error", self.lost or f"{self.name} has ended", worker=self.number))

    async def _death(self) -> str:
        await asyncio.to_thread(self.process.join, _PATIENCE_S)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}"

    async def end(self) -> None:
        """Lets it report and end, and ends it if it does not."""
        if hasattr(self, "listener"):
            if not self.lost:
                self.pipe.send(("end",))
            await asyncio.wait([self.listener], timeout=_PATIENCE_S)
            self.listener.cancel()
        if hasattr(self, "pipe"):
            self.pipe.close()
        if hasattr(self, "process"):
            await asyncio.to_thread(self.process.join, _PATIENCE_S if self.report else 0.0)
            if self.process.is_alive():
                self.process.kill()
                await asyncio.to_thread(self.process.join)


class Workers:
    """Sends through worker processes; a `replay.load.outcome.Backend` around the clients of this process."""

    def __init__(self, count: int, servers: Servers, schedule: Schedule, max_context: int | None):
        """Args:
        count: processes.
        servers: who is asked.
        schedule: of the run; workers make the same one.
        max_context: see `Schedule`.
        """
        self._servers = servers.for_worker()
        self._schedule = schedule
        self._max_context = max_context
        self._workers = [Worker(number, count) for number in range(count)]
        self._numbers = itertools.count()
        self._turns = Counter(step.family for step in schedule.steps)
        self._home: dict[int, Worker] = {}
        self._clients: Sequence[HttpBackend] = ()
        self._front: HttpBackend | Router
        self._clock: RunClock

    async def __aenter__(self) -> Workers:
        """Starts the processes and waits until each has its schedule.

        Raises:
            ReplayError: one cannot.
        """
        try:
            schedule = self._schedule
            plan = frame((schedule.trace, schedule.settings, self._max_context, self._servers))
            for worker in self._workers:
                await worker.start(plan)
            for worker in self._workers:
                await worker.expect("ready")
        except BaseException:
            await self.end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.end()

    async def end(self) -> None:
        """Ends the processes, on every way out; they report first if they can."""
        ending = asyncio.gather(*(worker.end() for worker in self._workers))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await ending
            raise

    async def serve(self, front: HttpBackend | Router, clients: Sequence[HttpBackend], clock: RunClock) -> None:
        """Connects the workers to the servers and sends what `clients` are asked through them.

        Args:
            front: what the run asks, entered.
            clients: the client of each instance behind it.
            clock: the run's clock; the workers go by the same origin.

        Raises:
            ReplayError: a worker cannot connect.
        """
        self._front, self._clients, self._clock = front, clients, clock
        for worker in self._workers:
            worker.pipe.send(("connect", clock.origin))
        for worker in self._workers:
            await worker.expect("connected")
            worker.listener = asyncio.create_task(worker.listen())
        for number, client in enumerate(clients):
            client.through = partial(self._ask, number)

    async def send(self, request: Request) -> Outcome:
        """Sends a request through the worker that has its family."""
        return await self._front.send(request)

    async def _ask(self, instance: int, request: Request, known: tuple[int, int | None]) -> Outcome:
        worker = self._worker(request.family)
        worker.turns -= 1
        if worker.lost:
            return Outcome("error", worker.lost, worker=worker.number)
        number = next(self._numbers)
        future = worker.waiting[number] = asyncio.get_running_loop().create_future()
        worker.pipe.send(("ask", number, instance, request.id, request.ideal, known, self._clock.now()))
        try:
            outcome: Outcome = await future
        except asyncio.CancelledError:
            worker.pipe.send(("cancel", number))
            raise
        finally:
            del worker.waiting[number]
        return outcome

    def _worker(self, family: int) -> Worker:
        """Families stay where they began: what an engine generated for them is known only there."""
        home = self._home.get(family)
        if home is None:
            alive = [worker for worker in self._workers if not worker.lost] or self._workers
            home = self._home[family] = min(alive, key=lambda worker: (worker.turns, worker.families))
            home.families += 1
            home.turns += self._turns[family]
        return home

    async def restart(self) -> None:
        """Not possible: the servers are someone else's.

        Raises:
            ReplayError: always.
        """
        await self._front.restart()

    async def restarting(self) -> None:
        """Whoever owns the servers is about to restart the engines."""
        await self._front.restarting()

    async def restarted(self) -> None:
        """They are back."""
        await self._front.restarted()

    @property
    def scraper(self) -> Any:
        """This process's readings of the servers' metrics."""
        return self._front.scraper

    def cache_events(self) -> list[CacheEvent]:
        """What the servers published about their caches."""
        return self._front.cache_events()

    @property
    def incomplete(self) -> str | None:
        """Why the run lacks something; null if it does not."""
        return "; ".join(worker.lost for worker in self._workers if worker.lost) or None

    def describe(self) -> dict[str, Any]:
        """What is stored with the run."""
        return {**self._front.describe(), "workers": len(self._workers)}

    def self_check(self) -> dict[str, Any]:
        """What all processes noticed. Complete once the workers have ended.

        ``workers`` holds, per worker: requests, its loop's lag, the times that it added, and ``handover_ms``, from
        the moment a request was due here until the worker had it.
        """
        reports = {worker.number: worker.report for worker in self._workers if worker.report is not None}
        lags = [lag for report in reports.values() if (lag := report.lag_p99()) is not None]
        own = self._front.self_check()
        merged = SelfCheck(self._servers.where.preset)
        for report in reports.values():
            merged.merge(report.check)
        counts = {name: sum(r.counts[name] for r in reports.values()) for name in (*self._clients[0].counts(),)}
        gone = [f"{worker.lost}: its requests failed" for worker in self._workers if worker.lost]
        return {
            **own,
            **merged.times(),
            **counts,
            "loop_lag_p99_s": max(lags, default=None),
            "handover_ms": percentiles(array("d", itertools.chain(*(r.handover for r in reports.values())))),
            "workers": [report.summary(number) for number, report in reports.items()],
            "warnings": [*own["warnings"], *gone],
        }
