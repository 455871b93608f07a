"""What a backend is asked and what it answers: `Request` and `Outcome`."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from replay.trace import PrefixTree, Tip, Turn


class Clock(Protocol):
    """Seconds from the start of the run; the one clock of driver and backend."""

    def now(self) -> float:
        """Seconds from the start of the run."""


class Request(msgspec.Struct, frozen=True):
    """One model call, ready to be sent."""

    turn: Turn
    """The turn of the trace (its session may be a clone's, see `session`)."""
    session: str
    """Session id within the run: the trace's, with ``#n`` for the n-th clone."""
    id: str
    """Unique within the run: ``session/turn``."""
    tree: PrefixTree
    """Prefix tree of the run."""
    tip: Tip
    """Where the prompt ends in the tree; ``tip.depth`` is the prompt's length in tokens."""
    context: Tip
    """Where prompt and output end."""
    output: int
    """Tokens to generate (after ``--scale-tokens``)."""
    ideal: int
    """Tokens of the longest prefix that any earlier request of the run shares."""
    parent_id: str | None = None
    """Request whose context this one continues: its live output is part of this prompt."""
    family: int = 0
    """Number of the family (a session and its sub-agents) in the run."""

    @property
    def prompt(self) -> int:
        """Prompt tokens."""
        return self.tip.depth


LOSSES = ("evicted", "granularity", "never_stored", "cold", "diverged", "unknown")
TIERS = ("gpu", "cpu", "disk", "remote", "external", "computed")


class Outcome(msgspec.Struct):
    """What happened to one request: flat, final, and null where unknown. Times are seconds from the run's start."""

    status: str
    """``ok``, ``error``, ``dropped`` (never sent: something it depends on failed) or ``cancelled``."""
    error: str | None = None
    """One line about what went wrong; never holds a key or prompt text."""
    sent: float | None = None
    first_byte: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    closed: float | None = None
    prompt_tokens: int | None = None
    """As the server counted."""
    output_tokens: int | None = None
    gpu: int | None = None
    cpu: int | None = None
    disk: int | None = None
    remote: int | None = None
    external: int | None = None
    """Served from beyond the GPU by a tier that the engine does not name."""
    computed: int | None = None
    tier_source: str | None = None
    """Who said which tier served: ``simulated``, ``usage``, ``connector``, ``events``, ``counters``."""
    lost: dict[str, int] | None = None
    """Ideal tokens that no tier served, by cause (see `LOSSES`); null where the backend cannot tell."""
    recompute_s: float | None = None
    """Prefill time that the loss cost, in seconds."""
    load_s: float | None = None
    """Time spent loading from lower tiers, in seconds."""
    preemptions: int | None = None
    attempts: int = 1
    """Times the request was put on the wire."""
    worker: int = 0
    """Number of the client's process that sent it, from 0."""
    instance: int | None = None
    """Number of the engine that answered, where the client chose among several; from 0."""
    output_ids: Any = None
    """Token ids that the model really generated, where the engine returns them; not stored."""


class Backend(Protocol):
    """The seam: whoever answers. Use as an async context manager; `send` may run concurrently.

    `send` never raises for what the server did wrong: it returns an `Outcome` with status ``error``.
    """

    async def __aenter__(self) -> Backend:
        """Starts or connects, and brings the cache to a known state."""

    async def __aexit__(self, *exc: object) -> None:
        """Stops everything that was started."""

    async def send(self, request: Request) -> Outcome:
        """Sends one request and waits for its end."""

    async def restart(self) -> None:
        """Restarts the engine: what only its process held is lost, what lies on disk or elsewhere stays.

        Raises:
            ReplayError: this backend cannot do that.
        """

    def describe(self) -> dict[str, Any]:
        """What is stored with the run: engine, versions, capacities per tier, cache state before the run."""
