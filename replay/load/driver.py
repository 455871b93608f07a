"""Asks again: sends every step of a schedule when it is due and turns each answer into a row.

One coroutine owns all the timing. A step is *due* when everything it waits for has ended and its
pause is over; nothing is sent before, and each step is sent at most once. On a `VirtualLoop` the
same code runs in virtual time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replay.load.clock import RunClock, VirtualLoop, sample_lag, undisturbed
from replay.load.outcome import Backend, Outcome
from replay.load.remaining import Remaining
from replay.load.row import row
from replay.load.schedule import Schedule

# Timers fire a rounding error early; a microsecond is far below what any clock here resolves.
_TICK = 1e-6
_LOOK_S = 0.5

Sink = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Progress:
    """Where a run stands; also its self-check when it has ended."""

    total: int
    """Steps of the schedule."""
    done: int = 0
    """Steps with an outcome."""
    failed: int = 0
    dropped: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    now: float = 0.0
    """Seconds from the run's start."""
    skipped_s: float = 0.0
    """Idle seconds jumped over (``--skip-idle``), less those of a restart."""
    ends: float | None = None
    """When the run ends at the earliest, given its pauses to come; null where not known, or nobody watches."""
    drift: list[float] = field(default_factory=list)
    """Seconds from due to sent, per step."""
    lag: list[float] = field(default_factory=list)
    """Seconds by which the event loop woke late, sampled (real clock only)."""
    restarted_at: float | None = None
    """When the engine was restarted (``--restart-at``), in seconds from the first request's."""
    stopped: bool = False
    """The run was interrupted."""


