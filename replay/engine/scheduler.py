"""Continuous batching with chunked prefill, as a state machine that knows the time of every step.

Follows vLLM v1 (``vllm/v1/core/sched/scheduler.py``): each step gives a token to every decoding
request, then prefill chunks to running requests, then admits waiting ones in order of arrival while
tokens of the step's budget are left. A waiting request is admitted when its whole prompt fits the free
blocks (``scheduler_reserve_full_isl``, on by default), although only its chunk is allocated. Where
blocks run out, the request that was admitted last is preempted: it loses its blocks and returns to the
head of the queue.

Steps in which nothing can change (only decoding, up to the next finished request or shortage of
blocks) are taken together: a *stretch*. `cut` shortens one when a request arrives in its midst. The steps
of a prefill that uses up their budget are taken together too; no arrival can change those.

The engine schedules asynchronously (``async_scheduling``, vLLM's default; ``EngineCore.step_with_batch_queue``):
a step is *decided*, and its kernels are launched, while the step before it runs. So a request that arrives
during a step misses the next one too, blocks are free one step after their request has ended, and the CPU
time of a launch shows only where the GPU has nothing left to do.
"""

from __future__ import annotations

from replay.engine.job import Job
from replay.engine.losses import attribute
from replay.engine.steps import Steps
from replay.engine.stretch import Stretch
from replay.engine.tier import Hit


