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

from collections import deque
from math import inf

import numpy as np

from replay.engine.cost import CostModel
from replay.engine.job import Job
from replay.engine.losses import attribute
from replay.engine.lru import Int32s, Int64s
from replay.engine.pool import UNFINISHED, BlockPool
from replay.engine.stretch import Stretch
from replay.engine.tiers import Hit, TierStack


class Scheduler:
    """Decides what each step of one engine instance does."""

    def __init__(
        self, pool: BlockPool, cost: CostModel, tiers: TierStack | None, max_batched_tokens: int, max_seqs: int
    ):
        """A scheduler without requests.

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
        self._gpu_free = 0.0
        """When the GPU has ended the step under way."""
        self._tokens_of: tuple[list[Job], list[Job]] = ([], [])
        """Requests whose first, and whose last token came with the step that ended last."""
        self.steps = 0
        """Engine steps taken."""
        self.skip = True
        """False: every step is taken by itself, which changes nothing but the time that it takes."""
        self.ahead = True
        """False: no step of a long prefill is taken before its time, as other engines share the tiers."""

    def begin(self, now: float) -> float | None:
        """Starts the next steps; returns when they end, or None if nothing can run at `now`.

        After None, call again at `wake` or when a request arrives.
        """
        end = self._begin(now)
        self._poll_loads()
        self._deliver(now if end is None else max(now, self._launched))
        return (
            self._prefill_on(end) if end is not None and self.skip and self.ahead and len(self._prefill) == 1 else end
        )

    def _begin(self, now: float) -> float | None:
        self._gpu_free = now
        decided = self._decided if self._decoding or self._prefill else max(now, self._decided)
        if not self.running:
            for job in self.loading:
                job.loaded = job.busy_until
        self._release_due(decided)
        self._drop_if_stuck(decided)
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
            return self._stretch(
                now, batch, context, decided, together=self.skip and not preempted and not self._comes_closer()
            )
        prefill = [(new, cached) for _, new, cached in work]
        launch, seconds = self.cost.launch_seconds(prefill, batch), self.cost.work_seconds(prefill, batch, context)
        end = self._run(work, now, ready, launch, seconds)
        self._now = Stretch(now, end)
        return end

    def wake(self, now: float) -> float | None:
        """When, after `now`, the next load or store ends that something waits for, or a request has come."""
        times = [job.busy_until if job.loaded is None else job.loaded for job in self.loading]
        times += [time for time, _ in self._releases]
        if self.waiting:
            times.append(self.waiting[0].arrived)
        return min((time for time in times if time > now), default=None)

    def cut(self, now: float) -> float:
        """Ends the steps under way before the first step that is decided from `now` on; returns that time."""
        stretch = self._under_way()
        low, high = 1, stretch.steps
        while low < high:
            middle = (low + high) // 2
            if stretch.after(middle - 1) >= now:
                high = middle
            else:
                low = middle + 1
        if low < stretch.steps:
            stretch.steps, stretch.end = low, stretch.after(low)
        return stretch.end

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

    def drop_all(self) -> list[Job]:
        """Takes every request out, as a restart does; returns them in no useful order."""
        jobs = [*self.waiting, *self.loading, *self.running]
        for job in jobs:
            self._let_go(job)
        for _, job in self._releases:
            self.pool.close(job.slot)
        self.waiting.clear()
        self._releases.clear()
        self._decided = self._launched = 0.0
        self.loading, self.running, self._prefill, self._now = [], [], [], None
        self._list_decoding()
        return jobs

    # -- one step ------------------------------------------------------------------------------------

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

    def _look_up(self, job: Job, now: float, ready: float) -> float | None:
        """Finds what the tiers hold of a waiting request and allocates it; None: it does not fit yet.

        Returns:
            When its KV from lower tiers is loaded; `ready` if there is none.
        """
        pool = self.pool
        if job.slot < 0:
            job.slot = pool.open(job.blocks, pool.blocks_for(job.goal))
        hits, idle = pool.match(job.slot, (job.total - 1) // pool.block_tokens)
        gpu = hits * pool.block_tokens
        if pool.blocks_for(job.total) - hits + idle > pool.free:
            self._lacks = hits if hits < (job.total - 1) // pool.block_tokens else -1
            return None
        pool.hold(job.slot, hits)
        job.hit = hit = self.tiers.lookup(job.chunks[: self._full_chunks(job.total)], gpu, now) if self.tiers else Hit()
        external = max(0, min(hit.chunks * self._chunk_tokens, job.total - 1) - gpu) if hit.parts else 0
        if not external:
            hit.parts.clear()
        if job.served is None:
            attribute(job, gpu, external, self.pool, self.tiers, now)
        job.stored = max(job.stored, hit.chunks)
        if not external or not self.tiers:
            return ready
        blocking = self._blocking(hit)
        pool.extend(job.slot, gpu + external, label=blocking)
        self.tiers.pin(job.chunks, hit, 1)
        # LMCache copies slot mappings on the stream that computes, and so waits for the step under way.
        start = max(ready, self._gpu_free) if blocking else now
        job.busy_until = self.tiers.load(job.chunks, hit, start)
        job.load_s += job.busy_until - start
        if blocking:
            self.tiers.pin(job.chunks, hit, -1)
        return job.busy_until

    def _resume(self, job: Job) -> bool:
        """Lets a request whose load has ended run, if the rest of its prompt fits."""
        pool = self.pool
        if pool.blocks_for(job.total) - int(pool.held[job.slot]) > pool.free:
            return False
        self.loading.remove(job)
        if self.tiers:
            self.tiers.pin(job.chunks, job.hit, -1)
        pool.label(job.slot)
        return True

    def _store(self, work: list[tuple[Job, int, int]], end: float) -> float:
        """Writes the chunks that a step completed through to lower tiers; returns when the step ends."""
        tiers = self.tiers
        if not tiers:
            return end
        held_up = end
        for job, new, cached in work:
            chunks = min((cached + new) // tiers.chunk_tokens, len(job.chunks))
            if chunks > job.stored:
                held_up, complete = tiers.store(job.chunks, job.stored, chunks, held_up)
                job.stored = chunks
                self.pool.remember(job.slot, chunks * tiers.chunk_tokens)
                job.busy_until = max(job.busy_until, complete)
        return held_up

    def _prefill_on(self, end: float) -> float:
        """Takes the next steps too, while a long prefill uses up their budget; returns when the last ends.

        Nothing that arrives or is loaded meanwhile can be admitted, so they need not wait for the event loop.
        They stop before the step that leaves budget over, and where a request ends or blocks are short.
        """
        pool, job, batch = self.pool, self._prefill[0], len(self._slots)
        budget = self.max_batched_tokens - batch
        cached = int(pool.tokens[job.slot])
        most = (job.total - cached) // budget
        if most and batch:
            most = min(most, int((self._goals - pool.tokens[self._slots]).min()))
        most = self._steps_that_fit(most, job, budget)
        if most <= 0:
            return end
        context = int(pool.tokens[self._slots].sum())
        launch = self.cost.launch_seconds([(budget, cached)], batch)
        seconds = self.cost.work_seconds([(budget, cached)], batch, context)
        more = self.cost.work_seconds([(budget, cached + budget)], batch, context + batch) - seconds
        release = min((time for time, _ in self._releases), default=inf)
        start = self._under_way().start
        steps = taken = 0
        while steps < most:
            decided = max(self._launched, start)
            if decided >= release:
                pool.prefill(job.slot, budget, self._slots, steps - taken)
                taken = steps
                self._release_due(decided)
                release = min((time for time, _ in self._releases), default=inf)
            start = end
            end = self._run([(job, budget, cached)], start, decided, launch, seconds + steps * more)
            self._now = Stretch(start, end)
            self._poll_loads()
            cached += budget
            steps += 1
        pool.prefill(job.slot, budget, self._slots, steps - taken)
        self.steps += steps
        return end

    def _run(self, work: list[tuple[Job, int, int]], now: float, ready: float, launch: float, seconds: float) -> float:
        """When a step with prefill ends that is launched from `ready` on, for `launch` seconds on the CPU.

        The GPU works on it for `seconds` from `now` on, or when it is prepared.
        """
        ready += self.tiers.launch_delay(ready) if self.tiers else 0.0
        self._launched = ready + launch
        end = max(max(now, ready + self.cost.fit.prepare_s) + seconds, self._launched)
        stored = self._store(work, end)
        if stored > end:
            self._launched = end = stored
        return end

    def _steps_that_fit(self, most: int, job: Job | None = None, chunk: int = 0) -> int:
        """Steps, at most `most`, for which there are free blocks: decoding, and a chunk of `job` in each."""
        pool = self.pool

        def fit(steps: int) -> bool:
            needed = pool.needed(self._slots, steps)
            if job is not None:
                needed += pool.blocks_for(int(pool.tokens[job.slot]) + steps * chunk) - int(pool.held[job.slot])
            return needed <= pool.free

        if most <= 0 or fit(most):
            return most
        low, high = 0, most - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fit(middle) else (low, middle - 1)
        return low

    def _stretch(self, now: float, batch: int, context: int, decided: float, together: bool) -> float:
        """Decodes until a request ends, blocks run short or a load or store ends; if not `together`, one step.

        After a preemption the next step may admit again.
        """
        base = self.cost.decode_base(batch) + self.cost.decode_context_s * context
        steps = 1
        if together:
            steps += self._steps_that_fit(int((self._goals - self.pool.tokens[self._slots]).min()))
        self._now = stretch = Stretch(now, now, steps, base, self.cost.decode_context_s * batch)
        stretch.end = stretch.after(steps)
        self._launched = decided
        self._poll_loads()
        wake = self.wake(decided)
        return stretch.end if wake is None else self.cut(wake)

    # -- ends ----------------------------------------------------------------------------------------

    def _end_prefill(self) -> list[Job]:
        """Moves requests whose prefill is complete to decoding: their next token has been generated."""
        complete = [job for job in self._prefill if self.pool.tokens[job.slot] >= job.total]
        for job in complete:
            self._prefill.remove(job)
        if complete:
            self._list_decoding()
        return complete

    def _comes_closer(self) -> bool:
        """Whether decoding computes the very block that the first waiting request lacks, which may let it in."""
        return self._lacks >= 0 and self.pool.comes_closer(self.waiting[0].slot, self._lacks, self._slots)

    def _poll_loads(self) -> None:
        """A step's worker looks for loads that have ended when it is launched, and reports them with its output."""
        if self._now is not None:
            for job in self.loading:
                if job.loaded is None and job.busy_until <= self._launched:
                    job.loaded = self._now.after(1)

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

    def _end(self, job: Job, now: float) -> None:
        pool = self.pool
        whole = (job.goal + 1) % pool.block_tokens == 0 and len(job.blocks) > job.goal // pool.block_tokens
        if whole and pool.caching and not pool.history[job.blocks[-1]]:
            pool.history[job.blocks[-1]] = UNFINISHED
        stored = now
        if self.tiers and self.tiers.holds_blocks:
            chunks = min(self._full_chunks(job.goal), len(job.chunks))
            stored = job.busy_until
            if chunks > job.stored:
                stored = max(stored, self.tiers.store(job.chunks, job.stored, chunks, now)[1])
        self._releases.append((max(stored, now), job))

    def _release_due(self, now: float) -> None:
        for _, job in [held for held in self._releases if held[0] <= now]:
            self.pool.close(job.slot)
        self._releases = [held for held in self._releases if held[0] > now]

    def _preempt(self, job: Job) -> None:
        """Takes the blocks of a running request; it starts again from the head of the queue."""
        self.running.remove(job)
        if job in self._prefill:
            self._prefill.remove(job)
        else:
            job.generated = int(self.pool.tokens[job.slot]) - job.prompt + 1
            self._list_decoding()
        self.pool.release(job.slot)
        job.preemptions += 1
        self.waiting.appendleft(job)

    def _drop_if_stuck(self, now: float) -> None:
        """Requests that have loaded KV may hold the blocks that the first of them needs: the last gives way."""
        if self.running or self._releases or any(job.busy_until > now for job in self.loading):
            return
        pool = self.pool
        while len(self.loading) > 1:
            first = self.loading[0]
            if pool.blocks_for(first.total) - int(pool.held[first.slot]) <= pool.free:
                return
            job = self.loading.pop()
            self._let_go(job)
            job.preemptions += 1
            self.waiting.appendleft(job)

    def _let_go(self, job: Job) -> None:
        """Frees what a request holds."""
        if job in self.loading and self.tiers:
            self.tiers.pin(job.chunks, job.hit, -1)
        if job.slot >= 0:
            self.pool.close(job.slot)
            job.slot = -1

    # -- small things --------------------------------------------------------------------------------

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

    def _blocking(self, hit: Hit) -> bool:
        return all(tier.link.blocking_load for tier, _, _ in hit.parts)
