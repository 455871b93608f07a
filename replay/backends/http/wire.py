"""Connections to the server, and the pool that uses them again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from replay.backends.http.exchange import Exchange, Now, Sink, Turns, WireError
from replay.backends.http.limits import Limits
from replay.errors import ReplayError


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
        if self._timer is not None:
            self._timer.cancel()
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
        if self._timer is None:  # else that of an earlier exchange looks in time
            self._look_in(min(self._limits.idle_s, self._limits.total_s))

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds + 0.001, self._watch)

    def _watch(self) -> None:
        """Ends an exchange that is over its limits; looks again when the next limit could be reached."""
        self._timer = None
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
            self._look_in(min(quiet_since + limits.idle_s, exchange.sent + limits.total_s) - now)


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
