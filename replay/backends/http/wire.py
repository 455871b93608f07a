"""HTTP/1.1 on an asyncio protocol: the transport of the client.

Bytes are stamped where they arrive, in `data_received`, and looked at later: a reply is parsed when
its end may have come or when much has gathered. That parsing, and the making and writing of requests,
is done in `Turns`, between which sockets are read. So of 16 requests of 200,000 tokens at once none
waits long for the work on the others, and the client's work does not count as the server's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

from replay.backends.http.http1 import BadResponse, Response
from replay.backends.http.limits import Limits
from replay.errors import ReplayError

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


class Connection(asyncio.Protocol):
    """A connection to the server, used by one exchange at a time."""

    def __init__(self, now: Now, limits: Limits):
        self._now = now
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With no slack, resume_writing tells when the kernel has taken the whole request.
        self._transport.set_write_buffer_limits(high=0)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()
        else:
            self._exchange.receive(data)

    def resume_writing(self) -> None:
        if self._exchange is not None and self._exchange.written is None:
            self._exchange.written = self._now()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._exchange is not None:
            self._exchange.lost(exc)

    @property
    def usable(self) -> bool:
        """Open, and not used for less than the keep-alive limit."""
        transport = self._transport
        open_ = transport is not None and not transport.is_closing()
        return open_ and self._now() - self.idle_since < self._limits.keep_alive_s

    def close(self) -> None:
        """Closes at once, whatever is still to be written."""
        if self._transport is not None:
            self._transport.abort()

    async def run(self, exchange: Exchange, turns: Turns) -> bool:
        """Sends a request and waits for the end of its reply.

        Returns:
            Whether the connection can be used again.

        Raises:
            WireError: the reply did not end well.
        """
        if self._transport is None:
            raise WireError("the server closed the connection before the reply began")
        self._exchange = exchange
        turns.add(self._start)
        try:
            await exchange.done
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._exchange = None
            self.idle_since = self._now()
        response = exchange.response
        return response.complete and response.keep_alive and exchange.written is not None

    def _start(self) -> None:
        exchange, transport = self._exchange, self._transport
        if exchange is None or transport is None or exchange.done.done():
            return
        began = self._now()
        try:
            data = exchange.make()
        except Exception as error:  # see Exchange.parse
            exchange.crash(error)
            return
        exchange.sent = self._now()
        exchange.compose_s = exchange.sent - began
        transport.write(data)
        if not transport.get_write_buffer_size():
            exchange.written = self._now()
        first_look = min(self._limits.idle_s, self._limits.total_s) + 0.001
        self._timer = asyncio.get_running_loop().call_later(first_look, self._watch)

    def _watch(self) -> None:
        """Ends an exchange that is over its limits; looks again when the next limit could be reached."""
        exchange = self._exchange
        if exchange is None or exchange.sent is None:
            return
        exchange.parse()
        now, limits = self._now(), self._limits
        quiet_since = max(exchange.sent, exchange.written or 0.0, exchange.closed or 0.0)
        if exchange.done.done():
            return
        if now - exchange.sent >= limits.total_s:
            exchange.fail(f"no end of the reply within {limits.total_s:g} s")
        elif now - quiet_since >= limits.idle_s:
            exchange.fail(f"the server was silent for {limits.idle_s:g} s")
        else:
            wait = min(quiet_since + limits.idle_s, exchange.sent + limits.total_s) - now
            self._timer = asyncio.get_running_loop().call_later(wait + 0.001, self._watch)


class Pool:
    """Connections to one server; each is used again while it is fresh."""

    def __init__(self, url: str, limits: Limits, now: Now):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ReplayError(f"--target {url}: give an address such as http://127.0.0.1:8000")
        try:
            port = parts.port
        except ValueError:
            raise ReplayError(f"--target {url}: the port is not a number from 1 to 65535") from None
        if parts.username or parts.password:
            raise ReplayError("--target: leave the key out of the address; name its variable with --api-key-env")
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.authority = f"{host}:{port}" if port else host
        self.limits = limits
        self.turns = Turns()
        self._now = now
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(limits.connections) if limits.connections else None
        self.opened = 0
        """Connections opened so far."""
        self.peak = 0
        """Most exchanges at once."""
        self._active = 0

    def exchange(self, make: Callable[[], bytes], sink: Sink) -> Exchange:
        """An exchange that is still to be run; `make` makes the bytes of the request."""
        return Exchange(make, sink, self.limits, self._now, self.turns)

    async def run(self, exchange: Exchange) -> None:
        """Sends one request and waits for its reply, on a free or a new connection.

        Raises:
            WireError: refused, broken, too slow or not HTTP; `exchange` tells what had come.
        """
        if self._slots is None:
            await self._run(exchange)
        else:
            async with self._slots:
                await self._run(exchange)

    async def _run(self, exchange: Exchange) -> None:
        connection = None
        reusable = False
        self._active += 1
        self.peak = max(self.peak, self._active)
        try:
            connection = self._take() or await self._open()
            reusable = await connection.run(exchange, self.turns)
        finally:
            self._active -= 1
            if reusable and connection is not None:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(
            lambda: Connection(self._now, self.limits), self.host, self.port, ssl=self._ssl
        )
        try:
            _, connection = await asyncio.wait_for(connecting, self.limits.connect_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise WireError(f"no connection within {self.limits.connect_s:g} s") from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise WireError(f"cannot connect to {self.authority}: {reason}") from None
        self.opened += 1
        return connection

    def close(self) -> None:
        """Closes the connections that wait."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
