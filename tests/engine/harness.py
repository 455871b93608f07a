"""Asks a simulated backend as a driver would, for the engine's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from replay.backends.preset import GpuTier, LowerTier, Preset, Tiers
from replay.backends.sim import SimBackend
from replay.backends.sim_router import SimRouter
from replay.engine.engine import Engine
from replay.engine.pool import BlockPool
from replay.load.clock import RunClock, run
from replay.load.outcome import Outcome, Request
from replay.trace import ROOT, PrefixTree, Tip, Turn

KV = 147_456
"""KV bytes of a Qwen3-8B token."""


@dataclass
class Ask:
    """One request of a test: continue what `parent` said (or start), append `tokens` of `segment`, generate."""

    parent: int
    keep: float
    segment: str
    tokens: int
    output: int
    pause: float = 100.0


def backend(
    connector: str = "none",
    gpu: int = 256,
    block: int = 4,
    chunk: int | None = None,
    tier: dict[str, object] | None = None,
    **settings: object,
) -> SimBackend | SimRouter:
    """A backend on a Qwen3-8B on an H200 with tiers of a few tokens; lower tiers by name, in tokens.

    `tier` holds further fields of every lower tier, `cpu_tier` and `storage` of the CPU tier and of those below.
    """
    cpu, storage = settings.pop("cpu_tier", {}), settings.pop("storage", {})
    lower = {
        name: LowerTier(
            gib=(settings.pop(name) + 0.5) * KV / 2**30, **(tier or {}), **(cpu if name == "cpu" else storage)
        )
        for name in ("cpu", "disk", "remote")
        if name in settings
    }
    tiers = Tiers(gpu=GpuTier(tokens=gpu), **lower)
    preset = Preset(name="test", connector=connector, tiers=tiers, block_tokens=block, chunk_tokens=chunk, **settings)
    make = SimRouter if preset.instances > 1 else SimBackend
    return make(preset, "qwen3-8b", "h200", RunClock())


class Session:
    """Sends requests as a driver would, and keeps what was said."""

    def __init__(self, backend: SimBackend):
        self.backend = backend
        self.tree = PrefixTree()
        self.contexts: list[Tip] = []
        self.prompts: list[Tip] = []

    def place(self, ask: Ask) -> Request:
        number = len(self.contexts)
        start = ROOT
        if ask.parent >= 0 and self.contexts:
            parent = self.contexts[ask.parent % len(self.contexts)]
            start = self.tree.cut(parent, round(parent.depth * ask.keep))
        tip = self.tree.extend(start, ask.segment, ask.tokens)
        context = self.tree.extend(tip, ("output", number), ask.output) if ask.output else tip
        self.contexts.append(context)
        self.prompts.append(tip)
        ideal = self.tree.longest_sent(tip)
        self.tree.mark_sent(context)
        turn = Turn(session="s", turn=number)
        return Request(turn, "s", f"s/{number}", self.tree, tip, context, ask.output, ideal)

    async def ask(self, ask: Ask) -> Outcome:
        return await self.backend.send(self.place(ask))

    def tokens(self, tip: Tip) -> list[object]:
        return [(segment, offset + k) for segment, offset, count in self.tree.pieces(tip) for k in range(count)]


ASKS = st.lists(
    st.builds(
        Ask,
        parent=st.integers(-1, 30),
        keep=st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.9]),
        segment=st.sampled_from("abcdef"),
        tokens=st.integers(1, 40),
        output=st.one_of(st.integers(0, 20), st.integers(40, 100)),
        pause=st.sampled_from([0.0, 0.0, 0.01, 0.3, 30.0]),
    ),
    min_size=1,
    max_size=25,
)
CONNECTORS = st.sampled_from(
    [
        {},
        {"prefix_caching": False},
        {"connector": "offload", "cpu": 80},
        {"connector": "lmcache", "chunk": 8, "cpu": 96},
        {"connector": "lmcache", "chunk": 8, "cpu": 48, "disk": 160},
        {"connector": "lmcache", "chunk": 12, "cpu": 36, "disk": 72, "remote": 240},
        {"connector": "lmcache", "chunk": 8, "disk": 160},
        {"connector": "lmcache", "chunk": 8, "cpu": 96, "prefix_caching": False},
    ]
)

EXCLUSIVE = {"write": "back", "inclusion": "exclusive"}
HICACHE = [
    {"connector": "hicache", "cpu": 300, "cpu_tier": {"write": "through"}},
    {"connector": "hicache", "cpu": 120, "cpu_tier": {"write": "through"}},
    {"connector": "hicache", "cpu": 120, "cpu_tier": {"write": "through_selective"}},
    {"connector": "hicache", "cpu": 120, "cpu_tier": {"write": "back"}},
    {"connector": "hicache", "cpu": 120, "disk": 400, "cpu_tier": {"write": "back"}},
    {"connector": "hicache", "cpu": 300, "remote": 400, "storage": {"prefetch": "best_effort"}},
    {"connector": "hicache", "cpu": 300, "disk": 200, "storage": {"prefetch": "wait_complete"}},
    {"connector": "hicache", "cpu": 300, "disk": 400},
]

SETTINGS = CONNECTORS | st.sampled_from(
    [
        {"connector": "lmcache", "chunk": 8, "cpu": 96, "tier": {"policy": "fifo"}},
        {"connector": "lmcache", "chunk": 8, "cpu": 96, "tier": {"policy": "lfu"}},
        {"connector": "lmcache", "chunk": 8, "cpu": 48, "disk": 160, "tier": {"policy": "lfu", "ttl_s": 0.5}},
        {"connector": "offload", "cpu": 80, "tier": {"ttl_s": 0.2}},
        {"connector": "lmcache-mp", "chunk": 8, "cpu": 160, "tier": {"watermark": 0.8}},
        {"connector": "lmcache-mp", "chunk": 8, "cpu": 96, "disk": 240, "tier": {"watermark": 0.5, "evict_ratio": 0.4}},
        {"connector": "lmcache-mp", "chunk": 8, "cpu": 96, "remote": 160},
        {"tensor_parallel": 2},
        {"connector": "lmcache", "chunk": 8, "cpu": 200, "disk": 240, "cpu_tier": {"staging": True}},
        {"connector": "lmcache-mp", "chunk": 8, "cpu": 96, "disk": 240, "cpu_tier": {"staging": True}},
        {"connector": "offload", "cpu": 80, "disk": 240},
        {"connector": "offload", "cpu": 48, "disk": 80, "remote": 160},
        {"connector": "offload", "cpu": 80, "cpu_tier": {"write": "back"}},
        {"connector": "offload", "cpu": 80, "cpu_tier": EXCLUSIVE},
        {"connector": "mooncake", "remote": 160},
        {"connector": "mooncake", "chunk": 8, "remote": 96, "tier": {"watermark": 0.6, "evict_ratio": 0.3}},
        {"engine": "sglang", "block": 1},
        {"engine": "sglang", "prefix_caching": False},
        *({"engine": "sglang", **how} for how in HICACHE),
    ]
)
"""Further settings that the naive caches do not know."""


def in_turn(
    asks: list[Ask], make: Callable[[], SimBackend], between: Callable[[Session, Outcome], None] | None = None
) -> tuple[Session, list[Outcome]]:
    """Asks one after the other, with a pause long enough for every store to end."""

    async def main() -> tuple[Session, list[Outcome]]:
        outcomes = []
        async with make() as sim:
            session = Session(sim)
            for ask in asks:
                outcomes.append(await session.ask(ask))
                if between:
                    between(session, outcomes[-1])
                await asyncio.sleep(100)
        return session, outcomes

    return run(main(), virtual=True)


def fits(asks: list[Ask], most: int = 180) -> list[Ask]:
    """Leaves out requests whose context grew beyond the smallest GPU tier of these tests."""
    kept: list[Ask] = []
    depths: list[int] = []
    for ask in asks:
        start = round(depths[ask.parent % len(depths)] * ask.keep) if ask.parent >= 0 and depths else 0
        if start + ask.tokens + ask.output <= most:
            kept.append(ask)
            depths.append(start + ask.tokens + ask.output)
    return kept


def free_queue(pool: BlockPool) -> list[int]:
    """Free blocks, the next one to be used first."""
    queue = pool._queue[pool._counts[2] : pool._counts[3]]
    return [int(block) for block in queue[queue >= 0]]


def check_engine(engine: Engine) -> None:
    """No tier above its capacity, no block both free and held."""
    pool = engine.pool
    queue = free_queue(pool)
    assert len(set(queue)) == len(queue) == pool.free
    assert (pool._place[queue] >= 0).all()
    assert int((pool._place[1:] < 0).sum()) + len(queue) == pool.usable
    for tier in engine.tiers.tiers if engine.tiers else []:
        cache = tier.cache
        assert cache.used == int((cache._state == 1).sum()) <= cache.capacity
        assert (cache._pins >= 0).all()
