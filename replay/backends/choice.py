"""Which instance of an engine answers a request: the policies of a router in front of several."""

from __future__ import annotations

from typing import NamedTuple

from replay.backends.http.attribution.loss import Prefilled
from replay.load.outcome import Request

_WORTH = 0.5
"""Share of a prompt that an instance must hold to be preferred. With less, all that begins with the same system
prompt would go to the instance that saw it first; the rest goes where least is in flight."""


class Taken(NamedTuple):
    """The instance for a request, and what it was sent before."""

    instance: int
    held: int
    """Tokens of the prompt that began an earlier prompt to it."""
    warm: int | None
    """Of these, since the engines were last restarted; null: they never were."""


class Choice:
    """Chooses an instance for each request, and keeps what that takes.

    ``round-robin`` takes them in turn, ``session`` keeps a session where its first request went (first requests
    take the instances in turn), ``prefix`` takes the one that was sent the longest prefix of the prompt.
    """

    def __init__(self, instances: int, policy: str):
        """Args:
        instances: how many there are.
        policy: ``round-robin``, ``session`` or ``prefix``.
        """
        self.policy = policy
        self.requests = [0] * instances
        """Requests that each instance got."""
        self._sent = [Prefilled() for _ in range(instances)]
        self._since: list[Prefilled] | None = None
        self._in_flight = [0] * instances
        self._home: dict[str, int] = {}
        self._turns = 0

    def take(self, request: Request) -> Taken:
        """The instance for a request that is sent now."""
        held = [sent.longest(request.tree, request.tip) for sent in self._sent]
        chosen = self._choose(request, held)
        self._sent[chosen].add(request.tree, request.context)
        warm = None
        if self._since is not None:
            warm = self._since[chosen].longest(request.tree, request.tip)
            self._since[chosen].add(request.tree, request.context)
        self._in_flight[chosen] += 1
        self.requests[chosen] += 1
        return Taken(chosen, held[chosen], warm)

    def restarted(self) -> None:
        """Notes that the engines were restarted. A router does not hear of that: its choices stay as they are."""
        self._since = [Prefilled() for _ in self._sent]

    def done(self, instance: int) -> None:
        """Notes that a request to this instance has ended."""
        self._in_flight[instance] -= 1

    def _choose(self, request: Request, held: list[int]) -> int:
        if self.policy == "round-robin":
            return self._next()
        if self.policy == "session":
            home = self._home.get(request.session)
            if home is None:
                home = self._home[request.session] = self._next()
            return home
        longest = max(held)
        if longest < _WORTH * request.prompt:
            return min(range(len(held)), key=lambda i: (self._in_flight[i], self.requests[i]))
        return min((i for i, tokens in enumerate(held) if tokens == longest), key=lambda i: self._in_flight[i])

    def _next(self) -> int:
        self._turns += 1
        return (self._turns - 1) % len(self.requests)
