"""`replay plan` as a user meets it: what it refuses, what its help says, Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from replay.cli import PLAN_BACKENDS, main

TRACE = Path(__file__).parents[2] / "traces" / "claude_code.jsonl"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sessions", "0"], "--sessions must be at least 1, not 0"),
        (["--no-predict", "--sessions", "-2"], "--sessions must be at least 1, not -2"),
        (["--no-predict", "--slo", "ttft_p95=2s"], "--no-predict simulates nothing: leave one out"),
        (["--slo", "ttft_p95"], "write it as METRIC=TIME, e.g. ttft_p95=2s"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["plan", str(TRACE), *options])
    assert result.exit_code == 2 and said in result.stderr
    assert result.stderr.count("\n") == 1 and not result.stdout


def test_help_names_the_backends_that_are_taken_and_why() -> None:
    text = " ".join(CliRunner().invoke(main, ["plan", "--help"]).stdout.split())
    assert ", ".join(PLAN_BACKENDS) in text.replace("- ", "-") and "compared with the real engine" in text
    assert "all that can be simulated" not in text and "upper bound" in text


@pytest.mark.parametrize("after", [0.0, 0.3, 0.7])
def test_ctrl_c_while_simulating_leaves_no_traceback(after: float) -> None:
    code = (
        "import threading, os, signal, replay.runs as runs\n"
        "play = runs.simulate\n"
        "def told(*args):\n"
        f"    threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return play(*args)\n"
        "runs.simulate = told\n"
        "from replay.cli import main\n"
        f"main(['plan', {str(TRACE)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "replay: interrupted\n" and not done.stdout
