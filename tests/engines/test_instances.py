"""Two vLLM instances behind our router, from the command line: started, asked, restarted, and gone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from replay.results import open_results
from replay.results.report import Report, report
from replay.trace import write

ROOT = Path(__file__).parents[2]
BLOCK, SYSTEM = 128, 600


@pytest.fixture(scope="module")
def stored(trace_of: Any, model: Path, engine_python: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results file of a run whose engines were restarted in its midst, and the folder of their logs."""
    folder = tmp_path_factory.mktemp("instances")
    asked = trace_of(seed=11, sessions=4, turns=12, pause=0.5)
    write(folder / "agents.jsonl", asked.header, asked.turns)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as scratch:  # short: engines put sockets into it
        done = subprocess.run(
            [
                *(sys.executable, "-m", "replay", "run", folder / "agents.jsonl", "--backend", "vllm"),
                *("--target", "launch", "--model", model, "--dummy-weights", "--max-model-len", "3968"),
                *("--set", "instances=2", "--set", "router=session", "--set", f"block_tokens={BLOCK}"),
                *("--set", "tiers.gpu.tokens=4096", "--set", "launch.args=[--enforce-eager]"),
                *("--restart-at", "4", "--logs", folder / "logs", "--db", folder / "r.duckdb"),
            ],
            env={**os.environ, "REPLAY_ENGINE_PYTHON": engine_python, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            check=False,
        )
        left = [path.name for path in Path(scratch).glob("replay-*")]
    assert done.returncode in (0, 1), done.stderr  # 1: this machine may be too busy for a verdict
    assert left == []
    return folder


@pytest.fixture
def rows(stored: Path) -> list[dict[str, Any]]:
    """The run's rows in the order in which they were sent."""
    with open_results(stored / "r.duckdb") as results:
        return results.frame("SELECT * FROM v_requests ORDER BY sent").to_dicts()


@pytest.fixture
def shown(stored: Path) -> Report:
    return report(stored / "r.duckdb")


def test_every_turn_is_answered_by_its_sessions_instance(rows: list[dict[str, Any]], shown: Report) -> None:
    assert len(rows) == 12 and {row["status"] for row in rows} == {"ok"}
    homes = {row["session"]: row["instance"] for row in rows}
    assert all(row["instance"] == homes[row["session"]] for row in rows)
    assert set(homes.values()) == {0, 1}
    assert sum(shown.self_check["requests_per_instance"]) == 12
    assert shown.settings["capacity_tokens"] == {"gpu": 2 * 4096}
    assert shown.settings["instances"] == 2 and shown.settings["router"] == "session"


def test_each_instance_serves_what_it_was_sent_since_its_start(rows: list[dict[str, Any]], shown: Report) -> None:
    restarted = shown.self_check["restarted_at_s"]
    after = [row for row in rows if row["sent"] > restarted + 1]
    assert 0 < len(after) < len(rows)
    for part in (rows[: -len(after)], after):
        contexts: dict[tuple[int, str], int] = {}
        for row in part:
            seen = any(instance == row["instance"] for instance, _ in contexts)
            held = contexts.get((row["instance"], row["session"]), SYSTEM if seen else 0)
            assert row["gpu_tokens"] == min(held, row["prompt_tokens"] - 1) // BLOCK * BLOCK
            assert row["gpu_tokens"] + row["computed_tokens"] == row["prompt_tokens"] == row["planned_tokens"]
            contexts[row["instance"], row["session"]] = row["prompt_tokens"] + row["output_tokens"]


def test_what_was_lost_is_told_and_the_engines_counters_agree(rows: list[dict[str, Any]], shown: Report) -> None:
    assert shown.self_check["counters_agree"]
    assert all(row["loss_total"] == max(0, row["ideal_tokens"] - row["gpu_tokens"]) for row in rows)
    assert shown.loss["unknown"] == 0
    assert shown.loss["cold"] > 0 and shown.loss["never_stored"] > 0
    first = next(row for row in rows if row["instance"] == 1)
    assert first["lost_never_stored"] == SYSTEM // BLOCK * BLOCK, "the other instance had computed it"


def test_each_instance_has_a_log_and_nothing_is_left(stored: Path, model: Path) -> None:
    logs = sorted(path.name for path in (stored / "logs").iterdir())
    assert logs == ["vllm-0.log", "vllm-1.log"]
    for log in logs:
        begins = [line for line in (stored / "logs" / log).read_text().splitlines() if line.startswith("# ")]
        assert len(begins) == 2 and begins[0] == begins[1], "restarted with the same command"
    running = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(model).encode() in _read(path)]
    assert running == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
