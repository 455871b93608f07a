"""The commands over several runs: `compare` and `sweep`. `replay.cli` imports this module last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from replay.cli import _db, _progress, _say, _trace, main, run
from replay.cli_output import PAGES, emit, page_options, write_page
from replay.errors import ReplayError


@main.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--gate", "gates", multiple=True, metavar="EXPR", help="Limit that every run must keep; exit 1 if not.")
@click.option("--force", is_flag=True, help="Compare runs that were not asked the same.")
@_db
@page_options("table", "json")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(
    runs: tuple[str, ...],
    gates: tuple[str, ...],
    force: bool,
    db: str,
    fmt: str,
    output: str | None,
    chart: str | None,
    as_json: bool,
) -> None:
    """Compare RUNS with the first of them, turn by turn, with 95 % intervals.

    A gate is METRIC OP VALUE: with a sign, the change against the first run (-25%, +100ms, +1pp), else the run's own
    figure (2s, 5%, 1.5M). Metrics: ttft_, ttft_due_, e2e_ and itl_ with mean, p50, p90, p95, p99; throughput,
    output_tokens_per_s, hit_share, gpu_share (cpu, ...), loss, loss_share, computed_tokens, recompute_s, errors.

    \b
    Examples:
      replay compare vllm lmcache-cpu --format html -o compare.html
      replay compare main change --gate 'ttft_p95 <= +5%' --gate 'throughput >= -2%' --json
    """
    from replay.results import compare_render
    from replay.results.compare import compare as compared

    found = compared(db, runs, limits=gates, force=force)
    if fmt in PAGES:
        from replay.results.html.compare import page

        write_page(page(db, found), fmt, output, chart)
    elif fmt == "json" or as_json:
        emit(found.json(), output)
    elif output is None:
        compare_render.show(found)
    else:
        emit(compare_render.text(found), output)
    if found.passed is False:
        sys.exit(1)


_PLACE = ("target", "model", "gpu", "api_key_env", "isolation", "workers", "dummy_weights", "max_model_len", "logs")
_PLAY = ("sessions", "speed", "skip_idle", "absolute", "scale_tokens", "outputs", "too_long", "restart_at", "seed")


@main.command()
@click.argument("trace")
@click.option("--backend", "backends", multiple=True, required=True, help="Preset name or a YAML file; repeatable.")
@click.option("--concurrency", default="open", metavar="N1,N2", help="Families live at once; open: at recorded times.")
@click.option(
    "--set", "changes", multiple=True, metavar="[BACKEND:]K=V1,V2",
    help="Vary a field, of one backend alone with its name before it.",
)  # fmt: skip
@click.option("--slo", "limits", multiple=True, metavar="METRIC=VALUE", help="Limit to keep, e.g. ttft_p95=2s.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes for simulated points [default: one a core].")
@click.option("--ray", metavar="ADDRESS", help="Ray cluster for simulated points; local starts one here.")
@_db
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def sweep(
    trace: str,
    backends: tuple[str, ...],
    concurrency: str,
    changes: tuple[str, ...],
    limits: tuple[str, ...],
    jobs: int | None,
    ray: str | None,
    db: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Run TRACE on every combination of backends, concurrency and settings; show them side by side.

    Points that the results file holds already are not run again, so an interrupted sweep goes on where it was.

    \b
    Examples:
      replay sweep my.jsonl --backend vllm --concurrency 1,4,16 --slo ttft_p95=2s
      replay sweep my.jsonl --backend lmcache-cpu --set tiers.cpu.gib=50,100,200
      replay sweep my.jsonl --backend vllm --backend lmcache-cpu
    """
    from replay import sweep as sweeping
    from replay.backends.connect import Where, default_target
    from replay.results import matrix
    from replay.results.store import Store
    from replay.results.units import count

    place = {key: options.pop(key) for key in _PLACE}
    place |= {"target": place["target"] or default_target(), "logs": Path(place["logs"])}
    slos = [matrix.slo(text) for text in limits]
    points = sweeping.points(
        backends, changes, _sessions_at_once(concurrency), lambda preset: Where(preset=preset, **place), **options
    )
    read = _trace(trace)
    for point in points:
        point.where.check()
    done = []
    with Store.create_or_open(db) as store:
        if not as_json:
            click.echo(f"{count(len(points), 'point')}; the first: {points[0].where.announce()}", err=True)
        try:
            with _points(len(points), shown=not as_json) as watch:
                for each in sweeping.sweep(read, points, store, jobs=jobs, ray=ray, watch=watch, say=_say):
                    done.append(each)
        except KeyboardInterrupt:
            click.echo(f"replay: stopped after {len(done)} of {len(points)} points; run it again to go on", err=True)
            sys.exit(130)
        done.sort(key=lambda each: points.index(each.point))
        failed = [(each.point.name, each.error) for each in done if each.error]
        if reused := sum(each.reused for each in done):
            click.echo(f"{reused} of {count(len(points), 'point')} in {db} already, not run again", err=True)
        found = matrix.matrix(store, [each.run for each in done if each.run], slos, failed)
    if as_json:
        click.echo(found.json())
    else:
        matrix.show(found)
    if failed:
        sys.exit(2)


sweep.params += [each for each in run.params if each.name in (*_PLACE, *_PLAY)]


def _sessions_at_once(text: str) -> list[int | None]:
    """``1,4,open`` as numbers; null is open."""
    try:
        found = [None if part.strip() == "open" else int(part) for part in text.split(",")]
    except ValueError:
        raise ReplayError(f"--concurrency {text}: write numbers with commas between, e.g. 1,4,16, or open") from None
    return list(dict.fromkeys(found))


class _points(_progress):
    """Progress over points; the one going on counts in part."""

    def _update(self, done: float, total: int, name: str) -> None:  # type: ignore[override]
        self.bar.update(self.task, completed=done, total=total, description=name)
