"""The commands ``replay validate`` and ``replay calibrate``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from replay.cli import _say, main
from replay.cli_output import emit


@main.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--trace", type=click.Path(path_type=Path), help="What was replayed, where SOURCE is a results file.")
@click.option("--gpu", help="GPU profile to judge [default: the recorded runs' own].")
@click.option("--draws", type=click.IntRange(1), default=7, show_default=True, help="Simulations of each run.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--format", "fmt", type=click.Choice(["table", "md"]), default="table", show_default=True)
@click.option("--max-error", type=float, help="Exit with 1 if p50, p90 or a share is off by more percent or points.")
def validate(
    source: Path, trace: Path | None, gpu: str | None, draws: int, as_json: bool, fmt: str, max_error: float | None
) -> None:
    """Replay recorded runs of real engines on the model and print both, with the error of each figure.

    SOURCE is a calibration folder (runs.yaml says what ran) or a results file with runs on real engines.

    \b
    Examples:
      replay validate calibration/h200-qwen3-8b
      replay validate results.duckdb --trace traces/claude_code.jsonl --max-error 10
    """
    import msgspec

    from replay.calibration import recorded, render
    from replay.calibration.validate import compare, micro

    figures = []
    for run in recorded.runs(source, trace):
        _say(f"simulating {run.name}")
        figures += compare(run, gpu, draws)
    tables = micro(source / "micro.json", say=_say) if source.is_dir() else []
    _say("")
    if as_json:
        rows = {"runs": [figure.as_dict() for figure in figures], "micro": [figure.as_dict() for figure in tables]}
        emit(msgspec.json.format(msgspec.json.encode(rows)).decode(), None)
    else:
        emit(render.text(figures, tables, markdown=fmt == "md"), None)
    worst = max((abs(f.error) for f in figures if f.figure != "ttft_p99"), default=0.0)
    if max_error is not None and worst * 100 > max_error:
        sys.exit(1)
