"""The engine model as a backend: answers requests on the run's clock, without a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from replay.backends.preset import Preset
from replay.backends.sim_events import TierEvents
from replay.engine import profiles
from replay.engine.connectors import warnings
from replay.engine.cost import cost_model
from replay.engine.engine import Engine, EngineRestarted
from replay.engine.job import Job
from replay.engine.pace import Pace, pace
from replay.errors import ReplayError
from replay.load.events import CacheEvent
from replay.load.outcome import Clock, Outcome, Request
from replay.trace import PrefixTree
from replay.trace.tree import BlockIds

GIB = 2**30
Ahead = Callable[[], Pace | None]
"""The steps of the engine under way, as one request sees them; times are those of its client."""


class SimBackend:
    """A `Backend` that simulates one engine instance with the tiers of a preset."""

    def __init__(self, preset: Preset, model: str, gpu: str, clock: Clock, beside: SimBackend | None = None):
        """A backend with empty tiers.

        Args:
            preset: engine, connector and tiers.
            model: name of a model profile, or a path to one or to a ``config.json``.
            gpu: name of a GPU profile, or a path to one.
            clock: the run's clock.
            beside: another instance, whose shared tiers this one uses too.

        Raises:
            ReplayError: unknown names, a model that does not fit, or a preset that cannot be simulated.
        """
        self.preset = preset
        self.model = profiles.model(model)
        self.gpu = profiles.gpu(gpu)
        self.clock = clock
        self.cost = cost_model(self.model, self.gpu, preset)
        self.token_bytes = self.model.kv_bytes_per_token(preset.kv_dtype) * self.model.kv_copies(preset.tensor_parallel)
        self.gpu_tokens = profiles.gpu_kv_tokens(self.model, self.gpu, preset)
        other = beside.engine if beside else None
        self.engine: Engine = Engine(preset, self.cost, self.gpu_tokens, self.token_bytes, beside=other)
        self._events = TierEvents(self.engine)
        self._blocks: BlockIds | None = None
        self._chunks: BlockIds | None = None

    async def __aenter__(self) -> SimBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.engine.stop()

    def reset(self, cold: bool) -> None:
        """Empties the GPU tier, and with `cold` all tiers; see `Engine.reset`."""
        with self._events.emptying(self.clock.now()):
            self.engine.reset(cold=cold)

    async def restart(self) -> None:
        """Empties what a restart of the engine's host does; see `replay.engine.connectors`."""
        with self._events.emptying(self.clock.now()):
            self.engine.restart()

    def cache_events(self) -> list[CacheEvent]:
        """What each tier stored, evicted and dropped so far: rows of the table `cache_events`, in order of time."""
        self._events.read_now(self.clock.now())
        return self._events.rows

    async def send(
        self, request: Request, on_first_token: Callable[[float, Ahead], None] | None = None, spent: float = 0.0
    ) -> Outcome:
        """Runs one request through the engine model.

        Args:
            request: what is asked.
            on_first_token: called when the model has the first token, with the time on the event loop at
                which the client is to have it, and what tells of the tokens after it.
            spent: seconds that a real server in front of the model has spent on the request already, which
                count as part of the engine's overhead.
        """
        sent = self.clock.now()
        output = max(1, request.output)
        problem = self._problem(request.prompt, output)
        if problem:
            return Outcome("error", problem, sent=sent, closed=sent)
        job = self._job(request, output)
        if on_first_token is not None:
            rest = self.engine.trailing_overhead(job.prompt, spent)
            job.on_first_token = lambda when: on_first_token(when + rest, lambda: _later(pace(self.engine, job), rest))
        origin = asyncio.get_running_loop().time() - sent
        try:
            await self.engine.run(job, self._given(self._blocks), self._given(self._chunks), spent)
        except EngineRestarted as error:
            return Outcome("error", str(error), sent=sent, closed=self.clock.now())
        self._events.read(self.clock.now())
        assert job.first_token is not None and job.last_token is not None and job.served is not None
        first, last = job.first_token - origin, job.last_token - origin
        return Outcome(
            "ok",
            sent=sent,
            first_byte=first,
            first_token=first,
            last_token=last,
            closed=last,
            prompt_tokens=job.prompt,
            output_tokens=output,
            gpu=job.served["gpu"],
            cpu=job.served.get("cpu"),
            disk=job.served.get("disk"),
            remote=job.served.get("remote"),
            computed=job.served["computed"],
            tier_source="simulated",
            lost={**job.lost, "diverged": 0, "unknown": 0},
            recompute_s=self._recompute_seconds(job),
            load_s=job.load_s,
            preemptions=job.preemptions,
        )

    def describe(self) -> dict[str, Any]:
        """Profiles and capacities, stored with the run. Sizes of tiers in tokens and GiB."""
        tokens = {"gpu": self.engine.gpu_tokens}
        if self.engine.tiers:
            chunk = self.engine.tiers.chunk_tokens
            tokens |= {tier.name: tier.cache.capacity * chunk for tier in self.engine.tiers.tiers}
        return {
            "engine": f"model of {self.preset.engine}",
            "connector": self.preset.connector,
            "model": self.model.name,
            "gpu": self.gpu.name,
            "cost_source": self.cost.source,
            "warnings": [*warnings(self.preset, tokens), *self.model.warnings],
            "kv_bytes_per_token": self.token_bytes,
            "tiers": {name: self._size(count) for name, count in tokens.items()},
            "cache_state_before_run": "empty",
        }

    def _size(self, tokens: int) -> dict[str, float]:
        return {"tokens": tokens, "gib": round(tokens * self.token_bytes / GIB, 3)}

    def _problem(self, prompt: int, output: int) -> str | None:
        if prompt + output > self.model.max_context:
            return (
                f"prompt of {prompt:,} and output of {output:,} tokens exceed the {self.model.max_context:,} "
                f"tokens of {self.model.name}"
            )
        if prompt + output - 1 > self.engine.gpu_tokens:
            return (
                f"prompt of {prompt:,} and output of {output:,} tokens exceed the GPU tier of "
                f"{self.engine.gpu_tokens:,} tokens"
            )
        return None

    def _job(self, request: Request, output: int) -> Job:
        blocks, chunks = self._numbering(request.tree)
        job = Job(blocks(request.context), request.prompt, output, request.ideal)
        tiers = self.engine.tiers
        if chunks and tiers:
            job.chunks = chunks(request.context if tiers.how.stores_output else request.tip)
        return job

    def _numbering(self, tree: PrefixTree) -> tuple[BlockIds, BlockIds | None]:
        """Block and chunk ids of the run's prefix tree."""
        if self._blocks is None or self._blocks.tree is not tree:
            if self._blocks is not None:
                raise ReplayError("one simulated backend serves one run: make a new one for another trace")
            self._blocks = BlockIds(tree, self.preset.block_tokens)
            if self.engine.tiers:
                size = self.engine.tiers.chunk_tokens
                self._chunks = self._blocks if size == self.preset.block_tokens else BlockIds(tree, size)
        return self._blocks, self._chunks

    @staticmethod
    def _given(ids: BlockIds | None) -> int:
        return ids.count if ids else 0

    def _recompute_seconds(self, job: Job) -> float:
        """Prefill time that the loss cost: of what was computed, less of what an unbounded cache leaves."""
        assert job.served is not None
        served = job.prompt - job.served["computed"]
        actual = self.cost.prefill_seconds(job.prompt - served, served)
        rest = max(1, job.prompt - job.ideal)
        return actual - min(actual, self.cost.prefill_seconds(rest, job.prompt - rest))


def _later(steps: Pace | None, seconds: float) -> Pace | None:
    """The same steps, whose tokens reach the client so much later."""
    return steps and steps._replace(start=steps.start + seconds, end=steps.end + seconds)
