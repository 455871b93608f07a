"""What the HTTP client costs, against an instant server: ``python benchmarks/client_speed.py``.

Prints, with the goal beside each figure: requests/s and CPU per request for small prompts at concurrency 64, by the
client alone, through the driver with every row stored, and by a bare aiohttp client in the same minute; CPU per
request, and what the client adds to TTFT, for prompts of 128k tokens alone and 16 at once; how late requests arrive
at 800 a second, every row stored.

"Added" is the time from the client's `sent` stamp until the server has the head of the request, and from the
server's first write to the client's `first_token` stamp; the server's own reading of the body is not the
client's. "Held" is the time from the call of `send` to `sent`: making the prompt, and waiting for the turn of
other requests. The machine's other load inflates all but CPU.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from replay.backends.http import HttpBackend
from replay.backends.preset import load
from replay.load.clock import RunClock
from replay.load.content import Content
from replay.load.driver import Driver
from replay.load.outcome import Outcome, Request
from replay.load.schedule import Schedule, Settings
from replay.results.store import Store
from replay.trace import ROOT, Header, PrefixTree, Trace, Turn

PORT = 18400


@dataclass
class Case:
    """One measurement: `count` requests of `prompt` tokens, `concurrency` at once, `chunks` events a reply."""

    name: str
    play: Callable[[Case, int], Coroutine[Any, Any, Played]]
    goals: dict[str, float]
    """By figure: what it should reach (rates) or not exceed (times)."""
    prompt: int
    chunks: int
    count: int
    concurrency: int = 1
    rate: float = 0.0
    split: bool = False
    """The server writes the first event alone."""

    def requests(self) -> list[Request]:
        """Sessions whose prompts grow by a hundredth each turn, as an agent's do."""
        tree = PrefixTree()
        made = []
        step = max(1, self.prompt // 100)
        for session in range(self.concurrency):
            tip = tree.extend(ROOT, f"start {session}", self.prompt)
            for turn in range(-(-self.count // self.concurrency)):
                name = f"{session}/{turn}"
                tip = tree.extend(tip, name, step)
                context = tree.extend(tip, ("output", name), self.chunks)
                asked = Turn(session=str(session), turn=turn, output=self.chunks)
                made.append(Request(asked, str(session), name, tree, tip, context, self.chunks, ideal=0))
        return made


@dataclass
class Sent:
    """What the client saw of a request. Times are the machine's monotonic clock, in seconds."""

    name: str
    """The request's id on the wire."""
    called: float
    """When `send` was called, or when the request was due."""
    sent: float
    first_token: float


@dataclass
class Played:
    """All requests of a case."""

    requests: list[Sent]
    cpu_s: float
    wall_s: float


async def play(case: Case, port: int) -> Played:
    """Sends the requests of a case in sessions that each have one in flight."""
    content = Content(1)
    sessions: dict[str, list[Request]] = {}
    for request in case.requests():
        sessions.setdefault(request.session, []).append(request)
        content.piece(f"start {request.session}", 0, case.prompt)
    clock = RunClock()
    origin = asyncio.get_running_loop().time() - clock.now()
    sent: list[Sent] = []

    async def session(backend: HttpBackend, requests: list[Request]) -> None:
        for request in requests:
            called = clock.now()
            sent.append(_sent(request.id, called, await backend.send(request), origin))

    async with _backend(port, content, clock) as backend:
        cpu, wall = time.process_time(), time.monotonic()
        await asyncio.gather(*(session(backend, requests) for requests in sessions.values()))
        return Played(sent, time.process_time() - cpu, time.monotonic() - wall)


async def play_stored(case: Case, port: int) -> Played:
    """Sends single-turn sessions through the driver, `case.rate` a second or some at once, and stores every row."""
    turns = [
        Turn(session=str(i), turn=0, at=i / case.rate if case.rate else 0.0, append=[(str(i), case.prompt)],
             output=case.chunks)
        for i in range(case.count)
    ]  # fmt: skip
    settings = Settings(concurrency=None if case.rate else case.concurrency)
    schedule = Schedule(Trace(Header(format="replay-trace", version=1, name="rate"), turns), settings)
    clock = RunClock()
    origin = asyncio.get_running_loop().time() - clock.now()
    with tempfile.TemporaryDirectory() as folder, Store.create_or_open(f"{folder}/runs.duckdb") as store:
        run_id = store.begin_run({"name": "bench", "backend": "vllm", "target": "null server", "simulated": False})
        async with _backend(port, Content(1), clock) as backend:
            cpu, wall = time.process_time(), time.monotonic()
            await Driver(schedule, backend, partial(store.add, run_id=run_id)).run(clock)
            wall = time.monotonic() - wall
            store.flush()
            cpu = time.process_time() - cpu
        sql = "SELECT session, due, sent, first_token FROM requests WHERE status = 'ok'"
        rows = store.reader().execute(sql).fetchall()
    if len(rows) < case.count:
        raise SystemExit(f"{case.count - len(rows)} of {case.count} requests failed")
    sent = [Sent(f"bench-{name}/0", *(at + origin for at in stamps)) for name, *stamps in rows]
    return Played(sent, cpu, wall)


def _backend(port: int, content: Content, clock: RunClock) -> HttpBackend:
    return HttpBackend(f"http://127.0.0.1:{port}", load("vllm"), content, clock, scrape_s=None, salt="bench")


def _sent(name: str, called: float, outcome: Outcome, origin: float) -> Sent:
    if outcome.status != "ok" or outcome.sent is None or outcome.first_token is None:
        raise SystemExit(f"a request failed: {outcome.error}")
    return Sent(f"bench-{name}", called + origin, outcome.sent + origin, outcome.first_token + origin)


async def play_bare(case: Case, port: int) -> Played:
    """A bare aiohttp client that decodes every event and keeps nothing: what is left to save."""
    body = b'{"stream":true,"prompt":[' + bytes(Content(1).piece("a", 0, case.prompt))[:-1] + b"]}"
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    decode = msgspec.json.Decoder().decode
    left = iter(range(case.count))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in left:
            async with session.post(url, data=body, headers=headers) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        decode(line[6:])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 18) as session:
        cpu, wall = time.process_time(), time.monotonic()
        await asyncio.gather(*(client(session) for _ in range(case.concurrency)))
        return Played([], time.process_time() - cpu, time.monotonic() - wall)


def measure(case: Case, port: int) -> dict[str, float]:
    """Starts a server, runs the case and joins both sides' stamps. Milliseconds and requests/s."""
    script = Path(__file__).with_name("client_null_server.py")
    command = [sys.executable, str(script), str(port), str(case.chunks), *(["--split"] if case.split else [])]
    server = subprocess.Popen(command)
    try:
        _wait(port)
        played = asyncio.run(case.play(case, port))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/log") as reply:
            rows = {row[0]: row for row in json.load(reply)}
    finally:
        server.terminate()
        server.wait()
    found = {"requests_per_s": case.count / played.wall_s, "cpu_ms": played.cpu_s / case.count * 1e3}
    if played.requests:
        heads = [rows[sent.name][1] for sent in played.requests]
        writes = [rows[sent.name][3] for sent in played.requests]
        each = list(zip(played.requests, heads, writes, strict=True))
        found["added_ms_p50"] = _percentile([h - s.sent + s.first_token - w for s, h, w in each], 50)
        found["held_ms_p50"] = _percentile([s.sent - s.called for s, _, _ in each], 50)
        found["late_ms_p99"] = _percentile([h - s.called for s, h, _ in each], 99)
    return found


def _percentile(seconds: list[float], percent: int) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)] * 1e3


