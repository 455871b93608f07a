"""Several processes share one run: the same run, whatever their number, and it always ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replay.backends.connect import Where
from replay.backends.preset import load
from replay.cli import main
from replay.errors import ReplayError
from replay.trace import write

KEY = "sk-not-for-anyones-eyes"


@contextlib.contextmanager
def one_killed(server: Any) -> Iterator[None]:
    """Kills a worker of the run within the block once the server has its fifth request."""

    def kill() -> None:
        assert server.fifth.wait(60)
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


def test_a_serial_run_has_the_same_rows_with_any_number_of_workers(kit: Any, engines: Any, play: Any) -> None:
    trace, url = kit.agents(sessions=6), engines()
    alone = play(trace, url, concurrency=1)
    shared = play(trace, url, concurrency=1, workers=3)
    assert shared.rows(kit.EXACT) == alone.rows(kit.EXACT)
    assert sum(ideal for (ideal,) in alone.rows("ideal_tokens")) > 6 * 2 * 500, "sessions continue and share"
    assert shared.rows("DISTINCT worker") == [(0,), (1,), (2,)]
    assert shared.about("status") == "complete"
    assert shared.about("settings")["workers"] == 3


def test_every_turn_is_sent_once_and_every_family_by_one_worker(kit: Any, slow: Any, play: Any) -> None:
    server, url = slow
    results = play(kit.agents(sessions=10), url, workers=3)
    rows = results.rows("session, turn, worker, status")
    assert [(session, turn) for session, turn, *_ in rows] == [(f"s{s}", n) for s in range(10) for n in range(3)]
    assert {status for *_, status in rows} == {"ok"}
    assert len(server.ids) == len(set(server.ids)) == 30
    assert len({name.partition("-")[0] for name in server.ids}) == 1, "one salt"
    assert len({(session, worker) for session, _, worker, _ in rows}) == 10
    counts = [sum(worker == number for _, _, worker, _ in rows) for number in range(3)]
    assert min(counts) >= 9, counts
    check = results.about("self_check")
    assert [each["requests"] for each in check["workers"]] == counts
    assert check["peak_in_flight"] == 10
    assert check["handover_ms"]["p50"] > 0
    assert check["compose_ms"]["max"] == max(each["compose_ms"]["max"] for each in check["workers"])


def test_slots_of_concurrency_are_those_of_all_workers_together(kit: Any, slow: Any, play: Any) -> None:
    server, url = slow
    results = play(kit.agents(sessions=9, turns=2), url, workers=2, concurrency=3)
    assert server.peak == 3
    assert results.about("self_check")["peak_in_flight"] == 3
    assert results.rows("DISTINCT worker") == [(0,), (1,)]


def test_idle_time_is_skipped_only_when_all_workers_are_idle(kit: Any, slow: Any, play: Any) -> None:
    _, url = slow
    began = time.monotonic()
    results = play(kit.agents(sessions=4, turns=2, pause=300.0), url, workers=2, skip_idle=True)
    assert time.monotonic() - began < 60
    assert results.about("self_check")["skipped_idle_s"] > 250
    first_ends = max(closed for (closed,) in results.rows("max(closed) FILTER (turn = 0)"))
    assert all(sent > first_ends for turn, sent in results.rows("turn, sent") if turn == 1)


def test_a_killed_worker_fails_its_own_turns_and_the_others_go_on(kit: Any, slow: Any, play: Any) -> None:
    server, url = slow
    server.wait_s = 0.3
    with one_killed(server):
        results = play(kit.agents(sessions=6), url, workers=2)
    rows = results.rows("session, turn, worker, status, error")
    assert len(rows) == 18
    failed = [(worker, error) for *_, worker, status, error in rows if status == "error"]
    assert failed and len({worker for worker, _ in failed}) == 1
    assert "was killed by signal 9" in failed[0][1]
    assert {status for *_, worker, status, _ in rows if worker == 1 - failed[0][0] and status != "dropped"} == {"ok"}
    assert sum(status == "ok" for *_, status, _ in rows) >= 9
    assert results.about("status") == "partial"
    assert any("was killed by signal 9" in text for text in results.about("self_check")["warnings"])


@pytest.fixture
def command(kit: Any, slow: Any, tmp_path: Path) -> Any:
    """Starts ``replay run`` with two workers in a process group of its own, where five requests never end."""
    server, url = slow
    server.wait_s = 1e6
    trace = kit.agents(sessions=6)
    write(tmp_path / "trace.jsonl", trace.header, trace.turns)
    started = []

    def start() -> subprocess.Popen[str]:
        options = [
            "--target",
            url,
            "--workers",
            "2",
            "--api-key-env",
            "REPLAY_TEST_KEY",
            "--db",
            str(tmp_path / "r.db"),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "replay", "run", str(tmp_path / "trace.jsonl"), "--backend", "vllm", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "REPLAY_TEST_KEY": KEY},
        )
        started.append(process)
        assert server.fifth.wait(60)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_command_that_lost_a_worker_exits_1_and_says_so(command: Any, slow: Any, tmp_path: Path) -> None:
    process = command()
    victim = next(int(path.parent.name) for path in processes(process.pid) if b"spawn_main" in path.read_bytes())
    os.kill(victim, signal.SIGKILL)
    slow[0].answer_all()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "was killed by signal 9" in output and "stopped before its end" not in output
    assert "Traceback" not in output


def test_a_sweep_sends_through_workers_too_and_names_one_that_died(kit: Any, slow: Any, tmp_path: Path) -> None:
    server, url = slow
    trace = kit.agents(sessions=6)
    write(tmp_path / "t.jsonl", trace.header, trace.turns)
    command = ["sweep", str(tmp_path / "t.jsonl"), "--backend", "vllm", "--target", url, "--workers", "2"]
    command += ["--db", str(tmp_path / "r.db"), "--concurrency", "3"]
    server.wait_s = 0.3
    with one_killed(server):
        lost = CliRunner().invoke(main, command)
    assert lost.exit_code == 2, lost.output
    assert "was killed by signal 9; its run" in " ".join(lost.output.split())
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 0, again.output
    import duckdb

    with duckdb.connect(str(tmp_path / "r.db"), read_only=True) as con:
        found = con.execute(
            "SELECT runs.status, list_sort(list(DISTINCT worker)) FROM runs JOIN requests ON run_id = id GROUP BY ALL"
        ).fetchall()
        assert sorted(found) == [("complete", [0, 1]), ("partial", [0, 1])]


def gone(group: int) -> bool:
    """Whether no process of a group is left, after a moment."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_ctrl_c_cancels_what_is_in_flight_and_leaves_no_process(command: Any, kit: Any, tmp_path: Path) -> None:
    process = command()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to workers, too
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output, output
    assert gone(process.pid)
    import duckdb

    with duckdb.connect(str(tmp_path / "r.db"), read_only=True) as con:
        assert con.execute("SELECT status FROM runs").fetchall() == [("partial",)]
        assert con.execute("SELECT status, count(*) FROM requests GROUP BY ALL").fetchall() == [("cancelled", 6)]


def test_workers_end_with_the_process_that_drives_them(command: Any) -> None:
    process = command()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert gone(process.pid)


def test_the_api_key_reaches_the_server_and_nothing_else(command: Any, slow: Any, tmp_path: Path) -> None:
    process = command()
    arguments = b"".join(path.read_bytes() for path in processes(process.pid))
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert slow[0].authorizations == {f"Bearer {KEY}"}
    assert b"replay" in arguments and KEY.encode() not in arguments
    assert KEY not in output
    assert KEY.encode() not in (tmp_path / "r.db").read_bytes()


def processes(group: int) -> list[Path]:
    """The command lines of a process group."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "stat").exists():
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found.append(folder / "cmdline")
    assert len(found) >= 3
    return found


def test_workers_need_a_real_clock_and_a_number() -> None:
    with pytest.raises(ReplayError, match="--workers: the engine model has one virtual clock"):
        Where(load("vllm"), workers=2)
    with pytest.raises(ReplayError, match="--workers must be at least 1"):
        Where(load("vllm"), "http://127.0.0.1:9", workers=0)
