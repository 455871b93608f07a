"""Intervals: equal to resampling by hand, right as often as they say, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.results.bootstrap import MIN_UNITS, Bootstrap, interval

QS = [0.0, 0.5, 0.9, 0.99, 1.0]
TURNS = 4


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    sessions=st.integers(1, 20),
    row=st.integers(0, 1999),
)
def test_a_resample_has_the_quantiles_and_sums_of_the_pairs_it_draws(
    values: list[float], sessions: int, row: int
) -> None:
    of_pair = np.sort(np.arange(len(values)) % sessions)
    data = np.array(values)
    draw = Bootstrap(of_pair)
    units = of_pair if draw.by == "session" else np.arange(len(data))
    drawn = np.repeat(data, draw.weights[row].astype(int)[units])
    known = np.ones(len(data), dtype=bool)
    assert draw.sums(data)[row] == pytest.approx(drawn.sum(), rel=1e-9, abs=1e-6)
    assert draw.quantiles(data, QS, known)[:, row] == pytest.approx(np.quantile(drawn, QS), rel=1e-9, abs=1e-6)


def test_sessions_are_drawn_whole_and_turns_where_sessions_are_few() -> None:
    many = Bootstrap(np.repeat(np.arange(MIN_UNITS), 7))
    few = Bootstrap(np.repeat(np.arange(MIN_UNITS - 1), 7))
    assert (many.by, many.units) == ("session", MIN_UNITS)
    assert (few.by, few.units) == ("turn", 7 * (MIN_UNITS - 1))
    assert (many.weights.sum(axis=1) == MIN_UNITS).all()


def test_the_same_pairs_give_the_same_draws() -> None:
    sessions = np.repeat(np.arange(30), 3)
    assert (Bootstrap(sessions).weights == Bootstrap(sessions).weights).all()


def test_groups_are_summed_apart() -> None:
    draw = Bootstrap(np.repeat(np.arange(12), 2))
    values, groups = np.arange(24.0), np.arange(24) % 2
    apart = draw.grouped_sums(values, groups, 2)
    assert apart[:, 0] == pytest.approx(draw.sums(np.where(groups == 0, values, 0.0)))
    assert apart.sum(axis=1) == pytest.approx(draw.sums(values))


def test_many_pairs_are_binned_without_moving_quantiles() -> None:
    rng = np.random.default_rng(1)
    values = rng.lognormal(size=60_000)
    draw = Bootstrap(np.repeat(np.arange(6_000), 10))
    found = draw.quantiles(values, [0.5, 0.9], np.ones(60_000, dtype=bool))
    for resampled, q in zip(found, (0.5, 0.9), strict=True):
        low, high = interval(resampled) or (0.0, 0.0)
        exact = np.quantile(values, q)
        assert low < exact < high
        assert high - low < 0.1 * exact


def test_no_interval_where_resamples_often_have_no_figure() -> None:
    assert interval(np.full(100, np.nan)) is None
    assert interval(np.array([1.0] * 90 + [np.nan] * 10)) is None
    assert interval(np.array([1.0] * 99 + [np.nan])) == (1.0, 1.0)


def _experiment(rng: np.random.Generator, effect: float) -> tuple[Bootstrap, np.ndarray, np.ndarray]:
    """40 sessions; a session's own level and its own response are most of the variance."""
    sessions = np.repeat(np.arange(40), TURNS)
    level, response = rng.normal(3, 1, 40)[sessions], rng.normal(effect, 0.3, 40)[sessions]
    a = level + rng.normal(0, 0.3, 40 * TURNS)
    return Bootstrap(sessions), a, a + response + rng.normal(0, 0.1, 40 * TURNS)


@pytest.mark.parametrize("figure", ["mean", "median"])
def test_intervals_cover_the_truth_about_as_often_as_they_say(figure: str) -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        draw, a, b = _experiment(rng, effect=0.2)
        if figure == "mean":
            resampled = draw.sums(b - a) / draw.sums(np.ones(40 * TURNS))
        else:
            known = np.ones(40 * TURNS, dtype=bool)
            resampled = draw.quantiles(b, [0.5], known)[0] - draw.quantiles(a, [0.5], known)[0]
        low, high = interval(resampled) or (0.0, 0.0)
        covered += low <= 0.2 <= high
    assert 0.88 <= covered / 100 <= 0.99


def test_turns_taken_for_independent_would_cover_far_less() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(30):
        _, a, b = _experiment(rng, effect=0.2)
        turns = Bootstrap(np.arange(40 * TURNS))
        low, high = interval(turns.sums(b - a) / turns.sums(np.ones(40 * TURNS))) or (0.0, 0.0)
        covered += low <= 0.2 <= high
    assert covered / 30 < 0.75
