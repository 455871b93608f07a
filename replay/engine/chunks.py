"""One cache tier below GPU memory: which chunks it holds, and which of them give way."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from replay.engine import chunk_kernel as kernel
from replay.engine.chunk_kernel import ABSENT, DROPPED, PRESENT
from replay.engine.connectors import Loop
from replay.engine.lru import Int32s
from replay.engine.pool import BlockPool

NO_IDS: Int32s = np.empty(0, np.int32)


class ChunkCache:
    """One tier: which chunks it holds, in order of eviction, and never more than fit.

    Entry ``id + 1`` of each array belongs to chunk `id`; entry 0 is the list's sentinel.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        policy: str = "lru",
        watermark: float | None = None,
        evict_ratio: float = 0.2,
        ttl_s: float | None = None,
        loop: Loop | None = None,
        lease_s: float = 0.0,
        under: BlockPool | None = None,
    ):
        """An empty tier.

        Args:
            name: ``cpu``, ``disk`` or ``remote``.
            capacity: chunks that fit.
            policy: ``lru``; ``fifo``, which a hit does not move; or ``lfu``: the one with the fewest uses gives
                way first, among equals the one not used for longest; or ``none``: nothing gives way.
            watermark: used share above which the loop evicts; null: an insert evicts what it needs.
            evict_ratio: share of what is held that one run of the loop evicts.
            ttl_s: seconds after its last use at which a chunk goes; null: never.
            loop: how often it runs; null: once a second.
            lease_s: seconds for which a use keeps a chunk from being evicted.
            under: the GPU tier, where it is a radix tree over the same ids: what it holds does not give way here, and
                leaves of the tree give way whole.
        """
        self.name = name
        self.capacity = capacity
        self.policy = policy
        self.watermark = watermark
        self.evict_ratio = evict_ratio
        self.ttl_s = ttl_s
        self.lease_s = lease_s
        self.ages = watermark is not None or ttl_s is not None
        """Whether chunks go with time alone."""
        self.left = 0
        """Chunks that have left so far, for the tier above or when they were only on their way."""
        self._loop = loop or Loop(1.0)
        self._under = under
        self._tick = self._loop.period_s
        """When the eviction loop runs next."""
        self.counts = np.zeros(3, np.int64)
        """Chunks held, evicted so far, dropped so far because nothing could give way."""
        self._after = np.zeros(1, np.int32)
        self._before = np.zeros(1, np.int32)
        self._state = np.zeros(1, np.int8)
        self._fate = np.zeros(1, np.int8)
        self._pins = np.zeros(1, np.int16)
        self._ready = np.zeros(1)
        self._busy = np.zeros(1)
        self._uses = np.zeros(1, np.int32)
        self._used_at = np.zeros(1)

    @property
    def used(self) -> int:
        """Chunks held, those on their way included."""
        return int(self.counts[0])

    def know(self, count: int) -> None:
        """Makes room for chunk ids below `count`."""
        size = len(self._state)
        if count + 1 > size:
            more = max(count + 1, 2 * size) - size
            for name in ("_after", "_before", "_state", "_fate", "_pins", "_ready", "_busy", "_uses", "_used_at"):
                setattr(self, name, np.pad(getattr(self, name), (0, more)))

    def prefix(self, ids: Int32s, start: int, now: float) -> int:
        """Where the run of visible chunks that begins at index `start` ends."""
        return int(kernel.prefix(self._state, self._ready, ids, start, now))

    def touch(self, ids: Int32s, start: int, end: int, now: float) -> None:
        """Notes a use of ``ids[start:end]``: all become the newest, the first newer than the last (not in FIFO)."""
        if self.policy != "fifo":
            kernel.touch(self._after, self._before, self._state, ids, start, end)
        if self.policy == "lfu":
            self._uses[ids[start:end] + 1] += 1
        if self.ttl_s is not None:
            self._used_at[ids[start:end] + 1] = now
        if self.lease_s:
            entries = ids[start:end] + 1
            self._busy[entries] = np.maximum(self._busy[entries], now + self.lease_s)

    def pass_time(self, now: float) -> None:
        """Takes out what has gone by `now` with time alone: expired chunks, and what the eviction loop took."""
        if self.ttl_s is not None:
            self._take_out(self._used_at, now - self.ttl_s, self.capacity, now)
        if self.watermark is None:
            return
        period = self._loop.period_s
        while self._tick <= now and self.used > self.watermark * self.capacity:
            share = self.evict_ratio
            if self._loop.excess_too:
                share += self.used / self.capacity - self.watermark
            if not self._evict(max(1, int(share * self.used)), self._tick):
                may_go = self._busy[(self._state == PRESENT) & (self._pins <= 0)]
                self._tick = float(np.ceil(may_go.min(initial=np.inf) / period)) * period
                continue
            self._tick += period
        self._tick = max(self._tick, (float(np.floor(now / period)) + 1.0) * period)

    def _evict(self, count: int, now: float) -> int:
        """Evicts up to `count` chunks that may be evicted at `now`; returns how many."""
        if self.policy == "lfu":
            self._rare_first(count, now)
        return self._take_out(self._busy, now, count, now)

    def _take_out(self, times: npt.NDArray[np.float64], until: float, most: int, now: float) -> int:
        """Evicts the first chunks that are not pinned or busy and whose time is `until` at the latest."""
        return int(
            kernel.take_out(
                self._after, self._before, self._state, self._pins, self._busy, self.counts, times, until, most, now
            )
        )

    def _first_use(self, ids: Int32s, start: int, end: int) -> None:
        """Counts the insert of what is not held as its first use: what left has lost its count."""
        entries = ids[start:end] + 1
        self._uses[entries[self._state[entries] == ABSENT]] = 1

    def _rare_first(self, count: int, now: float) -> None:
        """Moves the `count` least used chunks that may be evicted to the front of the list."""
        kernel.rare_first(self._after, self._before, self._pins, self._busy, self._uses, count, self.used, now)

    def missing(self, ids: Int32s, start: int, end: int) -> int:
        """How many of ``ids[start:end]`` are not held."""
        return int(kernel.missing(self._state, ids, start, end))

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
        if self.policy == "lfu":
            new = int(self.missing(ids, start, end))
            if self.used + new > self.capacity:
                self._rare_first(self.used + new - self.capacity, now)
            self._first_use(ids, start, end)
        if self.ttl_s is not None:
            self._used_at[ids[start:end] + 1] = now
        return float(
            kernel.insert(
                self._after, self._before, self._state, self._fate, self._pins, self._ready, self._busy, self.counts,
                ids, start, end, now, ready, each, self.capacity,
                self.watermark is None and self.policy != "none", *self._above(),
            )
        )  # fmt: skip

    def _above(self) -> tuple[Int32s, Int32s]:
        """By id, the block of the GPU tier that holds it, and the leaf that it belongs to; empty: of no account."""
        return (self._under.first, self._under.leaf) if self._under else (NO_IDS, NO_IDS)

    def drop(self, ids: Int32s, start: int, end: int) -> None:
        """Notes that those of ``ids[start:end]`` that are not held were to be stored and found no room."""
        entries = ids[start:end] + 1
        absent = entries[self._state[entries] == ABSENT]
        self._fate[absent] = DROPPED
        self.counts[2] += len(absent)

    def keep_until(self, ids: Int32s, start: int, end: int, lower: ChunkCache) -> None:
        """Keeps chunks from eviction until `lower` has them (they are its staging buffer)."""
        kernel.keep_until(self._state, self._busy, ids, start, end, lower._state, lower._ready)

    def room(self, count: int, now: float) -> int:
        """How many of `count` more chunks fit at `now`, evicting what may be evicted."""
        free = self.capacity - self.used
        if count <= free:
            return count
        if self.watermark is not None or self.policy == "none":
            return free
        return free + int(kernel.evictable(self._after, self._pins, self._busy, now, count - free, self._above()[0]))

    def room_at(self, count: int, now: float) -> float:
        """The earliest time from `now` on at which `count` more chunks fit, evicting what may be evicted."""
        most = min(count, self.capacity)
        short = most - self.room(most, now)
        if not short:
            return now
        held = self._state == PRESENT
        waits = np.sort(self._busy[held & (self._pins == 0) & (self._busy > now)])
        return float(waits[min(short, len(waits)) - 1]) if len(waits) else now

    def give_up(self, ids: Int32s, start: int, end: int) -> None:
        """Lets go of those of ``ids[start:end]`` that nobody is loading: the tier above has them."""
        lists = self._after, self._before, self._state, self._pins
        self.left += int(kernel.give_up(*lists, self.counts, ids, start, end))

    def give_up_unread(self, ids: Int32s, start: int, end: int, now: float) -> None:
        """Lets go of those of ``ids[start:end]`` that are still on their way at `now`."""
        late = ids[start:end][self._ready[ids[start:end] + 1] > now]
        self.give_up(late, 0, len(late))

    def let_through(self, now: float) -> None:
        """Lets go of all that is no longer on its way at `now`: the tier is a buffer."""
        before = self.counts[1]
        self.left += self._take_out(self._busy, now, self.used, now)
        self.counts[1] = before

    def evict_doubles(self, count: int, now: float) -> None:
        """Evicts up to `count` chunks that the GPU tier holds too."""
        lists = self._after, self._before, self._state, self._pins, self._busy
        kernel.evict_doubles(*lists, self.counts, self._above()[0], count, now)

    def pin(self, ids: Int32s, start: int, end: int, by: int) -> None:
        """Protects chunks from eviction (`by` = 1), or ends that (`by` = -1)."""
        self._pins[ids[start:end] + 1] += by

    def on_the_way(self, ids: Int32s, now: float, served: npt.NDArray[np.bool_], late: npt.NDArray[np.bool_]) -> None:
        """Marks which chunks are `served` at `now`, and which are `late`: their last store dropped or unfinished."""
        kernel.on_the_way(self._state, self._fate, self._ready, ids, now, served, late)

    def clear(self) -> None:
        """Empties the tier."""
        self._state[:] = ABSENT
        self._pins[:] = 0
        self._after[0] = self._before[0] = 0
        self.counts[0] = 0
