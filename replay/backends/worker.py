"""What runs in a worker process: the clients, a schedule of its own, and a pipe to the process that drives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replay.backends.clients import checked
from replay.backends.http import HttpBackend
from replay.backends.http.check import SelfCheck, percentiles
from replay.backends.pipe import Pipe
from replay.errors import ReplayError
from replay.load import clock
from replay.load.outcome import Outcome
from replay.load.schedule import Schedule


@dataclass(slots=True)
class Report:
    """What a worker noticed about itself."""

    check: SelfCheck
    counts: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    lag: list[float] = field(default_factory=list)
    """Seconds by which its event loop woke late, sampled."""
    handover: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from when a request was handed over until this process had it."""

    def lag_p99(self) -> float | None:
        """Null if it was too short-lived to sample."""
        return float(np.percentile(self.lag, 99)) if self.lag else None

    def summary(self, number: int) -> dict[str, Any]:
        """For the run's self-check."""
        own = {"worker": number, "requests": self.requests, "loop_lag_p99_s": self.lag_p99()}
        return {**own, **self.check.times(), "handover_ms": percentiles(self.handover)}


def work(end: socket.socket, number: int) -> None:
    """Worker process `number`: sends what `end` tells it to, until told to end or the driving process is gone."""
    with contextlib.suppress(EOFError, OSError):
        clock.run(_work(end, number), virtual=False)


async def _work(end: socket.socket, number: int) -> None:
    pipe = await Pipe.over(end)
    trace, settings, max_context, servers = await pipe.receive()
    schedule = Schedule(trace, settings, max_context)
    pipe.send(("ready", None))
    _, origin = await pipe.receive()
    run_clock = clock.RunClock(origin)
    try:
        async with contextlib.AsyncExitStack() as stack:
            clients = servers.clients(run_clock, worker=number)
            for client in clients:
                await stack.enter_async_context(client)
            pipe.send(("connected", None))
            await _Sender(pipe, schedule, clients, run_clock).run()
    except ReplayError as error:
        pipe.send(("failed", str(error)))
    await pipe.flush()
    pipe.close()


class _Sender:
    """Sends each step that the pipe names, and its outcome back."""

    def __init__(self, pipe: Pipe, schedule: Schedule, clients: list[HttpBackend], run_clock: clock.RunClock):
        self._pipe, self._schedule, self._clients, self._clock = pipe, schedule, clients, run_clock
        self._steps = {step.id: step for step in schedule.steps}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._report = Report(SelfCheck(clients[0].preset))

    async def run(self) -> None:
        lag = asyncio.create_task(clock.sample_lag(self._report.lag))
        try:
            with clock.undisturbed(asyncio.get_running_loop()):
                await self._serve()
        finally:
            for task in [lag, *self._tasks.values()]:
                task.cancel()
            await asyncio.gather(lag, *self._tasks.values(), return_exceptions=True)
        for client in self._clients:
            self._report.check.merge(client.check)
        self._report.counts = {name: checked(self._clients)[name] for name in self._clients[0].counts()}
        self._pipe.send(("report", self._report))

    async def _serve(self) -> None:
        while True:
            kind, *rest = await self._pipe.receive()
            if kind == "ask":
                self._tasks[rest[0]] = asyncio.create_task(self._send(*rest))
            elif kind == "cancel" and rest[0] in self._tasks:
                self._tasks.pop(rest[0]).cancel()
            elif kind == "end":
                return

    async def _send(
        self, number: int, instance: int, name: str, ideal: int, known: tuple[int, int | None], handed: float
    ) -> None:
        self._report.handover.append(self._clock.now() - handed)
        self._report.requests += 1
        request = self._schedule.request(self._steps[name], ideal)
        try:
            outcome = await self._clients[instance].ask(request, known)
        except Exception as error:  # ours: told here in full, and the driving process must not wait for ever
            asyncio.get_running_loop().call_exception_handler({"message": f"{name} failed", "exception": error})
            outcome = Outcome("error", f"replay itself failed: {type(error).__name__}")
        outcome.output_ids = None  # stays here, where later prompts need it
        del self._tasks[number]
        self._pipe.send(("outcome", number, outcome))
