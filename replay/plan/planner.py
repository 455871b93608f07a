"""`plan`: from a trace, a model and a GPU to what a cache of which size and kind would do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any

import numpy as np

from replay.backends.preset import Preset
from replay.engine.cost import CostModel, cost_model
from replay.engine.profiles import GIB, GpuProfile, ModelProfile, gpu_kv_tokens
from replay.errors import ReplayError, unknown_name
from replay.plan.curve import HitCurve
from replay.plan.stream import trace_curve
from replay.plan.tiers import Ground, TierPlan, gpu_tier, lower_tiers
from replay.trace import Trace

GRID = 240
"""Most rows of the curve in a plan."""
ENOUGH = 0.95
"""Share of the ceiling that a recommended capacity serves."""
HOURS = 730
"""Hours of a month."""
METRICS = tuple(f"ttft_p{p}" for p in (50, 90, 95, 99))
PRICES = ("gpu_hour", "cpu_gib_month", "disk_gib_month", "remote_gib_month")

KNOWN_ERROR = {"ttft_p50": 0.13, "ttft_p90": 0.17, "ttft_p99": 0.25}
"""Largest relative error of the engine model on runs that nothing was fitted to, tiers without a disk: Qwen3-8B on an
H200, docs/accuracy.md. Elsewhere the error is not known."""

Simulate = Callable[[Preset], Mapping[str, float | None]]
"""Runs the engine model on a preset; gives seconds for `METRICS` (null: unknown) and may add more figures."""


@dataclass(frozen=True)
class Slo:
    """A limit on one metric, in seconds."""

    metric: str
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Reads ``ttft_p95=2s`` or ``ttft_p50=300ms``.

        Raises:
            ReplayError: not of that form, or not a metric that the plan predicts.
        """
        match = re.fullmatch(r"(\w+)\s*(?:<=|=)\s*(\d+(?:\.\d+)?)\s*(ms|s)?", text.strip())
        if not match or float(match[2]) <= 0:
            raise ReplayError(f"--slo {text}: write it as METRIC=TIME, e.g. ttft_p95=2s or ttft_p50=300ms")
        if match[1] not in METRICS:
            raise unknown_name("SLO metric", match[1], METRICS)
        return cls(match[1], float(match[2]) / (1000 if match[3] == "ms" else 1))


@dataclass(frozen=True)
class Candidate:
    """One backend, with what it would do. Predicted times are simulated."""

    backend: str
    hit_share: float
    """From the curve at the size of its largest tier."""
    predicted: dict[str, float | None] | None
    """Simulated figures in seconds; null where no simulation was run."""
    meets_slo: bool | None
    cost_month: float | None
    """In the currency of the prices; null without prices."""
    slow_tiers: tuple[str, ...]
    """Tiers from which loading the median prompt takes longer than rebuilding it."""


@dataclass(frozen=True)
class Plan:
    """Everything `replay plan` says, as plain data. `as_dict` is its JSON."""

    trace: str
    model: str
    gpu: str
    cost_source: str
    """``measured`` or ``derived``: where the times come from."""
    sessions: int | None
    block_tokens: int
    bytes_per_token: int
    prompts: dict[str, int]
    """Tokens: ``total``, ``median``, ``longest``."""
    ceiling: dict[str, float]
    curve: list[dict[str, float]]
    knee: dict[str, float] | None
    """Where the curve bends most: more capacity than this buys less than the average of the whole curve."""
    tiers: list[TierPlan]
    recommendation: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """What ``replay plan --json`` prints."""
        data = asdict(self)
        for tier, row in zip(self.tiers, data["tiers"], strict=True):
            row["pays"] = tier.pays
            for cell, entry in zip(tier.break_even, row["break_even"], strict=True):
                entry["pays"] = cell.pays
        return data


