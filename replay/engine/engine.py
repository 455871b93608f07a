"""One instance of a serving engine on the running event loop's clock, virtual or real."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from replay.backends.preset import Preset
from replay.engine.connectors import check
from replay.engine.cost import CostModel
from replay.engine.job import Job
from replay.engine.pool import BlockPool
from replay.engine.scheduler import Scheduler
from replay.engine.tiers import TierStack


def request_tokens(preset: Preset, gpu_tokens: int) -> int:
    """Tokens that requests can hold in a GPU tier of `gpu_tokens`: whole blocks, of which vLLM keeps one to itself."""
    return (gpu_tokens // preset.block_tokens - (preset.engine != "sglang")) * preset.block_tokens


class EngineRestarted(Exception):
    """The engine was reset or stopped while a request was in it."""


class Engine:
    """Runs requests; every wait is a timer on the event loop, and none depends on how late it fires."""

    def __init__(
        self, preset: Preset, cost: CostModel, gpu_tokens: int, token_bytes: float, beside: Engine | None = None
    ):
        """An idle engine with empty tiers.

        Args:
            preset: tiers, block and batch sizes.
            cost: times of steps and links.
            gpu_tokens: tokens of the GPU tier.
            token_bytes: KV bytes of one token.
            beside: another instance, whose shared tiers this one uses too.

        Raises:
            ReplayError: the preset asks for something that is not modelled.
        """
        check(preset)
        self.cost = cost
        radix = preset.engine == "sglang"
        lower, cpu = preset.lower(), preset.tiers.cpu
        self.pool = BlockPool(
            request_tokens(preset, gpu_tokens) // preset.block_tokens + 1,
            preset.block_tokens,
            preset.prefix_caching,
            radix=radix,
            note_evicted=cpu is not None and cpu.write not in (None, "through"),
        )
        self.tiers: TierStack | None = None
        if lower:
            chunk = preset.chunk_tokens or preset.block_tokens
            shared = beside.tiers if beside else None
            under = self.pool if radix else None
            self.tiers = TierStack(lower, cost.links, preset.connector, chunk, token_bytes, shared, under)
        self.scheduler = Scheduler(self.pool, cost, self.tiers, preset.max_batched_tokens, preset.max_seqs)
        if beside and beside.tiers and self.tiers and self.tiers.shared:
            beside.tiers.shared = True
            self.scheduler.ahead = beside.scheduler.ahead = False
        if self.tiers and radix:
            self.scheduler.ahead = False  # what gives way below depends on what the GPU holds at that very step
        self._arrivals: deque[tuple[float, Job, asyncio.Future[None]]] = deque()
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False

    @property
    def gpu_tokens(self) -> int:
        """Tokens that requests can hold in the GPU tier."""
        return self.pool.usable * self.pool.block_tokens

    async def run(self, job: Job, block_ids: int, chunk_ids: int, spent: float = 0.0) -> None:
        """Runs a request to its last token; its results are in `job`.

        The fixed part of a request's overhead passes before it reaches the scheduler, the part that grows
        with its prompt after its tokens, so that requests are scheduled in the order in which they came.

        Args:
            job: the request.
            block_ids: block ids given out so far.
            chunk_ids: chunk ids given out so far.
            spent: seconds of the request's overhead that have passed already.

        Raises:
            EngineRestarted: a reset or restart took the request.
        """
        loop = asyncio.get_running_loop()
        self.pool.know(block_ids)
        if self.tiers:
            self.tiers.know(chunk_ids)
        future: asyncio.Future[None] = loop.create_future()
        arrival = loop.time() + self.cost.overhead_s
        self._arrivals.append((arrival, job, future))
        loop.call_at(arrival, self._guarded, self._arrive, arrival)
        await future
        after = self.trailing_overhead(job.prompt, spent)
        assert job.first_token is not None and job.last_token is not None
        job.first_token += after
        job.last_token += after
        await asyncio.sleep(max(0.0, job.last_token - loop.time()))

    def trailing_overhead(self, prompt: int, spent: float = 0.0) -> float:
        """Seconds of a request's overhead that pass after its tokens."""
        return max(0.0, self.cost.request_overhead(prompt) - self.cost.overhead_s - spent)

    def reset(self, *, cold: bool) -> None:
        """Empties the GPU tier, and with `cold` all tiers below it; requests in flight fail."""
        self._empty([tier.name for tier in self.tiers.tiers] if cold and self.tiers else [])

    def restart(self) -> None:
        """Empties the GPU tier and those that do not survive a restart of the host; requests in flight fail."""
        self._empty([*self.tiers.how.loses] if self.tiers else [])

    def stop(self) -> None:
        """Fails what is in flight and cancels timers."""
        self._fail(EngineRestarted("the engine was restarted"))

    def _fail(self, error: Exception) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._busy = False
        self.scheduler.drop_all()
        futures = [*self._futures.values(), *(future for _, _, future in self._arrivals)]
        self._futures.clear()
        self._arrivals.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _empty(self, tiers: list[str]) -> None:
        self.stop()
        self.pool.forget()
        if self.tiers and tiers:
            self.tiers.clear(*tiers)

    # -- timers --------------------------------------------------------------------------------------

    def _arrive(self, now: float) -> None:
        if not self._take_arrivals(now):
            return
        if not self._busy:
            self._begin(now)
        else:
            self._at(self.scheduler.cut(now), self._end)

    def _take_arrivals(self, now: float) -> bool:
        """Queues all requests that have arrived by `now`; returns whether there were any."""
        before = len(self._arrivals)
        while self._arrivals and self._arrivals[0][0] <= now:
            arrival, job, future = self._arrivals.popleft()
            self._futures[id(job)] = future
            job.arrived = arrival
            self.scheduler.waiting.append(job)
        return len(self._arrivals) < before

    def _begin(self, now: float) -> None:
        end = self.scheduler.begin(now)
        self._busy = end is not None
        if end is not None:
            self._at(end, self._end)
            return
        wake = self.scheduler.wake(now)
        if wake is not None:
            self._at(wake, self._begin)
        elif self.scheduler.waiting:
            raise RuntimeError("requests wait for something that cannot happen")

    def _end(self, now: float) -> None:
        for job in self.scheduler.finish():
            future = self._futures.pop(id(job))
            if not future.done():
                future.set_result(None)
        self._take_arrivals(now)
        self._begin(now)

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._guarded, call, when)

    def _guarded(self, call: Callable[[float], None], when: float) -> None:
        """A mistake of the model must fail the requests in it: an exception that ends in the loop hangs them."""
        try:
            call(when)
        except Exception as error:
            self._fail(error)
