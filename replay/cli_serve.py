"""The commands ``replay serve`` and ``replay doctor``."""

from __future__ import annotations

import contextlib

import click

from replay.cli import main


@main.command()
@click.option("--backend", required=True, help="Preset name or a YAML file; 'replay backends' lists presets.")
@click.option("--set", "overrides", multiple=True, metavar="K=V", help="Override a field, e.g. tiers.disk.gib=500.")
@click.option("--model", help="Model profile, or a path to a config.json [default: qwen2.5-7b-1m].")
@click.option("--gpu", help="GPU profile [default: h200].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port; 0 for a free one.")
@click.option(
    "--fault", "faults", multiple=True, metavar="KIND[=VALUE][@N]", help="A fault that every N-th request has."
)
def serve(
    backend: str,
    overrides: tuple[str, ...],
    model: str | None,
    gpu: str | None,
    host: str,
    port: int,
    faults: tuple[str, ...],
) -> None:
    """Serve the engine model over HTTP, OpenAI-compatible and in real time, until Ctrl-C.

    \b
    Examples:
      replay serve --backend lmcache-disk --port 8000
      replay serve --backend vllm --fault reset@10 --fault stall=2.5@25
    Faults: slow, stall, reset, refuse, status, truncate, garbage, error, no-usage.
    """
    from replay.backends.connect import DEFAULT_GPU, DEFAULT_MODEL
    from replay.backends.preset import load
    from replay.load.clock import run
    from replay.serve import parse_fault
    from replay.serve import serve as serve_model

    preset = load(backend, overrides)
    model, gpu = model or DEFAULT_MODEL, gpu or DEFAULT_GPU
    had = [parse_fault(fault) for fault in faults]

    def ready(url: str) -> None:
        click.echo(
            f"Simulating {preset.name} with {model} on {gpu}; no engine runs. Ctrl-C ends it. Listening at {url}"
        )
        for fault in had:
            click.echo(f"fault: {fault}")

    with contextlib.suppress(KeyboardInterrupt):
        run(serve_model(preset, model, gpu, host=host, port=port, faults=had, ready=ready), virtual=False)


@main.command()
@click.option("--disk", type=click.Path(), help="Folder to measure as a disk tier (writes half a GiB, removed after).")
@click.option("--python", help="The engine's interpreter [default: $REPLAY_ENGINE_PYTHON, else this one].")
@click.option("--model", default="qwen3-8b", show_default=True, help="Model whose KV size the disk is judged by.")
@click.option("--gpu", help="GPU profile to compare loading with computing.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(disk: str | None, python: str | None, model: str, gpu: str | None, as_json: bool) -> None:
    """Say what this machine can run, what is missing, and how fast a disk tier would be.

    \b
    Example:
      replay doctor --disk /mnt/nvme --gpu h100
    """
    import json
    from pathlib import Path

    from replay.backends import doctor as machine

    checks = machine.doctor(python=python, disk=Path(disk) if disk else None, model=model, gpu=gpu)
    if as_json:
        click.echo(json.dumps(machine.as_json(checks), indent=2))
        return
    from rich.console import Console

    Console(highlight=False).print(machine.render(checks))
