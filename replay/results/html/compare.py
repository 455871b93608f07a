"""The page and the charts of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb

from replay.results import compare_render, queries, units
from replay.results.compare import Against, Comparison
from replay.results.html import charts
from replay.results.html.figure import Figure
from replay.results.html.page import Item, Page, Verdict
from replay.results.layout import Section
from replay.results.report import CACHED, connection
from replay.results.store import Store

_TONES = {"better": "good", "worse": "bad"}
_GROUPS = {"prefix": "by reusable prefix, tokens", "pause": "by the pause before"}


def page(source: Store | str | Path, comparison: Comparison) -> Page:
    """The page of a comparison; `source` is where its runs are."""
    a, others = comparison.baseline, comparison.runs
    names = [against.run["name"] for against in others]
    with connection(source) as (con, _):
        items = [item for n, against in enumerate(others) for item in _items(con, a, against, n, len(others))]
    banners = [text for against in others if (text := compare_render.banner(a, against.run))]
    return Page(
        title=f"{', '.join(names)} against {a['name']}",
        kind="Cache comparison",
        mark=" · ".join(
            units.plain(part)
            for part in ("SIMULATED" if banners else None, f"{', '.join(names)} against {a['name']}", a["trace"])
            if part
        ),
        banner=banners[0] if banners else None,
        verdict=_verdict(comparison),
        facts=[fact for n, against in enumerate(others) for fact in _facts(a, against, n)],
        highlights=[each for against in others for each in _highlights(against, alone=len(others) == 1)],
        items=items,
    )


def _facts(a: dict[str, Any], against: Against, number: int) -> Iterator[tuple[str, str]]:
    """The first run is said once."""
    for label, text in compare_render.header(a, against):
        if number == 0 or label not in ("A", "asked"):
            yield label, text


def _verdict(comparison: Comparison) -> Verdict | None:
    if comparison.passed is None:
        return None
    reasons = [
        f"{against.run['name']}: {' '.join(row)}"
        for against in comparison.runs
        for section in compare_render.sections(against)
        if section.name == "gates"
        for row in section.rows
    ]
    word, tone = ("passed", "good") if comparison.passed else ("failed", "bad")
    return Verdict("Gates", word, tone, reasons)  # type: ignore[arg-type]


def _highlights(against: Against, *, alone: bool) -> Iterator[tuple[str, str, str]]:
    """Of each of several runs: its TTFT p50 and what it served."""
    names = ("ttft_p50", "ttft_p95", "throughput") if alone else ("ttft_p50",)
    of = "" if alone else f"{against.run['name']}: "
    for name in names:
        cell = against.metrics[name]
        if cell.change is not None:
            yield (
                of + compare_render.TIMES[name],
                f"{cell.change:+.1%}",
                _with_interval(cell.verdict, cell.change_low, cell.change_high),
            )
    share = against.metrics["hit_share"]
    if share.difference is not None:
        text = f"{units.share(share.a, 1)} to {units.share(share.b, 1)}"
        yield f"{of}served from a cache", f"{100 * share.difference:+.1f} pp", text


def _with_interval(verdict: str, low: float | None, high: float | None) -> str:
    return verdict if low is None or high is None else f"{verdict}; 95 % interval {low:+.1%} to {high:+.1%}"


def _items(
    con: duckdb.DuckDBPyConnection, a: dict[str, Any], against: Against, number: int, count: int
) -> Iterator[Item]:
    tables = {section.name: section for section in compare_render.sections(against)}
    figures = [*_changes(against, tables), *_tokens(a, against, tables), *_ttft(con, a, against)]
    rest: list[Item] = [tables[name] for name in ("turns", "gates") if name in tables]
    simulated = a["simulated"] or against.run["simulated"]
    for item in (*figures, *rest):
        name = item.name if count == 1 else f"{item.name}-{number + 1}"
        title = item.title if count == 1 else f"{item.title}: {against.run['name']}"
        if isinstance(item, Figure):
            yield replace(item, name=name, title=title, badge="simulated" if simulated else "")
        else:
            yield replace(item, name=name, title=title)


def _changes(against: Against, tables: dict[str, Section]) -> Iterator[Figure]:
    times = [
        _row(label, cell.change, cell.change_low, cell.change_high, cell.verdict)
        for key, label in compare_render.TIMES.items()
        if (cell := against.metrics[key]).change is not None
    ]
    if times:
        yield _forest("times", "What changed", {"Times and rates": times}, "%", [tables["times"]])
    panels = {
        title: [
            _row(f"{group.group} ({group.n:,})", group.difference, group.low, group.high, group.verdict)
            for group in against.groups
            if group.by == by
        ]
        for by, title in _GROUPS.items()
    }
    panels = {f"Mean TTFT {title}": rows for title, rows in panels.items() if rows}
    if panels:
        shown = [tables[name] for name in ("prefix", "pause", "served_from", "position") if name in tables]
        yield _forest("groups", "For which turns", panels, "seconds", shown)


def _row(what: str, change: float, low: float | None, high: float | None, verdict: str) -> dict[str, Any]:
    return {"what": what, "change": change, "low": low, "high": high, "tone": _TONES.get(verdict, "none")}


def _forest(
    name: str, title: str, panels: dict[str, list[dict[str, Any]]], unit: str, tables: Sequence[Section]
) -> Figure:
    def written(value: float) -> str:
        return f"{value:+.1%}" if unit == "%" else f"{value:+.3g} {unit}"

    said = "; ".join(f"{row['what']} {written(row['change'])}" for rows in panels.values() for row in rows)
    return Figure(
        name=name,
        title=title,
        alt=f"Differences from the first run, with intervals: {said}.",
        draw=charts.changes(panels, unit),
        tables=tables,
        notes=["A bar is the 95 % interval of the difference; a point alone has none. Left of 0 is less than in A."],
    )


def _tokens(a: dict[str, Any], against: Against, tables: dict[str, Section]) -> Iterator[Figure]:
    rows: list[dict[str, Any]] = [
        {"bar": f"{letter}: {run['name']}", "part": part, "tokens": n}
        for letter, run, side in (("A", a, "a"), ("B", against.run, "b"))
        for part, n in _parts(against, side)
        if n
    ]
    if rows:
        said = "; ".join(f"{row['bar']} {charts.label(row['part'])} {units.tokens(row['tokens'])}" for row in rows)
        yield Figure(
            name="tokens",
            title="Where prompt tokens came from",
            alt=f"Stacked bars of the prompt tokens of the turns that both runs answered. {said}.",
            draw=charts.stacked(rows),
            tables=[tables["tokens"], tables["why"]],
            notes=["Of the turns that both runs answered."],
        )


def _parts(against: Against, side: str) -> Iterator[tuple[str, float]]:
    def known(name: str) -> float | None:
        value: float | None = getattr(against.metrics[name], side)
        return value

    for tier in CACHED:
        yield tier, known(f"{tier}_tokens") or 0
    computed, loss, evicted = known("computed_tokens"), known("loss"), known("lost_evicted") or 0
    if loss is None:
        yield "computed", computed or 0
        return
    yield "evicted", evicted
    yield "lost", loss - evicted
    yield "new", (computed or loss) - loss


def _ttft(con: duckdb.DuckDBPyConnection, a: dict[str, Any], against: Against) -> Iterator[Figure]:
    colours, points = {}, []
    for letter, run, role in (("A", a, "ideal"), ("B", against.run, "cpu")):
        group = f"{letter}: {run['name']}"
        own = [row for row in queries.rows(con, "chart_ttft", run["id"]) if row["served_from"] == "all"]
        if own:
            colours[group] = role
            points += [{**row, "group": group} for row in own]
    if points:
        rows: list[tuple[str, ...]] = [
            (f"{share:.0%}", *(units.seconds(_at(points, group, share)) for group in colours))
            for share in (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
        ]
        said = "; ".join(f"{group} half within {units.seconds(_at(points, group, 0.5))} s" for group in colours)
        yield Figure(
            name="ttft",
            title="Time to first token",
            alt=f"Cumulative distributions of the time to first token of both runs. {said}.",
            draw=charts.distribution(points, colours),
            tables=[Section("Seconds within which a share of requests had its first token", ("share", *colours), rows)],
            notes=["Of all requests that a run answered; further left is faster."],
        )


def _at(points: Sequence[dict[str, Any]], group: str, share: float) -> float:
    return float(next(row["ttft"] for row in points if row["group"] == group and row["share"] >= share - 1e-9))
