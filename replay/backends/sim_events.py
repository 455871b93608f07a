"""What the tiers of a simulated engine stored, evicted and dropped, summed over stretches of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from replay.engine.engine import Engine
from replay.load.events import CacheEvent

STRETCH_S = 5.0
"""Shortest time between two readings of the counters. An event is dated by the reading that finds it."""
STRETCH_SHARE = 0.005
"""Shortest time between two readings as a share of the run's time so far: long runs get few rows more."""


class TierEvents:
    """Reads the counters of an engine's tiers now and then.

    Of the GPU tier these are evictions only: its blocks are stored as they are computed.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._next = 0.0
        self._before = dict(self._counts())
        self.rows: list[CacheEvent] = []
        """Changes so far, in order of time."""

    def read(self, now: float) -> None:
        """Notes what happened since the last reading, if that is long enough ago.

        Args:
            now: seconds from the run's start.
        """
        if now >= self._next:
            self.read_now(now)

    @contextmanager
    def emptying(self, now: float) -> Iterator[None]:
        """Around a reset or restart: notes which tiers it empties, and does not take that for evictions."""
        self.read_now(now)
        before = self._before
        yield
        self._before = dict(self._counts())
        held = [tier for tier, kind in before if kind == "held"]
        emptied = [tier for tier in held if before[tier, "held"] and not self._before[tier, "held"]]
        self.rows += [CacheEvent(now, "reset", tier) for tier in ("gpu", *emptied)]

    def read_now(self, now: float) -> None:
        """Notes what happened since the last reading."""
        self._next = now + max(STRETCH_S, STRETCH_SHARE * now)
        counts = dict(self._counts())
        for (tier, kind), n in counts.items():
            if kind == "left":
                continue
            new = n - self._before[tier, kind]
            if kind == "held":
                new += sum(counts[tier, gone] - self._before[tier, gone] for gone in ("evict", "left"))
            if new:
                name = "store" if kind == "held" else kind
                self.rows.append(CacheEvent(now, name, tier, blocks=new, tokens=new * self._unit(tier)))
        self._before = counts

    def _counts(self) -> Iterator[tuple[tuple[str, str], int]]:
        yield ("gpu", "evict"), self._engine.pool.evicted
        for tier in self._engine.tiers.own if self._engine.tiers else ():
            held, evicted, dropped = (int(n) for n in tier.cache.counts)
            yield (tier.name, "held"), held
            yield (tier.name, "evict"), evicted
            yield (tier.name, "drop"), dropped
            yield (tier.name, "left"), tier.cache.left

    def _unit(self, tier: str) -> int:
        tiers = self._engine.tiers
        return tiers.chunk_tokens if tiers and tier != "gpu" else self._engine.pool.block_tokens
