"""HTTP/1.1 on an asyncio protocol: the transport of the client.

Bytes are stamped where they arrive, in `data_received`, and looked at later: a reply is parsed when
its end may have come or when much has gathered. That parsing, and the making and writing of requests,
is done in `Turns`, between which sockets are read. So of 16 requests of 200,000 tokens at once none
waits long for the work on the others, and the client's work does not count as the server's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from replay.backends.http.http1 import BadResponse, Response
from replay.backends.http.limits import Limits

Now = Callable[[], float]

# A reply of unknown length ends in an empty line (of chunked coding) or in an event that says so; the
# longest of these, Anthropic's "message_stop", is shorter than this.
_TAIL = 64
# After the last event the end of the HTTP message follows at once from a server that sends it.
_GRACE_S = 1.0


class WireError(Exception):
    """A request that the network or the server's HTTP failed, as one line."""


class Sink(Protocol):
    """Takes a reply's body."""

    finished: bool
    """The body said by itself that it is complete."""

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Called once, before the first byte of a body."""

    def feed(self, at: float, data: bytes) -> None:
        """Takes decoded bytes, in order, with their arrival time."""


class Turns:
    """Does work in the order it came, half a millisecond at a time; between, the loop reads sockets."""

    _SLICE_S = 0.0005

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Callable[[], None]] = deque()
        self._called = False

    def add(self, work: Callable[[], None]) -> None:
        """Does `work` soon."""
        self._waiting.append(work)
        if not self._called:
            self._called = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        until = self._loop.time() + self._SLICE_S
        try:
            while self._waiting and self._loop.time() <= until:
                self._waiting.popleft()()
        finally:
            self._called = bool(self._waiting)
            if self._called:
                self._loop.call_soon(self._run)


class Exchange:
    """One request on a connection: what was received, and when. Times are the clock's, in seconds."""

    def __init__(self, make: Callable[[], bytes], sink: Sink, limits: Limits, now: Now, turns: Turns):
        """Args:
        make: makes the bytes of the request; called once, when they are to be written.
        sink: takes the reply's body.
        limits: of the client.
        now: the clock.
        turns: where work is done.
        """
        self.make = make
        self.compose_s: float | None = None
        """Time that making the request took."""
        self.response = Response()
        self.sent: float | None = None
        """Just before the first byte was written."""
        self.written: float | None = None
        """When the kernel had taken the last byte of the request."""
        self.first_byte: float | None = None
        self.closed: float | None = None
        """When the reply's last byte arrived."""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._limits = limits
        self._now = now
        self._turns = turns
        self._parsing = False
        self._waiting: list[tuple[float, bytes]] = []
        self._waiting_bytes = 0
        self._tail = b""
        self._begun = False
        self._grace: asyncio.TimerHandle | None = None

    def receive(self, data: bytes) -> None:
        """Stamps bytes; parses if these may be the last, or many wait."""
        at = self._now()
        if self.first_byte is None:
            self.first_byte = at
        self.closed = at
        self._waiting.append((at, data))
        self._waiting_bytes += len(data)
        self._tail = tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        if (
            self.response.eager
            or tail.endswith(b"\r\n\r\n")
            or b"[DONE]" in tail
            or b"message_stop" in tail
            or self._waiting_bytes > self._limits.parse_bytes
        ) and not self._parsing:
            self._parsing = True
            self._turns.add(self.parse)

    def parse(self) -> None:
        """Parses what waits."""
        self._parsing = False
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        try:
            for at, data in waiting:
                body = self.response.feed(data)
                if body:
                    if not self._begun:
                        self._begun = True
                        self._sink.begin(self.response.status, self.response.headers)
                    self._sink.feed(at, body)
        except BadResponse as error:
            self.fail(f"not HTTP: {error}")
            return
        except Exception as error:  # a mistake of ours must end this exchange, not hang it
            self.crash(error)
            return
        if self.response.complete:
            self.finish()
        elif self._sink.finished and self._grace is None:
            self._grace = asyncio.get_running_loop().call_later(_GRACE_S, self.finish)

    def finish(self) -> None:
        """Ends the exchange well."""
        if self._grace is not None:
            self._grace.cancel()
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, message: str) -> None:
        """Ends the exchange badly."""
        if not self.done.done():
            self.done.set_exception(WireError(message))

    def crash(self, error: Exception) -> None:
        """Hands an exception of the client's own work to whoever waits."""
        if not self.done.done():
            self.done.set_exception(error)

    def lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self.done.done():
            return
        self.parse()
        self.response.end_of_stream()
        if self.response.complete or self._sink.finished:
            self.finish()
        else:
            when = "in the middle of the reply" if self.first_byte is not None else "before the reply began"
            self.fail(f"the server {'reset' if error else 'closed'} the connection {when}")
