"""Python values over a socket between two processes of one run."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from typing import Any

_LENGTH = 8


class Pipe:
    """Sends without waiting and receives in order; neither side blocks the other's event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Pipe:
        """A pipe over one end of a socket pair, which it owns from now on."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: tuple[Any, ...]) -> None:
        """Sends a message; to a process that is gone it goes nowhere."""
        self.write(frame(message))

    def write(self, data: bytes) -> None:
        """Sends a message that `frame` made, which may go to several processes."""
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> tuple[Any, ...]:
        """The next message.

        Raises:
            EOFError, OSError: the other process is gone.
        """
        length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
        message: tuple[Any, ...] = pickle.loads(await self._reader.readexactly(length))
        return message

    async def flush(self) -> None:
        """Waits until what was sent is on its way."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        """Ends it; the other side then receives `EOFError`."""
        self._writer.close()


def frame(message: tuple[Any, ...]) -> bytes:
    """A message as it goes over the socket."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH, "big") + data
