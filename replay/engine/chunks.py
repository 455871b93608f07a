"""One cache tier below GPU memory: which chunks it holds, and which of them give way."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from replay.engine.connectors import Loop
from replay.engine.lru import Int32s, append, unlink
from replay.engine.pool import BlockPool

ABSENT, PRESENT = 0, 1
KEPT, DROPPED = 1, 2
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
        return int(_prefix(self._state, self._ready, ids, start, now))

    def touch(self, ids: Int32s, start: int, end: int, now: float) -> None:
        """Notes a use of ``ids[start:end]``: all become the newest, the first newer than the last (not in FIFO)."""
        if self.policy != "fifo":
            _touch(self._after, self._before, self._state, ids, start, end)
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
            _take_out(
                self._after, self._before, self._state, self._pins, self._busy, self.counts, times, until, most, now
            )
        )

    def _first_use(self, ids: Int32s, start: int, end: int) -> None:
        """Counts the insert of what is not held as its first use: what left has lost its count."""
        entries = ids[start:end] + 1
        self._uses[entries[self._state[entries] == ABSENT]] = 1

    def _rare_first(self, count: int, now: float) -> None:
        """Moves the `count` least used chunks that may be evicted to the front of the list."""
        _rare_first(self._after, self._before, self._pins, self._busy, self._uses, count, self.used, now)

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
        if self.policy == "lfu":
            new = int(self.missing(ids, start, end))
            if self.used + new > self.capacity:
                self._rare_first(self.used + new - self.capacity, now)
            self._first_use(ids, start, end)
        if self.ttl_s is not None:
            self._used_at[ids[start:end] + 1] = now
        return float(
            _insert(
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
        _keep_until(self._state, self._busy, ids, start, end, lower._state, lower._ready)

    def room(self, count: int, now: float) -> int:
        """How many of `count` more chunks fit at `now`, evicting what may be evicted."""
        free = self.capacity - self.used
        if count <= free:
            return count
        if self.watermark is not None or self.policy == "none":
            return free
        return free + int(_evictable(self._after, self._pins, self._busy, now, count - free, self._above()[0]))

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
        self.left += int(_give_up(self._after, self._before, self._state, self._pins, self.counts, ids, start, end))

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
        above = self._above()[0]
        _evict_doubles(self._after, self._before, self._state, self._pins, self._busy, self.counts, above, count, now)

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
    after, before, state, fate, pins, ready, busy, counts, ids, start, end, now, first, each, capacity, evict,
    above, leaf,
):  # fmt: skip
    time = first
    candidate = after[0]
    own = -1
    tree = len(above) > 0
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT:
            continue
        if counts[0] >= capacity:
            if not evict:
                candidate = 0
            while (
                candidate > 0
                and candidate != own
                and (pins[candidate] > 0 or busy[candidate] > now or (tree and above[candidate - 1] >= 0))
            ):
                candidate = after[candidate]
            if candidate in (0, own):
                counts[2] += 1
                fate[entry] = DROPPED
                continue
            whole = leaf[candidate - 1] if tree else 0
            while True:
                victim, candidate = candidate, after[candidate]
                unlink(after, before, victim)
                state[victim] = ABSENT
                counts[0] -= 1
                counts[1] += 1
                if not whole or candidate in (0, own) or leaf[candidate - 1] != whole:
                    break
                if pins[candidate] > 0 or busy[candidate] > now or above[candidate - 1] >= 0:
                    break
        append(after, before, entry)
        if own < 0:
            own = entry
        state[entry], fate[entry] = PRESENT, KEPT
        ready[entry] = busy[entry] = time
        counts[0] += 1
        time += each
    return time - each if time > first else first


@numba.njit(cache=True)
def _take_out(  # type: ignore[no-untyped-def]  # pragma: no cover
    after, before, state, pins, busy, counts, times, until, most, now
):
    taken, entry = 0, after[0]
    while entry > 0 and taken < most:
        following = after[entry]
        if pins[entry] <= 0 and busy[entry] <= now and times[entry] <= until:
            unlink(after, before, entry)
            state[entry] = ABSENT
            taken += 1
        entry = following
    counts[0] -= taken
    counts[1] += taken
    return taken


@numba.njit(cache=True)
def _rare_first(after, before, pins, busy, uses, count, held, now):  # type: ignore[no-untyped-def]  # pragma: no cover
    entries, size = np.empty(held, np.int32), 0
    entry = after[0]
    while entry > 0:
        if pins[entry] <= 0 and busy[entry] <= now:
            entries[size] = entry
            size += 1
        entry = after[entry]
    order = np.argsort(uses[entries[:size]], kind="mergesort")
    for index in range(min(count, size) - 1, -1, -1):
        entry = entries[order[index]]
        unlink(after, before, entry)
        oldest = after[0]
        before[oldest], after[entry] = entry, oldest
        before[entry], after[0] = 0, entry


@numba.njit(cache=True)
def _evictable(after, pins, busy, now, most, above):  # type: ignore[no-untyped-def]  # pragma: no cover
    count, entry = 0, after[0]
    while entry > 0 and count < most:
        count += pins[entry] <= 0 and busy[entry] <= now and (len(above) == 0 or above[entry - 1] < 0)
        entry = after[entry]
    return count


@numba.njit(cache=True)
def _give_up(after, before, state, pins, counts, ids, start, end):  # type: ignore[no-untyped-def]  # pragma: no cover
    gone = 0
    for index in range(start, end):
        entry = ids[index] + 1
        if state[entry] == PRESENT and pins[entry] <= 0:
            unlink(after, before, entry)
            state[entry] = ABSENT
            gone += 1
    counts[0] -= gone
    return gone


@numba.njit(cache=True)
def _evict_doubles(  # type: ignore[no-untyped-def]  # pragma: no cover
    after, before, state, pins, busy, counts, above, most, now
):
    taken, entry = 0, after[0]
    while entry > 0 and taken < most:
        following = after[entry]
        if pins[entry] <= 0 and busy[entry] <= now and above[entry - 1] >= 0:
            unlink(after, before, entry)
            state[entry] = ABSENT
            taken += 1
        entry = following
    counts[0] -= taken
    counts[1] += taken


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
