"""Gates: what they mean, what they refuse, and where the limit lies."""

from __future__ import annotations

import pytest

from replay.errors import ReplayError
from replay.results.gates import check, parse
from replay.results.metrics import METRICS, Cell


@pytest.mark.parametrize(
    ("text", "metric", "op", "scope", "limit"),
    [
        ("ttft_p50 <= -25%", "ttft_p50", "<=", "change", -0.25),
        ("throughput >= +29%", "throughput", ">=", "change", 0.29),
        ("ttft_p95<=2s", "ttft_p95", "<=", "value", 2.0),
        ("itl_p50 < 12.5 ms", "itl_p50", "<", "value", 0.0125),
        ("e2e_mean <= +100ms", "e2e_mean", "<=", "difference", 0.1),
        ("loss <= 1.5M", "loss", "<=", "value", 1.5e6),
        ("loss_share <= 5%", "loss_share", "<=", "value", 0.05),
        ("hit_share >= -1pp", "hit_share", ">=", "difference", -0.01),
        ("hit_share >= -1%", "hit_share", ">=", "change", -0.01),
        ("errors <= 0", "errors", "<=", "value", 0.0),
        ("computed_tokens > -10k", "computed_tokens", ">", "difference", -10_000.0),
        ("recompute_s <= 30s", "recompute_s", "<=", "value", 30.0),
    ],
)
def test_a_gate_means_what_it_says(text: str, metric: str, op: str, scope: str, limit: float) -> None:
    gate = parse(text)
    assert (gate.metric, gate.op, gate.scope, gate.limit) == (metric, op, scope, pytest.approx(limit))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft_p50", "METRIC OP VALUE"),
        ("ttft_p50 = 2s", "METRIC OP VALUE"),
        ("ttft_p50 <= fast", "METRIC OP VALUE"),
        ("ttft_p50 <= 2s or else", "METRIC OP VALUE"),
        ("tfft_p50 <= 2s", "nearest: ttft_p50"),
        ("ttft_p50 <= 25%", "write +25% or -25%"),
        ("ttft_p50 <= 2", "a unit is missing"),
        ("ttft_p50 <= 2k", "'k' does not fit"),
        ("throughput >= 2s", "'s' does not fit"),
        ("hit_share >= 0.9", "a unit is missing"),
        ("hit_share >= 1pp", "'pp' does not fit"),
        ("hit_share >= 1s", "write e.g. hit_share >= 50%, hit_share >= +1pp or hit_share >= -25%"),
        ("ttft_p95 < 2", "write e.g. ttft_p95 < 2s, ttft_p95 < +100ms or ttft_p95 < -25%"),
    ],
)
def test_what_cannot_be_read_is_explained_in_one_line(text: str, said: str) -> None:
    with pytest.raises(ReplayError) as caught:
        parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_metric_can_be_gated_by_change() -> None:
    for name in METRICS:
        assert parse(f"{name} <= +10%").scope == "change"


def test_the_limit_itself_passes_only_where_equality_is_allowed() -> None:
    cells = {"ttft_p50": Cell(a=2.0, b=1.5, difference=-0.5, change=-0.25)}
    assert check(parse("ttft_p50 <= -25%"), cells).passed
    assert not check(parse("ttft_p50 < -25%"), cells).passed
    assert check(parse("ttft_p50 >= 1.5s"), cells).passed
    assert not check(parse("ttft_p50 > 1.5s"), cells).passed


def test_an_unknown_figure_fails_and_says_why() -> None:
    unknown = check(parse("ttft_p99 <= 2s"), {"ttft_p99": Cell(n=12)})
    assert not unknown.passed and "too few turns" in unknown.reason
    nothing_before = check(parse("loss <= +10%"), {"loss": Cell(a=0.0, b=5.0, difference=5.0)})
    assert not nothing_before.passed and "0 in the first run" in nothing_before.reason


def test_a_gate_says_whether_its_interval_reaches_across_the_limit() -> None:
    cells = {"ttft_p50": Cell(a=2.0, b=1.5, difference=-0.5, change=-0.25, change_low=-0.3, change_high=-0.1)}
    assert check(parse("ttft_p50 <= -5%"), cells).certain is True
    assert check(parse("ttft_p50 <= -20%"), cells).certain is False
    assert check(parse("ttft_p50 <= +0%"), cells).certain is True
    assert check(parse("ttft_p50 <= 2s"), cells).certain is None
