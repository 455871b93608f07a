"""Cache tiers below GPU memory: chunks of the same key space, on links that take time.

What is modelled, per connector:

- ``lmcache`` (LMCache in the engine's process, ``lmcache/v1/storage_backend``): a lookup walks from the
  first chunk, the CPU tier as far as its longest prefix goes, then disk, then remote; every full chunk
  of a prompt that was computed is written through to all tiers; what a lower tier serves is written
  back to the CPU tier; a chunk stays in the CPU tier, its staging buffer, until the disk has it; what
  finds no room there is not stored at all, but a load from below waits for room, looking every 0.1 s
  (``LocalCPUBackend.allocate``); chunks found are touched last chunk first; chunks of the output
  are not stored (``save_decode_cache`` is off by default).
- ``lmcache-mp`` (LMCache's server, ``lmcache/v1/distributed``): the same walk, but loads and stores run beside
  the engine's steps, which keeps a request's GPU blocks until its stores have ended; what a lower tier serves
  is not written back (``--l2-prefetch-policy default``); its memory evicts only in a loop that runs once a
  second (`LowerTier.watermark`), and a store that finds too little free memory reaches no tier at all.
- ``offload`` (vLLM's ``OffloadingConnector``): a lookup starts where the GPU's hit ends; every full block
  is stored, also of the output, and the request's blocks are touched then; its GPU blocks stay held
  until the stores have ended.

A chunk is visible once its store has ended. A store never evicts a chunk that is still on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from replay.backends.preset import LowerTier
from replay.engine.chunks import ChunkCache
from replay.engine.lru import Int32s
from replay.engine.profiles import Link

RETRY_S = 0.1
"""Between two looks for room in the staging buffer (``LocalCPUBackend.allocate``)."""


@dataclass(slots=True)
class Hit:
    """What lower tiers hold of a prompt beyond the GPU's hit."""

    parts: list[tuple[Tier, int, int]] = field(default_factory=list)
    """Tier, first chunk and end of each part to load."""
    chunks: int = 0
    """Where the prefix that the tiers hold ends, in chunks of the prompt; stores begin there."""


@dataclass(slots=True)
class Tier:
    """A tier's contents and its link; loads queue on the link, and so do stores."""

    cache: ChunkCache
    link: Link
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


