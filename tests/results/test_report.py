"""The figures of a report: against numpy, against sums by hand, null where unknown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.resources import data_path
from replay.results import Store
from replay.results.report import LOSSES, TIERS, report

Write = Callable[..., Path]
Rows = Callable[..., list[dict[str, Any]]]
Row = Callable[..., dict[str, Any]]

SIZES = {"p50": 1, "p90": 10, "p95": 20, "p99": 100}


def test_json_is_as_before(standard: Path, golden: Callable[[str, str], None]) -> None:
    golden("report.json", report(standard).json() + "\n")


def test_json_has_the_promised_keys(standard: Path) -> None:
    shown = json.loads(report(standard).json())
    for key in ("run", "tokens", "loss", "ttft_s", "e2e_s", "itl_s", "throughput", "tiers", "self_check"):
        assert key in shown
    run = {"id", "name", "backend", "target", "simulated", "model", "gpu", "trace", "sessions", "turns"}
    assert run | {"started_at", "duration_s", "status", "verdict"} <= shown["run"].keys()
    assert {"prompt", "output", "ideal", *TIERS, "computed"} <= shown["tokens"].keys()
    assert {"total", *LOSSES, "recompute_s"} == shown["loss"].keys()
    assert {"all", *TIERS, "none"} <= shown["ttft_s"].keys() == shown["e2e_s"].keys() == shown["itl_s"].keys()
    assert {"n", "mean", "p50", "p90", "p95", "p99"} == shown["ttft_s"]["all"].keys()
    assert {"requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s"} <= shown["throughput"].keys()
    assert {"loads", "bytes", "seconds", "gb_per_s"} <= shown["tiers"]["cpu"].keys()
    checks = {"schedule_drift_p99_s", "peak_in_flight", "loop_lag_p99_s", "dropped_turns", "cache_before", "warnings"}
    assert checks <= shown["self_check"].keys()


def test_tokens_sum_to_the_prompt_and_losses_to_the_total(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    shown = report(write(rows))
    for name in ("prompt", "output", "ideal", "gpu", "cpu", "disk", "computed"):
        assert shown.tokens[name] == sum(row[f"{name}_tokens"] for row in rows)
    parts = [shown.tokens[name] for name in (*TIERS, "computed", "unknown")]
    assert sum(part or 0 for part in parts) == shown.tokens["prompt"]
    causes = [shown.loss[cause] for cause in LOSSES]
    assert sum(n for n in causes if n is not None) == shown.loss["total"]
    assert sum(s or 0 for s in shown.loss_s.values()) == pytest.approx(shown.loss["recompute_s"])
    assert shown.run["verdict"] == "valid"


def test_what_the_backend_lacks_is_null_and_not_zero(standard: Path) -> None:
    shown = report(standard)
    assert shown.tokens["remote"] is None
    assert shown.tiers["remote"] is None
    assert shown.loss["cold"] == 0


def test_what_the_backend_cannot_see_is_null(write: Write, make_rows: Rows) -> None:
    silent: dict[str, Any] = dict.fromkeys((
        *(f"{tier}_tokens" for tier in TIERS), "computed_tokens", *(f"lost_{cause}" for cause in LOSSES),
        "served_from", "tier_source", "recompute_s", "load_s",
    ))  # fmt: skip
    shown = report(write(make_rows(**silent)))
    assert {shown.tokens[name] for name in (*TIERS, "computed")} == {None}
    assert shown.tokens["unknown"] == shown.tokens["prompt"]
    assert set(shown.loss.values()) == set(shown.loss_s.values()) == set(shown.tiers.values()) == {None}
    assert shown.ttft_s["unknown"]["n"] == shown.ttft_s["all"]["n"] == 112
    assert "the backend does not say what served 112 of 112 requests" in shown.run["reasons"]
    assert [row["lost"] for row in shown.sessions] == [None] * 8


def test_an_empty_run_is_all_null(write: Write) -> None:
    shown = report(write([], status="partial"))
    assert (shown.run["status"], shown.run["verdict"]) == ("partial", "partial")
    assert set(shown.tokens.values()) == {None}
    assert shown.ttft_s["all"] == {"n": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None}
    assert shown.pauses == shown.sessions == []


def memory() -> duckdb.DuckDBPyConnection:
    """A results database without a file."""
    con = duckdb.connect(":memory:")
    con.execute(data_path("schemas", "results.sql").read_text("utf-8"))
    return con


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(0, 1e4), min_size=1, max_size=150))
def test_percentiles_are_numpys_and_left_out_where_too_few(make_row: Row, values: list[float]) -> None:
    with Store(memory(), Path("memory")) as store:
        run_id = store.begin_run({"backend": "vllm", "target": "sim", "simulated": True})
        for turn, value in enumerate(values):
            store.add({**make_row(turn=turn), "sent": 1.0, "due": 0.5, "first_token": 1.0 + value}, run_id=run_id)
        store.finish_run(run_id)
        shown = report(store)
    exact = np.array([1.0 + value for value in values]) - 1.0
    for cells, shift in ((shown.ttft_s, 0.0), (shown.ttft_due_s, 0.5)):
        cell = cells["all"]
        assert cell == cells["none"]
        assert cell["n"] == len(values)
        assert cell["mean"] == pytest.approx(exact.mean() + shift, abs=1e-8)
        for name, least in SIZES.items():
            if len(values) < least:
                assert cell[name] is None
            else:
                assert cell[name] == pytest.approx(np.percentile(exact, float(name[1:])) + shift, abs=1e-8)


def test_failures_count_as_failures_and_nowhere_else(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    good = report(write(rows, id="good")).tokens
    failed = [
        {**row, "session": f"{row['session']}#1", "status": status, "error": "HTTP 500"}
        for row, status in zip(rows[:12], ["error"] * 8 + ["dropped"] * 4, strict=True)
    ]
    shown = report(write(rows + failed, id="bad"))
    assert shown.tokens == good
    assert shown.requests == {
        "total": 124, "ok": 112, "errors": 8, "dropped": 4, "cancelled": 0, "too_long": 0, "after_too_long": 0,
    }  # fmt: skip
    assert shown.run["verdict"] == "invalid"
    assert shown.run["reasons"] == ["8 of 124 requests failed, 4 dropped after them (mostly: HTTP 500)"]


def test_speed_of_a_tier_comes_from_requests_that_read_it_alone(write: Write, make_row: Row, kv_bytes: int) -> None:
    alone = {**make_row(turn=1, pause=500.0, reusable=10_000), "load_s": 0.5}
    both = {**make_row(turn=2, pause=500.0, reusable=10_000), "cpu_tokens": 500, "load_s": 3.0}
    both["disk_tokens"] -= 500
    shown = report(write([alone, both]))
    assert shown.tiers["disk"] == {
        "loads": 2,
        "tokens": alone["disk_tokens"] + both["disk_tokens"],
        "bytes": (alone["disk_tokens"] + both["disk_tokens"]) * kv_bytes,
        "timed": 1,
        "seconds": 0.5,
        "gb_per_s": pytest.approx(alone["disk_tokens"] * kv_bytes / 0.5 / 1e9),
    }
    assert shown.tiers["cpu"] is not None
    assert (shown.tiers["cpu"]["loads"], shown.tiers["cpu"]["seconds"]) == (1, None)


def test_bytes_are_null_where_their_size_is_unknown(write: Write) -> None:
    shown = report(write(settings={}))
    assert shown.tiers["cpu"] is not None
    assert (shown.tiers["cpu"]["bytes"], shown.tiers["cpu"]["gb_per_s"]) == (None, None)


def test_pauses_fall_into_their_bins(write: Write, make_row: Row) -> None:
    edges = [0.0, 0.99, 1.0, 9.9, 10.0, 59.9, 60.0, 299.0, 300.0, 3599.0, 3600.0, 1e6]
    rows = [{**make_row(turn=n + 1, reusable=5_000), "pause": pause} for n, pause in enumerate(edges)]
    first = {**make_row(turn=0), "pause": 5_000.0}
    shown = report(write([first, *rows]))
    bins = [(row["bin"], row["requests"]) for row in shown.pauses]
    names = ("< 1 s", "1-10 s", "10-60 s", "1-5 min", "5-60 min", "> 1 h")
    assert bins == [("first turn", 1), *((name, 2) for name in names)]


def test_pauses_and_first_turns_add_up_to_what_the_run_lost(write: Write, make_rows: Rows) -> None:
    rows = make_rows(lost_evicted=7)
    shown = report(write(rows))
    assert sum(row["requests"] for row in shown.pauses) == shown.requests["ok"] == len(rows)
    assert sum(row["evicted"] for row in shown.pauses) == shown.loss["evicted"] == 7 * len(rows)


def test_throughput_is_per_second_of_the_run(write: Write, make_rows: Rows) -> None:
    rows = make_rows()
    shown = report(write(rows)).throughput
    ended = max(row["closed"] for row in rows)
    assert shown["requests_per_s"] == pytest.approx(len(rows) / ended)
    assert shown["output_tokens_per_s"] == pytest.approx(sum(row["output_tokens"] for row in rows) / ended)


def test_peak_in_flight_is_counted(write: Write, make_row: Row) -> None:
    spans = [(0, 4), (1, 2), (1.5, 6), (2, 3), (5, 7)]  # at 2 one ends as another starts
    rows = [{**make_row(turn=n), "sent": float(a), "closed": float(b)} for n, (a, b) in enumerate(spans)]
    assert report(write(rows)).self_check["peak_in_flight"] == 3


def test_a_run_is_found_by_id_name_or_start(write: Write) -> None:
    write(id="20260101-000000-aaaaaa", name="before", started_at="2026-01-01")
    write(id="20260102-000000-bbbbbb", name="after", started_at="2026-01-02")
    path = write(id="20260103-000000-cccccc", name="after", started_at="2026-01-03")
    assert report(path).run["id"].endswith("cccccc")
    assert report(path, "after").run["id"].endswith("cccccc")
    assert report(path, "20260102").run["id"].endswith("bbbbbb")
    assert report(path, "bef").run["id"].endswith("aaaaaa")
    with pytest.raises(ReplayError, match=r"'202601' could be any of 3 runs: 20260103.*type more"):
        report(path, "202601")
    with pytest.raises(ReplayError, match="unknown run 'befor_'; nearest: before"):
        report(path, "befor_")


def test_same_rows_same_report(write: Write, make_rows: Rows) -> None:
    first = report(write(make_rows(), id="a"))
    second = report(write(make_rows(), id="b"))
    assert msgspec.structs.replace(second, run={**second.run, "id": "a"}) == first


def test_a_large_run_reports_quickly(tmp_path: Path, make_row: Row) -> None:
    path = tmp_path / "r.duckdb"
    with Store.create_or_open(path) as store:
        run_id = store.begin_run({"backend": "vllm", "target": "sim", "simulated": True})
        store.add(make_row(reusable=9_000), run_id=run_id)
        reader = store.reader()
        reader.execute(
            "INSERT INTO requests SELECT r.* REPLACE ('s' || i // 40 AS session, i % 40 AS turn, i / 9 AS sent, "
            "i / 9 + hash(i) % 997 / 99 AS first_token, i / 9 + 20 AS closed) FROM requests r, range(200_000) x(i)"
        )
        reader.close()
    used = time.process_time()
    assert report(path).requests["total"] == 200_001
    assert time.process_time() - used < 3.0  # CPU time of a fifth of the rows that must take 3 s (usual: 0.5)
