"""`HttpBackend`: sends requests to a running server and says what came back, when, and from which tier."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from replay.backends.http import attribution, fields
from replay.backends.http.attribution import Usage, counters, loss
from replay.backends.http.attribution.lookups import Lookups
from replay.backends.http.bodies import Endpoint
from replay.backends.http.check import SelfCheck
from replay.backends.http.compose import Composer, request_headers
from replay.backends.http.errors import describe_error, fault
from replay.backends.http.exchange import Exchange, WireError
from replay.backends.http.history import History
from replay.backends.http.kv_events import KvEvents
from replay.backends.http.limits import Limits
from replay.backends.http.metrics import Sample, Scraper, gpu_tokens
from replay.backends.http.replies import Reply
from replay.backends.http.server import Server
from replay.backends.http.wire import Pool
from replay.backends.preset import Preset
from replay.errors import ReplayError
from replay.load.content import Content
from replay.load.events import CacheEvent
from replay.load.outcome import Clock, Outcome, Request

Ask = Callable[[Request, tuple[int, int | None]], Awaitable[Outcome]]
"""Sends a request, of which so much was known before (see `loss.Known.note`)."""


class HttpBackend:
    """A server that speaks OpenAI's or Anthropic's interface; a `replay.load.outcome.Backend`.

    Nothing of the API key is in `repr`, `describe`, outcomes or errors: it goes into one header.
    """

    def __init__(
        self,
        url: str,
        preset: Preset,
        content: Content,
        clock: Clock,
        *,
        model: str | None = None,
        api_key_env: str | None = None,
        headers: Mapping[str, str] | None = None,
        session_header: str = "X-Session-ID",
        limits: Limits | None = None,
        endpoint: Endpoint | None = None,
        outputs: str = "recorded",
        isolation: str = "salt",
        salt: str | None = None,
        stream: bool = True,
        scrape_s: float | None = 10.0,
        lookups: Lookups | None = None,
        kv_events: str | None = None,
        worker: int = 0,
        known: loss.Known | None = None,
        history: History | None = None,
    ):
        """Args:
            url: address of the server, with or without ``/v1``.
            preset: what the server runs: decides request fields and how replies are read.
            content: makes the prompts.
            clock: seconds from the run's start.
            model: name that the server knows; null: the first that it lists.
            api_key_env: environment variable that holds the API key.
            headers: further headers of every request, such as a router's.
            session_header: header with the session's id, which routers use to stay with a server; empty: none.
            limits: limits of the client.
            endpoint: interface to use; null: token ids if the engine takes them, messages where the trace has text.
            outputs: ``live`` puts what the engine generated into later prompts, ``recorded`` the trace's output.
            isolation: ``salt`` keeps the run apart from earlier ones, ``reset`` empties the cache, ``none``.
            salt: the salt; null: a new one. The workers of one run share one.
            stream: false reads whole replies; first tokens then come from the engine's own timings.
            scrape_s: seconds between two readings of the server's metrics; null: never.
            lookups: per-request records of LMCache's server or log.
            kv_events: ZMQ address at which the engine publishes cache events; null: it does not.
            worker: number of this process within the run.
            known: what earlier prompts held, shared with the clients of other instances.
            history: the messages of earlier requests, shared likewise.

        Raises:
            ReplayError: an address, key variable or header that cannot be used.
        """
        self.url = url
        self.preset = preset
        self.content = content
        self.model = model
        self.limits = limits or Limits()
        self.isolation = isolation
        self.check = SelfCheck(preset)
        self._endpoint = endpoint
        self._clock = clock
        self._live = outputs == "live"
        self._salt = salt or secrets.token_hex(8)
        self._stream = stream
        self._session_header = session_header
        self._headers, self._secret = request_headers(preset, api_key_env, headers or {})
        self._scrape_s = scrape_s
        self._lookups = lookups
        self._events = KvEvents(kv_events, clock.now) if kv_events else None
        self._worker = worker
        self._known = known or loss.Known()
        self._history = history or History()
        self._watch: counters.Watch | None = None
        self._about: dict[str, Any] = {}
        self.scraper: Scraper | None = None
        self.through: Ask | None = None
        """Sends in this client's place, as `ask` would: a worker process."""

    @classmethod
    def content_for(cls, preset: Preset, seed: int, *, tokenizer: str | None = None) -> Content:
        """Prompt content that a preset's engine takes: token ids, or words of a tokenizer.

        Args:
            preset: names the engine.
            seed: of token content.
            tokenizer: see `replay.load.words.words`; null: ids where the engine takes them, else the words of
                cl100k_base, whose lengths are nearly right for other vocabularies too.

        Raises:
            ReplayError: the tokenizer's vocabulary is not there.
        """
        if tokenizer is None and fields.default_endpoint(preset) == "completions":
            return Content(seed)
        from replay.load.words import words

        return Content(seed, words(tokenizer or "cl100k_base"))

    def __repr__(self) -> str:
        return f"HttpBackend({self.url!r}, {self.preset.name!r}, model={self.model!r}, limits={self.limits})"

    async def __aenter__(self) -> HttpBackend:
        """Finds the server and its model, and isolates the run from earlier ones.

        Raises:
            ReplayError: the server does not answer, refuses the key, or cannot do what was asked.
        """
        self._pool = Pool(self.url, self.limits, self._clock.now)
        server = Server(self._pool, self._headers, self.url)
        self._about = await server.find(self.preset, self.model)
        self._wall_origin = time.time() - self._clock.now()
        if self._events is not None:
            await self._events.start()
        self.model = self._about["model"]
        if self.isolation == "reset":
            await server.reset(self.preset)
        self._composer = Composer(
            self.preset,
            self.content,
            self._pool,
            self._headers,
            url=self.url,
            model=self._about["model"],
            endpoint=self._endpoint,
            session_header=self._session_header,
            salt=self._salt,
            isolate=self.isolation == "salt",
            stream=self._stream,
            live=self._live,
            history=self._history,
        )
        if counters.wanted(self.preset):
            self._watch = counters.Watch(Scraper(server, self._clock.now, 0.0).read)
        if self._scrape_s is not None:
            self.scraper = Scraper(server, self._clock.now, self._scrape_s)
            await self.scraper.start()
            found = gpu_tokens(self.scraper.samples)
            if found is not None:
                self._about["capacity_tokens"] = {"gpu": found}
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.scraper is not None:
            await self.scraper.stop()
        if self._events is not None:
            await self._events.stop()
        if self._lookups is not None:
            self._lookups.close()
        self._pool.close()

    def describe(self) -> dict[str, Any]:
        """What is stored with the run."""
        return {
            **self._about,
            "endpoint": self._composer.endpoint,
            "outputs": "live" if self._live else "recorded",
            "content": self.content.alphabet.name,
            "cache_before": {
                "salt": "isolated by a salt",
                "reset": "reset",
            }.get(self.isolation, "as earlier requests left it"),
            "limits": asdict(self.limits),
            "stream": self._stream,
        }

    def self_check(self) -> dict[str, Any]:
        """What the client noticed about itself and the server: added times, token drift, warnings."""
        found = {**self.check.summary(), **self.counts()}
        if self._events is not None and not self._events.rows:
            found["warnings"].append(
                f"no cache event came from {self._events.endpoint}; does the engine publish them there?"
            )
        return found

    def counts(self) -> dict[str, int]:
        """How many connections it had, and how many generated outputs went into later prompts."""
        pool = {"connections_opened": self._pool.opened, "peak_connections": self._pool.peak}
        return {**pool, "live_outputs": self.content.live_outputs}

    async def restart(self) -> None:
        """Not possible: the server is someone else's.

        Raises:
            ReplayError: always.
        """
        raise ReplayError(f"--restart-at: {self.url} is not ours to restart; use --target launch or sim")

    async def restarting(self) -> None:
        """Whoever owns the server is about to restart the engine: its counters are read, and not until it is back."""
        if self.scraper is not None:
            await self.scraper.stop()

    async def restarted(self) -> None:
        """The engine is back: what is lost from now on may be `cold`, and its counters begin anew."""
        self._known.restarted()
        if self.scraper is not None:
            await self.scraper.restart()

    def scrapes(self) -> list[Sample]:
        """Rows of the table `scrapes`: what the server's metrics said."""
        return self.scraper.samples if self.scraper is not None else []

    def cache_events(self) -> list[CacheEvent]:
        """Rows of the table `cache_events`: what the engine and LMCache published, in order of time."""
        rows = list(self._events.rows) if self._events is not None else []
        lower = [name for name, _ in self.preset.lower()]
        for at, kind, number, chunks in self._lookups.chunk_events if self._lookups is not None else ():
            tier = lower[number] if number < len(lower) else None
            tokens = chunks * self.preset.chunk_tokens if chunks and self.preset.chunk_tokens else None
            rows.append(CacheEvent(at - self._wall_origin, kind, tier, blocks=chunks, tokens=tokens))
        return sorted(rows, key=lambda row: row.at)

    async def send(self, request: Request) -> Outcome:
        """Sends one request; a server's fault becomes an outcome with status ``error``."""
        # Live outputs are what the engine generated, so all of a context is known to it.
        known = self._known.note(request.tree, request.tip, request.context if self._live else request.tip)
        ask = self.through or self.ask
        if self._watch is None:
            outcome = await ask(request, known)
        else:
            async with self._watch.request() as both:
                outcome = await ask(request, known)
                await counters.fill(self.preset, outcome, both)
        self.check.answered(request, outcome)
        return outcome

    async def ask(self, request: Request, known: tuple[int, int | None]) -> Outcome:
        """Sends one request and reads its reply; what concerns the run as a whole is `send`'s.

        Args:
            request: the request.
            known: what `loss.Known.note` says of its prompt.
        """
        endpoint = self._composer.endpoint_of(request)
        attempts = 0
        while True:
            attempts += 1
            reply = self._composer.reply(endpoint, request)
            exchange = self._pool.exchange(partial(self._composer.compose, endpoint, request), reply)
            failure = None
            try:
                await self._pool.run(exchange)
            except WireError as error:
                failure = str(error)
            if failure is None or exchange.first_byte is not None or attempts > self.limits.retries:
                break
            await asyncio.sleep(self.limits.retry_wait_s * 2 ** (attempts - 1))
        self.check.timed(exchange)
        reply.close(exchange.closed)
        counts = reply.counts
        outcome = self._outcome(reply, counts, exchange, failure)
        outcome.attempts = attempts
        outcome.worker = self._worker
        await self._attribute(request, reply, counts, outcome, known)
        if outcome.status == "ok":
            self._remember(request, reply, outcome)
        return outcome

    def _outcome(self, reply: Reply, counts: Usage, exchange: Exchange, failure: str | None) -> Outcome:
        error = failure or fault(reply, exchange.response.status)
        if error is not None:
            error = describe_error(error, reply, secret=self._secret, sent=exchange.make())
        outcome = Outcome(
            "ok" if error is None else "error",
            error,
            sent=exchange.sent,
            first_byte=exchange.first_byte,
            first_token=reply.first_token,
            last_token=reply.last_token,
            closed=exchange.closed,
            prompt_tokens=counts.prompt,
            output_tokens=counts.output,
            output_ids=reply.output_ids or None,
        )
        timings = reply.extra.get("metrics")
        if not reply.streaming and isinstance(timings, dict) and exchange.sent is not None:
            # vLLM's queue time includes lookups and loads, its first-token time starts when scheduled.
            waits = [timings.get(name) for name in ("queue_time_ms", "time_to_first_token_ms")]
            numbers = [wait for wait in waits if isinstance(wait, (int, float))]
            outcome.first_token = exchange.sent + sum(numbers) / 1e3 if len(numbers) == 2 else None
            outcome.last_token = exchange.closed
        return outcome

    async def _attribute(
        self, request: Request, reply: Reply, counts: Usage, outcome: Outcome, known: tuple[int, int | None]
    ) -> None:
        if self._lookups is not None and outcome.status == "ok":
            found = await self._lookups.find(self._composer.request_id(request))
            if found is not None:
                reply.extra["lookup"] = found
        served = attribution.tiers(self.preset, counts, reply.extra)
        served.put(outcome)
        if attribution.take_model(reply.extra, outcome):
            return
        if outcome.prompt_tokens is not None:
            outcome.lost = loss.split(
                self.preset,
                served,
                prompt=outcome.prompt_tokens,
                ideal=request.ideal,
                prefilled=known[0],
                warm=known[1],
                evicted=partial(self._evicted, request, outcome),
            )

    def _evicted(self, request: Request, outcome: Outcome) -> int | None:
        """Ideal tokens that the engine's events say were evicted before this request; null without events."""
        if self._events is None or outcome.sent is None:
            return None
        prefix = request.tree.cut(request.tip, min(request.ideal, request.prompt))
        ids = [self.content.tokens(*piece) for piece in request.tree.pieces(prefix)]
        joined = np.concatenate(ids) if ids else np.empty(0, np.int32)
        return self._events.residency.evicted(joined, self.preset.block_tokens, outcome.sent)

    def _remember(self, request: Request, reply: Reply, outcome: Outcome) -> None:
        if (
            self._live
            and outcome.output_ids
            and not self.content.set_output(("output", request.id), outcome.output_ids)
        ):
            self.check.output_refused()
        if reply.text is not None:
            self._composer.history.answered(request, "".join(reply.text))
