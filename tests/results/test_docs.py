"""docs/results.md is what a results file has: every column named, every example run."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest

from replay.results import Store, open_results, query

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs/results.md").read_text("utf-8")
QUERIES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
VIEWS = ("v_runs", "v_requests", "v_tiers", "v_losses", "v_ttft", "v_sessions")


@pytest.fixture(scope="module")
def with_events(standard: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs") / "replay.duckdb"
    shutil.copy(standard, path)
    with Store.create_or_open(path) as store:
        run_id = store.begin_run({"backend": "other", "target": "sim", "simulated": True})
        store.add_cache_events(run_id, [{"at": 90.0, "kind": "evict", "tier": "gpu", "blocks": 2, "tokens": 32}])
        store.finish_run(run_id)
    return path


@pytest.mark.parametrize("sql", QUERIES, ids=[sql.splitlines()[0].removeprefix("-- ") for sql in QUERIES])
def test_every_example_query_has_an_answer(with_events: Path, sql: str) -> None:
    assert len(query(with_events, sql, "csv").splitlines()) > 1


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
    shutil.copy(standard, tmp_path / "replay.duckdb")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert "ttft_p50" in printed.getvalue()
    assert "granularity" in printed.getvalue()


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
