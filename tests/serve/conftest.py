"""The engine model over HTTP, on a free port, and a client's requests to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from replay.backends.preset import Preset, load
from replay.backends.sim import SimBackend
from replay.load.clock import RunClock, run
from replay.serve import Server, parse_fault
from replay.serve.app import start

MODEL, GPU = "qwen3-8b", "h200"
Use = Callable[[str, Server], Awaitable[Any]]


@pytest.fixture
def serving() -> Callable[..., Any]:
    """Runs a coroutine function against a server and returns its result."""

    def serving(use: Use, *faults: str, preset: Preset | None = None, model: str = MODEL) -> Any:
        async def main() -> Any:
            async with SimBackend(preset or load("vllm"), model, GPU, RunClock()) as backend:
                server = Server(backend, [parse_fault(fault) for fault in faults])
                runner = await start(server, "127.0.0.1", 0)
                try:
                    return await asyncio.wait_for(use("http://{}:{}".format(*runner.addresses[0][:2]), server), 60)
                finally:
                    await runner.cleanup()
                    await asyncio.sleep(0.01)

        return run(main(), virtual=False)

    return serving


@pytest.fixture
def ask() -> Callable[..., Any]:
    """Posts a body, returns status and JSON."""

    async def ask(url: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as reply:
            return reply.status, await reply.json()

    return ask


@pytest.fixture
def arrivals() -> Callable[..., Any]:
    """Streams a completion; returns when each event with a token came."""

    async def arrivals(url: str, prompt: list[int], tokens: int) -> list[float]:
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as reply:
            return [time.monotonic() async for line in reply.content if line.startswith(b"data: {")]

    return arrivals