class Scheduler(Steps):
    """Decides what each step of one engine instance does."""

    def begin(self, now: float) -> float | None:
        """Starts the next steps; returns when they end, or None if nothing can run at `now`.

        After None, call again at `wake` or when a request arrives.
        """
        end = self._begin(now)
        if end is None:
            self._write_back(now)
        self._poll_loads()
        self._deliver(now if end is None else max(now, self._launched))
        return (
            self._prefill_on(end)
            if end is not None and self.skip and self.ahead and not self.notes_evictions and len(self._prefill) == 1
            else end
        )

    def _begin(self, now: float) -> float | None:
        self._gpu_free = now
        self._loaded = 0.0
        waited = bool(self.waiting) and self.waiting[0].arrived <= self._decided
        decided = self._decided if self._decoding or self._prefill or waited else max(now, self._decided)
        if not self.running:
            for job in self.loading:
                job.loaded = job.busy_until
        self._release_due(decided)
        self._drop_if_stuck(decided)
        if self.tiers and self.tiers.fetches:
            self._fetch(decided)
        context = int(self.pool.tokens[self._slots].sum())
        preempted = self._decode_one()
        if preempted:
            context = int(self.pool.tokens[self._slots].sum()) - len(self._slots)
        batch = len(self._slots)
        budget = self.max_batched_tokens - batch
        work: list[tuple[Job, int, int]] = []
        for job in list(self._prefill):
            budget -= self._continue(job, budget, work)
        ready = decided
        self._lacks = -1
        if not preempted:
            ready = self._admit(work, budget, decided)
        if not work and not batch:
            if decided >= now:
                return self._begin(now) if preempted else None
            self._decided = now
            return self._begin(now)
        if not work:
            together = self.skip and not (preempted or self.notes_evictions or self._comes_closer())
            return self._stretch(now, batch, context, decided, together)
        prefill = [(new, cached) for _, new, cached in work]
        launch, seconds = self.cost.launch_seconds(prefill, batch), self.cost.work_seconds(prefill, batch, context)
        end = self._run(work, now, ready, launch, seconds)
        self._now = Stretch(now, end)
        return end

    def finish(self) -> list[Job]:
        """Ends the steps under way; returns the requests that have ended, in order of admission."""
        stretch = self._under_way()
        self._now = None
        self._decided = max(self._launched, stretch.after(stretch.steps - 1))
        self.steps += stretch.steps
        if stretch.steps > 1:
            self.pool.decode(self._slots, stretch.steps - 1)
        done: list[Job] = []
        changed = self._end_prefill()
        for index in (self.pool.tokens[self._slots] >= self._goals).nonzero()[0]:
            job = self._decoding[index]
            self._end(job, stretch.end)
            done.append(job)
        self._tokens_of = (changed, done)
        if done:
            ended = set(map(id, done))
            self.running = [job for job in self.running if id(job) not in ended]
        if done or changed:
            self._list_decoding()
        return done

    def _decode_one(self) -> bool:
        """Gives every decoding request room for one token; preempts where blocks are short."""
        preempted = False
        while self.pool.needed(self._slots, 1) > self.pool.free:
            self._preempt(self.running[-1])
            preempted = True
        self.pool.decode(self._slots, 1)
        return preempted

    def _continue(self, job: Job, budget: int, work: list[tuple[Job, int, int]]) -> int:
        """Gives a running request its next prefill chunk; returns its tokens.

        Only the request admitted last can still be in prefill, so where blocks are short it preempts itself.
        """
        cached = int(self.pool.tokens[job.slot])
        new = min(job.total - cached, budget)
        if new <= 0:
            return 0
        if self.pool.blocks_for(cached + new) - int(self.pool.held[job.slot]) > self.pool.free:
            self._preempt(job)
            return 0
        self.pool.extend(job.slot, cached + new)
        work.append((job, new, cached))
        return new

    def _admit(self, work: list[tuple[Job, int, int]], budget: int, now: float) -> float:
        """Admits waiting requests; returns when loads that the step waits for have ended."""
        ready = now
        while budget > 0 and len(self.running) < self.max_seqs:
            job = next((job for job in self.loading if job.loaded is not None and job.loaded <= now), None)
            if job is not None:
                if not self._resume(job):
                    break
            elif self.waiting:
                job = self.waiting[0]
                if job.arrived > now:
                    break
                admitted = self._look_up(job, now, ready)
                if admitted is None:
                    break
                self.waiting.popleft()
                if not self._blocking(job.hit):
                    self.loading.append(job)
                    job.loaded = None
                    continue
                if self._layerwise:
                    self._loaded = max(self._loaded, admitted)
                else:
                    ready = max(ready, admitted)
            else:
                break
            cached = int(self.pool.tokens[job.slot])
            new = min(job.total - cached, budget)
            self.pool.extend(job.slot, cached + new)
            self.running.append(job)
            self._prefill.append(job)
            work.append((job, new, cached))
            budget -= new
        return ready

    def _fetch(self, now: float) -> None:
        """Has storage send KV of requests that have come; those that wait for it let others pass."""
        pool, tiers = self.pool, self.tiers
        assert tiers is not None
        for job in [job for job in self.waiting if not job.asked and job.arrived <= now]:
            job.asked = True
            self._open(job)
            hits, _ = pool.match(job.slot, (job.total - 1) // pool.block_tokens)
            chunks = job.chunks[: self._full_chunks(job.total)]
            job.prefetch = tiers.prefetch(chunks, hits * pool.block_tokens, now)
            if job.prefetch and job.prefetch.ready > now:
                job.load_s += job.prefetch.ready - now
                self.waiting.remove(job)
                self.fetching.append(job)
        for job in [job for job in self.fetching if job.prefetch and job.prefetch.ready <= now]:
            self.fetching.remove(job)
            later = (place for place, other in enumerate(self.waiting) if other.arrived > job.arrived)
            self.waiting.insert(next(later, len(self.waiting)), job)

    def _look_up(self, job: Job, now: float, ready: float) -> float | None:
        """Finds what the tiers hold of a waiting request and allocates it; None: it does not fit yet.

        Returns:
            When its KV from lower tiers is loaded; `ready` if there is none.
        """
        pool = self.pool
        self._open(job)
        hits, idle = pool.match(job.slot, (job.total - 1) // pool.block_tokens)
        gpu = hits * pool.block_tokens
        if pool.blocks_for(job.total) - hits + idle > pool.free:
            self._lacks = hits if hits < (job.total - 1) // pool.block_tokens else -1
            return None
        pool.hold(job.slot, hits)
        job.hit = hit = self.tiers.lookup(job.chunks[: self._full_chunks(job.total)], gpu, now) if self.tiers else Hit()
        job.met = max(gpu, hit.chunks * self._chunk_tokens)
        most = job.total - 1
        if pool.radix:  # SGLang serves whole pages only
            most -= most % pool.block_tokens
            hit.parts = [(tier, begin, min(end, most // pool.block_tokens)) for tier, begin, end in hit.parts]
        external = max(0, min(hit.chunks * self._chunk_tokens, most) - gpu) if hit.parts else 0
        if not self.tiers or external < self.tiers.how.least_load:
            external = 0
            hit.parts.clear()
        if self.tiers and job.prefetch:
            self.tiers.end_prefetch(job.chunks, job.prefetch, now)
        if job.served is None:
            attribute(job, gpu, external, self.pool, self.tiers, now)
        job.stored = max(job.stored, hit.chunks)
        job.known = gpu + external
        if not external or not self.tiers:
            return ready
        blocking = self._blocking(hit)
        pool.extend(job.slot, gpu + external, label=blocking)
        self.tiers.pin(job.chunks, hit)
        # LMCache copies slot mappings on the stream that computes, and so waits for the step under way.
        start = max(ready, self._gpu_free) if blocking and not self._layerwise else now
        job.busy_until = self.tiers.load(job.chunks, hit, start)
        job.load_s += job.busy_until - start
        if blocking:
            self.tiers.unpin(job.chunks, hit, loaded=True)
        return job.busy_until

    def _resume(self, job: Job) -> bool:
        """Lets a request whose load has ended run, if the rest of its prompt fits."""
        pool = self.pool
        if pool.blocks_for(job.total) - int(pool.held[job.slot]) > pool.free:
            return False
        self.loading.remove(job)
        if self.tiers:
            self.tiers.unpin(job.chunks, job.hit, loaded=True)
        pool.label(job.slot)
        return True

    def _drop_if_stuck(self, now: float) -> None:
        """Requests that have loaded KV may hold the blocks that the first of them needs: the last gives way."""
        if self.running or self._releases or any(job.busy_until > now for job in self.loading):
            return
        pool = self.pool
        while len(self.loading) > 1:
            first = self.loading[0]
            if pool.blocks_for(first.total) - int(pool.held[first.slot]) <= pool.free:
                return
            job = self.loading[-1]
            self._let_go(job)
            self.loading.remove(job)
            job.preemptions += 1
            self.waiting.appendleft(job)

    def _blocking(self, hit: Hit) -> bool:
        return all(tier.link.blocking_load for tier, _, _ in hit.parts)

    @property
    def _layerwise(self) -> bool:
        """Whether a step computes the first layers while the others are loaded."""
        return self.tiers is not None and self.tiers.how.loads == "layerwise"
