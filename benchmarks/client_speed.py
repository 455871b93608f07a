"""What the HTTP client costs, against an instant server: ``python benchmarks/client_speed.py [--uvloop]``.

Prints, with the goal beside each figure: requests/s and CPU per request for small prompts at concurrency 64;
CPU per request, and what the client adds to TTFT, for prompts of 128k tokens alone and 16 at once. "Added" is
the time from the client's `sent` stamp until the server has the head of the request, and from the server's
first write to the client's `first_token` stamp; the server's own reading of the body is not the client's.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from replay.backends.http import HttpBackend
from replay.backends.preset import load
from replay.load.clock import RunClock
from replay.load.content import Content
from replay.load.outcome import Outcome, Request
from replay.trace import ROOT, PrefixTree, Turn

PORT = 18400


class Case:
    """One measurement: `count` requests of `prompt` tokens, `concurrency` at once, `chunks` events a reply."""

    def __init__(self, name: str, *, prompt: int, chunks: int, concurrency: int, count: int, split: bool):
        self.name = name
        self.prompt = prompt
        self.chunks = chunks
        self.concurrency = concurrency
        self.count = count
        self.split = split

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


async def play(case: Case, port: int) -> tuple[list[tuple[str, Outcome]], float, float, float]:
    """Outcomes by request id, CPU seconds, wall seconds and the clock's origin."""
    content = Content(1)
    queues: dict[str, list[Request]] = {}
    for request in case.requests():
        queues.setdefault(request.session, []).append(request)
        content.piece(f"start {request.session}", 0, case.prompt)
    clock = RunClock()
    origin = asyncio.get_running_loop().time() - clock.now()
    outcomes: list[tuple[str, Outcome]] = []
    backend = HttpBackend(f"http://127.0.0.1:{port}", load("vllm"), content, clock, scrape_s=None)

    async def session(requests: list[Request]) -> None:
        for request in requests:
            outcomes.append((backend._request_id(request), await backend.send(request)))

    async with backend:
        cpu, wall = time.process_time(), time.monotonic()
        await asyncio.gather(*map(session, queues.values()))
        return outcomes, time.process_time() - cpu, time.monotonic() - wall, origin


def measure(case: Case, port: int) -> dict[str, float]:
    """Starts a server, runs the case and joins both sides' stamps."""
    script = Path(__file__).with_name("client_null_server.py")
    command = [sys.executable, str(script), str(port), str(case.chunks), *(["--split"] if case.split else [])]
    server = subprocess.Popen(command)
    try:
        _wait(port)
        outcomes, cpu, wall, origin = asyncio.run(play(case, port))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/log") as reply:
            rows = {row[0]: row for row in json.load(reply)}
    finally:
        server.terminate()
        server.wait()
    failed = [outcome.error for _, outcome in outcomes if outcome.status != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    added = []
    for name, outcome in outcomes:
        _, head, _, wrote, _ = rows[name]
        assert outcome.sent is not None and outcome.first_token is not None
        added.append((head - outcome.sent - origin) + (outcome.first_token + origin - wrote))
    added.sort()
    return {
        "requests_per_s": len(outcomes) / wall,
        "cpu_ms": cpu / len(outcomes) * 1e3,
        "added_ms_p50": added[len(added) // 2] * 1e3,
        "added_ms_p90": added[len(added) * 9 // 10] * 1e3,
    }


def _wait(port: int) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the null server did not start")


CASES = (
    (
        Case("small", prompt=256, chunks=8, concurrency=64, count=20_000, split=False),
        "requests_per_s",
        5_000,
        "cpu_ms",
        0.25,
    ),
    (Case("93k", prompt=93_000, chunks=100, concurrency=20, count=600, split=False), None, None, "cpu_ms", 5.0),
    (
        Case("128k alone", prompt=128_000, chunks=100, concurrency=1, count=100, split=True),
        None,
        None,
        "added_ms_p50",
        1.0,
    ),
    (
        Case("128k x16", prompt=128_000, chunks=100, concurrency=16, count=160, split=True),
        None,
        None,
        "added_ms_p50",
        10.0,
    ),
)


def main() -> None:
    """Prints a table; a ratio of 1 or more meets the goal."""
    if "--uvloop" in sys.argv:
        import uvloop

        uvloop.install()
    port = PORT + random.randrange(500)
    for number, (case, rate, least, cost, most) in enumerate(CASES):
        found = measure(case, port + number)
        ratios = [f"{cost} {most / found[cost]:.2f}x of goal {most:g}"]
        if rate is not None and least is not None:
            ratios.append(f"{rate} {found[rate] / least:.2f}x of goal {least:g}")
        figures = "  ".join(f"{name} {value:,.2f}" for name, value in found.items())
        print(f"{case.name:<11} {figures}   [{'; '.join(ratios)}]", flush=True)


if __name__ == "__main__":
    main()
