"""Cache tiers below GPU memory: chunks of the same key space, on links that take time.

What is modelled, per connector:

- ``lmcache`` (LMCache in the engine's process, ``lmcache/v1/storage_backend``): a lookup walks from the
  first chunk, the CPU tier as far as its longest prefix goes, then disk, then remote; every full chunk
  of a prompt that was computed is written through to all tiers; what a lower tier serves is written
  back to the CPU tier; a chunk stays in the CPU tier, its staging buffer, until the disk has it; what
  finds no room there is not stored at all, but a load from below waits for room, looking every 0.1 s
  (``LocalCPUBackend.allocate``); chunks found are touched last chunk first; chunks of the output
  are not stored (``save_decode_cache`` is off by default).
- ``offload`` (vLLM's ``OffloadingConnector``): a lookup starts where the GPU's hit ends; every full block
  is stored, also of the output, and the request's blocks are touched then; its GPU blocks stay held
  until the stores have ended.

A chunk is visible once its store has ended. A store never evicts a chunk that is still on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt

from replay.backends.preset import LowerTier
from replay.engine.lru import Int32s, append, unlink
from replay.engine.profiles import Link

RETRY_S = 0.1
"""Between two looks for room in the staging buffer (``LocalCPUBackend.allocate``)."""
ABSENT, PRESENT = 0, 1
KEPT, DROPPED = 1, 2


class ChunkCache:
    """One tier: which chunks it holds, in order of eviction, and never more than fit.

    Entry ``id + 1`` of each array belongs to chunk `id`; entry 0 is the list's sentinel.
    """

    def __init__(self, name: str, capacity: int, policy: str = "lru"):
        """An empty tier.

        Args:
            name: ``cpu``, ``disk`` or ``remote``.
            capacity: chunks that fit.
            policy: ``lru``, or ``fifo``, which a hit does not move.
        """
        self.name = name
        self.capacity = capacity
        self.policy = policy
        self.counts = np.zeros(3, np.int64)
        """Chunks held, evicted so far, dropped so far because nothing could give way."""
        self._after = np.zeros(1, np.int32)
        self._before = np.zeros(1, np.int32)
        self._state = np.zeros(1, np.int8)
        self._fate = np.zeros(1, np.int8)
        self._pins = np.zeros(1, np.int16)
        self._ready = np.zeros(1)
        self._busy = np.zeros(1)

    @property
    def used(self) -> int:
        """Chunks held, those on their way included."""
        return int(self.counts[0])

    def know(self, count: int) -> None:
        """Makes room for chunk ids below `count`."""
        size = len(self._state)
        if count + 1 > size:
            more = max(count + 1, 2 * size) - size
            for name in ("_after", "_before", "_state", "_fate", "_pins", "_ready", "_busy"):
                setattr(self, name, np.pad(getattr(self, name), (0, more)))

    def prefix(self, ids: Int32s, start: int, now: float) -> int:
        """Where the run of visible chunks that begins at index `start` ends."""
        return int(_prefix(self._state, self._ready, ids, start, now))

    def touch(self, ids: Int32s, start: int, end: int) -> None:
        """Makes ``ids[start:end]`` the newest, the first of them newer than the last (LRU only)."""
        if self.policy == "lru":
            _touch(self._after, self._before, self._state, ids, start, end)

    def missing(self, ids: Int32s, start: int, end: int) -> int:
        """How many of ``ids[start:end]`` are not held."""
        return int(_missing(self._state, ids, start, end))

    def insert(self, ids: Int32s, start: int, end: int, now: float, ready: float, each: float = 0.0) -> float:
        """Stores those of ``ids[start:end]`` that are not held, evicting what is due.

        What finds no room is dropped: entries that are pinned, still on their way or stored by this very call
        do not give way.

        Args:
            now: time of the call; entries whose store or staging ends later are still on their way.
            ready: when the first stored chunk is visible.
            each: seconds between one and the next.

        Returns:
            When the last one is visible.
        """
        return float(
            _insert(
                self._after, self._before, self._state, self._fate, self._pins, self._ready, self._busy, self.counts,
                ids, start, end, now, ready, each, self.capacity,
            )
        )  # fmt: skip

    def keep_until(self, ids: Int32s, start: int, end: int, lower: ChunkCache) -> None:
        """Keeps chunks from eviction until `lower` has them (they are its staging buffer)."""
        _keep_until(self._state, self._busy, ids, start, end, lower._state, lower._ready)

    def room(self, count: int, now: float) -> int:
        """How many of `count` more chunks fit at `now`, evicting what may be evicted."""
        free = self.capacity - self.used
        if count <= free:
            return count
        return free + int(_evictable(self._after, self._pins, self._busy, now, count - free))

    def room_at(self, count: int, now: float) -> float:
        """The earliest time from `now` on at which `count` more chunks fit, evicting what may be evicted."""
        most = min(count, self.capacity)
        short = most - self.room(most, now)
        if not short:
            return now
        held = self._state == PRESENT
        waits = np.sort(self._busy[held & (self._pins == 0) & (self._busy > now)])
        return float(waits[min(short, len(waits)) - 1]) if len(waits) else now

    def pin(self, ids: Int32s, start: int, end: int, by: int) -> None:
        """Protects chunks from eviction (`by` = 1), or ends that (`by` = -1)."""
        self._pins[ids[start:end] + 1] += by

    def on_the_way(self, ids: Int32s, now: float, served: npt.NDArray[np.bool_], late: npt.NDArray[np.bool_]) -> None:
        """Marks which chunks are `served` at `now`, and which are `late`: their last store dropped or unfinished."""
        _on_the_way(self._state, self._fate, self._ready, ids, now, served, late)

    def clear(self) -> None:
        """Empties the tier."""
        self._state[:] = ABSENT
        self._pins[:] = 0
        self._after[0] = self._before[0] = 0
        self.counts[0] = 0


@numba.njit(cache=True)
def _prefix(state, ready, ids, start, now):  # type: ignore[no-untyped-def]  # pragma: no cover
    end = start
    while end < len(ids) and state[ids[end] + 1] == PRESENT and ready[ids[end] + 1] <= now:
        end += 1
    return end


@numba.njit(cache=True)
def _touch(after, before, state, ids, start, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(end - 1, start - 1, -1):
        entry = ids[index] + 1
        if state[entry] == PRESENT:
            unlink(after, before, entry)
            append(after, before, entry)


@numba.njit(cache=True)
def _missing(state, ids, start, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    count = 0
    for index in range(start, end):
        count += state[ids[index] + 1] == ABSENT
    return count


@numba.njit(cache=True)
def _insert(  # type: ignore[no-untyped-def]  # pragma: no cover
    after, before, state, fate, pins, ready, busy, counts, ids, start, end, now, first, each, capacity
):
    time = first
    candidate = after[0]
    own = -1
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT:
            continue
        if counts[0] >= capacity:
            while candidate > 0 and candidate != own and (pins[candidate] > 0 or busy[candidate] > now):
                candidate = after[candidate]
            if candidate in (0, own):
                counts[2] += 1
                fate[entry] = DROPPED
                continue
            victim, candidate = candidate, after[candidate]
            unlink(after, before, victim)
            state[victim] = ABSENT
            counts[0] -= 1
            counts[1] += 1
        append(after, before, entry)
        if own < 0:
            own = entry
        state[entry], fate[entry] = PRESENT, KEPT
        ready[entry] = busy[entry] = time
        counts[0] += 1
        time += each
    return time - each if time > first else first


@numba.njit(cache=True)
def _evictable(after, pins, busy, now, most):  # type: ignore[no-untyped-def]  # pragma: no cover
    count, entry = 0, after[0]
    while entry > 0 and count < most:
        count += pins[entry] <= 0 and busy[entry] <= now
        entry = after[entry]
    return count


@numba.njit(cache=True)
def _on_the_way(state, fate, ready, ids, now, served, late):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(len(ids)):
        entry = ids[index] + 1
        here = state[entry] == PRESENT
        served[index] |= here and ready[entry] <= now
        late[index] |= fate[entry] == DROPPED or (here and ready[entry] > now)


@numba.njit(cache=True)
def _keep_until(state, busy, ids, start, end, lower_state, lower_ready):  # type: ignore[no-untyped-def]  # pragma: no cover
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT and lower_state[entry] == PRESENT:
            busy[entry] = max(busy[entry], lower_ready[entry])


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
    ):
        """Empty tiers.

        Args:
            tiers: names and sizes.
            links: the link of each.
            connector: ``lmcache`` or ``offload``; decides how lookups and stores work.
            chunk_tokens: tokens of one entry.
            token_bytes: KV bytes of one token.
        """
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * token_bytes
        self.from_start = connector == "lmcache"
        """A lookup walks from the first chunk, whatever the GPU holds."""
        self.stores_output = connector == "offload"
        """Chunks of the output are stored too, and GPU blocks are held until that has ended."""
        self.tiers = [
            Tier(ChunkCache(name, int(tier.gib * 2**30 // self.chunk_bytes), tier.policy), links[name])
            for name, tier in tiers
        ]

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
            end = tier.cache.prefix(ids, place, now)
            if max(place, begin) < end:
                hit.parts.append((tier, max(place, begin), end))
            if self.from_start:
                tier.cache.touch(ids, place, end)
            else:
                tier.cache.touch(ids, 0, len(ids))
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
        if below and top.name == "cpu":
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
        return sum(tier.link.busy_launch_s for tier in self.tiers if tier.store_free > now)

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
            count = tier.cache.missing(ids, begin, end)
            if depth == 0 and len(self.tiers) > 1 and self.from_start:
                short = max(0, count - tier.cache.room(count, handed))
                count, end = count - short, end - short
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
            top.touch(ids, 0, end)
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
