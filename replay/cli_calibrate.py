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
@click.option("--draws", type=click.IntRange(1), default=15, show_default=True, help="Simulations of each run.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.option("--format", "fmt", type=click.Choice(["table", "md"]), default="table", show_default=True)
@click.option("--max-error", type=float, help="Exit with 1 if p50, p90 or a share is off by more percent or points.")
def validate(
    source: Path, trace: Path | None, gpu: str | None, draws: int, as_json: bool, fmt: str, max_error: float | None
) -> None:
    """Replay recorded runs of real engines on the model and print both, with the error of each figure.

    SOURCE is a results file with runs on real engines, of which those of the trace are taken, or a calibration folder
    whose runs.yaml says what ran.

    \b
    Examples:
      replay validate reports/h200-qwen3-8b.duckdb --trace traces/agents48.jsonl
      replay validate mine.duckdb --trace my.jsonl --max-error 10
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


@main.command()
@click.option("--target", default="launch", show_default=True, help="launch, or the URL of a running server.")
@click.option("--backend", default="vllm", show_default=True, help="Preset that runs there, or a YAML file.")
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override a field, e.g. tiers.gpu.tokens=64000.")
@click.option("--model", help="What the engine loads or serves.")
@click.option("--profile", required=True, help="That model's profile, or a path to its config.json.")
@click.option("--gpu", default="h200", show_default=True, help="GPU profile for data sheet figures and other links.")
@click.option("--api-key-env", metavar="VAR", help="Environment variable that holds the server's API key.")
@click.option("--dummy-weights", is_flag=True, help="Launch with random weights: same timing, no download.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="GPU profile to write (YAML).")
def calibrate(
    target: str,
    backend: str,
    overrides: tuple[str, ...],
    model: str | None,
    profile: str,
    gpu: str,
    api_key_env: str | None,
    dummy_weights: bool,
    output: Path,
) -> None:
    """Measure an idle engine on a small grid and write a GPU profile that simulates it, with the fit's residuals.

    Takes about two minutes on a GPU. Coming back is measured from the slowest tier of the backend and needs the
    size of the tiers above it (--set tiers.gpu.tokens=N); how stores and the disk's writes interfere is not.

    \b
    Examples:
      replay calibrate --model Qwen/Qwen3-8B --profile qwen3-8b --dummy-weights -o mine.yaml
      replay calibrate --target http://127.0.0.1:8000 --profile qwen3-8b -o mine.yaml
    """
    import yaml

    from replay.backends import connect, preset
    from replay.calibration import measure, render
    from replay.engine import profiles
    from replay.errors import ReplayError

    if output.suffix not in (".yaml", ".yml"):
        raise ReplayError(f"-o {output}: a profile is a YAML file; end its name in .yaml")
    shape, base = profiles.model(profile), profiles.gpu(gpu)
    where = connect.Where(
        preset.load(backend, overrides),
        target=target,
        model=model,
        api_key_env=api_key_env,
        dummy_weights=dummy_weights,
    )
    grid = measure.measure(where, measure.others(where.preset, shape), say=_say)
    _say("")
    made, residuals = measure.fit_profile(grid, shape, base, where.preset, output.stem)
    output.write_text(yaml.safe_dump(measure.plain(made), sort_keys=False))
    emit(render.residuals(residuals), None)
    click.echo(f"{output}: GPU profile of {where.preset.name} with {shape.name}; use it with --gpu {output}", err=True)