class Driver:
    """Plays a schedule against a backend. Use once."""

    def __init__(
        self,
        schedule: Schedule,
        backend: Backend,
        sink: Sink,
        watch: Callable[[Progress], None] | None = None,
    ):
        """Args:
        schedule: what to send.
        backend: who answers; entered already.
        sink: gets each row as soon as it is final.
        watch: called after each row.
        """
        self.schedule = schedule
        self.backend = backend
        self.progress = Progress(total=len(schedule.steps))
        self._sink = sink
        self._watch = watch
        self._steps = schedule.steps
        self._settings = schedule.settings
        self._missing = [len(step.needs) for step in self._steps]
        self._children: list[list[int]] = [[] for _ in self._steps]
        for index, step in enumerate(self._steps):
            for need in step.needs:
                self._children[need].append(index)
        self._ended = [0.0] * len(self._steps)
        self._over = [False] * len(self._steps)
        self._timers: list[tuple[float, int]] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._fault: Exception | None = None
        self._restart_at = schedule.settings.restart_at
        self._restarting: asyncio.Future[None] | None = None
        self._remaining: Remaining | None = None
        self._looks_next = 0.0

    async def run(self, clock: RunClock) -> Progress:
        """Sends everything and returns when the last answer is in, or after `stop`.

        Args:
            clock: the run's clock, the same one that the backend stamps its outcomes with.

        Raises:
            Exception: what the sink raised, or a mistake of the backend's own; the run ends there.
        """
        self._clock = clock
        self._wake = asyncio.Event()
        self._families = self._group_families()
        self._queue = deque(sorted(range(len(self._families)), key=self._family_start))
        self._slots = self._settings.concurrency or len(self._queue)
        loop = asyncio.get_running_loop()
        virtual = isinstance(loop, VirtualLoop)
        if self._watch is not None and not virtual:
            self._remaining = Remaining(self.schedule)
        self._began = clock.now()
        self._open_families()
        if self._settings.concurrency is None:
            self._began = clock.now()  # to open many sessions takes a while, and none is late for it
        lag = None if virtual else loop.create_task(sample_lag(self.progress.lag))
        with undisturbed(loop):
            try:
                await self._play()
            finally:
                if lag is not None:
                    lag.cancel()
                await self._finish()
        if self._fault is not None:
            raise self._fault
        return self.progress

    async def _play(self) -> None:
        while self.progress.done < self.progress.total and not self.progress.stopped:
            self._open_families()
            if self._restart_due():
                await self._restart()
            else:
                self._send_due()
            await self._sleep()

    def stop(self) -> None:
        """Ends the run now: requests in flight are cancelled and recorded as such, a restart is broken off."""
        self.progress.stopped = True
        if self._restarting is not None:
            self._restarting.cancel()
        if hasattr(self, "_wake"):
            self._wake.set()

    # Time. The schedule's time starts with the driver, a moment after the clock, which finding the server took,
    # and runs ahead of it by the idle seconds jumped over.

    def _now(self) -> float:
        return self._running() if self._restart_at is None else min(self._running(), self._restart_at)

    def _running(self) -> float:
        return self._clock.now() - self._began + self.progress.skipped_s

    async def _sleep(self) -> None:
        """Waits for the next timer or answer."""
        if self.progress.done >= self.progress.total or self.progress.stopped or (self._slots and self._queue):
            return
        loop = asyncio.get_running_loop()
        timer = None
        alarm = self._next_alarm()
        if alarm is not None:
            wait = alarm - self._now()
            if wait > 0 and self._settings.skip_idle and self.progress.in_flight == 0:
                self.progress.skipped_s += wait
                return
            timer = loop.call_at(loop.time() + max(0.0, wait), self._wake.set)
        await self._wake.wait()
        self._wake.clear()
        if timer is not None:
            timer.cancel()

    def _next_alarm(self) -> float | None:
        """When something is to be done next, if nothing is answered before."""
        if self._restart_due():
            return None
        times = [] if not self._timers else [self._timers[0][0]]
        if self._timers and self._restart_at is not None:
            times.append(self._restart_at)
        return min(times, default=None)

    # Restart of the engine: once it is due nothing is sent until all is answered and the engine is back, and the
    # schedule's time stands still meanwhile, so that no request counts as late.

    def _restart_due(self) -> bool:
        return self._restart_at is not None and self._now() >= self._restart_at - _TICK

    async def _restart(self) -> None:
        if self.progress.in_flight:
            return
        self.progress.restarted_at = self._running()
        self._restarting = asyncio.ensure_future(self.backend.restart())
        try:
            await self._restarting
        except asyncio.CancelledError:
            if not self.progress.stopped:
                raise
            return
        finally:
            self._restarting = None
        assert self._restart_at is not None
        self.progress.skipped_s -= self._running() - self._restart_at
        self._restart_at = None
        self._wake.set()

    # Families and slots.

    def _group_families(self) -> list[list[int]]:
        families: list[list[int]] = [[] for _ in range(self.schedule.families)]
        for index, step in enumerate(self._steps):
            families[step.family].append(index)
        self._family_left = [len(family) for family in families]
        return families

    def _family_start(self, family: int) -> float:
        return min(
            (self._steps[i].at or 0.0 for i in self._families[family] if not self._steps[i].needs),
            default=0.0,
        )

    def _open_families(self) -> None:
        """Starts every session at its recorded time, or as many as there are slots."""
        while self._slots and self._queue:
            self._slots -= 1
            self._open_family(self._queue.popleft())

    def _open_family(self, family: int) -> None:
        start = self._family_start(family)
        shift = 0.0 if self._settings.concurrency is None else self._now() - start
        for index in self._families[family]:
            step = self._steps[index]
            if not step.needs and not self._over[index]:
                self._ready(index, (step.at or 0.0) + shift)

    # One step.

    def _ready(self, index: int, due: float) -> None:
        step = self._steps[index]
        if step.dropped is not None:
            self._drop(index, step.dropped)
        else:
            heapq.heappush(self._timers, (due, index))

    def _send_due(self) -> None:
        now = self._now()
        while self._timers and self._timers[0][0] <= now + _TICK:
            due, index = heapq.heappop(self._timers)
            on_the_clock = self._began + due - self.progress.skipped_s
            self._tasks[index] = asyncio.create_task(self._guarded(index, on_the_clock))
            self.progress.in_flight += 1
            self.progress.peak_in_flight = max(self.progress.peak_in_flight, self.progress.in_flight)

    async def _guarded(self, index: int, due: float) -> None:
        try:
            await self._send(index, due)
        except Exception as error:
            self._fault = self._fault or error
            self.stop()
        finally:
            del self._tasks[index]

    async def _send(self, index: int, due: float) -> None:
        step = self._steps[index]
        tree = self.schedule.tree
        ideal = tree.longest_sent(step.tip)
        tree.mark_sent(step.context)
        request = self.schedule.request(step, ideal)
        started = self._clock.now()
        try:
            outcome = await self.backend.send(request)
        except asyncio.CancelledError:
            outcome = Outcome("cancelled", "the run was interrupted", sent=started)
        self.progress.in_flight -= 1
        if outcome.sent is not None:
            self.progress.drift.append(outcome.sent - due)
        self._record(index, row(step, outcome, due=due, ideal=ideal))
        if outcome.status == "ok":
            self._follow(index)
        elif outcome.status == "error":
            self._fail(index, f"{step.id}, which failed")

    def _follow(self, index: int) -> None:
        """Sets the timers of the steps for which this was the last thing to wait for."""
        self._ended[index] = self._now()
        for child in self._children[index]:
            self._missing[child] -= 1
            step = self._steps[child]
            if self._missing[child] == 0 and not self._over[child]:
                due = max(self._ended[need] for need in step.needs) + step.pause
                if self._settings.absolute and step.at is not None:
                    due = step.at
                self._ready(child, due)

    def _fail(self, index: int, why: str) -> None:
        """What depends on a failed step is never sent; each such step is recorded once."""
        stack = list(self._children[index])
        while stack:
            child = stack.pop()
            if not self._over[child]:
                self._record_dropped(child, self._steps[child].dropped or f"not sent: it depends on {why}")
                stack.extend(self._children[child])

    def _drop(self, index: int, why: str) -> None:
        self._record_dropped(index, why)
        self._fail(index, f"{self._steps[index].id}, which was dropped")

    def _record_dropped(self, index: int, why: str) -> None:
        step = self._steps[index]
        self.progress.dropped += 1
        self._record(index, row(step, Outcome("dropped", why), due=None, ideal=None))

    def _record(self, index: int, values: dict[str, Any]) -> None:
        self._over[index] = True
        self._sink(values)
        self.progress.done += 1
        self.progress.failed += values["status"] == "error"
        self.progress.now = self._clock.now()
        family = self._steps[index].family
        self._family_left[family] -= 1
        if self._family_left[family] == 0:
            self._slots += 1
        self._wake.set()
        if self._watch is not None:
            self._look_ahead(index, failed=values["status"] != "ok")
            self._watch(self.progress)

    def _look_ahead(self, ended: int, *, failed: bool) -> None:
        """Says how long the run goes on at least; the longer that takes to find out, the more seldom."""
        now = self._now()
        if self._remaining is None or now < self._looks_next:
            return
        in_flight = (index for index in self._tasks if index != ended or not failed)
        left = self._remaining.seconds(now, self._timers, in_flight, self._queue)
        self.progress.ends = None if left is None else self.progress.now + left
        self._looks_next = now + max(_LOOK_S, 200 * (self._now() - now))

    async def _finish(self) -> None:
        tasks = list(self._tasks.values())
        if self.progress.stopped:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks)
        self.progress.now = self._clock.now()
