"""docs/results.md is what a results file has: every column named, every example run."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.results import Store, open_results, query

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs/results.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
TIERS = ("gpu", "cpu", "disk")
Row = dict[str, Any]
VIEWS = ("v_runs", "v_requests", "v_tiers", "v_losses", "v_ttft", "v_sessions")


@pytest.fixture(scope="module")
def with_events(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs") / "replay.duckdb"
    shutil.copy(standard, path)
    with Store.create_or_open(path) as store:
        run_id = store.begin_run(
            {"backend": "other", "target": "sim", "simulated": True, "started_at": "2020-01-01T00:00:00Z"}
        )
        store.add_cache_events(run_id, [{"at": 90.0, "kind": "evict", "tier": "gpu", "blocks": 2, "tokens": 32}])
        store.finish_run(run_id)
    return path


@pytest.mark.parametrize("sql", QUERIES, ids=[sql.splitlines()[0].removeprefix("-- ") for sql in QUERIES])
def test_every_example_query_has_an_answer(with_events: Path, sql: str) -> None:
    assert len(query(with_events, sql, "csv").splitlines()) > 1


@pytest.fixture(scope="module")
def runs(make_rows: Callable[..., list[Row]]) -> dict[str, list[Row]]:
    """Two runs of one name: `old`, with TTFTs three times as long and other causes of loss, and `new`."""
    old, new = make_rows(), make_rows()
    for row in old:
        row["first_token"] = row["sent"] + 3 * (row["first_token"] - row["sent"])
        row["last_token"] = row["closed"] = row["first_token"] + 1
        row["lost_evicted"], row["lost_granularity"] = row["lost_granularity"], row["lost_evicted"]
    return {"old": old, "new": new}


@pytest.fixture(scope="module")
def two(runs: dict[str, list[Row]], standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "replay.duckdb"
    fields = {"backend": "lmcache-disk", "name": "mine", "target": "sim", "trace": "t"}
    with Store.create_or_open(path) as store:
        for day, (id, rows) in enumerate(runs.items(), 1):
            given = {"id": id, "simulated": id == "new", "started_at": f"2026-01-{day:02d}T00:00:00Z"}
            settings = {"capacity_tokens": {"disk": 1000 * day}}
            store.begin_run({**fields, **given, "settings": settings, "turns": len(rows)})
            for row in rows:
                store.add(row, run_id=id)
            evictions = [(59.5, 16), (60.5, 32), (119.9, 64 * day)]
            store.add_cache_events(
                id, [{"at": at, "kind": "evict", "tier": "gpu", "blocks": 1, "tokens": n} for at, n in evictions]
            )
            store.finish_run(id)
    return path


def answer(path: Path, title: str) -> list[dict[str, str]]:
    (sql,) = [sql for sql in QUERIES if sql.startswith(f"-- {title}")]
    return list(csv.DictReader(io.StringIO(query(path, sql, "csv"))))


def ttft(row: Row) -> float:
    return float(row["first_token"] - row["sent"])


def test_no_query_of_the_page_mixes_runs_of_one_name(two: Path, runs: dict[str, list[Row]]) -> None:
    """Every query of the page, on a file with two runs of one name, against sums of our own."""
    new = runs["new"]
    assert [(r["id"], r["requests"]) for r in answer(two, "Runs that may")] == [("new", "112"), ("old", "112")]
    assert [(r["id"], r["disk_tokens"]) for r in answer(two, "Capacity")] == [("new", "2000"), ("old", "1000")]

    groups = defaultdict(list)
    for row in new:
        groups[row["served_from"], row["prompt_tokens"] // 20000 * 20000].append(ttft(row))
    found = {(r["served_from"], int(r["prompt_from"])): r for r in answer(two, "Median TTFT by tier")}
    assert found.keys() == groups.keys()
    for key, waits in groups.items():
        assert int(found[key]["n"]) == len(waits)
        assert float(found[key]["ttft_p50"]) == pytest.approx(np.median(waits))

    for r in answer(two, "Do long pauses"):
        chosen = [x for x in runs[r["run_id"]] if x["position"] and (x["pause"] > 300) == (r["long_pause"] == "True")]
        assert int(r["n"]) == len(chosen)
        evicted = sum(x["lost_evicted"] for x in chosen) / sum(x["ideal_tokens"] for x in chosen)
        assert float(r["evicted_share"]) == pytest.approx(evicted)

    shares = answer(two, "Share of prompt tokens")
    assert {(r["run_id"], r["tier"]) for r in shares} == {(a, b) for a in runs for b in (*TIERS, "computed")}
    for r in shares:
        rows = runs[r["run_id"]]
        part = sum(x[f"{r['tier']}_tokens"] for x in rows) / sum(x["prompt_tokens"] for x in rows)
        assert float(r["share"]) == pytest.approx(part)

    for r in (costs := answer(two, "What evictions cost")):
        assert int(r["tokens"]) == sum(x["lost_evicted"] for x in runs[r["run_id"]])
    assert [r["run_id"] for r in costs] == ["new", "old"]

    percentiles = answer(two, "Runs by their 95th")
    assert [r["run_id"] for r in percentiles] == ["new", "old"]
    for r in percentiles:
        expected = np.quantile([ttft(x) for x in runs[r["run_id"]]], [0.5, 0.95])
        assert [float(r["p50"]), float(r["p95"])] == pytest.approx(list(expected))
        assert r["n"] == "112"

    worst = defaultdict(float)
    for row in new:
        worst[row["session"]] = max(worst[row["session"]], ttft(row))
    longest = answer(two, "Sessions of the newest run")
    assert {r["turns"] for r in longest} == {"14"}
    assert [float(r["ttft_max"]) for r in longest] == pytest.approx(sorted(worst.values(), reverse=True)[:5])

    minutes = [tuple(r.values()) for r in answer(two, "Tokens that each tier")]
    assert minutes == [("new", "gpu", "0", "16"), ("new", "gpu", "1", "160"),
                       ("old", "gpu", "0", "16"), ("old", "gpu", "1", "96")]  # fmt: skip
    assert len(QUERIES) == 9, "each is checked here"


def test_the_python_example_is_of_one_run(
    two: Path, runs: dict[str, list[Row]], tmp_path: Path, monkeypatch: Any
) -> None:
    printed = run_example(two, tmp_path, monkeypatch)
    waits = [ttft(row) for row in runs["new"] if row["served_from"] == "disk"]
    assert re.search(rf"\b{len(waits)} │ {np.median(waits):.4f}", printed), printed


@pytest.mark.parametrize("view", VIEWS)
def test_every_column_of_a_view_is_described_in_order_of_sections_and_none_besides(standard: Path, view: str) -> None:
    section = PAGE.split(f"### {view}\n")[1].split("```sql")[0]
    described = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    with open_results(standard) as results:
        columns = results.sql(f"SELECT * FROM {view}").columns
        assert getattr(results, view.removeprefix("v_")).columns == columns
    assert sorted(described) == sorted(columns)
    assert QUERIES
    assert any(view in sql for sql in QUERIES)


def test_all_views_are_on_the_page(standard: Path) -> None:
    found = query(standard, "SELECT view_name FROM duckdb_views() WHERE NOT internal ORDER BY 1", "csv").split()[1:]
    assert found == sorted(VIEWS)


def test_the_python_example_runs(standard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = run_example(standard, tmp_path, monkeypatch)
    assert "ttft_p50" in printed
    assert "granularity" in printed


def run_example(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the Python example of the page prints for a results file."""
    shutil.copy(path, folder / "replay.duckdb")
    monkeypatch.chdir(folder)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    return printed.getvalue()


