"""What each connector does with the tiers below the GPU, and what the engine model refuses.

All that tells connectors apart is a field of `Connector`; `replay.engine.tiers` and `replay.engine.steps` read these.
Sources, read in the packages' code:

- ``lmcache`` (LMCache 0.5.6 in the engine's process, ``lmcache/v1/storage_backend``): every full chunk of a computed
  prompt is written through to all tiers, while the engine's step waits; what a lower tier serves is kept in the CPU
  tier too. A chunk stays in the CPU tier, its staging buffer, until the disk has it; what finds no room there is stored
  nowhere. ``staging`` is ``local_cpu: false``: the CPU tier holds chunks only on their way. Chunks of the output
  are not stored (``save_decode_cache`` is off). The index of the disk is in memory: a restart loses it.
- ``lmcache-mp`` (LMCache's server, ``lmcache/v1/distributed``): the same, but beside the engine's steps; what a lower
  tier serves is not kept (``--l2-prefetch-policy default``); memory evicts only in a loop, once a second, and a store
  that finds too little free memory reaches no tier. ``staging`` is ``--l2-store-policy skip_l1``.
- ``offload`` (vLLM 0.32's ``OffloadingConnector``): stores every full block, also of the output, beside the steps.
  Tiers below the CPU are ``TieringOffloadingSpec`` (``v1/kv_offload/tiering``): each chunk that the CPU tier has is
  written on to all of them, and comes back through the CPU tier; they evict nothing (``fs``, ``obj``). ``write: back``
  is ``SimpleCPUOffloadConnector`` with ``lazy_offload``, which copies blocks shortly before the GPU evicts them; here
  they are copied when it does.
- ``hicache`` (SGLang 0.5.23, ``srt/mem_cache/unified_radix_cache.py``): CPU memory holds the same pages as the radix
  tree of the GPU (see `replay.engine.pool`), written beside the steps (``write_through``), when a second request uses
  them (``write_through_selective``), or when the GPU evicts them, which a step waits for (``write_back``; full memory
  then first drops what the GPU has too). Otherwise what the GPU holds does not leave CPU memory. A step runs while
  what its requests hit there is loaded layer by layer; hits of fewer than 10 tokens are not. Everything in CPU memory
  is written on to storage, which is asked when a request comes: at least 256 tokens are sent to CPU memory while it
  waits, for 1 s and 0.25 s for each 1,024 tokens at most (``timeout``), until all are there (``wait_complete``), or
  until there is room for the request in a step (``best_effort``). Not modelled: its scheduler (vLLM's continuous
  batching runs instead, where SGLang runs prefill and decoding in turn), repeated requests to storage and their limit,
  ``--hicache-host-memory-mode buffer_only``.
- ``mooncake`` (vLLM's ``MooncakeStoreConnector``, Mooncake 0.3.13): one pool of memory for all instances. A lookup
  leases what it finds for 10 s; a loop, every 10 ms, evicts down to 5 % below the watermark of 90 %, by when leases
  ended, which is LRU but for those 10 s; what finds no room is not stored. The output is not stored. The pool is
  memory of the instances (``mode: embedded``): a restart of all of them empties it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from replay.backends.preset import LowerTier, Preset
from replay.errors import ReplayError

Drops = Literal["each", "rest", "all"]
"""What a store into a full tier loses: single chunks, all from the first that finds no room on, or the whole store."""


@dataclass(frozen=True)
class Loop:
    """Eviction by a loop rather than on demand."""

    period_s: float
    watermark: float | None = None
    """Used share above which it evicts; null: none unless the preset has one."""
    evict_ratio: float = 0.2
    """Share of what is held that goes in one run."""
    excess_too: bool = False
    """One run also evicts what is above the watermark."""


@dataclass(frozen=True)
class Connector:
    """What one connector does; the defaults are the commonest."""

    engine: Literal["vllm", "sglang"] = "vllm"
    tiers: tuple[str, ...] = ("cpu", "disk", "remote")
    """Tiers that it can have."""
    needs_cpu: bool = False
    """Tiers below CPU memory are reached through it only."""
    from_start: bool = True
    """A lookup walks from the first chunk, whatever the GPU holds."""
    stores_output: bool = False
    """Chunks of the output are stored too."""
    loads: Literal["link", "asynchronous", "layerwise"] = "asynchronous"
    """Who waits for a load: as the link's profile says; the request alone; or the step, which computes the first
    layers while the others are loaded."""
    holds_blocks: bool = True
    """GPU blocks are held until the first tier has what they hold."""
    promotes: bool = False
    """What a lower tier serves is kept in the CPU tier too."""
    drops: Drops = "each"
    drops_above: Drops = "each"
    """The same where the tier is the way to others."""
    shares: Literal["remote", "all"] = "remote"
    """Tiers that instances share."""
    loses: tuple[str, ...] = ("cpu",)
    """Tiers that are empty after a restart."""
    loop: Loop | None = None
    lease_s: float = 0.0
    """Seconds for which what a lookup found is not evicted."""
    batches: bool = False
    """One request moves all entries of a load or store: a link's costs of a chunk, unless measured, do not arise."""
    least_load: int = 1
    """Hits of fewer tokens are computed instead."""
    prefetches: bool = False
    """Tiers below the CPU serve it alone, ahead of the requests that wait; hits are counted as theirs all the same."""
    evict_waits: bool = False
    """A step waits until what it evicts from the GPU is written back."""
    policies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Eviction policies by tier, its default first; ``lru`` where none are named."""
    writes: tuple[str, ...] = ("through",)
    """Write policies of the CPU tier, its default first."""
    exclusive: bool = False
    """It can be told that the CPU tier is exclusive."""
    staging: bool = False
    """It can be told that the CPU tier is only a buffer."""

    def policy(self, name: str, tier: LowerTier) -> str:
        """The eviction policy of a tier."""
        return tier.policy or self.policies.get(name, ("lru",))[0]


_LMCACHE_POLICIES = dict.fromkeys(("cpu", "disk", "remote"), ("lru", "fifo", "lfu"))

CONNECTORS = {
    "none": Connector(tiers=()),
    "lmcache": Connector(
        loads="link",
        holds_blocks=False,
        promotes=True,
        drops_above="rest",
        loses=("cpu", "disk"),
        policies=_LMCACHE_POLICIES,
        staging=True,
    ),
    "lmcache-mp": Connector(drops="all", drops_above="all", shares="all", loop=Loop(1.0), staging=True),
    "offload": Connector(
        needs_cpu=True,
        from_start=False,
        stores_output=True,
        promotes=True,
        drops_above="all",
        policies={"disk": ("none",), "remote": ("none",)},
        writes=("through", "back"),
        exclusive=True,
    ),
    "hicache": Connector(
        engine="sglang",
        needs_cpu=True,
        from_start=False,
        stores_output=True,
        loads="layerwise",
        drops="rest",
        drops_above="rest",
        least_load=10,
        prefetches=True,
        evict_waits=True,
        writes=("through", "through_selective", "back"),
    ),
    "mooncake": Connector(
        tiers=("remote",), loses=("remote",), loop=Loop(0.01, 0.9, 0.05, excess_too=True), lease_s=10.0, batches=True
    ),
}


def check(preset: Preset) -> None:
    """Refuses what the engine model does not know, rather than ignoring it.

    Raises:
        ReplayError: says which field, and what to use instead.
    """
    for what, instead in _problems(preset):
        raise ReplayError(f"backend {preset.name}: {what} is not modelled by the simulated engine; {instead}")
    if preset.max_batched_tokens < preset.max_seqs:
        raise ReplayError(
            f"backend {preset.name}: max_batched_tokens ({preset.max_batched_tokens}) must be at least "
            f"max_seqs ({preset.max_seqs}), as in vLLM"
        )


def warnings(preset: Preset, tokens: Mapping[str, int] | None = None) -> list[str]:
    """What a simulation with this preset has not been compared with a real engine in, and sizes that disappoint.

    Args:
        preset: engine, connector and tiers.
        tokens: size of each tier.
    """
    cpu = preset.tiers.cpu
    found = []
    if preset.engine == "sglang":
        found.append(
            "SGLang is not validated: its caches are modelled after its source; scheduling, times and, unless "
            "tiers.gpu says it, the GPU tier's size are vLLM's"
        )
    if preset.connector == "hicache" and tokens and tokens["cpu"] <= tokens["gpu"] and cpu and cpu.write != "back":
        found.append(
            f"CPU memory of {tokens['cpu']:,} tokens is no larger than the GPU tier of {tokens['gpu']:,}: SGLang does "
            "not start with that, and would keep in it what the GPU holds and little else"
        )
    if preset.connector == "mooncake":
        found.append("Mooncake is not validated: modelled after its source, on the profile's link to a remote tier")
    if preset.connector == "offload" and cpu and (cpu.write == "back" or preset.lower()[1:]):
        found.append("vLLM's offload is validated with a CPU tier that is written through, and nothing else")
    if cpu and cpu.inclusion == "exclusive":
        found.append("an exclusive CPU tier is a what-if: vLLM's offload has none")
    return found


def _problems(preset: Preset) -> Iterator[tuple[str, str]]:
    """What is not modelled, and what to do instead."""
    if preset.engine not in ("vllm", "sglang"):
        yield f"engine {preset.engine}", "use a vllm or sglang preset, or another --target"
    how = CONNECTORS[preset.connector]
    if preset.connector != "none" and how.engine != preset.engine:
        fitting = [name for name, other in CONNECTORS.items() if other.tiers and other.engine == preset.engine]
        yield f"connector {preset.connector} under engine {preset.engine}", f"use {' or '.join(fitting)}"
    if how.tiers and not preset.lower():
        yield f"connector {preset.connector} without tiers", f"set tiers.{how.tiers[0]}.gib"
    if preset.instances > 1:
        yield "more than one instance in one engine", "set instances to 1"
    if preset.engine == "sglang" and preset.chunk_tokens not in (None, preset.block_tokens):
        yield "chunk_tokens under engine sglang", "leave it out: every tier holds pages of block_tokens"
    if how.prefetches and not preset.prefix_caching:
        yield "prefix_caching: false under HiCache", "use engine sglang with connector none"
    if how.prefetches and preset.tiers.disk and preset.tiers.remote:
        yield "more than one storage backend under HiCache", "leave tiers.disk or tiers.remote out"
    for name, tier in preset.lower():
        yield from _tier_problems(preset, how, name, tier)


def _tier_problems(preset: Preset, how: Connector, name: str, tier: LowerTier) -> Iterator[tuple[str, str]]:
    under = f"under connector {preset.connector}"
    if name not in how.tiers:
        yield f"tiers.{name} {under}", f"use tiers.{' or tiers.'.join(how.tiers)}"
    if name != "cpu" and how.needs_cpu and preset.tiers.cpu is None:
        yield f"tiers.{name} without tiers.cpu {under}", "set tiers.cpu.gib: the way to it goes through CPU memory"
    policies = how.policies.get(name, ("lru",))
    if how.policy(name, tier) not in policies:
        yield f"tiers.{name}.policy {tier.policy} {under}", f"leave it out, or use {' or '.join(policies)}"
    writes = how.writes if name == "cpu" else ("through",)
    if tier.write and tier.write not in writes:
        yield f"tiers.{name}.write {tier.write} {under}", f"leave it out, or use {' or '.join(writes)}"
    if tier.write == "back" and preset.chunk_tokens not in (None, preset.block_tokens):
        yield f"tiers.{name}.write back with chunk_tokens", "leave chunk_tokens out: the GPU evicts block by block"
    if tier.write == "back" and not how.prefetches and preset.lower()[1:]:
        yield f"tiers.{name}.write back {under} with tiers below", "leave them out, or write through"
    if tier.inclusion == "exclusive" and not (how.exclusive and name == "cpu" and tier.write == "back"):
        yield f"tiers.{name}.inclusion exclusive {under}", "leave it out, or use offload's CPU tier with write: back"
    if tier.prefetch and not (how.prefetches and name != "cpu"):
        yield f"tiers.{name}.prefetch {under}", "leave it out: only tiers below the CPU under hicache have it"
    if tier.watermark is not None and how.loop is None:
        yield f"tiers.{name}.watermark {under}", "leave it out, or use lmcache-mp or mooncake"
    if tier.staging and not (how.staging and name == "cpu" and preset.lower()[1:]):
        yield (
            f"tiers.{name}.staging {under}",
            "leave it out, or use LMCache with tiers.disk or tiers.remote",
        )
