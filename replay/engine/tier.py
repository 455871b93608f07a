"""One cache tier below GPU memory on its link, and what of it a request loads."""

from __future__ import annotations

from dataclasses import dataclass, field

from replay.backends.preset import LowerTier
from replay.engine.chunks import ChunkCache
from replay.engine.lru import Int32s
from replay.engine.profiles import Link


@dataclass(slots=True)
class Hit:
    """What lower tiers hold of a prompt beyond the GPU's hit."""

    parts: list[tuple[Tier, int, int]] = field(default_factory=list)
    """Tier, first chunk and end of each part to load."""
    chunks: int = 0
    """Where the prefix that the tiers hold ends, in chunks of the prompt; stores begin there."""


@dataclass(slots=True)
class Prefetch:
    """Chunks that storage sends to CPU memory for a request that waits: tier, first one and end."""

    tier: Tier
    begin: int
    end: int
    ready: float
    """Until when the request waits for them."""


@dataclass(slots=True)
class Tier:
    """A tier's contents and its link; loads queue on the link, and so do stores."""

    cache: ChunkCache
    link: Link
    settings: LowerTier
    chunk_bytes: float
    load_free: float = 0.0
    store_free: float = 0.0
    dirtied: float = 0.0
    """Bytes written since the last write-back."""
    flush_s: float = 0.0
    """What is left of the write-back, in seconds."""
    loads: int = 0
    """Chunks loaded so far."""
    load_s: float = 0.0
    """Seconds of loading so far."""

    @property
    def name(self) -> str:
        """``cpu``, ``disk`` or ``remote``."""
        return self.cache.name

    def flush(self, count: int) -> float:
        """Seconds for which a step that writes waits while the host writes back what its files have dirtied."""
        if not self.link.flush_every_gb:
            return 0.0
        self.dirtied += count * self.chunk_bytes
        if self.dirtied >= self.link.flush_every_gb * 1e9:
            self.dirtied = 0.0
            self.flush_s += self.link.flush_s
        pause = min(self.flush_s, self.link.flush_pause_s)
        self.flush_s -= pause
        self.store_free += pause
        return pause

    def write(self, ids: Int32s, begin: int, end: int, count: int, now: float, done: float) -> float:
        """Puts chunks into the tier, visible at `done` or as its drain takes them."""
        if self.link.drain_gbps is None:
            return self.cache.insert(ids, begin, end, now, done)
        each = self.chunk_bytes / (self.link.drain_gbps * 1e9)
        start = max(done, self.store_free)
        self.store_free = start + count * each
        return self.cache.insert(ids, begin, end, now, start + each, each)
