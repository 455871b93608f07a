"""How long steps take, and which of them are taken together; see `replay.engine.scheduler`."""

from __future__ import annotations

from math import inf

from replay.engine.job import Job
from replay.engine.requests import Requests
from replay.engine.stretch import Stretch


class Steps(Requests):
    """Starts steps whose work has been decided, and knows when they end."""

    def wake(self, now: float) -> float | None:
        """When, after `now`, the next load or store ends that something waits for, or a request has come."""
        times = [job.busy_until if job.loaded is None else job.loaded for job in self.loading]
        if self.tiers and self.tiers.fetches:
            times += [job.prefetch.ready for job in self.fetching if job.prefetch]
            times += [job.arrived for job in self.waiting if not job.asked]
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

    def _run(self, work: list[tuple[Job, int, int]], now: float, ready: float, launch: float, seconds: float) -> float:
        """When a step with prefill ends that is launched from `ready` on, for `launch` seconds on the CPU.

        The GPU works on it for `seconds` from `now` on, or when it is prepared.
        """
        if self.tiers:
            ready = self._write_back(ready)
            ready += self.tiers.launch_delay(ready)
        self._launched = ready + launch
        start = max(now, ready + self.cost.fit.prepare_s)
        seconds = self._power.step(start, sum(new for _, new, _ in work), seconds)
        end = max(start + seconds, self._launched, self._loaded)
        stored = self._store(work, end)
        if stored > end:
            self._launched = end = stored
        return end

    def _write_back(self, now: float) -> float:
        """Tells lower tiers what the GPU has evicted; returns when a step that needs the room can be launched."""
        return self.tiers.evicted(self.pool.take_evicted(), now) if self.tiers and self.notes_evictions else now

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

    def _stretch(self, now: float, batch: int, context: int, decided: float, together: bool) -> float:
        """Decodes until a request ends, blocks run short or a load or store ends; if not `together`, one step.

        After a preemption the next step may admit again.
        """
        now = max(now, self._write_back(decided)) if self.notes_evictions else now
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

    def _comes_closer(self) -> bool:
        """Whether decoding computes the very block that the first waiting request lacks, which may let it in."""
        return self._lacks >= 0 and self.pool.comes_closer(self.waiting[0].slot, self._lacks, self._slots)

    def _poll_loads(self) -> None:
        """A step's worker looks for loads that have ended when it is launched, and reports them with its output."""
        if self._now is not None:
            for job in self.loading:
                if job.loaded is None and job.busy_until <= self._launched:
                    job.loaded = self._now.after(1)