def plan(
    trace: Trace,
    model: ModelProfile,
    gpu: GpuProfile,
    presets: Sequence[Preset],
    *,
    sessions: int | None = None,
    slo: Slo | None = None,
    simulate: Simulate | None = None,
    known_error: Mapping[str, float] | None = None,
    prices: Mapping[str, float] | None = None,
    block_tokens: int | None = None,
    partial_blocks: bool = False,
) -> Plan:
    """What a cache would do for this trace.

    Args:
        trace: the requests.
        model: served model.
        gpu: GPU it runs on.
        presets: backends to choose from; the first one's GPU settings decide the GPU tier.
        sessions: sessions live at once; null: as the trace's start times have them.
        slo: limit that the recommended backend must keep.
        simulate: predicts TTFT of a preset; null: no prediction is made.
        known_error: relative error of the engine model by metric, shown beside predictions where the model's times
            on this GPU were measured.
        prices: see `PRICES`.
        block_tokens: granularity of the curve; null: the trace's own, else the first preset's.
        partial_blocks: count a prompt's last, partial block (block-hash traces that give it an id).

    Raises:
        ReplayError: the trace has no prompt of a block, the model does not fit, or a price is unknown.
    """
    _check_prices(prices)
    size = block_tokens or trace.header.block_tokens or presets[0].block_tokens
    curve = trace_curve(trace, size, sessions=sessions, partial=partial_blocks)
    if len(curve.blocks) == 1:
        raise ReplayError(f"{trace.header.name}: no prompt fills a block of {size} tokens; nothing can be cached")
    costs = [(preset, cost_model(model, gpu, preset)) for preset in presets]
    first, cost = costs[0]
    median = median_low(trace.prompt)
    ground = Ground(curve, model.kv_bytes_per_token(first.kv_dtype), median, model.max_context)
    room = gpu_kv_tokens(model, gpu, first)
    tiers = [gpu_tier(ground, first, cost, room), *lower_tiers(ground, costs, room)]
    candidates = [
        _candidate(ground, *pair, gpu_kv_tokens(model, gpu, pair[0]), slo=slo, simulate=simulate, prices=prices)
        for pair in costs
    ]
    return Plan(
        trace=trace.header.name,
        model=model.name,
        gpu=gpu.name,
        cost_source=cost.source,
        sessions=sessions,
        block_tokens=size,
        bytes_per_token=ground.bytes_per_token,
        prompts={"total": curve.prompt_tokens, "median": median, "longest": max(trace.prompt)},
        ceiling={"hit_tokens": curve.ceiling, "hit_share": curve.ceiling / curve.prompt_tokens},
        curve=curve_rows(curve, ground.bytes_per_token),
        knee=knee(curve, ground.bytes_per_token),
        tiers=tiers,
        recommendation=_recommend(ground, candidates, slo, known_error if cost.source == "measured" else None),
        notes=_notes(trace, model, cost),
    )


def parse_prices(texts: Sequence[str]) -> dict[str, float] | None:
    """Prices from ``KEY=NUMBER`` texts; null if there are none.

    Raises:
        ReplayError: not of that form, or an unknown key.
    """
    prices = {}
    for text in texts:
        key, _, number = text.partition("=")
        try:
            prices[key] = float(number)
        except ValueError:
            raise ReplayError(f"--price {text}: write it as KEY=NUMBER, e.g. gpu_hour=3.5") from None
    _check_prices(prices or None)
    return prices or None


def curve_rows(curve: HitCurve, bytes_per_token: int) -> list[dict[str, float]]:
    """At most `GRID` rows on a geometric grid in rising capacity, from one block to the working set."""
    last = int(np.searchsorted(curve.tokens, curve.tokens[-1]))
    if not last:
        return [_row(curve, 0, bytes_per_token)]
    grid = np.unique(np.geomspace(1, last, min(GRID, last)).round().astype(int))
    changed = np.append(True, np.diff(curve.tokens[grid]) > 0)
    return [_row(curve, int(blocks), bytes_per_token) for blocks in grid[changed]]


def knee(curve: HitCurve, bytes_per_token: int) -> dict[str, float] | None:
    """The point farthest above the straight line from an empty cache to the working set (Kneedle,
    Satopaa et al. 2011); null where nothing is ever reused."""
    last = int(np.searchsorted(curve.tokens, curve.tokens[-1]))
    if not last:
        return None
    above = curve.tokens[: last + 1] / curve.tokens[-1] - np.arange(last + 1) / last
    return _row(curve, int(above.argmax()), bytes_per_token)


def _row(curve: HitCurve, blocks: int, bytes_per_token: int) -> dict[str, float]:
    tokens, hits = blocks * curve.block_tokens, int(curve.tokens[blocks])
    return {
        "tokens": tokens,
        "gib": tokens * bytes_per_token / GIB,
        "hit_tokens": hits,
        "hit_share": hits / curve.prompt_tokens,
    }


