"""Recorded runs beside the model: what must hold, what is read, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from replay.backends import preset
from replay.backends.connect import Where
from replay.calibration import recorded, render, validate
from replay.calibration.validate import Figure
from replay.cli import main
from replay.errors import ReplayError
from replay.results import Store
from replay.trace import read, write


@pytest.fixture(scope="module")
def folder(calibration: Path) -> Path:
    return calibration / "h200-qwen3-8b"


def test_the_model_agrees_with_the_recorded_runs(folder: Path) -> None:
    within = {"ttft_p50": 0.10, "ttft_p90": 0.10, "ttft_p99": 0.25}
    p50, p90 = {}, {}
    for run in recorded.runs(folder):
        figures = {figure.figure: figure for figure in validate.compare(run)}
        for name, figure in figures.items():
            assert abs(figure.error) <= within.get(name, 0.01), (run.name, name, figure)
        p50[run.name], p90[run.name] = figures["ttft_p50"].simulated, figures["ttft_p90"].simulated
    order = ["replay48-gpu128k.vllm", "replay48-gpu64k.vllm", "replay48-gpu64k.lmcache-disk"]
    assert sorted(p50, key=p50.__getitem__) == sorted(p90, key=p90.__getitem__) == order


def test_document_tests_agree_with_the_measured_tables(folder: Path) -> None:
    """Hits of the same engine differ by up to a quarter between the measured tables: those of vLLM alone decide."""
    for figure in validate.micro(folder / "micro.json"):
        if figure.run.endswith(" vllm") or figure.figure in ("first 16k", "back 16k", "miss 4k"):
            assert abs(figure.error) < 0.10, figure


def write_folder(folder: Path) -> Path:
    """Two sessions of a turn each, as one run of which the model's own answers are the record."""
    sessions = [
        {"session": n, "start": n / 10, "shared": 64, "turns": [{"append": 100 + n, "output": 3, "pause": 0}]}
        for n in range(2)
    ]
    (folder / "trace2.json").write_text(json.dumps(sessions))
    (folder / "replay2-gpu64k.vllm.jsonl").write_text(
        "".join(
            json.dumps({"prompt": 164 + n, "cached": 64 * n, "external": None, "ttft_ms": 20.0}) + "\n"
            for n in range(2)
        )
    )
    return folder


def test_a_folders_file_names_say_what_ran(tmp_path: Path) -> None:
    [run] = recorded.runs(write_folder(tmp_path))
    assert (run.preset.name, run.preset.tiers.gpu.tokens, run.model, run.gpu) == ("vllm", 64_000, "qwen3-8b", "h200")
    assert run.trace.prompt == [164, 165]
    share = next(figure for figure in validate.compare(run, draws=2) if figure.figure == "cached share")
    assert share.measured == share.simulated == 64 / 329


def test_a_manifest_wins_over_file_names(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "runs.yaml").write_text(
        "model: qwen3-8b\ngpu: h100\ntrace: trace2.json\n"
        "runs: [{file: replay2-gpu64k.vllm.jsonl, backend: vllm, set: [tiers.gpu.tokens=4096]}]\n"
    )
    [run] = recorded.runs(tmp_path)
    assert (run.gpu, run.preset.tiers.gpu.tokens) == ("h100", 4096)
    (tmp_path / "runs.yaml").write_text("model: qwen3-8b\n")
    with pytest.raises(ReplayError, match=r"runs\.yaml.*gpu"):
        recorded.runs(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="holds no run of a real engine"):
        recorded.runs(tmp_path)


def test_a_results_file_needs_its_trace_and_is_compared_with_it(tmp_path: Path) -> None:
    [run] = recorded.runs(write_folder(tmp_path))
    write(str(tmp_path / "trace.jsonl"), run.trace.header, run.trace.turns)
    path = tmp_path / "results.duckdb"
    with pytest.raises(ReplayError, match="--trace"):
        recorded.runs(path)
    where = Where(preset.load("vllm", ["tiers.gpu.tokens=64000"]), model="qwen3-8b", gpu="h200")
    with Store.create_or_open(path) as store:
        settings = {"preset": msgspec.to_builtins(where.preset), "capacity_tokens": {"gpu": 32_000}}
        about = {"name": "real", "backend": "vllm", "target": "http://x", "simulated": False, "model": "Qwen/Qwen3-8B"}
        run_id = store.begin_run({**about, "gpu": "NVIDIA H200", "trace": "trace2", "settings": settings})
        for row in validate.simulate(run.trace, where):
            store.add(row, run_id=run_id)
        store.finish_run(run_id, status="complete", duration_s=1.0)
    [read_back] = recorded.runs(path, tmp_path / "trace.jsonl")
    assert (read_back.model, read_back.gpu, read_back.preset.tiers.gpu.tokens) == ("qwen3-8b", "h200", 32_000)
    assert [figure.error for figure in validate.compare(read_back, draws=1)] == pytest.approx([0.0] * 6)
    assert read(str(tmp_path / "trace.jsonl")).prompt == run.trace.prompt


def test_the_command_prints_tables_and_exits_by_error(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path))
    shown = CliRunner().invoke(main, ["validate", folder, "--draws", "1"])
    assert shown.exit_code == 0
    assert "simulated" in shown.output
    markdown = CliRunner().invoke(main, ["validate", folder, "--draws", "1", "--format", "md"])
    assert "| replay2-gpu64k.vllm | cached share | 19.5 % | 19.5 % |" in markdown.output
    data = json.loads(CliRunner().invoke(main, ["validate", folder, "--draws", "1", "--json"]).stdout)
    assert {row["figure"] for row in data["runs"]} == {"cached share", "ttft_p50", "ttft_p90", "ttft_p99"}
    assert CliRunner().invoke(main, ["validate", folder, "--draws", "1", "--max-error", "1"]).exit_code == 1


def test_the_table_fits_80_columns_and_names_each_run_once() -> None:
    names = ("vllm-offload-cpu agents-again, and a longer name than most", "b\x1b[31m")
    figures = [
        Figure(name, figure, 13.815, 8.254, 7.1, 13.9) for name in names for figure in ("ttft_p50", "ttft_p99")
    ] + [Figure(names[1], "cached share", 0.892, 0.9, 0.9, 0.9)]
    shown = render.text(figures, [])
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.splitlines()[3:] == [
        names[0],
        "  ttft_p50      13,815 ms   8,254 ms  7,100 ms to 13,900 ms      -40.3 %",
        "  ttft_p99      13,815 ms   8,254 ms  7,100 ms to 13,900 ms      -40.3 %",
        "b?[31m",
        "  ttft_p50      13,815 ms   8,254 ms  7,100 ms to 13,900 ms      -40.3 %",
        "  ttft_p99      13,815 ms   8,254 ms  7,100 ms to 13,900 ms      -40.3 %",
        "  cached share     89.2 %     90.0 %                         +0.8 points",
    ]
    assert "simulated" in shown.splitlines()[0]


def test_what_the_help_says_first_runs_in_the_repository() -> None:
    helped = CliRunner().invoke(main, ["validate", "--help"]).output
    (command,) = re.findall(r"Examples:\n +replay (validate .*)", helped)
    root = Path(__file__).parents[2]
    args = [str(root / word) if "/" in word else word for word in command.split()]
    done = CliRunner().invoke(main, [*args, "--draws", "1"], catch_exceptions=False)
    assert done.exit_code == 0 and "vllm agents\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
