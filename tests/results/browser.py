"""A headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-extensions", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """A page that is open, and what happened on it: `requests` (URLs) and `complaints` (console, exceptions)."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._ids = socket, count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Takes what the browser says, until it closes."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            elif said["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.complaints.append(str(said["params"]))
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, 30)
        assert "error" not in said, said
        return dict(said["result"])

    async def open(self, path: Path, *, width: int = 1100, dark: bool = False) -> None:
        """Loads a file on a screen of `width` pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self._loaded.clear()
        await self.call("Page.navigate", url=path.as_uri())
        await asyncio.wait_for(self._loaded.wait(), 30)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A fresh browser with one page."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            BINARY, *_ARGUMENTS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = await asyncio.to_thread(_port, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [target for target in await answer.json() if target["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    opened = Tab(socket)
                    listener = asyncio.create_task(opened.listen())
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await opened.call(f"{domain}.enable")
                    yield opened
                await listener
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


def _port(file: Path) -> int:
    """The port that the browser has chosen and written down."""
    for _ in range(600):
        if file.exists() and "\n" in (text := file.read_text()):
            return int(text.split()[0])
        time.sleep(0.05)
    raise TimeoutError("the browser did not start")