def _candidate(
    ground: Ground,
    preset: Preset,
    cost: CostModel,
    room: int,
    *,
    slo: Slo | None,
    simulate: Simulate | None,
    prices: Mapping[str, float] | None,
) -> Candidate:
    lower = lower_tiers(ground, [(preset, cost)], 0)
    largest = max([room, *(tier.tokens for tier in lower)])
    predicted = dict(simulate(preset)) if simulate else None
    value = predicted.get(slo.metric) if predicted and slo else None
    return Candidate(
        backend=preset.name,
        hit_share=ground.curve.hit_share(largest) if preset.prefix_caching else 0.0,
        predicted=predicted,
        meets_slo=None if value is None or slo is None else value <= slo.seconds,
        cost_month=_cost(preset, prices) if prices else None,
        slow_tiers=tuple(tier.tier for tier in lower if not tier.pays),
    )


def _cost(preset: Preset, prices: Mapping[str, float]) -> float:
    gpus = prices.get("gpu_hour", 0.0) * HOURS * preset.tensor_parallel * preset.instances
    return gpus + sum(tier.gib * prices.get(f"{name}_gib_month", 0.0) for name, tier in preset.lower())


def _check_prices(prices: Mapping[str, float] | None) -> None:
    for name, value in (prices or {}).items():
        if name not in PRICES:
            raise unknown_name("price", name, PRICES)
        if not 0 <= value < math.inf:
            raise ReplayError(f"price {name}={value}: give a positive number")


def _recommend(
    ground: Ground, candidates: list[Candidate], slo: Slo | None, known_error: Mapping[str, float] | None
) -> dict[str, Any]:
    curve = ground.curve
    enough = int(np.searchsorted(curve.tokens, ENOUGH * curve.ceiling)) if curve.ceiling else 0
    choice, why = _choose(candidates, slo)
    return {
        "backend": choice.backend if choice else None,
        "why": why,
        "capacity": _row(curve, enough, ground.bytes_per_token),
        "slo": asdict(slo) if slo else None,
        "candidates": [asdict(candidate) for candidate in candidates],
        "known_error": dict(known_error) if known_error else None,
        "simulated": any(candidate.predicted for candidate in candidates),
    }


def _choose(candidates: list[Candidate], slo: Slo | None) -> tuple[Candidate | None, str]:
    """The cheapest of those that keep the SLO, else the fastest; without prices, the fastest of them."""
    metric = slo.metric if slo else "ttft_p95"
    timed = [c for c in candidates if c.predicted and c.predicted.get(metric) is not None]
    if not timed:
        sound = [c for c in candidates if not c.slow_tiers]
        best = max(sound, key=lambda c: c.hit_share, default=None)
        return (
            best,
            "serves most of the prompts from tiers that are faster than rebuilding; no times were simulated",
        )

    def value(candidate: Candidate) -> float:
        return (candidate.predicted or {})[metric] or 0.0

    fastest = min(timed, key=value)
    if slo is None:
        return fastest, f"lowest simulated {metric}"
    good = [c for c in timed if c.meets_slo]
    if not good:
        near = f"{fastest.backend} comes nearest with {value(fastest):.2f} s"
        return None, f"none keeps {metric} <= {slo.seconds:g} s; {near}"
    if all(c.cost_month is not None for c in good):
        return min(good, key=lambda c: (c.cost_month, value(c))), f"cheapest that keeps {metric} <= {slo.seconds:g} s"
    return min(good, key=value), f"lowest simulated {metric} of those that keep {metric} <= {slo.seconds:g} s"


def _notes(trace: Trace, model: ModelProfile, cost: CostModel) -> list[str]:
    notes = list(model.warnings)
    long = sum(prompt > model.max_context for prompt in trace.prompt)
    if long:
        notes.append(
            f"{long:,} of {len(trace):,} prompts are longer than {model.name}'s context of {model.max_context:,} tokens"
        )
    if cost.source == "derived":
        notes.append(f"times of {model.name} are scaled by FLOPs and bytes from a measured model, not measured")
    if any(turn.output for turn in trace.turns):
        notes.append("hits are of prompts alone: a run may also reuse generated tokens, and counts a little more")
    return notes
