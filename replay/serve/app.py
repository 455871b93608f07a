"""The HTTP side of the server: OpenAI's completions and chat, vLLM's metrics and reset.

Usage says which tier served the prompt, under ``prompt_tokens_details.tiers``, and ``replay`` what was
lost; both are marked as simulated. A streamed output comes token by token, when the model has each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from replay.backends.preset import Preset
from replay.backends.sim import Ahead, SimBackend
from replay.errors import ReplayError
from replay.load.clock import RunClock
from replay.load.outcome import Outcome, Request
from replay.serve.faults import Fault
from replay.serve.metrics import Metrics
from replay.serve.pace import decoded
from replay.serve.prompts import Ids, Prompts
from replay.trace import Turn

_BODY_LIMIT = 1 << 30
_DEFAULT_OUTPUT = 16
_JSON = "application/json"


class Refused(Exception):
    """A request that the server does not take: HTTP status and message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server:
    """Serves one engine model. Make it within a running event loop."""

    def __init__(self, backend: SimBackend, faults: Sequence[Fault] = ()):
        self.backend = backend
        self.faults = tuple(faults)
        self.model = backend.model.name
        self.prompts = Prompts()
        self.metrics = Metrics(self.model)
        self.requests = 0
        """Requests for tokens so far."""
        self.app = web.Application(client_max_size=_BODY_LIMIT)
        self.app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "owned_by": "replay"}
        return _json({"object": "list", "data": [model | {"max_model_len": self.backend.model.max_context}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": "replay serve", "simulated": True, "backend": self.backend.describe()})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics.text())

    async def _reset(self, request: web.Request) -> web.Response:
        """As vLLM's: not while requests run, unless they may be ended."""
        if self.metrics.running and request.query.get("reset_running_requests") != "true":
            return _json({"success": False})
        self.backend.reset(cold=request.query.get("reset_external") == "true")
        return _json({"success": True})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def _answer(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        self.requests += 1
        reply = Reply(self, request, chat, {f.kind: f.value for f in self.faults if f.hits(self.requests)})
        try:
            return await reply.run()
        except Refused as error:
            status = error.status
            return _json({"error": {"message": str(error), "type": "BadRequestError", "code": status}}, status)


class Reply:
    """One request for tokens, from its body to the end of its reply."""

    def __init__(self, server: Server, http: web.Request, chat: bool, faults: dict[str, float]):
        self.server = server
        self.http = http
        self.chat = chat
        self.faults = faults

    async def run(self) -> web.StreamResponse:
        """Reads, runs and answers; may cut the connection on purpose."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        fields = _decode(await self.http.read())
        read = loop.time()
        await self._early_faults()
        asked = loop.time()
        ids = self._prompt(fields)
        request, generated = self._request(fields, ids)
        self.name = request.id
        first: asyncio.Future[tuple[float, Ahead]] = loop.create_future()
        self.server.metrics.running += 1
        # What this server takes to read a prompt, a real one does too, and the model's overhead has it.
        spent = read - began + loop.time() - asked
        task = asyncio.create_task(self.server.backend.send(request, lambda *came: first.set_result(came), spent))
        try:
            if fields.get("stream"):
                return await self._stream(fields, task, first, generated)
            outcome = self._checked(await task)
            return _json(self._document(outcome, generated, fields))
        finally:
            self.server.metrics.running -= 1
            task.cancel()

    async def _early_faults(self) -> None:
        if "slow" in self.faults:
            await asyncio.sleep(self.faults["slow"])
        if "refuse" in self.faults:
            self._cut()
        if "status" in self.faults:
            raise Refused(int(self.faults["status"]), "injected fault")

    def _cut(self) -> None:
        if self.http.transport is not None:
            self.http.transport.abort()
        raise ConnectionResetError

    def _prompt(self, fields: dict[str, Any]) -> Ids:
        model = fields.get("model")
        if model is not None and model != self.server.model:
            raise Refused(404, f"The model {model!r} does not exist.")
        try:
            prompts = self.server.prompts
            if self.chat:
                ids = prompts.render(fields.get("messages"), fields.get("tools"))
            else:
                ids = prompts.read(fields.get("prompt"))
        except ValueError as error:
            raise Refused(400, str(error)) from None
        if not len(ids):
            raise Refused(400, "the prompt is empty")
        return ids

    def _request(self, fields: dict[str, Any], ids: Ids) -> tuple[Request, Ids]:
        output = fields.get("max_completion_tokens") or fields.get("max_tokens") or _DEFAULT_OUTPUT
        if not isinstance(output, int) or output < 1:
            raise Refused(400, "max_tokens must be at least 1")
        limit = self.server.backend.model.max_context
        if len(ids) + output > limit:
            raise Refused(
                400, f"This model's maximum context length is {limit} tokens; {len(ids) + output} were asked."
            )
        prompts = self.server.prompts
        tip = prompts.context(ids, str(fields.get("cache_salt") or ""))
        ideal = prompts.tree.longest_sent(tip)
        context, generated = prompts.answer(tip, output)
        prompts.tree.mark_sent(context)
        number = self.server.requests
        name = str(fields.get("request_id") or number)
        turn = Turn(session="serve", turn=number, output=output)
        return Request(turn, "serve", name, prompts.tree, tip, context, output, ideal), generated

    def _checked(self, outcome: Outcome) -> Outcome:
        if outcome.status != "ok":
            raise Refused(500, outcome.error or "the engine failed")
        self.server.metrics.add(outcome)
        return outcome

    async def _stream(
        self,
        fields: dict[str, Any],
        task: asyncio.Task[Outcome],
        first: asyncio.Future[tuple[float, Ahead]],
        generated: Ids,
    ) -> web.StreamResponse:
        either: list[asyncio.Future[Any]] = [first, task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            self._checked(task.result())
        at, ahead = first.result()
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(self.http)
        show_ids = bool(fields.get("return_token_ids"))
        await response.write(self._event(0, generated, show_ids, len(generated)))
        await self._mid_faults(response)
        sent = 1
        async for number in decoded(at, ahead, task, len(generated) - 1):
            events = [self._event(i, generated, show_ids, len(generated)) for i in range(sent, number)]
            await response.write(b"".join(events))
            sent = number
        outcome = await task
        if outcome.status != "ok":
            await response.write(_event({"error": {"message": outcome.error, "type": "InternalServerError"}}))
        else:
            self.server.metrics.add(outcome)
            rest = [self._event(i, generated, show_ids, len(generated)) for i in range(sent, len(generated))]
            if (fields.get("stream_options") or {}).get("include_usage") and "no-usage" not in self.faults:
                rest.append(_event(self._head() | {"choices": [], **_usage(outcome)}))
            await response.write(b"".join(rest) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _mid_faults(self, response: web.StreamResponse) -> None:
        if "stall" in self.faults:
            await asyncio.sleep(self.faults["stall"])
        if "reset" in self.faults:
            self._cut()
        if "garbage" in self.faults:
            await response.write(b"data: <html>\n\n")
        if "error" in self.faults:
            await response.write(_event({"error": {"message": "injected fault", "type": "InternalServerError"}}))
        if "truncate" in self.faults:
            await response.write(b'data: {"choices":[{"te')
            self._cut()

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.name}", "object": kind, "model": self.server.model}

    def _event(self, number: int, ids: Ids, show_ids: bool, total: int) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if number == total - 1 else None}
        text = f" {ids[number]}"
        if self.chat:
            choice["delta"] = {"content": text} if number else {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if show_ids:
            choice["token_ids"] = [int(ids[number])]
        return _event(self._head() | {"choices": [choice]})

    def _document(self, outcome: Outcome, ids: Ids, fields: dict[str, Any]) -> dict[str, Any]:
        text = "".join(f" {i}" for i in ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        if fields.get("return_token_ids"):
            choice["token_ids"] = ids.tolist()
        head = self._head() | {"object": "chat.completion" if self.chat else "text_completion"}
        usage = {} if "no-usage" in self.faults else _usage(outcome)
        assert outcome.sent is not None and outcome.first_token is not None
        wait = (outcome.first_token - outcome.sent) * 1e3
        return head | {"choices": [choice], **usage, "metrics": {"queue_time_ms": 0.0, "time_to_first_token_ms": wait}}


def _usage(outcome: Outcome) -> dict[str, Any]:
    prompt, computed = outcome.prompt_tokens or 0, outcome.computed or 0
    tiers = {tier: getattr(outcome, tier) for tier in ("gpu", "cpu", "disk", "remote")}
    output = outcome.output_tokens or 0
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": prompt - computed, "tiers": tiers},
    }
    more = {"recompute_s": outcome.recompute_s, "load_s": outcome.load_s, "preemptions": outcome.preemptions}
    return {"usage": usage, "replay": {"simulated": True, "tiers": tiers, "lost": outcome.lost, **more}}


def _decode(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body is not a JSON object")
    return fields


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _json(fields: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(fields), status=status, content_type=_JSON)


async def start(server: Server, host: str, port: int) -> web.AppRunner:
    """Listens; returns the runner, whose ``addresses`` say where, and whose ``cleanup`` ends it.

    Raises:
        OSError: the address is in use.
    """
    runner = web.AppRunner(server.app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=4096).start()
    return runner


async def serve(
    preset: Preset,
    model: str,
    gpu: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    faults: Sequence[Fault] = (),
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves the engine model of a preset until it is cancelled. Run it on a real event loop.

    Args:
        preset: engine, connector and tiers.
        model: model profile.
        gpu: GPU profile.
        host: address to listen on; the loopback unless the user says otherwise.
        port: 0 for a free one.
        faults: what goes wrong on purpose.
        ready: called with the address once the server listens.

    Raises:
        ReplayError: the preset cannot be simulated, or the address is in use.
    """
    await _warm_up(preset, model, gpu)
    async with SimBackend(preset, model, gpu, RunClock()) as backend:
        try:
            runner = await start(Server(backend, faults), host, port)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ReplayError(f"--port {port}: {reason}; choose another with --port") from None
        try:
            ready("http://{}:{}".format(*runner.addresses[0][:2]))
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


async def _warm_up(preset: Preset, model: str, gpu: str) -> None:
    """Loads compiled code on a model that is thrown away, so that the first request does not wait for it."""
    prompts = Prompts()
    tip = prompts.context(np.arange(64, dtype=np.int32))
    turn = Turn(session="warm", turn=0, output=1)
    async with SimBackend(preset, model, gpu, RunClock()) as backend:
        await backend.send(Request(turn, "warm", "warm/0", prompts.tree, tip, prompts.answer(tip, 1)[0], 1, ideal=0))
