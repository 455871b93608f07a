"""How far the difference between two runs could be chance: a paired bootstrap.

The pairs are resampled with replacement, the same draw for both runs, and every figure is computed anew from each
resample; the middle 95 % of the differences are the interval (percentile bootstrap: Efron and Tibshirani, *An
Introduction to the Bootstrap*, 1993, chapter 13).

Turns of one session resemble each other, so whole sessions are drawn (cluster bootstrap: Davison and Hinkley,
*Bootstrap Methods and their Application*, 1997, section 3.8); treating turns as independent would give intervals that
are too narrow. With fewer than `MIN_UNITS` sessions there is nothing to draw from, and turns are drawn.

Draws are counts: row r of `weights` says how often resample r holds each unit. So sums of all resamples are one matrix
product, and quantiles are read off weighted histograms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESAMPLES = 2_000
LEVEL = 0.95
SEED = 0
MIN_UNITS = 10
"""Fewer sessions (or turns) than this say nothing about their spread."""
MAX_UNITS = 2_048
"""More sessions are drawn in groups of neighbours: as valid, and the cost stays bounded."""
MAX_BINS = 2_048
"""More pairs are sorted into this many bins of equal count, each standing for its mean."""


class Bootstrap:
    """Draws from the pairs of one comparison. The same pairs give the same draws, always."""

    def __init__(self, sessions: Ints):
        """Args:
        sessions: (pairs,) number of each pair's session, counted from 0; pairs of a session are neighbours.
        """
        self.n = len(sessions)
        count = int(sessions.max()) + 1 if self.n else 0
        self.by = "session" if count >= MIN_UNITS else "turn"
        """What is drawn."""
        index = sessions.astype(np.int64) if self.by == "session" else np.arange(self.n, dtype=np.int64)
        count = count if self.by == "session" else self.n
        self.units = min(count, MAX_UNITS)
        """How many there are to draw from."""
        self._unit = index * self.units // max(1, count)
        rng = np.random.default_rng(SEED)
        self.weights: Floats = np.empty((RESAMPLES, self.units))
        if self.units:
            self.weights[:] = rng.multinomial(self.units, np.full(self.units, 1 / self.units), size=RESAMPLES)

    def enough(self, known: NDArray[np.bool_]) -> bool:
        """Whether those pairs come from enough sessions (or turns) for an interval.

        Args:
            known: (pairs,) which pairs count.
        """
        return int(np.count_nonzero(np.bincount(self._unit[known]))) >= MIN_UNITS

    def sums(self, values: Floats) -> Floats:
        """(resamples,) sum of the values in each resample.

        Args:
            values: (pairs,) without NaN.
        """
        sums: Floats = self.weights @ np.bincount(self._unit, weights=values, minlength=self.units)
        return sums

    def grouped_sums(self, values: Floats, groups: Ints, count: int) -> Floats:
        """(resamples, count) sum of the values of each group in each resample.

        Args:
            values: (pairs,) without NaN.
            groups: (pairs,) group of each pair, from 0.
            count: number of groups.
        """
        sums: Floats = self.weights @ self._by_unit(groups, count, values)
        return sums

    def quantiles(self, values: Floats, qs: list[float], known: NDArray[np.bool_]) -> Floats:
        """(len(qs), resamples) quantiles of each resample, linear between order statistics as in the reports.

        Args:
            values: (pairs,) values.
            qs: shares, from 0 to 1.
            known: (pairs,) which pairs count.
        """
        chosen, units = values[known], self._unit[known]
        order = np.argsort(chosen, kind="stable")
        bins = min(len(chosen), MAX_BINS)
        of_rank = np.arange(len(chosen)) * bins // max(1, len(chosen))
        height = np.bincount(of_rank, weights=chosen[order], minlength=bins) / np.bincount(of_rank, minlength=bins)
        histogram = np.bincount(units[order] * bins + of_rank, minlength=self.units * bins)
        counts = self.weights.astype(np.float32) @ histogram.reshape(self.units, bins).astype(np.float32)
        reached = np.cumsum(counts, axis=1)  # float32 counts exactly up to 16 M pairs, and to one in 10^7 beyond
        return np.stack([_quantile(reached, height, q) for q in qs])

    def _by_unit(self, columns: Ints, count: int, values: Floats) -> Floats:
        sums = np.bincount(self._unit * count + columns, weights=values, minlength=self.units * count)
        return sums.astype(np.float64).reshape(self.units, count)


def interval(resampled: Floats) -> tuple[float, float] | None:
    """The middle 95 % of a figure's resamples, or null where a resample in twenty has no such figure.

    Args:
        resampled: (resamples,) values, NaN where a resample gives none.
    """
    known = resampled[np.isfinite(resampled)]
    if len(known) < LEVEL * len(resampled) or not len(known):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _quantile(reached: NDArray[np.float32], height: Floats, q: float) -> Floats:
    """(resamples,) the quantile at q of weighted values.

    Args:
        reached: (resamples, values) cumulative counts of the ascending values.
        height: (values,) the values.
        q: share.
    """
    total = reached[:, -1].astype(np.float64)
    place = q * np.maximum(total - 1, 0)
    below = np.floor(place)
    last = len(height) - 1
    lower, upper = (
        height[np.minimum(np.count_nonzero(reached <= rank[:, None].astype(np.float32), axis=1), last)]
        for rank in (below, np.ceil(place))
    )
    result: Floats = np.where(total > 0, lower + (place - below) * (upper - lower), np.nan)
    return result
