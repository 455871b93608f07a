"""Which backend to take: what each would serve, how fast and at what price, and how far that can be trusted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from replay.backends.preset import Preset
from replay.engine.cost import CostModel
from replay.errors import ReplayError, unknown_name
from replay.plan.tiers import Ground, lower_tiers
from replay.results import units

HOURS = 730
"""Hours of a month."""
METRICS = tuple(f"ttft_p{p}" for p in (50, 90, 95, 99))
PRICES = ("gpu_hour", "cpu_gib_month", "disk_gib_month", "remote_gib_month")

KNOWN_ERROR = {"ttft_p50": 0.27, "ttft_p90": 0.40, "ttft_p99": 0.35}
"""Largest relative error of the engine model on runs that nothing was fitted to, tiers without a disk: Qwen3-8B on
H200s, profile `h200`, docs/accuracy.md. Elsewhere the error is not known."""
DISK_ERROR = {"ttft_p50": (-0.70, 0.54), "ttft_p90": (-0.37, 1.80), "ttft_p99": (-0.43, 1.22)}
"""Lowest and highest relative error on the runs with a disk tier there."""
SHORTFALL = 0.05
"""Simulated below bound by more than this share of the prompts: that is said."""

Simulate = Callable[[Preset], Mapping[str, float | None]]
"""Runs the engine model on a preset; gives seconds for `METRICS` and ``served_share`` (null: unknown)."""


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
    """One backend, with what it would do. Predicted times and the served share are simulated."""

    backend: str
    hit_share: float
    """Of the curve at the size of its largest tier: a bound, see `Plan.curve`."""
    served_share: float | None
    """Share of prompt tokens that the simulated run did not compute; null where no simulation was run."""
    predicted: dict[str, float | None] | None
    """Simulated figures in seconds; null where no simulation was run."""
    meets_slo: bool | None
    cost_month: float | None
    """In the currency of the prices; null without prices."""
    slow_tiers: tuple[str, ...]
    """Tiers from which loading the median prompt takes longer than rebuilding it."""


def candidate(
    ground: Ground,
    preset: Preset,
    cost: CostModel,
    room: int,
    *,
    slo: Slo | None,
    simulate: Simulate | None,
    prices: Mapping[str, float] | None,
) -> Candidate:
    """What a preset with a GPU tier of `room` tokens would do; arguments as of `replay.plan.plan`."""
    lower = lower_tiers(ground, [(preset, cost)], 0)
    largest = max([room, *(tier.tokens for tier in lower)])
    predicted = dict(simulate(preset)) if simulate else None
    served = predicted.pop("served_share", None) if predicted else None
    value = predicted.get(slo.metric) if predicted and slo else None
    return Candidate(
        backend=preset.name,
        hit_share=ground.curve.hit_share(largest) if preset.prefix_caching else 0.0,
        served_share=served,
        predicted=predicted,
        meets_slo=None if value is None or slo is None else value <= slo.seconds,
        cost_month=_cost(preset, prices) if prices else None,
        slow_tiers=tuple(tier.tier for tier in lower if not tier.pays),
    )


def on_the_gpu(
    presets: Sequence[Preset], rooms: Sequence[int], tokens: int, longest: int, simulate: Simulate | None
) -> float | None:
    """Simulated share of prompt tokens that a GPU tier of `tokens` tokens alone serves.

    Null where nothing says: no simulation, no preset with a single GPU tier, more than the GPU holds (`rooms`, of
    each preset), or less than the longest prompt and its output need (`longest`).
    """
    for preset, room in zip(presets, rooms, strict=True):
        alone = preset.prefix_caching and not preset.lower() and preset.instances == 1
        if simulate and alone and longest <= tokens <= room:
            gpu = msgspec.structs.replace(preset.tiers.gpu, tokens=tokens, gib=None)
            tiers = msgspec.structs.replace(preset.tiers, gpu=gpu)
            return simulate(msgspec.structs.replace(preset, tiers=tiers)).get("served_share")
    return None


def choose(candidates: list[Candidate], slo: Slo | None) -> tuple[Candidate | None, str]:
    """The cheapest of those that keep the SLO, else the fastest; without prices, the fastest of them."""
    metric = slo.metric if slo else "ttft_p95"
    timed = [c for c in candidates if c.predicted and c.predicted.get(metric) is not None]
    if not timed:
        sound = [c for c in candidates if not c.slow_tiers]
        best = max(sound, key=lambda c: c.hit_share, default=None)
        return best, "highest bound of those without a tier slower than rebuilding; no times were simulated"

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


def shortfalls(candidates: Sequence[Candidate], backend: str | None) -> list[str]:
    """A note if the recommended backend serves less than its bound by more than `SHORTFALL` when simulated."""
    return [
        f"{row.backend} serves {units.share(row.served_share, 1)} of the prompts when simulated, not the "
        f"{units.share(row.hit_share, 1)} of its bound: running requests need memory too"
        for row in candidates
        if row.backend == backend and row.served_share is not None and row.hit_share - row.served_share > SHORTFALL
    ]


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
    check_prices(prices or None)
    return prices or None


def check_prices(prices: Mapping[str, float] | None) -> None:
    """Raises:
    ReplayError: a name that is not of `PRICES`, or no positive number.
    """
    for name, value in (prices or {}).items():
        if name not in PRICES:
            raise unknown_name("price", name, PRICES)
        if not 0 <= value < math.inf:
            raise ReplayError(f"price {name}={value}: give a positive number")


def _cost(preset: Preset, prices: Mapping[str, float]) -> float:
    gpus = prices.get("gpu_hour", 0.0) * HOURS * preset.tensor_parallel * preset.instances
    return gpus + sum(tier.gib * prices.get(f"{name}_gib_month", 0.0) for name, tier in preset.lower())
