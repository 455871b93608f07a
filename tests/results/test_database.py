"""What can be wrong with a results file, each in one line, and the file stays as it was."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest

from replay.errors import ReplayError
from replay.resources import data_path
from replay.results import Store, open_results
from replay.results.database import uninterrupted
from replay.results.report import report

_HOLD = """
import sys
from replay.results import Store
with Store.create_or_open(sys.argv[1]) as store:
    print("open", flush=True)
    sys.stdin.read()
"""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refuses(action: Callable[[Path], object], path: Path, match: str) -> None:
    with pytest.raises(ReplayError, match=match) as caught:
        action(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        before = digest(path)
        refuses(Store.create_or_open, path, rf"another process has this results file open \(PID {process.pid}\); wait")
        refuses(report, path, "no runs yet")  # reading is not refused
        assert digest(path) == before
    Store.create_or_open(path).close()


@pytest.mark.parametrize("action", [Store.create_or_open, report, open_results])
def test_a_file_of_another_kind_is_refused_and_left_alone(tmp_path: Path, action: Callable[[Path], object]) -> None:
    text = tmp_path / "trace.jsonl"
    text.write_text('{"format": "replay-trace"}\n' * 1_000)
    before = digest(text)
    refuses(action, text, "not a DuckDB file")
    assert digest(text) == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]

    empty = tmp_path / "empty.duckdb"
    empty.touch()
    refuses(action, empty, "an empty file")
    assert empty.stat().st_size == 0

    other = tmp_path / "other.duckdb"
    with duckdb.connect(str(other)) as con:
        con.execute("CREATE TABLE requests (url VARCHAR)")
    before = digest(other)
    refuses(action, other, "not a results file of replay")
    assert digest(other) == before

    refuses(action, tmp_path, "a folder, not a results file")


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    refuses(Store.create_or_open, tmp_path / "missing" / "r.duckdb", "no folder .*missing; create it")
    refuses(Store.create_or_open, Path("/dev/null/r.duckdb"), "no folder /dev/null")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refuses(report, tmp_path / "none.duckdb", "no such results file; `replay run` writes one")
    assert not list(tmp_path.iterdir())


def test_an_empty_database_becomes_a_results_file_only_when_written(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    duckdb.connect(str(path)).close()
    refuses(report, path, "an empty database")
    Store.create_or_open(path).close()
    refuses(report, path, "no runs yet")


@pytest.mark.parametrize("opens", ["writer", "reader"])
def test_a_file_that_lacks_columns_gets_them(tmp_path: Path, opens: str) -> None:
    path = tmp_path / "r.duckdb"
    schema = data_path("schemas", "results.sql").read_text("utf-8")
    tables = schema[: schema.index("-- Requests with what follows")]
    assert "  load_s " in tables
    newer = ("  load_s ", "  duplication ", "  families ")
    old = "".join(line for line in tables.splitlines(keepends=True) if not line.startswith(newer))
    with duckdb.connect(str(path)) as con:
        con.execute(old)
        con.execute("INSERT INTO schema_version VALUES (1)")
        con.execute(
            "INSERT INTO runs (id, backend, target, simulated, sessions, started_at, status) "
            "VALUES ('old', 'vllm', 'sim', true, 1, now(), 'complete')"
        )
        con.execute("INSERT INTO requests (run_id, session, turn, status) VALUES ('old', 's', 0, 'ok')")
        con.execute("INSERT INTO requests (run_id, session, turn, status) VALUES ('old', 's/agent', 0, 'ok')")
    if opens == "writer":
        with Store.create_or_open(path) as store:
            store.add({"session": "s", "turn": 1, "status": "ok", "load_s": 0.5}, run_id="old")
    with open_results(path) as results:
        found = results.sql("SELECT turn, load_s FROM v_requests ORDER BY turn").fetchall()
        counted = results.sql("SELECT sessions, families FROM v_runs").fetchall()
    assert found == [(0, None), (0, None), (1, 0.5)][: len(found)]
    assert report(path, "old").requests["total"] == len(found) == (3 if opens == "writer" else 2)
    assert counted == [(2, 1)]  # such files counted families as sessions


@pytest.mark.parametrize(("version", "what"), [(0, "older than this replay can read"), (99, "upgrade replay")])
def test_a_file_of_an_unknown_version_is_refused_and_left_alone(tmp_path: Path, version: int, what: str) -> None:
    path = tmp_path / "r.duckdb"
    Store.create_or_open(path).close()
    with duckdb.connect(str(path)) as con:
        con.execute("UPDATE schema_version SET version = ?", [version])
    before = digest(path)
    refuses(Store.create_or_open, path, what)
    refuses(report, path, what)
    assert digest(path) == before


def test_columns_of_a_newer_release_do_no_harm(write: Callable[..., Path]) -> None:
    path = write()
    before = report(path).tokens
    with duckdb.connect(str(path)) as con:
        con.execute("ALTER TABLE requests ADD COLUMN colour VARCHAR")
    with Store.create_or_open(path) as store:
        store.add({"session": "new", "turn": 0, "status": "ok", "colour": "red"}, run_id=report(store).run["id"])
    assert report(path).tokens == before


def test_reading_and_writing_at_once_in_one_process_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    with Store.create_or_open(path):
        refuses(report, path, "this process has the results file open in another mode")
        opens = f"import duckdb; duckdb.connect({str(path)!r})"
        other = subprocess.run([sys.executable, "-c", opens], capture_output=True, text=True, check=False)
        assert "set lock on file" in other.stderr, "looking at the file must not give up its lock"


def test_ctrl_c_waits_for_a_statement_of_the_results_file_to_end():
    done = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
