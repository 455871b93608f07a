"""Results between files: what Parquet holds, and that a merge adds each run once, or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from replay.errors import ReplayError
from replay.results import Store, open_results, report
from replay.results.html import run as page_of
from replay.results.transfer import VIEWS, export, merge

Write = Callable[..., Path]


def contents(path: Path) -> dict[str, list[Any]]:
    """All rows of a results file, in an order of their own."""
    with duckdb.connect(str(path), read_only=True) as con:
        return {
            table: sorted(con.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
            for table in ("runs", "requests", "scrapes", "cache_events")
        }


@pytest.fixture
def two(write: Write, tmp_path: Path, make_rows: Callable[..., list[dict[str, Any]]]) -> tuple[Path, Path]:
    """Results files of two machines: a run each, the second with a scrape and an eviction."""
    first = write(id="first", name="one").rename(tmp_path / "it's a host.duckdb")
    second = write(make_rows(sessions=2), id="second", name="two").rename(tmp_path / "b.duckdb")
    with Store.create_or_open(second) as store:
        store.add_scrapes("second", 1.0, [("vllm:num_requests_running", None, 3.0)])
        store.add_cache_events("second", [{"at": 2.0, "kind": "evict", "tier": "gpu", "tokens": 64, "blocks": 4}])
    return first, second


def test_parquet_holds_what_the_views_hold(two: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "it's parquet"
    written = export(two[1], folder)
    assert {file.name: rows for file, rows in written.items()} == {
        "runs.parquet": 1, "requests.parquet": 28, "scrapes.parquet": 1, "cache_events.parquet": 1,
    }  # fmt: skip
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.parquet" for name in VIEWS)
    with open_results(two[1]) as results:
        for name, view in VIEWS.items():
            stored = results.frame(f"FROM {view}")
            read = pl.read_parquet(folder / f"{name}.parquet")
            assert read.columns == stored.columns
            assert sorted(read.rows(), key=repr) == sorted(stored.rows(), key=repr)


def test_only_the_runs_asked_for_are_exported(two: tuple[Path, Path], tmp_path: Path) -> None:
    merge(tmp_path / "all.duckdb", two)
    export(tmp_path / "all.duckdb", tmp_path / "parquet", ["two"])
    assert pl.read_parquet(tmp_path / "parquet" / "runs.parquet")["id"].to_list() == ["second"]
    assert set(pl.read_parquet(tmp_path / "parquet" / "requests.parquet")["run_id"]) == {"second"}
    with pytest.raises(ReplayError, match="unknown run 'three'"):
        export(tmp_path / "all.duckdb", tmp_path / "parquet", ["two", "three"])


def test_an_export_that_cannot_be_written_is_one_line(two: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match="file: cannot make this folder"):
        export(two[0], tmp_path / "file")
    (tmp_path / "full" / "runs.parquet").mkdir(parents=True)
    with pytest.raises(ReplayError, match=r"runs\.parquet: cannot write"):
        export(two[0], tmp_path / "full")
    assert [each.name for each in (tmp_path / "full").iterdir()] == ["runs.parquet"]


def test_a_merged_file_holds_every_run_and_reports_it_as_before(two: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "all.duckdb"
    assert merge(target, two) == {two[0]: (1, 0), two[1]: (1, 0)}
    merged, parts = contents(target), [contents(path) for path in two]
    assert all(merged[table] == sorted(parts[0][table] + parts[1][table], key=repr) for table in merged)
    assert report.report(target, "one") == report.report(two[0])
    assert page_of.page(target, "two").title == "two on made_up"


def test_merging_again_adds_nothing(two: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "all.duckdb"
    copy = Path(shutil.copy(two[0], tmp_path / "copy.duckdb"))
    assert merge(target, [two[0], copy, two[0]]) == {two[0]: (1, 0), copy: (0, 1)}
    before = contents(target)
    assert merge(target, two) == {two[0]: (0, 1), two[1]: (1, 0)}
    assert merge(target, [copy]) == {copy: (0, 1)}
    assert contents(target)["requests"] == sorted(before["requests"] + contents(two[1])["requests"], key=repr)


def test_another_run_of_the_same_id_is_refused_and_nothing_is_added(two: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "all.duckdb"
    merge(target, [two[0]])
    changed = Path(shutil.copy(two[0], tmp_path / "changed.duckdb"))
    with duckdb.connect(str(changed)) as con:
        con.execute("UPDATE requests SET gpu_tokens = gpu_tokens + 1 WHERE session = 'session-1' AND turn = 1")
    with pytest.raises(ReplayError, match=r"changed\.duckdb: its run first is not the run of that id"):
        merge(target, [two[1], changed])
    assert contents(target) == contents(two[0])


def test_a_run_that_was_killed_is_the_same_run_once_it_is_marked_as_partial(write: Write, tmp_path: Path) -> None:
    source = write(id="killed").rename(tmp_path / "source.duckdb")
    with duckdb.connect(str(source)) as con:
        con.execute("UPDATE runs SET status = 'running', verdict = NULL, reasons = NULL")
    target = tmp_path / "all.duckdb"
    assert merge(target, [source]) == {source: (1, 0)}
    Store.create_or_open(target).close()
    assert merge(target, [source]) == {source: (0, 1)}


def test_what_is_no_results_file_is_refused_before_anything_is_made(two: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "all.duckdb"
    (tmp_path / "text").write_text("hello world, not a database")
    for wrong, said in ((tmp_path / "text", "not a DuckDB file"), (tmp_path / "none", "no such results file")):
        with pytest.raises(ReplayError, match=said):
            merge(target, [two[0], wrong])
    with pytest.raises(ReplayError, match="cannot be merged into itself"):
        merge(two[0], [two[1], two[0]])
    assert not target.exists()
