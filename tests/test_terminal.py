"""Output as a user meets it: piped, in an ASCII locale, on a dumb terminal, 80 columns wide."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.progress import Progress

from replay import cli_progress
from replay.cli import _progress, main
from replay.load import driver

ROOT = Path(__file__).resolve().parent.parent
MACHINE = ("--model", "qwen3-8b", "--gpu", "h100")
TRACE = str(ROOT / "traces/doc_qa.jsonl")
COMMANDS = {
    "report": ("report", "a"),
    "report as Markdown": ("report", "a", "--format", "md"),
    "inspect": ("inspect", TRACE),
    "plan": ("plan", TRACE, *MACHINE, "--no-predict"),
    "compare": ("compare", "a", "b"),
    "sql": ("sql", "SELECT 'caf\u00e9 \u2713' AS x, name FROM v_runs"),
    "backends": ("backends",),
}


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, of which one has a name beyond ASCII."""
    path = tmp_path_factory.mktemp("terminal") / "r.duckdb"
    for backend, name in (("vllm", "a"), ("lmcache-cpu", "b"), ("vllm", "d\u00e9j\u00e0 vu")):
        asked = ["run", TRACE, "--backend", backend, "--name", name, *MACHINE, "--target", "sim", "--db", str(path)]
        assert CliRunner().invoke(main, asked, catch_exceptions=False).exit_code == 0
    return path


def environment(db: Path, **changed: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "PYTHONUTF8", "FORCE_COLOR")}
    return {**kept, "REPLAY_DB": str(db), **changed}


@pytest.mark.parametrize("name", [*COMMANDS, "report of a foreign name"])
def test_an_ascii_locale_gets_ascii_in_80_columns_without_escapes(db: Path, name: str) -> None:
    arguments = COMMANDS.get(name, ("report",))
    ascii_only = environment(db, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", NO_COLOR="1")
    command = [sys.executable, "-m", "replay", *arguments]
    done = subprocess.run(command, env=ascii_only, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii")
    assert text.strip()
    assert "\x1b" not in text
    if name not in ("backends", "report as Markdown"):  # these are a line each when piped, however long
        assert max(map(len, text.splitlines())) <= 80
        assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
@pytest.mark.parametrize("name", ["plan", "report", "backends"])
def test_a_terminal_gets_80_columns_and_a_dumb_one_no_escapes(db: Path, name: str, term: str) -> None:
    text = on_a_terminal(COMMANDS[name], environment(db, TERM=term, COLUMNS="80"))
    assert ("\x1b" in text) == (term != "dumb" and name != "backends")
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in text.splitlines()) <= 80
    assert "\u2026" not in text, "nothing is cut"


def on_a_terminal(arguments: tuple[str, ...], env: dict[str, str]) -> str:
    """What a command prints on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "replay", *arguments], env=env, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        read = bytearray()
        while chunk := _read(ours):
            read += chunk
        os.close(ours)
        assert process.wait() == 0, read.decode()
    return read.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # Linux's way to say that the other end is closed
        return b""


def test_a_long_pause_is_foretold_on_the_progress_line(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"format":"replay-trace","version":1,"name":"t"}\n'
        '{"session":"a","turn":0,"at":0,"append":[["x",64]],"output":4}\n'
        '{"session":"a","turn":1,"pause":36000,"append":[["y",64]],"output":4}\n'
    )
    env = environment(tmp_path / "r.duckdb", TERM="xterm-256color", COLUMNS="100")
    serve = [sys.executable, "-m", "replay", "serve", "--backend", "vllm", "--port", "0"]
    with subprocess.Popen(serve, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        ours, theirs = pty.openpty()
        run = [sys.executable, "-m", "replay", "run", str(trace), "--backend", "vllm", "--target", url]
        with subprocess.Popen(run, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            read = bytearray()
            while b"to go" not in read and (chunk := _read(ours)):
                read += chunk
            process.send_signal(signal.SIGINT)
            while chunk := _read(ours):
                read += chunk
            os.close(ours)
        server.terminate()
    assert b"at least 10.0 h to go" in read, read.decode()
    assert b"1 of 2 requests answered" in read
    assert process.returncode == 130


class StuckTerminal(io.StringIO):
    """Takes nothing more once it is stuck, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()
        self.free.set()
        self.reached = threading.Event()

    def write(self, text: str) -> int:
        if not self.free.is_set():
            self.reached.set()
            self.free.wait(10)
        return len(text)


def test_a_run_does_not_wait_for_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StuckTerminal()
    console = Console(file=terminal, force_terminal=True)
    monkeypatch.setattr(cli_progress, "bar", lambda: Progress(console=console, auto_refresh=False))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with _progress(2, shown=True) as watch:
        terminal.free.clear()
        assert terminal.reached.wait(10)
        told = driver.Progress(total=2, done=1)
        began = time.monotonic()
        for _ in range(1000):
            watch(told)
        assert time.monotonic() - began < 1.0
        assert not terminal.free.is_set()
        terminal.free.set()
