"""Cache tiers below GPU memory: chunks of the same key space, on links that take time.

What tells one connector from another is in `replay.engine.connectors`. A chunk is visible once its store has ended.
A store never evicts a chunk that is still on its way. A tier takes what is handed to it when it is computed (written
through), or the CPU tier what the GPU evicts (written back); it hands all that on to the tiers below.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from replay.backends.preset import LowerTier
from replay.engine.chunks import ChunkCache
from replay.engine.connectors import CONNECTORS
from replay.engine.lru import Int32s
from replay.engine.pool import BlockPool
from replay.engine.profiles import Link
from replay.engine.tier import Hit, Prefetch, Tier
from replay.errors import ReplayError

RETRY_S = 0.1
"""Between two looks for room in the staging buffer (``LocalCPUBackend.allocate``)."""
PREFETCH_TOKENS = 256
"""Fewest tokens that SGLang brings from storage to CPU memory (``prefetch_threshold``)."""
PREFETCH_S = (1.0, 0.25)
"""How long a request waits for them under ``timeout``: seconds, and more for each 1,024 tokens."""


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
        under: BlockPool | None = None,
    ):
        """Empty tiers.

        Args:
            tiers: names and sizes.
            links: the link of each.
            connector: one of `replay.engine.connectors.CONNECTORS`.
            chunk_tokens: tokens of one entry.
            token_bytes: KV bytes of one token.
            beside: the tiers of another instance; what all share is taken from there, link and all.
            under: the GPU tier, where it is a radix tree whose ids the chunks share.

        Raises:
            ReplayError: a tier that holds nothing.
        """
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * token_bytes
        self.how = CONNECTORS[connector]
        self._under = under
        theirs = beside.tiers if beside else []
        shared = {tier.name: tier for tier in theirs if self.how.shares == "all" or tier.name == "remote"}
        self.own = [self._tier(name, tier, links[name]) for name, tier in tiers if name not in shared]
        """Those of this engine, and those that it shares and counts as the first."""
        self.shared = bool(shared)
        """Whether another engine uses one of them too."""
        named = {tier.name: tier for tier in self.own} | shared
        self.tiers: list[Tier] = [named[name] for name, _ in tiers]
        top = self.tiers[0]
        self.write = top.settings.write or self.how.writes[0]
        """When the first tier gets what the GPU has: ``through``, ``through_selective`` or ``back``."""
        self.fetches = self.how.prefetches and len(self.tiers) > 1
        """Whether requests that wait have storage send what it holds to CPU memory."""
        self._exclusive = top.settings.inclusion == "exclusive"
        self._buffer = top if top.settings.staging else None
        self._seen = self.tiers[:1] if self.fetches else [tier for tier in self.tiers if tier is not self._buffer]
        """Those that a lookup sees."""
        self._drops = self.how.drops_above if len(self.tiers) > 1 else self.how.drops
        self._disturbing = [tier for tier in self.tiers if tier.link.busy_launch_s]
        self._uses: npt.NDArray[np.int8] = np.zeros(1, np.int8)
        """Requests, up to two, that have used each chunk on the GPU, where that decides whether it is stored."""

    def _tier(self, name: str, tier: LowerTier, link: Link) -> Tier:
        capacity = int(tier.gib * 2**30 // self.chunk_bytes)
        loop, how = self.how.loop, self.how
        if not capacity:
            raise ReplayError(
                f"tiers.{name}.gib {tier.gib:g} holds no entry of {self.chunk_tokens} tokens, which takes "
                f"{self.chunk_bytes / 2**30:.2g} GiB; raise it"
            )
        watermark, ratio = tier.watermark, tier.evict_ratio
        if watermark is None and loop and loop.watermark:
            watermark, ratio = loop.watermark, loop.evict_ratio
        cache = ChunkCache(
            name, capacity, how.policy(name, tier), watermark, ratio, tier.ttl_s, loop, how.lease_s,
            self._under if name == "cpu" else None,
        )  # fmt: skip
        if how.loads != "link":
            link = msgspec.structs.replace(link, blocking_load=how.loads == "layerwise", blocking_store=False)
        if how.batches and link.source == "derived":
            link = msgspec.structs.replace(link, per_chunk_s=0.0, store_per_chunk_s=0.0)
        return Tier(cache, link, tier, self.chunk_bytes)

    def know(self, count: int) -> None:
        """Makes room for chunk ids below `count`."""
        for tier in self.tiers:
            tier.cache.know(count)
        if self.write == "through_selective" and count > len(self._uses):
            self._uses = np.pad(self._uses, (0, max(count, 2 * len(self._uses)) - len(self._uses)))

    def lookup(self, ids: Int32s, gpu_tokens: int, now: float) -> Hit:
        """What the tiers can add to a GPU hit of `gpu_tokens` tokens.

        Args:
            ids: ids of the prompt's full chunks.
            gpu_tokens: tokens of the prompt that the GPU holds.
            now: chunks stored until then count.
        """
        begin = gpu_tokens // self.chunk_tokens
        place = 0 if self.how.from_start else begin
        hit = Hit()
        for tier in self._seen:
            tier.cache.pass_time(now)
            end = tier.cache.prefix(ids, place, now)
            if max(place, begin) < end:
                hit.parts.append((tier, max(place, begin), end))
            if self.how.from_start:
                tier.cache.touch(ids, place, end, now)
            else:
                tier.cache.touch(ids, 0, len(ids), now)
            place = end
        if self.how.from_start or hit.parts:
            hit.chunks = place
        return hit

    def prefetch(self, ids: Int32s, gpu_tokens: int, now: float) -> Prefetch | None:
        """Has storage send what it holds, beyond GPU and CPU tier, of a request that waits to CPU memory.

        Under ``timeout`` the request waits for it as long as SGLang lets it; what has not come by then does not come.

        Returns:
            None if storage has too little.
        """
        cpu, storage = self.tiers[0].cache, self.tiers[1]
        begin = cpu.prefix(ids, gpu_tokens // self.chunk_tokens, now)
        storage.cache.pass_time(now)
        end = storage.cache.prefix(ids, begin, now)
        if (end - begin) * self.chunk_tokens < PREFETCH_TOKENS:
            return None
        storage.cache.touch(ids, begin, end, now)
        count = cpu.room(end - begin, now)
        if count * self.chunk_tokens < PREFETCH_TOKENS:
            return None
        link, start = storage.link, max(now, storage.load_free)
        each = link.load_seconds(count * self.chunk_bytes, count) / count
        policy = storage.settings.prefetch or "timeout"
        deadline = np.inf
        if policy == "timeout":
            deadline = now + PREFETCH_S[0] + PREFETCH_S[1] * count * self.chunk_tokens / 1024
        come = int(min(count, max(0.0, (deadline - start) / each)))
        done = start
        if come:
            done = cpu.insert(ids, begin, begin + come, now, start + each, each)
            storage.load_free = done
            storage.loads += come
            storage.load_s += done - start
        ready = now if policy == "best_effort" else done if come == count else deadline
        return Prefetch(storage, begin, begin + come, ready)

    def end_prefetch(self, ids: Int32s, prefetch: Prefetch, now: float) -> None:
        """Stops a prefetch when its request is admitted: what is still on its way does not come."""
        self.tiers[0].cache.give_up_unread(ids, prefetch.begin, prefetch.end, now)

    def load(self, ids: Int32s, hit: Hit, now: float) -> float:
        """Starts loading a hit; returns when its KV is in GPU memory.

        Tiers are read one after the other; each load waits for those before it on the same link.

        Raises:
            ReplayError: the engine would wait for ever.
        """
        top = self.tiers[0]
        below = [(begin, end) for tier, begin, end in hit.parts if tier is not top]
        passes = bool(below) and self.how.promotes and top.name == "cpu"
        begin, end = (below[0][0], below[-1][1]) if passes else (0, 0)
        if passes:
            self._let_through(now)
            if self._buffer and end - begin > top.cache.capacity:
                raise ReplayError(
                    f"a load of {(end - begin) * self.chunk_tokens:,} tokens exceeds the staging buffer of "
                    f"{top.cache.capacity * self.chunk_tokens:,} tokens, for which LMCache waits for ever; raise "
                    "tiers.cpu.gib"
                )
            wait = top.cache.room_at(end - begin, now) - now
            now += -(-wait // RETRY_S) * RETRY_S
            self._let_through(now)
            if not self._buffer:
                top.cache.insert(ids, begin, end, now, now)
        first = now
        for tier, begin_of, end_of in hit.parts:
            start = max(now, tier.load_free)
            done = start + tier.link.load_seconds((end_of - begin_of) * self.chunk_bytes, end_of - begin_of)
            tier.load_free = done
            tier.loads += end_of - begin_of
            tier.load_s += done - start
            now = done
        if passes and self._buffer:
            top.cache.insert(ids, begin, end, first, now)
        return now

    def _let_through(self, now: float) -> None:
        """Empties a tier that is only a buffer of what is no longer on its way."""
        if self._buffer:
            self._buffer.cache.let_through(now)

    def launch_delay(self, now: float) -> float:
        """Seconds by which writers that are at work at `now` delay the launch of a step with prefill."""
        return sum([tier.link.busy_launch_s for tier in self._disturbing if tier.store_free > now], 0.0)

    def pin(self, ids: Int32s, hit: Hit) -> None:
        """Protects the chunks of a hit while they are loaded."""
        for tier, begin, end in hit.parts:
            tier.cache.pin(ids, begin, end, 1)

    def unpin(self, ids: Int32s, hit: Hit, loaded: bool) -> None:
        """Ends that; what has been `loaded` leaves an exclusive tier."""
        for tier, begin, end in hit.parts:
            tier.cache.pin(ids, begin, end, -1)
            if loaded and self._exclusive:
                tier.cache.give_up(ids, begin, end)

    def store(self, ids: Int32s, begin: int, end: int, now: float) -> tuple[float, float]:
        """Takes note of chunks that the GPU has computed or used, and writes those through that are due.

        Returns:
            Until when the engine's step waits, and when GPU blocks need no longer be held for it.
        """
        if self.write == "back":
            if self._exclusive:
                self.tiers[0].cache.give_up(ids, begin, end)
            return now, now
        if self.write == "through_selective":
            used = self._uses[ids[begin:end]]
            self._uses[ids[begin:end]] = np.minimum(used + 1, 2)
            end = begin + int(np.count_nonzero(used))  # whoever used a chunk has used all before it
            if begin == end:
                return now, now
        held_up, complete = self._hand_down(ids, begin, end, now)
        if not self.how.from_start:
            self.tiers[0].cache.touch(ids, 0, end, now)
        return held_up, complete

    def evicted(self, ids: Int32s, now: float) -> float:
        """Takes what the GPU has evicted, in the order in which that happened; returns until when a step waits."""
        if self.write == "through_selective":
            self._uses[ids] = 0
        if self.write != "back" or not len(ids):
            return now
        top = self.tiers[0].cache
        if self._under:
            top.evict_doubles(top.missing(ids, 0, len(ids)) + top.used - top.capacity, now)
        complete = self._hand_down(ids, 0, len(ids), now)[1]
        return complete if self.how.evict_waits else now

    def _hand_down(self, ids: Int32s, begin: int, end: int, now: float) -> tuple[float, float]:
        """Writes chunks to every tier that lacks them, from the first one down."""
        held_up = complete = handed = now
        top = self.tiers[0]
        full = top.cache.used >= top.cache.capacity
        for tier in self.tiers:
            if tier.cache.ages:
                tier.cache.pass_time(handed)
            count = tier.cache.missing(ids, begin, end)
            if tier is top and self._drops != "each":
                self._let_through(handed)
                short = max(0, count - tier.cache.room(count, handed))
                short = count if short and self._drops == "all" else short
                if short:
                    kept = begin if self._drops == "all" else end - short
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
            written = tier.write(ids, begin, end, count, handed, done)
            if tier is top or self.how.loads == "link":
                complete = max(complete, written)
            if self.how.loads != "link":
                handed = max(handed, written)
            held_up += tier.flush(count)
        for tier in self.tiers[1:]:
            top.cache.keep_until(ids, begin, end, tier.cache)
        return held_up, max(complete, held_up)

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
