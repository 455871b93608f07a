"""The figures that two runs are compared by and that gates and SLOs may name: kind, and which way is better."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from replay.results.report import CACHED, LOSSES, TIERS

Kind = Literal["seconds", "tokens", "share", "rate", "count"]

LATENCIES = ("ttft", "ttft_due", "e2e", "itl")
"""Columns of `v_requests`; their statistics are `ttft_mean`, `ttft_p50` and so on."""
LEAST = {"mean": 1, "p50": 1, "p90": 10, "p95": 20, "p99": 100}
"""Statistics of a latency, and the fewest requests that support each (as in reports/latency.sql)."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SUMS = {
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "output_tokens",
    "ideal_tokens": "ideal_tokens",
    **{f"{tier}_tokens": f"{tier}_tokens" for tier in CACHED},
    "computed_tokens": "computed_tokens",
    "loss": "loss_total",
    **{f"lost_{cause}": f"lost_{cause}" for cause in LOSSES},
    "recompute_s": "recompute_s",
    "load_s": "load_s",
    "preemptions": "preemptions",
}
"""Metrics that are sums of a column of `v_requests`."""
RATIOS = {
    "hit_share": ("served_tokens", "prompt_tokens"),
    **{f"{tier}_share": (f"{tier}_tokens", "prompt_tokens") for tier in TIERS},
    "loss_share": ("loss_total", "ideal_tokens"),
}
"""Metrics that are one sum over another."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A metric in both runs. Null is unknown: the backend does not say, or too few pairs support it."""

    a: float | None = None
    b: float | None = None
    difference: float | None = None
    """b - a."""
    change: float | None = None
    """Difference as a share of a; null where a is 0."""
    low: float | None = None
    """Ends of the 95 % interval of the difference; null where there is none, as for throughput: one figure a run."""
    high: float | None = None
    change_low: float | None = None
    """Ends of the 95 % interval of the change."""
    change_high: float | None = None
    n: int | None = None
    """Pairs that it rests on; null for figures of the whole run."""
    verdict: str = "unknown"
    """`better`, `worse` (`more`, `less` where neither is better), `no difference shown` (the interval holds 0),
    `no interval`, `only in A` or `only in B` (a tier that the other's preset does not have), or `unknown`."""


class Metric(NamedTuple):
    """What a figure is."""

    kind: Kind
    better: int
    """-1: less is better; 1: more is; 0: neither."""


_LESS = ("computed_tokens", "loss", *(f"lost_{cause}" for cause in LOSSES), "recompute_s", "preemptions")


def _kind(name: str) -> Kind:
    return "seconds" if name.endswith("_s") else "count" if name == "preemptions" else "tokens"


METRICS: dict[str, Metric] = {
    **{f"{latency}_{stat}": Metric("seconds", -1) for latency in LATENCIES for stat in LEAST},
    **{name: Metric(_kind(name), -1 if name in _LESS else 0) for name in SUMS},
    "hit_share": Metric("share", 1),
    **{f"{tier}_share": Metric("share", 0) for tier in TIERS},
    "loss_share": Metric("share", -1),
    "throughput": Metric("rate", 1),
    "output_tokens_per_s": Metric("rate", 1),
    "prompt_tokens_per_s": Metric("rate", 1),
    "errors": Metric("count", -1),
    "error_share": Metric("share", -1),
}
"""By name. `throughput` is answered requests per second."""
