"""Questions of the user's own: answered read-only, nothing else reachable."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from replay.errors import ReplayError
from replay.results import open_results, query


def test_formats_agree(standard: Path) -> None:
    path = standard
    sql = "SELECT session, turn, remote_tokens FROM requests ORDER BY session, turn LIMIT 2"
    assert query(path, sql) == (
        "session    turn  remote_tokens\n"
        "---------  ----  -------------\n"
        "session-0     0           NULL\n"
        "session-0     1           NULL\n"
    )
    assert json.loads(query(path, sql, "json")) == [
        {"session": "session-0", "turn": 0, "remote_tokens": None},
        {"session": "session-0", "turn": 1, "remote_tokens": None},
    ]
    assert list(csv.reader(io.StringIO(query(path, sql, "csv"))))[1:] == [
        ["session-0", "0", ""],
        ["session-0", "1", ""],
    ]


def test_wide_rows_become_paragraphs(standard: Path) -> None:
    shown = query(standard, "SELECT * FROM v_runs")
    assert "backend       lmcache-disk\n" in shown
    assert "requests      112\n" in shown


def test_long_tables_say_what_they_leave_out(standard: Path) -> None:
    shown = query(standard, "SELECT i FROM range(1234) t(i)")
    assert shown.endswith("... and 234 more rows; --format csv shows all\n")
    assert len(query(standard, "SELECT i FROM range(1234) t(i)", "csv").splitlines()) == 1235


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM requests",
        "CREATE TABLE t (i INTEGER)",
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM '{secret}'",
        "SELECT * FROM glob('{folder}/*')",
        "COPY runs TO '{folder}/out.csv'",
        "ATTACH '{folder}/other.duckdb'",
        "EXPORT DATABASE '{folder}/out'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SELEC",
        "SELECT nothing FROM requests",
    ],
)
def test_anything_but_reading_is_refused_in_one_line(standard: Path, tmp_path: Path, sql: str) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with pytest.raises(ReplayError) as caught:
        query(standard, sql.format(secret=secret, folder=tmp_path))
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["secret.csv"]


def test_several_statements_are_refused(standard: Path) -> None:
    with pytest.raises(ReplayError, match="SQL: 2 statements; one at a time"):
        query(standard, "SELECT 1; SELECT 2")
    assert query(standard, "SELECT 1 AS one; -- the end", "csv") == "one\n1\n"


def test_python_gets_relations_and_frames(standard: Path) -> None:
    with open_results(standard) as results:
        assert results.runs.fetchall()[0][0] == "20260131-094210-k3v9tq"
        disk = results.requests.filter("served_from = 'disk'").aggregate("count(*)").fetchall()
        frame = results.frame("SELECT served_from, ttft FROM v_requests WHERE session = $s", s="session-1")
        assert results.scrapes.fetchall() == results.cache_events.fetchall() == []
        with pytest.raises(ReplayError, match="SQL: "):
            results.frame("SELECT nothing FROM requests")
    assert disk == [(13,)]
    assert frame.shape == (14, 2)
    assert frame["ttft"].null_count() == 0
