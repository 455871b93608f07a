"""Which tier served each prompt token, and why an ideal token was not served.

Loss is what an unbounded cache would have served and this one did not. Each lost token has one cause:

- ``granularity``: no cache with these blocks and chunks could have served it (the rest of a block or
  chunk, the last prompt token, which always runs, and the last generated one, which never did);
- ``never_stored``: nothing had stored it when the request was admitted;
- ``evicted``: it was stored, and is gone or lies behind a block that is gone;
- ``cold``: the same, but a reset or restart took it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np

from replay.engine.pool import BlockPool
from replay.engine.pool_kernel import NEVER
from replay.engine.tiers import TierStack

if TYPE_CHECKING:
    from replay.engine.job import Job

CAUSES = ("never_stored", "evicted", "cold", "granularity")
"""Cause by the history of a block that is not resident: `NEVER`, `STORED`, `BEFORE_RESET`, `UNFINISHED`."""


def attribute(job: Job, gpu: int, external: int, pool: BlockPool, tiers: TierStack | None, now: float) -> None:
    """Fills in `job.served` and `job.lost`.

    Args:
        job: a request being admitted at `now`; `job.hit` is what lower tiers held.
        gpu: prompt tokens served by the GPU.
        external: prompt tokens served by lower tiers, after those.
    """
    served = gpu + external
    job.served = {"gpu": gpu, **_by_tier(job, gpu, served, tiers), "computed": job.prompt - served}
    lost = job.ideal - served
    if lost < 0 and tiers and (tiers.shared or job.prefetch):
        # Another instance, or a request that has passed this one, has computed meanwhile what was sent after it.
        job.lost = dict.fromkeys(CAUSES, 0)
        return
    if lost < 0:
        raise RuntimeError(f"a request was served {served} tokens, more than the {job.ideal} that anyone had sent")
    size = pool.block_tokens
    reachable = max(served, min(job.ideal, job.prompt - 1) // size * size)
    if external and tiers and served // tiers.chunk_tokens == job.ideal // tiers.chunk_tokens:
        reachable = served
    counts = np.zeros(len(CAUSES), np.int64)
    first, end = served // size, reachable // size
    if first < end:
        on_the_way, per_chunk = np.zeros(0, np.bool_), end
        if tiers:
            per_chunk = tiers.chunk_tokens // size
            on_the_way = tiers.on_the_way(job.chunks[: -(-end // per_chunk)], now)
        _count(pool.history, pool.first, pool.ids(job.slot), first, end, on_the_way, per_chunk, counts)
    job.lost = dict(zip(CAUSES, (counts * size).tolist(), strict=True))
    job.lost["granularity"] += job.ideal - reachable


@numba.njit(cache=True)
def _count(history, resident, ids, begin, end, on_the_way, per_chunk, counts):  # type: ignore[no-untyped-def]  # pragma: no cover
    cause, index = -1, begin
    while index < end:
        chunk = index // per_chunk
        late = chunk < len(on_the_way) and on_the_way[chunk]
        for block in ids[index : min(end, (chunk + 1) * per_chunk)]:
            if cause < 0 or resident[block] < 0:
                cause = NEVER if late else history[block]
            counts[cause] += 1
        index = (chunk + 1) * per_chunk


def _by_tier(job: Job, gpu: int, served: int, tiers: TierStack | None) -> dict[str, int]:
    if not tiers:
        return {}
    size = tiers.chunk_tokens
    tokens = {tier.name: 0 for tier in tiers.tiers}
    for tier, begin, end in job.hit.parts:
        tokens[tier.name] += min(end * size, served) - max(begin * size, gpu)
        if job.prefetch:
            first, last = max(begin, job.prefetch.begin), min(end, job.prefetch.end)
            fetched = max(0, min(last * size, served) - max(first * size, gpu))
            tokens[tier.name] -= fetched
            tokens[job.prefetch.tier.name] += fetched
    return tokens