def test_long_forms_sum_to_the_wide_ones(standard: Path) -> None:
    with open_results(standard) as results:
        assert results.sql(
            "SELECT count(*) FROM v_requests r WHERE prompt_tokens <> (SELECT sum(tokens) FROM v_tiers t WHERE "
            "t.run_id = r.run_id AND t.session = r.session AND t.turn = r.turn)"
        ).fetchall() == [(0,)]
        wide = results.sql("SELECT sum(loss_total), sum(recompute_s) FROM v_requests WHERE loss_total > 0").fetchall()
        long = results.losses.aggregate("sum(tokens), sum(seconds)").fetchall()
    assert long[0] == pytest.approx(wide[0])


def test_tokens_of_an_unknown_tier_are_unnamed_and_what_is_unknown_has_no_row(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    with Store.create_or_open(path) as store:
        run_id = store.begin_run({"backend": "vllm", "target": "http://host", "simulated": False})
        for turn, computed in ((0, 40), (1, None)):
            row = {"session": "s", "turn": turn, "status": "ok", "prompt_tokens": 100, "computed_tokens": computed}
            store.add(row, run_id=run_id)
        store.finish_run(run_id)
    with open_results(path) as results:
        assert results.tiers.project("turn, tier, tokens").fetchall() == [(0, "unnamed", 60), (0, "computed", 40)]
        assert results.losses.fetchall() == results.ttft.fetchall() == []
