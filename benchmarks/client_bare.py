"""The least that a Python client can do, as a command: bare aiohttp, bodies joined from bytes, every event decoded.

    python client_bare.py URL fixed COUNT TOKENS CONCURRENCY [TIMES.json]
    python client_bare.py URL timed FILE
    python client_bare.py URL agents FOLDER

``fixed`` keeps CONCURRENCY requests in flight; ``timed`` sends the rows of a Mooncake trace at their times;
``agents`` sends one chain of requests for each recorded session (kv-cache-tester JSON), at the recorded lengths,
without pauses, all sessions at once. Nothing is stored but, where a file is named, ``[request id, TTFT]``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

_HEADERS = {"Content-Type": "application/json"}
_decode = msgspec.json.Decoder().decode


class Bare:
    """Sends token-id prompts; all are slices of one serialised list."""

    def __init__(self, session: aiohttp.ClientSession, url: str, longest: int):
        self._session, self._url = session, url + "/v1/completions"
        self._ids = memoryview(b"".join(b"%6d," % (1_000 + n % 29_000) for n in range(longest)))
        self.times: list[tuple[str, float]] = []

    async def send(self, tokens: int) -> None:
        """Sends one request and reads its stream."""
        name = f"bare-{len(self.times)}"
        self.times.append((name, 0.0))
        body = b"".join([b'{"model":"null","stream":true,"prompt":[', self._ids[: tokens * 7 - 1], b"]}"])
        began, first = time.monotonic(), None
        async with self._session.post(self._url, data=body, headers={**_HEADERS, "X-Request-Id": name}) as reply:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic()
                    _decode(line[6:])
        self.times[int(name[5:])] = (name, (first or began) - began)

    async def chain(self, lengths: Iterable[int]) -> None:
        """Sends one request after the other."""
        for tokens in lengths:
            await self.send(tokens)

    async def timed(self, rows: list[dict[str, Any]]) -> None:
        """Sends each row at its time."""
        began = time.monotonic()
        tasks = []
        for row in rows:
            await asyncio.sleep(max(0.0, began + row["timestamp"] / 1e3 - time.monotonic()))
            tasks.append(asyncio.create_task(self.send(row["input_length"])))
        await asyncio.gather(*tasks)


def _lengths(trace: dict[str, Any]) -> Iterator[int]:
    for request in trace["requests"]:
        if request.get("type") == "subagent":
            yield from _lengths(request)
        else:
            yield request["in"]


async def chains(url: str, lengths: list[list[int]]) -> list[tuple[str, float]]:
    """Sends several chains of prompts at once; returns request ids and TTFT in seconds."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 18) as session:
        bare = Bare(session, url, max(map(max, lengths)))
        await asyncio.gather(*map(bare.chain, lengths))
        return bare.times


async def timed(url: str, rows: list[dict[str, Any]]) -> None:
    """Sends the rows of a trace at their times."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 18) as session:
        await Bare(session, url, max(row["input_length"] for row in rows)).timed(rows)


def main(url: str, mode: str, *arguments: str) -> None:
    """Runs one mode."""
    if mode == "fixed":
        count, tokens, concurrency = map(int, arguments[:3])
        shares = [count // concurrency + (n < count % concurrency) for n in range(concurrency)]
        times = asyncio.run(chains(url, [[tokens] * share for share in shares]))
        if len(arguments) > 3:
            Path(arguments[3]).write_text(json.dumps(times))
    elif mode == "timed":
        asyncio.run(timed(url, [json.loads(line) for line in Path(arguments[0]).read_text().splitlines()]))
    else:
        files = sorted(Path(arguments[0]).glob("*.json"))
        asyncio.run(chains(url, [list(_lengths(json.loads(path.read_text()))) for path in files]))


if __name__ == "__main__":
    main(*sys.argv[1:])
