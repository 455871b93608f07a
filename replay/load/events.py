"""What happens in a cache, as rows of the table `cache_events`."""

from __future__ import annotations

from typing import NamedTuple


class CacheEvent(NamedTuple):
    """What happened in a cache at one moment, or since the event before it of the same kind and tier."""

    at: float
    """Seconds from the run's start."""
    kind: str
    """``store``, ``evict``, ``drop`` (no room for a store) or ``reset``."""
    tier: str | None
    session: str | None = None
    turn: int | None = None
    blocks: int | None = None
    tokens: int | None = None
    detail: str | None = None
