"""A server that answers with scripted bytes, and a way to send it one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from replay.backends.http import HttpBackend, Limits
from replay.backends.preset import Preset, load
from replay.load.clock import RunClock, run
from replay.load.content import Content
from replay.load.outcome import Outcome, Request
from replay.trace import ROOT, PrefixTree, Turn

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
RESET = object()
"""In a script: cuts the connection with a TCP reset."""
CLOSE = object()
"""In a script: closes the connection properly."""

Script = list[Any]
"""Bytes to write, seconds to wait, `RESET` or `CLOSE`."""


def chunk(data: bytes) -> bytes:
    """A chunk of the chunked transfer coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(fields: Any) -> bytes:
    """A server-sent event with JSON data."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str | None = " a", **choice: Any) -> bytes:
    """A content event of ``/v1/completions``."""
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": text, **choice}]})


def usage(prompt: int = 64, output: int = 2, cached: int | None = 32) -> bytes:
    """A usage event with empty choices."""
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"id": "cmpl-1", "choices": [], "usage": counts})


DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def stream(*events: bytes) -> bytes:
    """A whole streamed reply."""
    return HEAD + b"".join(map(chunk, events)) + END


def document(status: str, body: Any) -> bytes:
    """A whole reply of one JSON document."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


@dataclass
class Mock:
    """A server on a free port of the loopback; `scripts` answer the requests in turn, the last one for ever."""

    scripts: list[Script]
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """First line, headers by lower-case name, and body of each request that is not about models or metrics."""
    port: int = 0
    active: int = 0
    peak: int = 0
    connections: int = 0
    models: bytes = document("200 OK", {"data": [{"id": "m", "max_model_len": 4096}]})
    metrics: Callable[[int], bytes] = lambda count: b""
    """What ``/metrics`` says after so many requests."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "/v1/models" in first:
            writer.write(self.models)
            return True
        if " /v1/" not in first:
            writer.write(
                document("200 OK", self.metrics(len(self.requests)))
                if "/metrics" in first
                else document("404 Not Found", {})
            )
            return True
        self.requests.append((first, headers, body))
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            return await self._play(script, writer)
        finally:
            self.active -= 1

    async def _play(self, script: Script, writer: asyncio.StreamWriter) -> bool:
        for step in script:
            if step is RESET:
                writer.transport.abort()
                return False
            if step is CLOSE:
                return False
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            else:
                await asyncio.sleep(step)
        return True


@pytest.fixture
def mock() -> Callable[..., Mock]:
    """Makes a `Mock` that answers with the given scripts."""
    return lambda *scripts: Mock([list(script) for script in scripts])


async def with_backend(
    mock: Mock, use: Callable[[HttpBackend], Awaitable[Any]], preset: Preset | None = None, **options: Any
) -> Any:
    """Starts the mock, enters a backend on it, and returns what `use` does with that."""
    server = await asyncio.start_server(mock.handle, "127.0.0.1", 0, backlog=1024)
    mock.port = server.sockets[0].getsockname()[1]
    options = {"scrape_s": None, "limits": Limits(retry_wait_s=0.01)} | options
    url = f"http://127.0.0.1:{mock.port}"
    try:
        async with HttpBackend(url, preset or load("vllm"), Content(7), RunClock(), **options) as backend:
            return await asyncio.wait_for(use(backend), 60)
    finally:
        server.close()
        await asyncio.sleep(0.01)


def make_request(prompt: int = 64, output: int = 2, *, number: int = 0, session: str = "s", **turn: Any) -> Request:
    """A request of a session's first turn."""
    tree = PrefixTree()
    tip = tree.extend(ROOT, f"segment {number}", prompt)
    name = f"{session}/{number}"
    context = tree.extend(tip, ("output", name), output)
    asked = Turn(session=session, turn=number, append=[(f"segment {number}", prompt)], output=output, **turn)
    return Request(asked, session, name, tree, tip, context, output, ideal=0)


@pytest.fixture
def send() -> Callable[..., Outcome]:
    """Sends one request to a mock and returns the outcome."""

    def send(mock: Mock, request: Request | None = None, **options: Any) -> Outcome:
        async def use(backend: HttpBackend) -> Outcome:
            return await backend.send(request or make_request())

        outcome: Outcome = run(with_backend(mock, use, **options), virtual=False)
        return outcome

    return send


@pytest.fixture
def wire() -> Any:
    """This module's names, for tests: pytest imports test files without a package."""
    import sys

    return sys.modules[__name__]
