"""Servers in a thread of their own, and whole runs against them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from replay import runs
from replay.backends.connect import Where
from replay.backends.preset import load
from replay.load.schedule import Settings
from replay.results.store import Store
from replay.serve import serve
from replay.trace import Header, Trace, Turn

PRESET = load("vllm")
EXACT = (
    "session, turn, position, cause, pause, status, error, planned_tokens, prompt_tokens, output_tokens, ideal_tokens, "
    "gpu_tokens, cpu_tokens, disk_tokens, computed_tokens, lost_evicted, lost_granularity, lost_never_stored, "
    "lost_cold, lost_diverged, lost_unknown, served_from, tier_source, attempts"
)
"""Columns of a row that do not depend on when and by whom it was sent."""


def agents(sessions: int, turns: int = 3, pause: float = 0.0) -> Trace:
    """Sessions that share a system prompt and nothing else."""
    found = [
        Turn(
            session=f"s{s}",
            turn=n,
            at=0.0 if n == 0 else None,
            pause=pause if n else 0.0,
            append=[*([("system", 200)] if n == 0 else []), (f"{s}/{n}", 300 + 37 * s)],
            output=8,
        )
        for s in range(sessions)
        for n in range(turns)
    ]
    return Trace(Header(format="replay-trace", version=1, name="agents"), found)


@contextlib.contextmanager
def in_thread(server: Callable[[Callable[[str], None]], Awaitable[Any]]) -> Iterator[str]:
    """Runs a server on a loop of its own while the block lasts; it calls back with its URL."""
    running: list[Any] = []
    ready = threading.Event()

    async def main() -> None:
        task = asyncio.ensure_future(server(note))
        running.extend((asyncio.get_running_loop(), task))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def note(url: str) -> None:
        running.append(url)
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(60)
    loop, task, url = running
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


class Slow:
    """A vLLM of sorts: answers after `wait_s`, and knows who asked what, and how many at once."""

    def __init__(self, wait_s: float = 0.05):
        self.wait_s = wait_s
        self.ids: list[str] = []
        self.authorizations: set[str | None] = set()
        self.active = self.peak = 0
        self.fifth = threading.Event()
        """Set once five requests are in."""

    def answer_all(self) -> None:
        """Answers those that wait, and others at once, for a test that has seen enough of them; from any thread."""
        self._loop.call_soon_threadsafe(self._enough.set)

    async def serve(self, ready: Callable[[str], None]) -> None:
        self._loop, self._enough = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 28)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.ids.append(request.headers["X-Request-Id"])
        self.authorizations.add(request.headers.get("Authorization"))
        if len(self.ids) == 5:
            self.fifth.set()
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            body = await request.json()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._enough.wait(), self.wait_s)
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
            lines = [{"choices": [{"index": 0, "text": " a"}]}, {"choices": [], "usage": usage}]
            text = "".join(f"data: {web.json_response(line).text}\n\n" for line in lines) + "data: [DONE]\n\n"
            return web.Response(text=text, content_type="text/event-stream")
        finally:
            self.active -= 1


@pytest.fixture
def slow() -> Iterator[tuple[Slow, str]]:
    """A slow server and its URL."""
    server = Slow()
    with in_thread(server.serve) as url:
        yield server, url


@pytest.fixture
def engines() -> Iterator[Callable[..., str]]:
    """Starts engine models over HTTP, returns their URLs joined by commas."""
    with contextlib.ExitStack() as stack:

        def start(count: int = 1, preset: Any = PRESET) -> str:
            def one(ready: Callable[[str], None]) -> Awaitable[None]:
                return serve(preset, "qwen3-8b", "h200", port=0, ready=ready)

            return ",".join(stack.enter_context(in_thread(one)) for _ in range(count))

        yield start


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Any]:
    """Replays a trace and returns what SQL finds in the results file about that run, as ``play.sql`` does later."""

    def play(trace: Trace, url: str, *, workers: int = 1, preset: Any = PRESET, **settings: Any) -> Results:
        settings.setdefault("outputs", "live")
        where = Where(preset, url, workers=workers)
        with Store.create_or_open(tmp_path / "runs.duckdb") as store:
            run = runs.execute(trace, where, Settings(**settings), store)
        return Results(tmp_path / "runs.duckdb", run)

    return play


class Results:
    """A stored run."""

    def __init__(self, path: Path, run: str):
        self.path, self.run = path, run

    def rows(self, columns: str, table: str = "requests") -> list[tuple[Any, ...]]:
        """Rows of the run, in order of session and turn."""
        import duckdb

        key = "id" if table == "runs" else "run_id"
        with duckdb.connect(str(self.path), read_only=True) as con:
            return con.execute(f"SELECT {columns} FROM {table} WHERE {key} = ? ORDER BY ALL", [self.run]).fetchall()

    def about(self, column: str) -> Any:
        """A column of the table `runs`, decoded if it is JSON."""
        import msgspec

        ((value,),) = self.rows(column, "runs")
        return msgspec.json.decode(value) if column in ("settings", "self_check") else value


@pytest.fixture
def kit() -> Any:
    """This module's names, for tests: pytest imports test files without a package."""
    import sys

    return sys.modules[__name__]
