"""Python values over a socket between two processes of one run."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import deque
from typing import Any, cast

_LENGTH = 8


class Pipe(asyncio.Protocol):
    """Sends without waiting and receives in order; neither side blocks the other's event loop.

    What is sent in one round of the loop goes out together, and what came together is read together: a message
    costs a fraction of a system call where there are thousands a second.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._out: list[bytes] = []
        self._in = bytearray()
        self._came: deque[tuple[Any, ...]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._drained = asyncio.Event()
        self._drained.set()

    @classmethod
    async def over(cls, end: socket.socket) -> Pipe:
        """A pipe over one end of a socket pair, which it owns from now on."""
        end.setblocking(False)
        _, pipe = await asyncio.get_running_loop().create_connection(cls, sock=end)
        return pipe

    def send(self, message: tuple[Any, ...]) -> None:
        """Sends a message; to a process that is gone it goes nowhere."""
        self.write(frame(message))

    def write(self, data: bytes) -> None:
        """Sends a message that `frame` made, which may go to several processes."""
        if not self._out:
            self._loop.call_soon(self._write)
        self._out.append(data)

    def _write(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        if data and not self._lost:
            self._transport.write(data)

    async def receive(self) -> tuple[Any, ...]:
        """The next message; one caller at a time.

        Raises:
            EOFError: the other process is gone.
        """
        while not self._came:
            if self._lost:
                raise EOFError
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._came.popleft()

    async def flush(self) -> None:
        """Waits until what was sent is on its way."""
        self._write()
        await self._drained.wait()

    def close(self) -> None:
        """Ends it once what was sent is on its way; the other side then receives `EOFError`."""
        self._write()
        self._transport.close()

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def data_received(self, data: bytes) -> None:
        self._in += data
        start, size = 0, len(self._in)
        while start + _LENGTH <= size:
            end = start + _LENGTH + int.from_bytes(self._in[start : start + _LENGTH], "big")
            if end > size:
                break
            self._came.append(pickle.loads(self._in[start + _LENGTH : end]))
            start = end
        del self._in[:start]
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._drained.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def frame(message: tuple[Any, ...]) -> bytes:
    """A message as it goes over the socket."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH, "big") + data