class TierStack:
    """The lower tiers of one engine, fastest first."""

    def __init__(
        self,
        tiers: list[tuple[str, LowerTier]],
        links: dict[str, Link],
        connector: str,
        chunk_tokens: int,
        token_bytes: float,
        beside: TierStack | None = None,
    ):
        """Empty tiers.

        Args:
            tiers: names and sizes.
            links: the link of each.
            connector: ``lmcache``, ``lmcache-mp`` or ``offload``; decides how lookups and stores work.
            chunk_tokens: tokens of one entry.
            token_bytes: KV bytes of one token.
            beside: the tiers of another instance; what all share is taken from there, link and all.
        """
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * token_bytes
        self.from_start = connector != "offload"
        """A lookup walks from the first chunk, whatever the GPU holds."""
        self.stores_output = connector == "offload"
        """Chunks of the output are stored too."""
        self.holds_blocks = connector != "lmcache"
        """GPU blocks are held until their stores have ended."""
        self._server = connector == "lmcache-mp"
        theirs = beside.tiers if beside else []
        shared = {tier.name: tier for tier in theirs if self._server or tier.name == "remote"}
        self.own = [self._tier(name, tier, links[name]) for name, tier in tiers if name not in shared]
        """Those of this engine, and those that it shares and counts as the first."""
        self.shared = bool(shared)
        """Whether another engine uses one of them too."""
        named = {tier.name: tier for tier in self.own} | shared
        self.tiers: list[Tier] = [named[name] for name, _ in tiers]
        self._disturbing = [tier for tier in self.tiers if tier.link.busy_launch_s]

    def _tier(self, name: str, tier: LowerTier, link: Link) -> Tier:
        capacity = int(tier.gib * 2**30 // self.chunk_bytes)
        return Tier(ChunkCache(name, capacity, tier.policy, tier.watermark, tier.evict_ratio, tier.ttl_s), link)

    def know(self, count: int) -> None:
        """Makes room for chunk ids below `count`."""
        for tier in self.tiers:
            tier.cache.know(count)

    def lookup(self, ids: Int32s, gpu_tokens: int, now: float) -> Hit:
        """What the tiers can add to a GPU hit of `gpu_tokens` tokens.

        Args:
            ids: ids of the prompt's full chunks.
            gpu_tokens: tokens of the prompt that the GPU holds.
            now: chunks stored until then count.
        """
        begin = gpu_tokens // self.chunk_tokens
        place = 0 if self.from_start else begin
        hit = Hit()
        for tier in self.tiers:
            tier.cache.pass_time(now)
            end = tier.cache.prefix(ids, place, now)
            if max(place, begin) < end:
                hit.parts.append((tier, max(place, begin), end))
            if self.from_start:
                tier.cache.touch(ids, place, end, now)
            else:
                tier.cache.touch(ids, 0, len(ids), now)
            place = end
        if self.from_start or hit.parts:
            hit.chunks = place
        return hit

    def load(self, ids: Int32s, hit: Hit, now: float) -> float:
        """Starts loading a hit; returns when its KV is in GPU memory.

        Tiers are read one after the other; each load waits for those before it on the same link. What comes
        from below the CPU tier is written back to it.
        """
        top = self.tiers[0]
        below = [(begin, end) for tier, begin, end in hit.parts if tier is not top]
        if below and top.name == "cpu" and not self._server:
            begin, end = below[0][0], below[-1][1]
            wait = top.cache.room_at(end - begin, now) - now
            now += -(-wait // RETRY_S) * RETRY_S
            top.cache.insert(ids, begin, end, now, now)
        for tier, begin, end in hit.parts:
            start = max(now, tier.load_free)
            done = start + tier.link.load_seconds((end - begin) * self.chunk_bytes, end - begin)
            tier.load_free = done
            tier.loads += end - begin
            tier.load_s += done - start
            now = done
        return now

    def launch_delay(self, now: float) -> float:
        """Seconds by which writers that are at work at `now` delay the launch of a step with prefill."""
        return sum([tier.link.busy_launch_s for tier in self._disturbing if tier.store_free > now], 0.0)

    def pin(self, ids: Int32s, hit: Hit, by: int) -> None:
        """Protects the chunks of a hit while they are loaded (`by` = 1), or ends that (-1)."""
        for tier, begin, end in hit.parts:
            tier.cache.pin(ids, begin, end, by)

    def store(self, ids: Int32s, begin: int, end: int, now: float) -> tuple[float, float]:
        """Writes chunks through to every tier that lacks them.

        Returns:
            Until when the engine's step waits, and when the last tier has them all.
        """
        held_up = complete = now
        handed = now
        full = self.tiers[0].cache.used >= self.tiers[0].cache.capacity
        for depth, tier in enumerate(self.tiers):
            if tier.cache.ages:
                tier.cache.pass_time(handed)
            count = tier.cache.missing(ids, begin, end)
            if depth == 0 and self.from_start and (self._server or len(self.tiers) > 1):
                short = max(0, count - tier.cache.room(count, handed))
                short = count if short and self._server else short
                if short:
                    kept = begin if self._server else end - short
                    tier.cache.drop(ids, kept, end)
                    count, end = count - short, kept
            if not count:
                continue
            seconds = tier.link.store_seconds(count * self.chunk_bytes, count)
            seconds += count * tier.link.crowded_store_s if full else 0.0
            done = (handed if tier.link.blocking_store else max(handed, tier.store_free)) + seconds
            if tier.link.blocking_store:
                held_up = handed = done
            else:
                tier.store_free = done
            complete = max(complete, self._write(tier, ids, begin, end, count, handed, done))
            held_up += self._flush(tier, count)
        top = self.tiers[0].cache
        for tier in self.tiers[1:]:
            top.keep_until(ids, begin, end, tier.cache)
        if not self.from_start:
            top.touch(ids, 0, end, now)
        return held_up, max(complete, held_up)

    def _flush(self, tier: Tier, count: int) -> float:
        """Seconds for which a step that writes waits while the host writes back what a tier's files have dirtied."""
        if not tier.link.flush_every_gb:
            return 0.0
        tier.dirtied += count * self.chunk_bytes
        if tier.dirtied >= tier.link.flush_every_gb * 1e9:
            tier.dirtied = 0.0
            tier.flush_s += tier.link.flush_s
        pause = min(tier.flush_s, tier.link.flush_pause_s)
        tier.flush_s -= pause
        tier.store_free += pause
        return pause

    def _write(self, tier: Tier, ids: Int32s, begin: int, end: int, count: int, now: float, done: float) -> float:
        """Puts chunks into one tier, visible at `done` or as its drain takes them."""
        if tier.link.drain_gbps is None:
            return tier.cache.insert(ids, begin, end, now, done)
        each = self.chunk_bytes / (tier.link.drain_gbps * 1e9)
        start = max(done, tier.store_free)
        tier.store_free = start + count * each
        return tier.cache.insert(ids, begin, end, now, start + each, each)

    def clear(self, *names: str) -> None:
        """Empties the named tiers, or all."""
        for tier in self.tiers:
            if not names or tier.name in names:
                tier.cache.clear()

    def on_the_way(self, ids: Int32s, now: float) -> npt.NDArray[np.bool_]:
        """Which chunks no tier can serve at `now` because a store was dropped or has not ended."""
        served, late = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.bool_)
        for tier in self.tiers:
            tier.cache.on_the_way(ids, now, served, late)
        return late & ~served
