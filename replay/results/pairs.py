"""The turns that two runs share, as arrays: differences of every metric, by group, and where tokens moved.

The SQL of ``reports/compare_*.sql`` pairs the turns and counts; the intervals come from `replay.results.bootstrap`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.results import queries
from replay.results.bootstrap import Bootstrap, Floats, interval
from replay.results.metrics import LATENCIES, LEAST, METRICS, QUANTILES, RATIOS, SUMS, Cell
from replay.results.report import CACHED

SOURCES = (*CACHED, "computed")
_GROUPINGS = ("prefix", "pause", "served_from", "position")
_Mask = NDArray[np.bool_]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of one kind: TTFT in seconds."""

    by: str
    """`prefix` (reusable tokens), `pause`, `served_from` (first run's > second's) or `position` in the session."""
    group: str
    n: int
    better: int
    """Turns whose TTFT fell by more than 5 % and 1 ms."""
    worse: int
    a_mean: float
    b_mean: float
    difference: float
    low: float | None
    high: float | None
    verdict: str


class Pairs:
    """The table `pairs` in memory, and what is computed from it."""

    def __init__(self, con: duckdb.DuckDBPyConnection, ids: dict[str, str]):
        self._con = con
        con.execute("CREATE OR REPLACE TEMP TABLE pairs AS " + queries.text("compare_pairs"), ids)
        numbers = con.execute("SELECT session_number FROM pairs").fetchnumpy()["session_number"]
        self.draw = Bootstrap(np.ma.filled(numbers, 0).astype(np.int64))

    def metrics(self) -> dict[str, Cell]:
        """The metrics of pairs, by name."""
        cells: dict[str, Cell] = {}
        for latency in LATENCIES:
            cells |= self._latency(latency)
        cells |= {name: self._sum(name, column) for name, column in SUMS.items()}
        cells |= {name: self._ratio(name, *columns) for name, columns in RATIOS.items()}
        return cells

    def groups(self) -> Iterator[Group]:
        """The rows of ``reports/compare_groups.sql`` with intervals."""
        rows = queries.select(self._con, "compare_groups")
        a, b = self._both("ttft")
        known = np.isfinite(a) & np.isfinite(b)
        for by in _GROUPINGS:
            of_kind = [row for row in rows if row["by"] == by]
            if not of_kind:
                continue
            numbers = np.array([row["number"] for row in of_kind])
            of_pair = self._column(f"{by}_group")
            inside = known & np.isfinite(of_pair)
            index = np.where(inside, np.searchsorted(numbers, np.where(inside, of_pair, 0)), 0)
            difference = np.where(inside, b - a, 0.0)
            with np.errstate(invalid="ignore"):
                means = self.draw.grouped_sums(difference, index, len(numbers)) / self.draw.grouped_sums(
                    inside.astype(float), index, len(numbers)
                )
            for number, row in enumerate(of_kind):
                yield self._group(row, means[:, number], inside & (index == number))

    def moved(self) -> list[dict[str, Any]]:
        """Tokens by where they came from in either run; a turn's gains are shared out over its losses."""
        gains = []
        for source in SOURCES:
            a, b = self._both(f"{source}_tokens")
            gains.append(np.nan_to_num(b) - np.nan_to_num(a))
        change = np.stack(gains)
        gained, lost = np.maximum(change, 0), np.maximum(-change, 0)
        moved = (lost / np.maximum(gained.sum(axis=0), 1)) @ gained.T
        found = [
            {"from": source, "to": target, "tokens": round(float(moved[i, j]))}
            for i, source in enumerate(SOURCES)
            for j, target in enumerate(SOURCES)
            if round(float(moved[i, j]))
        ]
        return sorted(found, key=lambda row: -row["tokens"])

    def why(self) -> dict[str, float | None]:
        """The difference of all TTFTs together, and the parts of it that were recorded."""
        parts = {}
        for name, column in (("ttft_s", "ttft"), ("recompute_s", "recompute_s"), ("load_s", "load_s")):
            a, b = self._both(column)
            difference = (b - a)[np.isfinite(a) & np.isfinite(b)]
            parts[name] = _round(float(difference.sum())) if len(difference) else None
        known = [parts[name] for name in ("ttft_s", "recompute_s", "load_s")]
        total, *of_it = known
        complete = total is not None and all(part is not None for part in of_it)
        rest = total - sum(part or 0.0 for part in of_it) if complete and total is not None else None
        return {**parts, "rest_s": _round(rest)}

    def _latency(self, latency: str) -> dict[str, Cell]:
        a, b = self._both(latency)
        known = np.isfinite(a) & np.isfinite(b)
        n = int(known.sum())
        points: dict[str, tuple[float, float]] = {}
        draws: dict[str, tuple[Floats, Floats]] = {}
        if n:
            qs = list(QUANTILES.values())
            for stat, left, right in zip(QUANTILES, *(np.quantile(x[known], qs) for x in (a, b)), strict=True):
                points[stat] = (float(left), float(right))
            points["mean"] = (float(a[known].mean()), float(b[known].mean()))
            if self.draw.enough(known):
                resampled = [self.draw.quantiles(x, qs, known) for x in (a, b)]
                draws = dict(zip(QUANTILES, zip(*resampled, strict=True), strict=True))
                draws["mean"] = (self._mean(a, known), self._mean(b, known))
        return {
            f"{latency}_{stat}": cell(
                f"{latency}_{stat}", *(points.get(stat, (None, None)) if n >= least else (None, None)), n=n,
                draws=draws.get(stat),
            )
            for stat, least in LEAST.items()
        }  # fmt: skip

    def _sum(self, name: str, column: str) -> Cell:
        a, b = self._both(column)
        known = np.isfinite(a) & np.isfinite(b)
        n = int(known.sum())
        if not n:
            return cell(name, _total(a), _total(b), n=0)
        draws = None
        if self.draw.enough(known):
            draws = (n * self._mean(a, known), n * self._mean(b, known))
        return cell(name, float(a[known].sum()), float(b[known].sum()), n=n, draws=draws)

    def _ratio(self, name: str, part: str, whole: str) -> Cell:
        (a, b), (a_whole, b_whole) = self._both(part), self._both(whole)
        known = np.isfinite(a) & np.isfinite(b) & np.isfinite(a_whole) & np.isfinite(b_whole)
        points = [_share(x[known], y[known]) for x, y in ((a, a_whole), (b, b_whole))]
        draws = None
        if self.draw.enough(known):
            draws = (self._mean(a, known, a_whole), self._mean(b, known, b_whole))
        return cell(name, *points, n=int(known.sum()), draws=draws)

    def _mean(self, values: Floats, known: _Mask, whole: Floats | None = None) -> Floats:
        """(resamples,) sum of the values over their number, or over the sum of `whole`."""
        below = known.astype(float) if whole is None else np.where(known, whole, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean: Floats = self.draw.sums(np.where(known, values, 0.0)) / self.draw.sums(below)
        return mean

    def _group(self, row: dict[str, Any], means: Floats, inside: _Mask) -> Group:
        ends = interval(means) if self.draw.enough(inside) else None
        low, high = ends or (None, None)
        difference = row["b_mean"] - row["a_mean"]
        return Group(
            by=row["by"], group=row["group"], n=row["n"], better=row["better"], worse=row["worse"],
            a_mean=row["a_mean"], b_mean=row["b_mean"], difference=difference,
            low=low, high=high, verdict=_verdict(-1, difference, low, high),
        )  # fmt: skip

    def _both(self, column: str) -> tuple[Floats, Floats]:
        return self._column(f"a_{column}"), self._column(f"b_{column}")

    def _column(self, name: str) -> Floats:
        found = self._con.execute(f'SELECT "{name}"::DOUBLE AS x FROM pairs').fetchnumpy()["x"]
        values: Floats = np.ma.filled(found, np.nan)
        return values


def cell(
    name: str, a: float | None, b: float | None, *, n: int | None = None, draws: tuple[Floats, Floats] | None = None
) -> Cell:
    """A metric in both runs.

    Args:
        name: of the metric.
        a: in the first run; null: unknown.
        b: in the other.
        n: pairs that it rests on; null: the whole runs.
        draws: (resamples,) its values in the resamples of the first run and of the other; null: no interval.
    """
    if a is None or b is None:
        return Cell(a=_round(a), b=_round(b), n=n)
    low = high = change_low = change_high = None
    if draws is not None:
        low, high = interval(draws[1] - draws[0]) or (None, None)
        with np.errstate(invalid="ignore", divide="ignore"):
            change_low, change_high = interval(draws[1] / draws[0] - 1) or (None, None)
    return Cell(
        a=_round(a), b=_round(b), difference=_round(b - a), change=_round(b / a - 1) if a else None,
        low=_round(low), high=_round(high), change_low=_round(change_low) if a else None,
        change_high=_round(change_high) if a else None, n=n, verdict=_verdict(METRICS[name].better, b - a, low, high),
    )  # fmt: skip


def _verdict(better: int, difference: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return "no interval" if difference else "no difference shown"
    if _round(low) <= 0 <= _round(high):
        return "no difference shown"
    if not better:
        return "more" if low > 0 else "less"
    return "better" if (low > 0) == (better > 0) else "worse"


def _total(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.sum()) if len(known) else None


def _share(part: Floats, whole: Floats) -> float | None:
    total = float(whole.sum())
    return float(part.sum()) / total if total else None


def _round(value: Any) -> Any:
    """Nine decimals, as in a report: sums differ in the last bits from one order to another."""
    return None if value is None else round(value, 9)
