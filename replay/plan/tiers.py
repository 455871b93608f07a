"""Does a tier pay? Loading a prefix against computing it again, by context length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replay.backends.preset import Preset
from replay.engine.cost import CostModel
from replay.engine.profiles import GIB, Link
from replay.plan.curve import HitCurve

CONTEXTS = (1024, 4096, 16384, 65536, 131072, 262144)
NEXT_GB = 10


@dataclass(frozen=True)
class BreakEven:
    """One prefix length: rebuilding it on an idle GPU against loading it over an idle link."""

    context: int
    """Tokens of the prefix."""
    rebuild_s: float
    """Prefill of all of it."""
    load_s: float
    """The link's latency, chunk costs and bytes."""
    gbps: float
    """Break-even: bytes over rebuild time. Above this effective bandwidth, loading is faster."""
    effective_gbps: float
    """What the link delivers for a prefix of this length, in GB/s."""

    @property
    def pays(self) -> bool:
        """Loading is faster than rebuilding."""
        return self.load_s < self.rebuild_s


@dataclass(frozen=True)
class TierPlan:
    """One tier of the hierarchy, from the GPU down."""

    tier: str
    backend: str
    """Preset whose sizes and link these are."""
    tokens: int
    """Capacity."""
    gib: float
    hit_tokens: int
    """Prompt tokens found here and not above: like all hits here the curve's, a bound."""
    hit_share: float
    """Those as a share of all prompt tokens."""
    headroom_tokens: int
    """What an unlimited cache would serve beyond this tier and those above it."""
    next_10gb_tokens: int
    """Further hit tokens with 10 GB more."""
    next_10gb_saved_s: float
    """GPU seconds that those save: prefill not run, less load time."""
    load_gbps: float | None = None
    """Of a load alone from this tier; null for the GPU itself."""
    bandwidth_gbps: float | None = None
    """Of loads in the long run, limited by writes (see `Link.sustained_gbps`): break-even uses it."""
    store_gbps: float | None = None
    bandwidth_source: str | None = None
    """``measured``, ``derived`` (from a profile) or ``given`` (in the preset)."""
    break_even: tuple[BreakEven, ...] = ()
    typical: BreakEven | None = None
    """At the trace's median prompt."""

    @property
    def pays(self) -> bool | None:
        """Whether loading the median prompt is faster than rebuilding it; null for the GPU."""
        return self.typical.pays if self.typical else None


def break_even(cost: CostModel, link: Link, bytes_per_token: int, chunk_tokens: int, context: int) -> BreakEven:
    """Compares rebuilding `context` tokens with loading them in chunks of `chunk_tokens`.

    The break-even bandwidth is KV bytes a token over prefill seconds a token: a GPU that computes a token in
    22 us and stores 147 kB for it computes KV at 6.7 GB/s. Loading is taken at the sustained bandwidth.
    """
    nbytes = context * bytes_per_token
    rebuild_s = cost.prefill_seconds(context, 0)
    load_s = link.load_seconds(0, -(-context // chunk_tokens)) + nbytes / (link.sustained_gbps * 1e9)
    return BreakEven(context, rebuild_s, load_s, nbytes / rebuild_s / 1e9, nbytes / load_s / 1e9)


@dataclass(frozen=True)
class Ground:
    """What all tiers of a plan are judged by."""

    curve: HitCurve
    bytes_per_token: int
    prompt: int
    """Median prompt in tokens."""
    max_context: int


def gpu_tier(ground: Ground, preset: Preset, cost: CostModel, tokens: int) -> TierPlan:
    """The GPU's own tier, of `tokens` tokens."""
    return _tier(ground, "gpu", preset, cost, above=0, tokens=tokens)


def lower_tiers(ground: Ground, presets: Sequence[tuple[Preset, CostModel]], gpu_tokens: int) -> list[TierPlan]:
    """The tiers below the GPU that any of the presets has, fastest first, each from the first that has it.

    Tiers are taken as inclusive: a lower one also holds what those above it hold (LMCache and vLLM's offload
    write through), so a tier smaller than the one above it adds nothing.
    """
    found: list[TierPlan] = []
    above = gpu_tokens
    for name in ("cpu", "disk", "remote"):
        for preset, cost in presets:
            tier = dict(preset.lower()).get(name)
            if tier is None or tier.staging:
                continue
            tokens = int(tier.gib * GIB / ground.bytes_per_token)
            found.append(_tier(ground, name, preset, cost, above=above, tokens=tokens))
            above = max(above, tokens)
            break
    return found


def _tier(ground: Ground, name: str, preset: Preset, cost: CostModel, *, above: int, tokens: int) -> TierPlan:
    curve, reach = ground.curve, max(above, tokens)
    hits = curve.hit_tokens(reach) - (curve.hit_tokens(above) if above else 0)
    more = curve.hit_tokens(reach + NEXT_GB * 1e9 / ground.bytes_per_token) - curve.hit_tokens(reach)
    link, chunk = cost.links.get(name), preset.chunk_tokens or preset.block_tokens
    lengths = [n for n in CONTEXTS if n <= ground.max_context]
    typical = break_even(cost, link, ground.bytes_per_token, chunk, ground.prompt) if link else None
    rebuild = typical.rebuild_s if typical else cost.prefill_seconds(ground.prompt, 0)
    gain = (rebuild - (typical.load_s if typical else 0.0)) / ground.prompt
    tier = dict(preset.lower()).get(name)
    return TierPlan(
        tier=name,
        backend=preset.name,
        tokens=tokens,
        gib=tokens * ground.bytes_per_token / GIB,
        hit_tokens=hits,
        hit_share=hits / curve.prompt_tokens,
        headroom_tokens=curve.ceiling - curve.hit_tokens(reach),
        next_10gb_tokens=more,
        next_10gb_saved_s=more * gain if more else 0.0,
        load_gbps=link.load_gbps if link else None,
        bandwidth_gbps=link.sustained_gbps if link else None,
        store_gbps=link.store_gbps if link else None,
        bandwidth_source=("given" if tier and tier.gbps else link.source) if link else None,
        break_even=tuple(break_even(cost, link, ground.bytes_per_token, chunk, n) for n in lengths) if link else (),
        typical=typical,
    )
