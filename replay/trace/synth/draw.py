"""Random draws by inverse distribution, so that a seed means the same numbers on every Python.

`random.Random.random` is the one generator whose stream Python promises to keep; everything here is
a function of uniform numbers from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class SplitLognormal:
    """A lognormal whose lower and upper halves have their own width: it fits p50 and both tails."""

    p50: float
    low: float
    """Sigma below the median, e.g. ``log(p50 / p25) / 0.674``."""
    high: float
    """Sigma above the median, e.g. ``log(p90 / p50) / 1.2816``."""
    least: float = 0.0
    most: float = float("inf")
    """The distribution is cut to ``least..most``: its share outside is redrawn inside."""

    def at(self, quantile: float) -> float:
        """The value at a quantile (0 to 1) of the cut distribution."""
        below = self._share(self.least) if self.least > 0 else 0.0
        above = self._share(self.most) if self.most < float("inf") else 1.0
        z = _NORMAL.inv_cdf(min(max(below + quantile * (above - below), 1e-12), 1 - 1e-12))
        return self.p50 * exp(z * (self.low if z < 0 else self.high))

    def _share(self, value: float) -> float:
        z = log(value / self.p50)
        return _NORMAL.cdf(z / (self.low if z < 0 else self.high))

    def draw(self, rng: Random) -> float:
        """One value."""
        return self.at(rng.random())


def lognormal(p50: float, sigma: float, least: float = 0.0, most: float = float("inf")) -> SplitLognormal:
    """A lognormal given by its median, cut to ``least..most``."""
    return SplitLognormal(p50, sigma, sigma, least, most)


def stratified(rng: Random, count: int) -> list[float]:
    """`count` uniform numbers, one in each of `count` equal parts of 0..1, in random order.

    A few dozen sessions drawn at these quantiles have the distribution's median whatever the seed.
    """
    values = [(index + rng.random()) / count for index in range(count)]
    shuffle(rng, values)
    return values


def shuffle(rng: Random, values: list[float]) -> None:
    """Fisher-Yates on `random()`: unlike `Random.shuffle`, promised to stay as it is."""
    for last in range(len(values) - 1, 0, -1):
        other = int(rng.random() * (last + 1))
        values[last], values[other] = values[other], values[last]


def exponential(rng: Random, mean: float) -> float:
    """A gap of a Poisson process."""
    return -mean * log(1 - rng.random())
