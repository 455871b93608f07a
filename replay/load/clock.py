"""One driver, two clocks: an event loop in real time, or one whose time jumps when nothing can run.

Everything that waits (driver, HTTP client, engine model) does so on its asyncio loop and reads
``loop.time()``. On the virtual loop, waiting costs nothing: when no callback is ready, time advances
to the next timer. So the same timing code is tested in milliseconds and simulates days in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import selectors
import sys
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_SWITCH_S = 0.0005


class Deadlock(RuntimeError):
    """On the virtual clock nothing is runnable and no timer is set: the program would wait for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls for I/O without waiting and hands the time that a real loop would have slept to `jump`."""

    jump: Any = None
    _calls = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Only signals and pipes come from outside; a system call in every round would cost more than the round.
        self._calls += 1
        ready = super().select(0) if timeout is None or self._calls % 32 == 0 else []
        if not ready:
            if timeout is None:
                raise Deadlock("nothing is left to run on the virtual clock")
            if timeout > 0:
                self.jump(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` starts at 0 and jumps to the next timer when nothing is ready."""

    def __init__(self) -> None:
        self._now = 0.0
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.jump = self._jump

    @property
    def _clock_resolution(self) -> float:
        """Asyncio runs timers with ``when < time() + resolution``: just those that are due, at any magnitude."""
        return math.ulp(self._now)

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """The base class sets the system clock's resolution, which means nothing here."""

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _jump(self, seconds: float) -> None:
        # The exact time of the next timer, where there is one: now + (when - now) can round below it,
        # and the loop would spin.
        scheduled = getattr(self, "_scheduled", None)
        target = scheduled[0].when() if scheduled else self._now + seconds
        self._now = max(self._now, target)


class RunClock:
    """Seconds from the start of the run, on the running loop.

    A real loop's time is the machine's monotonic clock, so processes that share an origin share a clock.
    """

    def __init__(self, origin: float | None = None) -> None:
        """`origin` is the run's start in the loop's time; null: now."""
        # Kept, as it is asked ten times a request: to find the running loop costs a system call before Python 3.12.
        self._time = asyncio.get_running_loop().time
        self.origin = self._time() if origin is None else origin

    def restart(self) -> None:
        """The run starts now: an engine that had to be launched first is up."""
        self.origin = self._time()

    def now(self) -> float:
        """Seconds from the start of the run."""
        return self._time() - self.origin


@contextlib.contextmanager
def undisturbed(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Keeps pauses of the interpreter's own short while a run measures in real time.

    Garbage collection leaves alone what exists already (a schedule can be millions of objects), and other threads,
    such as the one that writes rows, give way after half a millisecond instead of five.
    """
    if isinstance(loop, VirtualLoop):
        yield
        return
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)


async def sample_lag(lag: list[float]) -> None:
    """Appends the seconds by which the running loop wakes late, sampled every 50 ms until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.05
        await asyncio.sleep(0.05)
        lag.append(loop.time() - due)


def run(main: Coroutine[Any, Any, T], *, virtual: bool) -> T:
    """Runs a coroutine to its end on a fresh loop, in virtual or in real time."""
    loop = VirtualLoop() if virtual else asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        _close(loop)


def _close(loop: asyncio.AbstractEventLoop) -> None:
    try:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
