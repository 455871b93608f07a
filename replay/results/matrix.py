"""Many runs side by side, and the operating point: the one that keeps the SLOs at the highest throughput."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from replay.errors import ReplayError, unknown_name
from replay.results import gates, queries, units
from replay.results.layout import Section
from replay.results.metrics import METRICS
from replay.results.render import WIDTH, emit, plain, section_table
from replay.results.report import TIERS, connection
from replay.results.store import Store

SHARES = (*(f"{tier}_share" for tier in TIERS), "computed_share", "loss_share")
_MEASURED = (
    "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p95", "ttft_p99", "e2e_p50", "e2e_p95", "itl_p50", "throughput",
    "output_tokens_per_s", "hit_share", "loss_share", "error_share",
)  # fmt: skip
"""Metrics that an SLO may name: columns of ``reports/matrix.sql``."""
_EXAMPLES = {"seconds": "2s or 300ms", "share": "50%", "rate": "10 or 1.5k", "tokens": "1.5M", "count": "10"}


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """Runs as rows. The field names are the keys of ``replay sweep --json`` and stay as they are."""

    points: list[dict[str, Any]]
    """Rows of ``reports/matrix.sql``, with `meets_slo` (null without SLOs), times in seconds, shares of 1."""
    slo: list[str]
    """The limits."""
    best: str | None
    """Id of the run with the highest throughput of those that keep every limit; null where none does."""
    failed: list[dict[str, str]]
    """Points that could not be run: `name` and `error`."""

    def json(self) -> str:
        """This matrix as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def slo(text: str) -> gates.Gate:
    """Reads a limit such as ``ttft_p95=2s`` or ``throughput=10``: at most, or at least where more is better.

    Raises:
        ReplayError: unknown metric, or not of that form.
    """
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=)\s*([\d.]+\s*[a-zA-Z%]*)\s*", text)
    if match is None:
        raise ReplayError(f"--slo {text!r}: write it as METRIC=VALUE, e.g. ttft_p95=2s or hit_share=90%")
    metric, op, value = match.groups()
    if metric not in _MEASURED:
        raise unknown_name("SLO metric", metric, _MEASURED)
    if op == "=":
        op = ">=" if METRICS[metric].better > 0 else "<="
    try:
        return gates.parse(f"{metric} {op} {value}")
    except ReplayError:
        example = f"{metric}={_EXAMPLES[METRICS[metric].kind]}"
        raise ReplayError(f"--slo {text!r}: {value!r} is no limit on {metric}; write e.g. {example}") from None


def matrix(
    source: Store | str | Path,
    runs: Sequence[str],
    limits: Sequence[gates.Gate] = (),
    failed: Sequence[tuple[str, str]] = (),
) -> Matrix:
    """Reads runs side by side.

    Args:
        source: an open store or the path of a results file.
        runs: ids, in the order to show.
        limits: SLOs; a run without the figure, or an invalid one, does not keep them.
        failed: names and errors of points without a run.

    Raises:
        ReplayError: the results file cannot be read.
    """
    with connection(source) as (con, _):
        rows = {row["run"]: row for row in queries.select(con, "matrix", runs=list(runs))}
    points = [_judged(rows[run], limits) for run in runs if run in rows]
    good = [point for point in points if point["meets_slo"] is not False and point["throughput"] is not None]
    best = max(good, key=_merit)["run"] if good else None
    return Matrix(
        points=points,
        slo=[limit.text.strip() for limit in limits],
        best=best,
        failed=[{"name": name, "error": error} for name, error in failed],
    )


def show(found: Matrix, console: Console | None = None) -> None:
    """Prints a matrix; plain where the output is no terminal, colourless where ``NO_COLOR`` is set."""
    emit(table(found), console)


def text(found: Matrix, *, width: int = WIDTH) -> str:
    """A matrix as plain text."""
    return plain(table(found), width=width)


def table(found: Matrix) -> RenderableType:
    """A matrix as a rich renderable, at home in 80 columns."""
    parts: list[RenderableType] = []
    if banner := _banner(found.points):
        parts += [Text(f" {banner} ", style="bold black on yellow"), Text()]
    for section in _sections(found):
        parts += [Text(section.title, style="bold"), section_table(section), *map(Text, section.lines), Text()]
    parts += [Text(f"failed: {units.plain(each['name'])}: {units.plain(each['error'])}") for each in found.failed]
    parts.append(Text(_advice(found), style="bold"))
    return Group(*parts)


def _judged(row: dict[str, Any], limits: Sequence[gates.Gate]) -> dict[str, Any]:
    figures = [row[limit.metric] for limit in limits]
    kept = all(value is not None and limit.holds(value) for limit, value in zip(limits, figures, strict=True))
    meets = kept and row["verdict"] != "invalid" if limits else None
    rounded = {name: round(value, 9) if isinstance(value, float) else value for name, value in row.items()}
    return {**rounded, "meets_slo": meets if row["verdict"] != "invalid" else False}


def _merit(point: dict[str, Any]) -> tuple[float, float]:
    """Throughput; at the same throughput, the faster first token."""
    return (point["throughput"], -(point["ttft_p50"] or 0.0))


def _banner(points: list[dict[str, Any]]) -> str | None:
    simulated = sum(point["simulated"] for point in points)
    if not simulated:
        return None
    if simulated == len(points):
        return "SIMULATED: all times and tiers are the engine model's; no engine ran."
    return f"{simulated} of {len(points)} runs are SIMULATED by the engine model (marked sim)."


def _sections(found: Matrix) -> Iterator[Section]:
    mixed = len({point["simulated"] for point in found.points}) == 2
    names = [("sim " if mixed and point["simulated"] else "") + units.plain(point["name"]) for point in found.points]
    times = [
        (
            name,
            *(units.seconds(point[key]) for key in ("ttft_p50", "ttft_p95", "ttft_p99")),
            units.rate(point["throughput"]),
            units.share(point["error_share"], 1),
            _mark(point, found.best),
        )
        for name, point in zip(names, found.points, strict=True)
    ]
    columns = ("run", "TTFT p50", "p95", "p99", "req/s", "failed", "SLO" if found.slo else "")
    yield Section("TTFT in seconds, and throughput", columns, times, left=(0, 6))
    shown = [key for key in SHARES if any(point[key] for point in found.points)]
    shares = [
        (name, *(units.share(point[key], 1) for key in shown)) for name, point in zip(names, found.points, strict=True)
    ]
    titles = ["lost of ideal" if key == "loss_share" else key.removesuffix("_share") for key in shown]
    yield Section("Where prompt tokens came from", ("run", *titles), shares)


def _mark(point: dict[str, Any], best: str | None) -> str:
    if point["verdict"] == "invalid":
        return "invalid"
    kept = {None: "", True: "keeps", False: "misses"}[point["meets_slo"]]
    return f"{kept} *".strip() if point["run"] == best else kept


def _advice(found: Matrix) -> str:
    limits = " and ".join(found.slo)
    best = next((point for point in found.points if point["run"] == found.best), None)
    if best is None:
        return f"No run keeps {limits}." if limits else "No valid run."
    what = f"{units.plain(best['name'])} ({units.rate(best['throughput'])} requests/s)"
    if limits:
        return f"* Operating point: {what}, the highest throughput that keeps {limits}."
    return f"* Highest throughput: {what}. --slo ttft_p95=2s asks for the best that is fast enough."
