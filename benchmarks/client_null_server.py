"""An instant OpenAI-compatible server for measuring clients: ``python client_null_server.py PORT [CHUNKS] [--split]``.

Replies with CHUNKS content events and a usage event, in one write or, with ``--split``, with the first
event alone. It does as little as possible per byte, so that what is measured is the client. ``GET /log``
returns a row a request and clears them: ``[request id, head read, body read, first write, body bytes]``,
on the machine's monotonic clock, which client processes share. ``GET /count`` returns how many requests
came, and the CPU seconds that this server has used.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"\r\nx-request-id: *([^\r]*)", re.IGNORECASE)
_MODELS = b'{"object":"list","data":[{"id":"null","object":"model","max_model_len":1000000}]}'


def _chunk(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def _events(chat: bool, chunks: int) -> list[bytes]:
    said = b'"delta":{"content":" a"}' if chat else b'"text":" a","logprobs":null'
    kind = b"chat.completion.chunk" if chat else b"text_completion"
    head = b'{"id":"cmpl-1","object":"%s","created":1,"model":"null","choices":[{"index":0,%s,"finish_reason":'
    return [
        _chunk((head + b"%s}]}") % (kind, said, b'"length"' if i == chunks - 1 else b"null")) for i in range(chunks)
    ]


def _document(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


class _Replies:
    """The bytes of all replies, made once."""

    def __init__(self, chunks: int):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.first: dict[bool, bytes] = {}
        self.rest: dict[bool, bytes] = {}
        for chat in (False, True):
            first, *rest = _events(chat, chunks)
            self.first[chat] = head + first
            self.rest[chat] = b"".join(rest)
        self.chunks = chunks

    def end(self, prompt_tokens: int) -> bytes:
        """Usage, ``[DONE]`` and the end of the body."""
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.chunks,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        event = json.dumps({"id": "cmpl-1", "model": "null", "choices": [], "usage": usage}).encode()
        return _chunk(event) + _chunk(b"[DONE]") + b"0\r\n\r\n"


class _Protocol(asyncio.BufferedProtocol):
    """Reads into one buffer, looks at heads, and counts the bytes of bodies without keeping them."""

    answered = 0
    _buffer = memoryview(bytearray(1 << 20))

    def __init__(self, replies: _Replies, split: bool, log: list[list[object]]):
        self._replies = replies
        self._split = split
        self._log = log
        self._head = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._missing:
            self._missing -= nbytes
        else:
            start = self._head + bytes(self._buffer[: min(nbytes, 4096)])
            end = start.find(b"\r\n\r\n")
            if end < 0:
                self._head = start
                return
            self._head_at = time.monotonic()
            length = _LENGTH.search(start[:end])
            self._size = int(length.group(1)) if length else 0
            self._missing = self._size - (len(self._head) + nbytes - end - 4)
            self._head = start[:end]
        if self._missing == 0:
            self._answer()

    def _answer(self) -> None:
        head, self._head = self._head, b""
        path = head.split(b" ", 2)[1]
        if b"completions" not in path:
            self._other(path)
            return
        chat = b"chat" in path
        read_at = time.monotonic()
        end = self._replies.end(self._size // 6)
        name = _REQUEST_ID.search(head)
        first, rest = self._replies.first[chat], self._replies.rest[chat] + end
        wrote_at = time.monotonic()
        if self._split:
            self._transport.write(first)
            asyncio.get_running_loop().call_soon(self._transport.write, rest)
        else:
            self._transport.write(first + rest)
        _Protocol.answered += 1
        self._log.append([name.group(1).decode() if name else "", self._head_at, read_at, wrote_at, self._size])

    def _other(self, path: bytes) -> None:
        if path == b"/log":
            self._transport.write(_document(json.dumps(self._log).encode()))
            self._log.clear()
        elif path == b"/count":
            self._transport.write(_document(json.dumps([self.answered, time.process_time()]).encode()))
        else:
            self._transport.write(_document(_MODELS if b"models" in path else b"{}"))


async def serve(port: int, chunks: int, split: bool) -> None:
    """Serves until it is stopped."""
    log: list[list[object]] = []
    replies = _Replies(chunks)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Protocol(replies, split, log), "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    asyncio.run(serve(numbers[0], numbers[1] if len(numbers) > 1 else 100, "--split" in sys.argv))
