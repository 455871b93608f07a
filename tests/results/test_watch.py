"""A run that is going on in another process: reports, queries and `watch` see what it has stored."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from rich.console import Console

from replay.errors import ReplayError
from replay.results import open_results, query, snapshot
from replay.results.render import text
from replay.results.report import report
from replay.results.watch import watch

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A results file and the process that simulates a long run into it; some rows are there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()
    path = tmp_path / "r.duckdb"
    trace = ROOT / "traces/claude_code.jsonl"
    command = [sys.executable, "-m", "replay", "run", trace, "--backend", "vllm", "--target", "sim", "--db", path]
    process = subprocess.Popen(
        [*map(str, command), "--sessions", "800"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while not _rows(path):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield path, process
    finally:
        process.kill()
        process.wait()


def _rows(path: Path) -> int:
    try:
        return int(query(path, "SELECT count(*) AS n FROM requests", "csv").split()[1])
    except ReplayError:
        return 0  # the file is not there yet


def test_a_run_that_is_going_on_is_read_and_followed_until_it_ends(
    going_on: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    path, process = going_on
    so_far = report(path)
    assert so_far.run["status"] == "running"
    assert 0 < so_far.requests["ok"] < so_far.run["turns"]
    assert "none yet: the run is going on" in text(so_far)
    with open_results(path) as results:
        assert len(results.requests.fetchall()) >= so_far.requests["total"]
    assert list((tmp_path / "temp").iterdir()) == []

    watcher = subprocess.Popen(
        [sys.executable, "-m", "replay", "report", "--watch", "--db", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert watcher.stdout is not None
    for line in (watcher.stdout.readline(), watcher.stdout.readline()):
        assert " turns, run time " in line
        assert ", TTFT p50 " in line
    watcher.send_signal(signal.SIGINT)
    _, said = watcher.communicate(timeout=30)
    assert (watcher.returncode, said) == (0, "left; the run goes on\n")
    assert process.poll() is None

    screen = io.StringIO()
    threading.Timer(1, lambda: process.send_signal(signal.SIGINT)).start()
    terminal = Console(file=screen, force_terminal=True, width=80, color_system=None)
    ended = watch(path, console=terminal, refresh_s=0.3)
    assert process.wait(timeout=60) == 130
    assert ended.run["status"] == "partial"
    assert ended.requests["ok"] >= so_far.requests["ok"]
    for shown in ("SIMULATED", "Ctrl-C leaves it to go on", "Where ", "\x1b[?25h"):  # the last: the cursor is back
        assert shown in screen.getvalue()
    assert list((tmp_path / "temp").iterdir()) == []


def test_a_run_that_has_ended_is_returned_at_once(standard: Path) -> None:
    shown = io.StringIO()
    assert watch(standard, console=Console(file=shown)).run["status"] == "complete"
    assert shown.getvalue() == ""


def test_a_copy_during_which_the_file_changed_is_made_again(
    standard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.duckdb"
    path.write_bytes(standard.read_bytes())
    copies = []
    real = snapshot._copy

    def torn(source: Path, folder: Path) -> Path:
        copy = real(source, folder)
        copies.append(copy)
        if len(copies) == 1:  # blocks of another moment
            copy.write_bytes(b"\0" * copy.stat().st_size)
        if len(copies) == 2:
            with duckdb.connect(str(source)) as con:
                con.execute("UPDATE runs SET name = 'renamed'")
        return copy

    monkeypatch.setattr(snapshot, "_copy", torn)
    monkeypatch.setattr(snapshot, "WAIT_S", 0)
    with snapshot._snapshot(path) as con:
        assert con.execute("SELECT name FROM runs").fetchall() == [("renamed",)]
    assert len(copies) == 3
    monkeypatch.setattr(snapshot, "_state", lambda path: object())
    with pytest.raises(ReplayError, match="too fast for a copy"):
        snapshot._snapshot(path)
