"""`plan`: from a trace, a model and a GPU to what a cache of which size and kind would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median_low
from typing import Any

import numpy as np

from replay.backends.preset import Preset
from replay.engine.cost import CostModel, cost_model
from replay.engine.profiles import GIB, GpuProfile, ModelProfile, gpu_kv_tokens
from replay.errors import ReplayError
from replay.plan.advice import (
    DISK_ERROR,
    Candidate,
    Simulate,
    Slo,
    candidate,
    check_prices,
    choose,
    on_the_gpu,
    shortfalls,
)
from replay.plan.curve import HitCurve
from replay.plan.stream import trace_curve
from replay.plan.tiers import Ground, TierPlan, gpu_tier, lower_tiers
from replay.trace import Trace

GRID = 240
"""Most rows of the curve in a plan."""
ENOUGH = 0.95
"""Share of the ceiling that a recommended capacity serves."""


@dataclass(frozen=True)
class Plan:
    """Everything `replay plan` says, as plain data. `as_dict` is its JSON."""

    trace: str
    model: str
    gpu: str
    cost_source: str
    """``measured`` or ``derived``: the profile that the times come from."""
    sessions: int | None
    block_tokens: int
    bytes_per_token: int
    prompts: dict[str, int]
    """Tokens: ``total``, ``median``, ``longest``."""
    ceiling: dict[str, float]
    """Of an unlimited cache: ``hit_tokens``, ``hit_share``."""
    curve: list[dict[str, float]]
    """Hits by capacity: an upper bound for an LRU cache of this size, which serves the prompts in their order
    without time and without memory that running requests hold. Of prompts alone: generated tokens that a later
    prompt repeats come on top in a run."""
    knee: dict[str, float] | None
    """Where the curve bends most: more capacity than this buys less than the average of the whole curve."""
    tiers: list[TierPlan]
    """Their hits are the curve's."""
    recommendation: dict[str, Any]
    """``backend`` (null: none) and ``why``; ``capacity``: a row of the curve with ``served_share``, what a GPU tier of
    this size alone serves when simulated (null: not simulated); ``candidates``: see `Candidate`; ``known_error`` and
    ``known_disk_error`` (null: unknown), relative, by metric, of tiers without and with a disk."""
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
    check_prices(prices)
    size = block_tokens or trace.header.block_tokens or presets[0].block_tokens
    curve = trace_curve(trace, size, sessions=sessions, partial=partial_blocks)
    if len(curve.blocks) == 1:
        raise ReplayError(f"{trace.header.name}: no prompt fills a block of {size} tokens; nothing can be cached")
    costs = [(preset, cost_model(model, gpu, preset)) for preset in presets]
    first, cost = costs[0]
    median = median_low(trace.prompt)
    ground = Ground(curve, model.kv_bytes_per_token(first.kv_dtype), median, model.max_context)
    rooms = [gpu_kv_tokens(model, gpu, preset) for preset in presets]
    tiers = [gpu_tier(ground, first, cost, rooms[0]), *lower_tiers(ground, costs, rooms[0])]
    candidates = [
        candidate(ground, *pair, room, slo=slo, simulate=simulate, prices=prices)
        for pair, room in zip(costs, rooms, strict=True)
    ]
    capacity: dict[str, float | None] = {**_enough(ground)}
    longest = min(max(turn.output + prompt for turn, prompt in zip(trace.turns, trace.prompt, strict=True)),
                  model.max_context) + first.block_tokens  # fmt: skip
    capacity["served_share"] = on_the_gpu(presets, rooms, int(capacity["tokens"] or 0), longest, simulate)
    known = known_error if cost.source == "measured" else None
    recommendation = _recommend(candidates, slo, capacity, known, any(tier.tier == "disk" for tier in tiers))
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
        recommendation=recommendation,
        notes=[*shortfalls(candidates, recommendation["backend"]), *_notes(trace, model, cost)],
    )


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


def _enough(ground: Ground) -> dict[str, float]:
    curve = ground.curve
    enough = int(np.searchsorted(curve.tokens, ENOUGH * curve.ceiling)) if curve.ceiling else 0
    return _row(curve, enough, ground.bytes_per_token)


def _recommend(
    candidates: list[Candidate],
    slo: Slo | None,
    capacity: dict[str, float | None],
    known_error: Mapping[str, float] | None,
    disk: bool,
) -> dict[str, Any]:
    choice, why = choose(candidates, slo)
    return {
        "backend": choice.backend if choice else None,
        "why": why,
        "capacity": capacity,
        "slo": asdict(slo) if slo else None,
        "candidates": [asdict(candidate) for candidate in candidates],
        "known_error": dict(known_error) if known_error else None,
        "known_disk_error": dict(DISK_ERROR) if known_error and disk else None,
        "simulated": any(candidate.predicted for candidate in candidates),
    }


def _notes(trace: Trace, model: ModelProfile, cost: CostModel) -> list[str]:
    notes = list(model.warnings)
    long = sum(prompt > model.max_context for prompt in trace.prompt)
    if long:
        notes.append(
            f"{long:,} of {len(trace):,} prompts are longer than {model.name}'s context of {model.max_context:,} "
            "tokens; the curve counts them, a simulated run does not"
        )
    if cost.source == "derived":
        notes.append(f"times of {model.name} are scaled by FLOPs and bytes from a measured model, not measured")
    if any(turn.output for turn in trace.turns):
        notes.append(
            "the curve counts prompts alone; generated tokens that a later prompt repeats come on top in a run"
        )
    return notes
