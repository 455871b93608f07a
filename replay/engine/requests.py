"""The requests of one engine instance: who waits, loads and runs, and what they hold."""

from __future__ import annotations

from collections import deque

import numpy as np

from replay.engine.cost import CostModel
from replay.engine.job import Job
from replay.engine.lru import Int32s, Int64s
from replay.engine.pool import BlockPool
from replay.engine.pool_kernel import UNFINISHED
from replay.engine.power import PowerCap
from replay.engine.stretch import Stretch
from replay.engine.tiers import TierStack


class Requests:
    """State that `replay.engine.steps` and `replay.engine.scheduler` work on, and how requests leave it."""

    def __init__(
        self, pool: BlockPool, cost: CostModel, tiers: TierStack | None, max_batched_tokens: int, max_seqs: int
    ):
        """No request yet.

        Args:
            pool: the GPU tier.
            cost: times of steps and links.
            tiers: the tiers below, or none.
            max_batched_tokens: most tokens of one step.
            max_seqs: most requests that run at once.
        """
        self.pool = pool
        self.cost = cost
        self.tiers = tiers
        self.max_batched_tokens = max_batched_tokens
        self.max_seqs = max_seqs
        self.waiting: deque[Job] = deque()
        self.fetching: list[Job] = []
        """They wait for storage to send their KV to CPU memory, and return to their place in the queue."""
        self.loading: list[Job] = []
        """Admitted to load KV; they hold blocks and return to the head of the queue."""
        self.running: list[Job] = []
        """In order of admission: decoding ones and those whose prefill goes on."""
        self._prefill: list[Job] = []
        self._slots: Int32s = np.empty(0, np.int32)
        self._goals: Int64s = np.empty(0, np.int64)
        self._decoding: list[Job] = []
        self._releases: list[tuple[float, Job]] = []
        self._now: Stretch | None = None
        self._lacks = -1
        """Block of its prompt that the first waiting request, which does not fit, has to compute first; -1: none."""
        self._decided = 0.0
        """When the next step is decided: what happened later does not count in it."""
        self._launched = 0.0
        """When the CPU has launched the last step under way."""
        self._power = PowerCap(cost.fit)
        self._gpu_free = 0.0
        """When the GPU has ended the step under way."""
        self._tokens_of: tuple[list[Job], list[Job]] = ([], [])
        """Requests whose first, and whose last token came with the step that ended last."""
        self.steps = 0
        """Engine steps taken."""
        self._loaded = 0.0
        """When the last layer of what the step under way needs is loaded."""
        self.skip = True
        """False: every step is taken by itself, which changes nothing but the time that it takes."""
        self.ahead = True
        """False: no step of a long prefill is taken before its time: the tiers would see others' actions too early."""
        self.notes_evictions = tiers is not None and tiers.write != "through"
        """Whether lower tiers hear what the GPU evicts; each step is taken by itself then."""

    def drop_all(self) -> list[Job]:
        """Takes every request out, as a restart does; returns them in no useful order."""
        jobs = [*self.waiting, *self.fetching, *self.loading, *self.running]
        for job in jobs:
            self._let_go(job)
        for _, job in self._releases:
            self.pool.close(job.slot)
        self.waiting.clear()
        self.fetching.clear()
        self._releases.clear()
        self._decided = self._launched = 0.0
        self.loading, self.running, self._prefill, self._now = [], [], [], None
        self._list_decoding()
        return jobs

    def _end_prefill(self) -> list[Job]:
        """Moves requests whose prefill is complete to decoding: their next token has been generated."""
        complete = [job for job in self._prefill if self.pool.tokens[job.slot] >= job.total]
        for job in complete:
            self._prefill.remove(job)
            self._grow_tree(job, job.total)
        if complete:
            self._list_decoding()
        return complete

    def _end(self, job: Job, now: float) -> None:
        pool = self.pool
        whole = (job.goal + 1) % pool.block_tokens == 0 and len(job.blocks) > job.goal // pool.block_tokens
        if whole and pool.caching and not pool.history[job.blocks[-1]]:
            pool.history[job.blocks[-1]] = UNFINISHED
        self._grow_tree(job, job.goal)
        stored = now
        if self.tiers and self.tiers.how.holds_blocks:
            chunks = min(self._full_chunks(job.goal), len(job.chunks))
            stored = job.busy_until
            # Of what was preempted and found again, an exclusive tier may hold what the GPU computed since.
            begin = 0 if self.tiers.write == "back" else job.stored
            if chunks > begin:
                stored = max(stored, self.tiers.store(job.chunks, begin, chunks, now)[1])
        self._releases.append((max(stored, now), job))

    def _release_due(self, now: float) -> None:
        for _, job in [held for held in self._releases if held[0] <= now]:
            self.pool.close(job.slot)
        self._releases = [held for held in self._releases if held[0] > now]

    def _preempt(self, job: Job) -> None:
        """Takes the blocks of a running request; it starts again from the head of the queue."""
        self.running.remove(job)
        self._grow_tree(job, int(self.pool.tokens[job.slot]))
        if job in self._prefill:
            self._prefill.remove(job)
        else:
            job.generated = int(self.pool.tokens[job.slot]) - job.prompt + 1
            self._list_decoding()
        self.pool.release(job.slot)
        job.preemptions += 1
        self.waiting.appendleft(job)

    def _grow_tree(self, job: Job, end: int) -> None:
        """Puts what a request has computed up to a token into SGLang's radix tree: a leaf for each prefill chunk, and
        one for the output, which is put there when the request ends."""
        if self.pool.radix:
            chunks = range(job.known + self.max_batched_tokens, min(end, job.total), self.max_batched_tokens)
            self.pool.grow_tree(job.slot, job.known, job.met, [*(cut for cut in chunks if cut > job.met), end])
            job.met = max(job.met, end)

    def _deliver(self, now: float) -> None:
        """Hands out the tokens of the last step: the engine reads them once the next step is launched."""
        first, last = self._tokens_of
        for job in first:
            if job.first_token is None:
                job.first_token = now
                if job.on_first_token is not None:
                    job.on_first_token(now)
        for job in last:
            job.last_token = now
        self._tokens_of = ([], [])

    def _open(self, job: Job) -> None:
        """Gives a request its row of the block table."""
        if job.slot < 0:  # the last token is never computed, but may be a block of its own
            job.slot = self.pool.open(job.blocks, max(len(job.blocks), self.pool.blocks_for(job.goal)))

    def _let_go(self, job: Job) -> None:
        """Frees what a request holds."""
        if job in self.loading and self.tiers:
            self.tiers.unpin(job.chunks, job.hit, loaded=False)
        if job.slot >= 0:
            self.pool.close(job.slot)
            job.slot = -1

    def _list_decoding(self) -> None:
        prefill = set(map(id, self._prefill))
        self._decoding = [job for job in self.running if id(job) not in prefill]
        self._slots = np.array([job.slot for job in self._decoding], np.int32)
        self._goals = np.array([job.goal for job in self._decoding], np.int64)

    def _under_way(self) -> Stretch:
        if self._now is None:
            raise RuntimeError("no step is under way")
        return self._now

    @property
    def _chunk_tokens(self) -> int:
        return self.tiers.chunk_tokens if self.tiers else 1

    def _full_chunks(self, tokens: int) -> int:
        return tokens // self._chunk_tokens
