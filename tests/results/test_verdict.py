"""Each reason to distrust a run, and its weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.results.report import LOSSES, TIERS, report
from replay.results.verdict import verdict

GOOD: dict[str, Any] = {
    "turns": 1000, "ok": 1000, "errors": 0, "dropped": 0, "cancelled": 0, "repeated": 0, "drift_p99": 0.0,
    "too_long": 0, "after_too_long": 0,
    "truncated": 0, "unbalanced": 0, "warm": 0, "unattributed": 0, "timed": 1000, "common_error": None,
    "peak_in_flight": 4,
}  # fmt: skip

Write = Callable[..., Path]
Rows = Callable[..., list[dict[str, Any]]]
Row = Callable[..., dict[str, Any]]


def test_a_clean_run_is_valid_without_reasons() -> None:
    assert verdict(GOOD, {}) == ("valid", [])


@pytest.mark.parametrize(
    ("checks", "self_check", "expected", "words"),
    [
        ({"ok": 989, "errors": 11}, {}, "invalid", "11 of 1,000 requests failed"),
        ({"ok": 989, "errors": 1, "dropped": 10}, {}, "invalid", "10 dropped after them"),
        ({"ok": 990, "errors": 10, "common_error": "HTTP 500"}, {}, "partial", "mostly: HTTP 500"),
        (
            {"ok": 600, "dropped": 400, "too_long": 370, "after_too_long": 30},
            {},
            "partial",
            "370 prompts too long, 30 turns after them",
        ),
        (
            {"ok": 589, "errors": 1, "dropped": 410, "too_long": 370, "after_too_long": 30},
            {},
            "invalid",
            "1 of 600 requests failed, 10 dropped after them",
        ),
        ({"ok": 0, "timed": 0, "turns": 0}, {}, "invalid", "no request succeeded"),
        ({"ok": 990, "cancelled": 10}, {}, "partial", "10 requests cancelled"),
        ({"truncated": 1}, {}, "partial", "1 request had a prompt shorter than the trace's"),
        ({"truncated": 11}, {}, "invalid", "prompt shorter"),
        ({}, {"truncated": 11}, "invalid", "prompt shorter"),
        ({"unbalanced": 1}, {}, "partial", "do not add up"),
        ({"unbalanced": 11}, {}, "invalid", "do not add up"),
        ({"warm": 11}, {}, "invalid", "the cache was not empty"),
        ({"repeated": 1}, {}, "invalid", "1 turn recorded more than once"),
        ({"drift_p99": 0.2}, {}, "partial", "p99 0.20 s after they were due"),
        ({"drift_p99": 2.0}, {}, "invalid", "left late"),
        ({"drift_p99": None}, {}, "valid", None),
        ({}, {"loop_lag_p99_s": 0.2}, "partial", "the client was saturated"),
        ({}, {"loop_lag_p99_s": 0.6}, "invalid", "the client was saturated"),
        ({}, {"loop_lag_p99_s": None}, "valid", None),
        ({}, {"counters_moved": True}, "invalid", "counters moved before the run"),
        ({}, {"timestamp_quantum_s": 1}, "valid", "multiples of 1 s"),
        ({}, {"warnings": ["clock stepped"]}, "valid", "clock stepped"),
        ({"unattributed": 10}, {}, "valid", "does not say what served 10 of 1,000 requests"),
        ({"timed": 99}, {}, "valid", "too few requests for p99: 99"),
        ({"timed": 9}, {}, "valid", "too few requests for p90, p95, p99: 9"),
    ],
)
def test_each_reason_has_its_weight(
    checks: dict[str, Any], self_check: dict[str, Any], expected: str, words: str | None
) -> None:
    found, reasons = verdict({**GOOD, **checks}, self_check)
    assert found == expected
    assert (words is None and not reasons) or any(words in reason for reason in reasons if words)


def test_only_a_complete_run_is_valid() -> None:
    assert verdict(GOOD, {}, status="partial") == ("partial", ["the run was stopped before its end"])
    assert verdict(GOOD, {}, status="running") == ("partial", ["the run has not ended"])


def test_the_gravest_reason_comes_first() -> None:
    _, reasons = verdict({**GOOD, "timed": 50, "unbalanced": 1, "repeated": 2}, {})
    assert [reason.split()[-1] for reason in reasons] == ["once", "loss", "50"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"computed_tokens": 5}, "do not add up"),
        ({"lost_evicted": 77}, "do not add up"),
        ({"prompt_tokens": 900}, "prompt shorter"),
        ({"sent": 1e9}, "left late"),
        ({"ideal_tokens": 0}, "the cache was not empty"),
    ],
)
def test_faults_in_the_rows_are_found(write: Write, make_rows: Rows, change: dict[str, Any], words: str) -> None:
    shown = report(write(make_rows(**change)))
    assert shown.run["verdict"] == "invalid"
    assert any(words in reason for reason in shown.run["reasons"])


@pytest.mark.parametrize(("earlier", "warm"), [(0.5, False), (-0.5, True)])
def test_who_is_overtaken_may_reuse_what_was_sent_later(
    write: Write, make_row: Row, earlier: float, warm: bool
) -> None:
    """Both start with the same 4,096 tokens; the first one sent waits, unless the cache held them already."""
    first, second = make_row("first", due=1.0, reusable=4096), make_row("second", due=1.1)
    first = {**first, "ideal_tokens": 0, "lost_granularity": 0, "recompute_s": 0.0}
    second = {**second, "first_token": first["first_token"] - earlier}
    shown = report(write([first, second]))
    assert any("the cache was not empty" in reason for reason in shown.run["reasons"]) == warm


def test_cached_tokens_of_an_unknown_tier_balance(write: Write, make_rows: Rows) -> None:
    rows = make_rows(served_from=None, **dict.fromkeys(f"{tier}_tokens" for tier in TIERS))
    shown = report(write(rows))
    assert shown.run["verdict"] == "valid"
    assert shown.tokens["unnamed"] == sum(row["prompt_tokens"] - row["computed_tokens"] for row in rows)
    assert shown.tokens["unknown"] == 0
    too_many = [{**row, "computed_tokens": row["prompt_tokens"] + 1} for row in rows]
    assert report(write(too_many, id="20260131-094211-aaaaaa")).run["verdict"] == "invalid"


@pytest.mark.parametrize(
    ("off", "expected"), [(0, "valid"), (112, "valid"), (113, "partial"), (-113, "partial"), (200_000, "invalid")]
)
def test_the_engines_own_counters_must_agree(write: Write, make_rows: Rows, off: int, expected: str) -> None:
    rows = make_rows()
    shown = report(write(rows, scrapes=scraped(rows, gpu=off)))
    assert shown.run["verdict"] == expected
    assert shown.self_check["counters_agree"] is (expected == "valid")
    said = [reason for reason in shown.run["reasons"] if "the engine's counters differ" in reason]
    assert len(said) == (expected != "valid") and all("gpu" in reason and "lower" not in reason for reason in said)


def test_counters_say_where_unnamed_tokens_were(write: Write, make_rows: Rows) -> None:
    seen = make_rows()
    rows = make_rows(**dict.fromkeys(f"{tier}_tokens" for tier in TIERS))
    shown = report(write(rows, scrapes=scraped(seen)))
    assert shown.run["verdict"] == "valid" and shown.self_check["counters_agree"]
    assert shown.counters["gpu"] == {"engine": sum(row["gpu_tokens"] for row in seen), "requests": None}
    assert shown.counters["computed"]["engine"] == shown.tokens["computed"] == shown.counters["computed"]["requests"]


def test_counters_are_not_compared_where_they_or_the_requests_are_incomplete(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    restarted = [(at + 2, name, labels, 5.0) for at, name, labels, _ in scraped(rows, gpu=9_999_999)]
    shown = report(write(rows, scrapes=[*scraped(rows, gpu=9_999_999), *restarted]))
    assert shown.self_check["counters_agree"] is None and shown.counters["gpu"]["engine"] is None
    failed = [{**rows[0], "status": "error"}, *rows[1:]]
    shown = report(write(failed, scrapes=scraped(rows), id="20260131-094211-aaaaaa"))
    assert shown.self_check["counters_agree"] is None and shown.counters["gpu"]["requests"] is None
    again = [{**rows[0], "attempts": 2}, *rows[1:]]
    shown = report(write(again, scrapes=scraped(rows, gpu=9_999_999), id="20260131-094212-aaaaaa"))
    assert shown.self_check["counters_agree"] is None


def test_the_counters_of_several_instances_count_together(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    both = [
        (at + number / 10, name, f'{{instance="{number}",{(labels or "{}")[1:]}', value)
        for number, part in enumerate((rows[:50], rows[50:]))
        for at, name, labels, value in scraped(part)
    ]
    shown = report(write(rows, scrapes=sorted(both)))
    assert shown.self_check["counters_agree"]
    assert shown.counters["gpu"]["engine"] == sum(row["gpu_tokens"] for row in rows)


def test_a_restart_by_replay_does_not_part_the_counters_from_the_requests(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    # After the restart they begin at what the engine asked itself, and end higher than they had been before.
    after = [(at + 2, name, labels, value + 50_000) for at, name, labels, value in scraped(rows[50:])]
    marked = [*scraped(rows[:50]), (1.5, "replay:restarted", None, 1.0), *after]
    shown = report(write(rows, scrapes=marked))
    assert shown.self_check["counters_agree"] and shown.run["verdict"] == "valid"
    assert shown.counters["prompt"]["engine"] == shown.tokens["prompt"]


def scraped(rows: list[dict[str, Any]], gpu: int = 0) -> list[tuple[float, str, str | None, float]]:
    """Two scrapes of vLLM's counters around a run; the GPU's is off by so many tokens."""
    prompt, computed, own = (sum(row[f"{key}_tokens"] for row in rows) for key in ("prompt", "computed", "gpu"))
    grown = {
        ("vllm:prompt_tokens_total", None): prompt,
        ("vllm:prompt_tokens_cached_total", None): prompt - computed,
        ("vllm:prompt_tokens_by_source_total", '{source="local_cache_hit"}'): own + gpu,
        ("vllm:prompt_tokens_by_source_total", '{source="external_kv_transfer"}'): prompt - computed - own,
        ("vllm:prompt_tokens_by_source_total", '{source="local_compute"}'): computed,
        ("vllm:prefix_cache_hits_total", None): 3 * own,
    }
    before = [(0.0, name, labels, 200_000.0) for name, labels in grown]
    return before + [(1.0, name, labels, 200_000.0 + value) for (name, labels), value in grown.items()]


def test_a_turn_written_twice_is_found(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    shown = report(write([*rows, rows[0]]))
    assert "1 turn recorded more than once" in shown.run["reasons"]


def test_a_tier_nobody_sees_does_not_unbalance(write: Write, make_rows: Rows) -> None:
    unseen: dict[str, Any] = dict.fromkeys(("disk_tokens", "computed_tokens", *(f"lost_{cause}" for cause in LOSSES)))
    assert report(write(make_rows(**unseen))).run["verdict"] == "valid"
