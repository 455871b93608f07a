"""Writing runs: nothing is lost, nothing collides, a crash costs seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.resources import data_path
from replay.results import Store, open_results
from replay.results import store as store_module
from replay.results.report import report
from replay.results.store import new_run_id

RUN = {"backend": "vllm", "target": "sim", "simulated": True}

_KILLED = """
import sys, time
from replay.results import Store
store = Store.create_or_open(sys.argv[1])
run = store.begin_run({"backend": "vllm", "target": "sim", "simulated": True})
for turn in range(500):
    store.add({"session": "s", "turn": turn, "status": "ok", "prompt_tokens": 10}, run_id=run)
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    reader = store._con.cursor()
    if reader.execute("SELECT count(*) FROM requests").fetchone()[0] == 500:
        print("written", flush=True)
        time.sleep(60)
    time.sleep(0.05)
"""


def read(path: Path, query: str) -> list[tuple[object, ...]]:
    with open_results(path) as results:
        return results.sql(query).fetchall()


def test_a_killed_process_leaves_its_rows_and_a_partial_run(tmp_path: Path) -> None:
    path = tmp_path / "results.duckdb"
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "written\n"  # by the writer's timer: nothing called flush
        process.send_signal(signal.SIGKILL)
    assert read(path, "SELECT count(*), min(turn), max(turn) FROM requests") == [(500, 0, 499)]
    shown = report(path)
    assert (shown.run["status"], shown.run["verdict"]) == ("partial", "partial")
    assert shown.tokens["prompt"] == 5_000
    Store.create_or_open(path).close()
    assert read(path, "SELECT status, verdict FROM runs") == [("partial", "partial")]


def test_rows_reach_the_file_without_anyone_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "BATCH_SECONDS", 0.02)
    with Store.create_or_open(tmp_path / "r.duckdb") as store:
        store.add({"run_id": "x", "session": "s", "turn": 0, "status": "ok"})
        reader = store._con.cursor()
        deadline = time.monotonic() + 10
        while reader.execute("SELECT count(*) FROM requests").fetchone() != (1,):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), max_size=12), batch=st.integers(1, 7))
def test_rows_keep_their_order_whatever_the_batches(sizes: list[int], batch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "BATCH_ROWS", batch)
        store = Store(_memory(), Path("memory"))
        with store:
            for turn in range(sum(sizes)):
                store.add({"session": "s", "turn": turn, "status": "ok"}, run_id="r")
            turns = [turn for (turn,) in store.reader().execute("SELECT turn FROM requests").fetchall()]
    assert turns == list(range(sum(sizes)))


def _memory() -> duckdb.DuckDBPyConnection:
    con = duckdb.connect(":memory:")
    con.execute(data_path("schemas", "results.sql").read_text("utf-8"))
    return con


def test_run_ids_never_repeat_and_sort_by_time() -> None:
    ids = [new_run_id() for _ in range(2_000)]
    assert len(set(ids)) == len(ids)
    assert new_run_id() > "20250101"


def test_a_run_id_that_exists_is_refused(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "r.duckdb") as store:
        run_id = store.begin_run(RUN)
        with pytest.raises(ReplayError, match="exists already"):
            store.begin_run({**RUN, "id": run_id})


def test_runs_append_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    for _ in range(3):
        with Store.create_or_open(path) as store:
            run_id = store.begin_run(RUN)
            store.add({"session": "s", "turn": 0, "status": "ok"}, run_id=run_id)
            store.finish_run(run_id)
    assert read(path, "SELECT count(DISTINCT run_id), count(*) FROM requests") == [(3, 3)]
    assert read(path, "SELECT DISTINCT status, requests FROM v_runs") == [("complete", 1)]


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "r.duckdb") as store:
        with pytest.raises(ValueError, match="requests has no column colour"):
            store.add({"session": "s", "turn": 0, "status": "ok", "colour": 1}, run_id="r")
        with pytest.raises(ValueError, match="runs has no column colour"):
            store.begin_run({**RUN, "colour": 1})


def test_a_status_that_does_not_exist_never_gets_in(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path / "r.duckdb")
    store.add({"session": "s", "turn": 0, "status": "fine"}, run_id="r")
    with pytest.raises(ReplayError, match="cannot write results: CHECK constraint"):
        store.close()


def test_scrapes_and_cache_events_are_kept_as_said(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    with Store.create_or_open(path) as store:
        run_id = store.begin_run(RUN)
        store.add_scrapes(run_id, 1.5, [("vllm:prompt_tokens_total", '{engine="0"}', 12.0), ("gone", None, None)])
        store.add_cache_events(run_id, [{"at": 2.0, "kind": "evict", "tier": "cpu", "blocks": 3}])
    assert read(path, 'SELECT "at", name, labels, value FROM scrapes') == [
        (1.5, "vllm:prompt_tokens_total", '{engine="0"}', 12.0),
        (1.5, "gone", None, None),
    ]
    assert read(path, "SELECT kind, tier, blocks, tokens FROM cache_events") == [("evict", "cpu", 3, None)]


def test_keys_in_a_targets_address_are_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    with Store.create_or_open(path) as store:
        store.begin_run({**RUN, "target": "https://me:sk-123@host:8000/v1?api_key=sk-456"})
    assert read(path, "SELECT target FROM runs") == [("https://host:8000/v1",)]


def test_text_of_any_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    session = "'); DROP TABLE runs; --\x00\t\n[red]<script>✓"
    with Store.create_or_open(path) as store:
        run_id = store.begin_run({**RUN, "name": session})
        store.add({"session": session, "turn": 0, "status": "error", "error": session}, run_id=run_id)
        store.finish_run(run_id)
    assert read(path, "SELECT session, error FROM requests") == [(session, session)]
    assert report(path, session).run["name"] == session


def test_a_store_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    with Store.create_or_open(tmp_path / "r.duckdb") as store:
        run_id = store.begin_run(RUN)
        store.add({"session": "s", "turn": 0, "status": "ok", "prompt_tokens": 7}, run_id=run_id)
        shown = report(store)
        assert (shown.run["status"], shown.tokens["prompt"]) == ("running", 7)
        store.add({"session": "s", "turn": 1, "status": "ok", "prompt_tokens": 7}, run_id=run_id)
        assert report(store).tokens["prompt"] == 14


def test_adding_rows_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that an engine keeps busy takes seconds to write; the client that measures must not stand still."""
    began, go_on = threading.Event(), threading.Event()

    class SlowDisk(Store):
        def _insert(self, table: str, rows: list[dict[str, Any]]) -> None:
            began.set()
            assert go_on.wait(20)
            super()._insert(table, rows)

    monkeypatch.setattr(store_module, "BATCH_SECONDS", 0.01)
    path = tmp_path / "results.duckdb"
    with SlowDisk.create_or_open(path) as store:
        run = store.begin_run(RUN)
        store.add({"session": "s", "turn": 0, "status": "ok"}, run_id=run)
        assert began.wait(20)
        store.add({"session": "s", "turn": 1, "status": "ok"}, run_id=run)  # would wait until the disk is done
        go_on.set()
    assert read(path, "SELECT turn FROM requests") == [(0,), (1,)]


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(Store):
        full = False

        def _insert(self, table: str, rows: list[dict[str, Any]]) -> None:
            if self.full and table == "scrapes":
                raise duckdb.IOException("no space left")
            super()._insert(table, rows)

    monkeypatch.setattr(store_module, "BATCH_SECONDS", 60)
    path = tmp_path / "results.duckdb"
    with FullDisk.create_or_open(path) as store:
        run = store.begin_run(RUN)
        store.full = True
        store.add({"session": "s", "turn": 0, "status": "ok"}, run_id=run)
        store.add_scrapes(run, 0.0, [("a", None, 1.0)])
        with pytest.raises(ReplayError, match="no space left"):
            store.flush()
        store.add_scrapes(run, 1.0, [("a", None, 2.0)])
        store.full = False
    assert read(path, "SELECT count(*) FROM requests") == [(1,)]
    assert read(path, "SELECT value FROM scrapes") == [(1.0,), (2.0,)]


def test_writing_is_fast_enough_for_the_virtual_clock(tmp_path: Path, make_row: Callable[..., dict[str, Any]]) -> None:
    row = make_row(reusable=30_000)
    with Store.create_or_open(tmp_path / "r.duckdb") as store:
        used = time.process_time()
        for turn in range(20_000):
            row["turn"] = turn
            store.add(row, run_id="r")
        store.flush()
        used = time.process_time() - used
    assert used < 20_000 / 20_000, "fewer than 20,000 rows a second of CPU time (usual: 100,000)"
