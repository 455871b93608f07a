"""What is asked of a server besides the requests of a run: model, version, reset, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from replay.backends.http.exchange import WireError
from replay.backends.http.wire import Pool
from replay.backends.preset import Preset
from replay.errors import ReplayError

# What `replay serve` says about its engine model that is stored with the run.
_OF_THE_MODEL = ("gpu", "tiers", "kv_bytes_per_token", "cost_source", "warnings")
_RESET_TRIES = 50
_RESET_WAIT_S = 0.2


class Document:
    """Collects a body; a `wire.Sink`."""

    finished = False

    def __init__(self) -> None:
        self.body = bytearray()

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Any body will do."""

    def feed(self, at: float, data: bytes) -> None:
        """Adds bytes."""
        self.body += data


class Server:
    """The control side of a server."""

    def __init__(self, pool: Pool, headers: Mapping[str, str], url: str):
        self.url = url
        self._pool = pool
        self._headers = headers

    async def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of a small request.

        Raises:
            WireError: no answer.
        """
        lines = [f"{method} {self._pool.prefix}{path} HTTP/1.1", f"Host: {self._pool.authority}", "Content-Length: 0"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        sink = Document()
        data = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        exchange = self._pool.exchange(lambda: data, sink)
        await self._pool.run(exchange)
        return exchange.response.status, bytes(sink.body)

    async def find(self, preset: Preset, model: str | None) -> dict[str, Any]:
        """The model to use and what the server says about itself.

        Raises:
            ReplayError: no answer, a refused key, or a model that the server does not have.
        """
        about: dict[str, Any] = {"url": self.url, "engine": preset.engine, "model": model}
        try:
            status, body = await self.ask("GET", "/v1/models")
        except WireError as error:
            raise ReplayError(f"--target {self.url}: {error}; is the server running there?") from None
        if status in (401, 403):
            raise ReplayError(f"--target {self.url}: HTTP {status}; name the variable with its key by --api-key-env")
        models = _items(body) if status == 200 else []
        names = [item["id"] for item in models if isinstance(item.get("id"), str)]
        if model is None:
            if not names:
                raise ReplayError(f"--target {self.url}: it lists no models (HTTP {status}); name one with --model")
            about["model"] = names[0]
        elif names and preset.engine in ("vllm", "sglang") and model not in names:
            raise ReplayError(f"--target {self.url} has no model {model!r}; it has {', '.join(names[:5])}")
        for item in models:
            if item.get("id") == about["model"] and isinstance(item.get("max_model_len"), int):
                about["max_context"] = item["max_model_len"]
        about |= await self._version(preset)
        return about

    async def _version(self, preset: Preset) -> dict[str, Any]:
        """The engine's ``version``, and ``simulated`` if it is the engine model of `replay serve`."""
        unknown = {"version": None, "simulated": False}
        path = {"vllm": "/version", "sglang": "/get_server_info"}.get(preset.engine)
        if path is None:
            return unknown
        try:
            status, body = await self.ask("GET", path)
            said = msgspec.json.decode(body) if status == 200 else None
        except (WireError, msgspec.DecodeError, UnicodeDecodeError):
            return unknown
        if not isinstance(said, dict):
            return unknown
        version = said.get("version")
        about = {
            "version": version if isinstance(version, str) else None,
            "simulated": said.get("simulated") is True,
        }
        model = said.get("backend")
        if about["simulated"] and isinstance(model, dict):
            about |= {name: model[name] for name in _OF_THE_MODEL if name in model}
        return about

    async def reset(self, preset: Preset) -> None:
        """Empties the prefix cache; waits while the engine says that blocks are in use.

        Raises:
            ReplayError: the server cannot, or does not within 10 s.
        """
        path = "/flush_cache" if preset.engine == "sglang" else "/reset_prefix_cache?reset_external=true"
        for _ in range(_RESET_TRIES):
            try:
                status, body = await self.ask("POST", path)
            except WireError as error:
                raise ReplayError(f"--target {self.url}: {error}; the cache could not be reset") from None
            if status == 404:
                raise ReplayError(
                    f"--target {self.url} has no {path.partition('?')[0]}; start vLLM with VLLM_SERVER_DEV_MODE=1, "
                    "or isolate runs by a salt instead of a reset"
                )
            # vLLM answers {"success": false} while blocks are held; SGLang 400 while requests run.
            if status == 200 and b'"success":false' not in body.replace(b" ", b""):
                return
            await asyncio.sleep(_RESET_WAIT_S)
        raise ReplayError(f"--target {self.url}: the cache was not reset within 10 s; is something else using it?")


def _items(body: bytes) -> list[dict[str, Any]]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    items = data.get("data") if isinstance(data, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
