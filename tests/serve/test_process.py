"""The whole server: it says where it listens, answers, and refuses an address that is taken."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import aiohttp
import pytest

from replay.backends.preset import load
from replay.errors import ReplayError
from replay.load.clock import run
from replay.serve import serve


def test_it_listens_on_the_loopback_and_stops_when_cancelled() -> None:
    async def main() -> int:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(load("vllm"), "qwen3-8b", "h200", port=0, ready=ready.set_result))
        url = await asyncio.wait_for(ready, 60)
        assert url.startswith("http://127.0.0.1:")
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
            status = reply.status
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return status

    assert run(main(), virtual=False) == 200


@pytest.mark.parametrize("options", [{"port": -1}, {}])
def test_an_address_that_cannot_be_used_is_refused(options: dict[str, Any]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = options.get("port", taken.getsockname()[1])
        with pytest.raises(ReplayError, match="choose another with --port"):
            run(serve(load("vllm"), "qwen3-8b", "h200", port=port), virtual=False)


def test_the_command_says_where_it_serves_and_ends_with_ctrl_c() -> None:
    command = [sys.executable, "-m", "replay", "serve", "--backend", "vllm", "--port", "0", "--fault", "status=429@1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        found = re.search(r"no engine runs\. .* at (http://127\.0\.0\.1:\d+)$", first.strip())
        assert found is not None, first
        with pytest.raises(urllib.error.HTTPError, match="429"):
            urllib.request.urlopen(f"{found[1]}/v1/completions", data=b"{}")
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