def _wait(port: int) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the null server did not start")


CASES = (
    Case("small", play, {"requests_per_s": 5_000, "cpu_ms": 0.25}, prompt=256, chunks=8, count=20_000, concurrency=64),
    Case("small, all stored", play_stored, {"requests_per_s": 5_000, "cpu_ms": 0.25}, 128, 8, 20_000, 64),
    Case("small, bare aiohttp", play_bare, {}, prompt=256, chunks=8, count=20_000, concurrency=64),
    Case("800 a second", play_stored, {"late_ms_p99": 3.0}, prompt=512, chunks=8, count=6_000, rate=800.0),
    Case("93k x20", play, {"cpu_ms": 5.0}, prompt=93_000, chunks=100, count=600, concurrency=20),
    Case("128k alone", play, {"added_ms_p50": 1.0}, prompt=128_000, chunks=100, count=100, split=True),
    Case("128k x16", play, {"added_ms_p50": 10.0}, prompt=128_000, chunks=100, count=160, concurrency=16, split=True),
)


def main() -> None:
    """Prints a line a case; a ratio of 1 or more meets the goal."""
    port = PORT + random.randrange(500)
    for number, case in enumerate(CASES):
        found = measure(case, port + number)
        ratios = [
            f"{name} {found[name] / goal if name == 'requests_per_s' else goal / found[name]:.2f}x of goal {goal:g}"
            for name, goal in case.goals.items()
        ]
        figures = "  ".join(f"{name} {value:,.2f}" for name, value in found.items())
        print(f"{case.name:<20} {figures}   [{'; '.join(ratios)}]", flush=True)


if __name__ == "__main__":
    main()
