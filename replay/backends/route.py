"""`Router`: one run over several instances of an engine, as a router in front of them would spread it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from replay.backends.choice import Choice, Taken
from replay.backends.clients import checked
from replay.backends.http import HttpBackend
from replay.backends.http.metrics import Sample
from replay.load.events import CacheEvent
from replay.load.outcome import Outcome, Request


class Scrapes(NamedTuple):
    """What the instances' metrics said, each sample labelled with its instance."""

    samples: list[Sample]


class Router:
    """Sends each request to the instance that `Choice` takes; a `replay.load.outcome.Backend`."""

    def __init__(self, clients: Sequence[HttpBackend], policy: str):
        """Args:
        clients: one for each instance; they share what they know of earlier prompts.
        policy: ``round-robin``, ``session`` or ``prefix``.
        """
        self.clients = list(clients)
        self.policy = policy
        self._choice = Choice(len(clients), policy)
        self._stack = AsyncExitStack()
        # The tiers of these engines lie in, or beside, one instance; an LMCache server or remote store is for all.
        preset = clients[0].preset
        self._apart = preset.connector != "lmcache-mp" and preset.tiers.remote is None

    async def __aenter__(self) -> Router:
        """Enters all clients.

        Raises:
            ReplayError: a server does not answer or cannot do what was asked.
        """
        async with AsyncExitStack() as stack:
            for client in self.clients:
                await stack.enter_async_context(client)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def send(self, request: Request) -> Outcome:
        """Sends a request to the instance of its choice."""
        taken = self._choice.take(request)
        try:
            outcome = await self.clients[taken.instance].send(request)
        finally:
            self._choice.done(taken.instance)
        outcome.instance = taken.instance
        if self._apart:
            explain(outcome, request.ideal, taken, self.clients[0].preset.block_tokens)
        return outcome

    async def restart(self) -> None:
        """Not possible: the servers are someone else's.

        Raises:
            ReplayError: always.
        """
        await self.clients[0].restart()

    async def restarting(self) -> None:
        """Whoever owns the servers is about to restart the engines; see `HttpBackend.restarting`."""
        for client in self.clients:
            await client.restarting()

    async def restarted(self) -> None:
        """They are back; see `HttpBackend.restarted`."""
        self._choice.restarted()
        for client in self.clients:
            await client.restarted()

    @property
    def scraper(self) -> Scrapes:
        """Readings of the metrics of all instances."""
        found = [
            Sample(at, name, _labelled(labels, number), value)
            for number, client in enumerate(self.clients)
            for at, name, labels, value in client.scrapes()
        ]
        return Scrapes(sorted(found, key=lambda sample: sample.at))

    def cache_events(self) -> list[CacheEvent]:
        """What LMCache's server, which is there for all instances, published about its cache."""
        return self.clients[0].cache_events()

    def describe(self) -> dict[str, Any]:
        """What is stored with the run: that of the first instance, and the capacity of all together."""
        each = [client.describe() for client in self.clients]
        sizes = [about["capacity_tokens"]["gpu"] for about in each if about.get("capacity_tokens")]
        capacity = {"capacity_tokens": {"gpu": sum(sizes)}} if len(sizes) == len(each) else {"capacity_tokens": None}
        warnings = [text for about in each for text in about.get("warnings") or []]
        return {
            **each[0],
            **capacity,
            "tiers": _summed([about.get("tiers") for about in each]),
            "warnings": list(dict.fromkeys(warnings)),
            "instances": len(each),
            "urls": [client.url for client in self.clients],
            "router": self.policy,
        }

    def self_check(self) -> dict[str, Any]:
        """What the clients noticed, together, and how many requests each instance got."""
        return {**checked(self.clients), "requests_per_instance": list(self._choice.requests)}


def explain(outcome: Outcome, ideal: int, taken: Taken, block: int) -> None:
    """Tells in an outcome's loss what its instance was never sent, and what a restart took from it.

    Args:
        outcome: changed in place.
        ideal: tokens that any earlier request of the run shared.
        taken: the instance, and what it was sent before.
        block: tokens of its blocks; one that it has in part, it cannot serve.
    """
    if outcome.lost is None or outcome.prompt_tokens is None or outcome.computed is None:
        return
    served = outcome.prompt_tokens - outcome.computed
    # A client alone takes what any instance lost in a restart for cold.
    known = {cause: tokens for cause, tokens in outcome.lost.items() if cause not in ("unknown", "cold")}
    left = max(0, ideal - served - sum(known.values()))

    def beyond(end: int, sent: int) -> int:
        return max(0, end - max(sent // block * block, served)) if sent < end else 0

    elsewhere = min(left, beyond(ideal, taken.held))
    known["never_stored"] = known.get("never_stored", 0) + elsewhere
    left -= elsewhere
    cold = 0 if taken.warm is None else min(left, beyond(min(taken.held, ideal), taken.warm))
    outcome.lost = {**known, "cold": cold, "unknown": left - cold}


def _labelled(labels: str | None, instance: int) -> str:
    """Labels as scraped, and the instance; another name than vLLM's own label ``engine``."""
    own = f'instance="{instance}"'
    return f"{{{own},{labels[1:]}" if labels and labels != "{}" else f"{{{own}}}"


def _summed(tiers: Sequence[Any]) -> dict[str, Any] | None:
    """Sizes of tiers, of all instances together, where each says them (`replay serve` does)."""
    if not all(tiers):
        return None
    return {name: {unit: sum(each[name][unit] for each in tiers) for unit in sizes} for name, sizes in tiers[0].items()}
