"""The command ``replay serve``."""

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
        click.echo(f"Simulating {preset.name} with {model} on {gpu} at {url}: no engine runs. Ctrl-C ends it.")
        for fault in had:
            click.echo(f"fault: {fault}")

    with contextlib.suppress(KeyboardInterrupt):
        run(serve_model(preset, model, gpu, host=host, port=port, faults=had, ready=ready), virtual=False)
