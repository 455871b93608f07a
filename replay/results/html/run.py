"""The page and the charts of one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import duckdb

from replay.results import layout, queries, units
from replay.results.html import charts
from replay.results.html.figure import Figure
from replay.results.html.lanes import lanes
from replay.results.html.page import Item, Page, Verdict
from replay.results.layout import Section
from replay.results.report import CACHED, LOSSES, Report, connection, report
from replay.results.store import Store

_PARTS = ("evicted", "lost")
_TONES: dict[str, Literal["good", "doubt", "bad"]] = {"valid": "good", "partial": "doubt", "invalid": "bad"}


def page(source: Store | str | Path, run: str | None = None) -> Page:
    """The page of a run.

    Args:
        source: an open store or the path of a results file.
        run: id, name, or unique start of either; null for the latest run.

    Raises:
        ReplayError: no such file or run.
    """
    result = report(source, run)
    with connection(source) as (con, _):
        items = [_badged(item, result) for item in _items(con, result)]
    return Page(
        title=f"{result.run['name'] or result.run['backend']} on {result.run['trace'] or 'an unnamed trace'}",
        kind="Cache report",
        mark=mark(result),
        banner=layout.banner(result),
        verdict=Verdict("Verdict", result.run["verdict"], _TONES[result.run["verdict"]], result.run["reasons"] or ()),
        facts=[(name, text) for name, text in layout.header(result) if name not in ("", "verdict")],
        highlights=list(_highlights(result)),
        items=items,
    )


def mark(result: Report) -> str:
    """The line that says below a chart which run it shows, and whether that was simulated."""
    run = result.run
    parts = ["SIMULATED" if run["simulated"] else None, run["name"] or run["backend"], run["model"], run["gpu"]]
    parts += [run["trace"], run["id"]]
    return " · ".join(units.plain(part) for part in parts if part)


def _items(con: duckdb.DuckDBPyConnection, result: Report) -> Iterator[Item]:
    tables = {section.name: section for section in layout.sections(result)}
    if result.requests["ok"]:
        yield _tokens(result, tables)
        points = queries.rows(con, "chart_ttft", result.run["id"])
        if by_tier := [row for row in points if row["served_from"] != "all"]:
            yield _ttft(result, by_tier, tables)
        if stretches := queries.rows(con, "chart_time", result.run["id"]):
            yield _time(stretches, queries.rows(con, "chart_evictions", result.run["id"]))
        if rows := queries.rows(con, "chart_sessions", result.run["id"]):
            yield _lanes(rows, tables)
        if any(row["ideal"] and row["lost"] is not None for row in result.pauses):
            yield _pauses(result, tables)
    yield _self_check(result)


def _badged(item: Item, result: Report) -> Item:
    return replace(item, badge="simulated") if result.run["simulated"] and isinstance(item, Figure) else item


def _highlights(result: Report) -> Iterator[tuple[str, str, str]]:
    tokens, ttft = result.tokens, result.ttft_s["all"]
    known = [n for tier in CACHED if (n := tokens[tier]) is not None]
    served = units.share(sum(known) if known else None, tokens["prompt"])
    yield "served from a cache", served, f"of prompt tokens; ideal {units.share(tokens['ideal'], tokens['prompt'])}"
    yield "lost to eviction", units.tokens(result.loss["evicted"]), _rebuilt(result.loss_s["evicted"])
    yield "TTFT p50", f"{units.seconds(ttft['p50'])} s", f"p95 {units.seconds(ttft['p95'])} s"
    per = result.throughput
    yield "pace", f"{units.rate(per['requests_per_s'])} /s", f"requests over {units.duration(per['seconds'])}"


def _rebuilt(seconds: float | None) -> str:
    return "tokens" if seconds is None else f"tokens, rebuilt in {units.duration(seconds)}"


def _tokens(result: Report, tables: dict[str, Section]) -> Figure:
    steps = list(_steps(result))
    said = "; ".join(f"{step['step']} {step['text']}" for step in steps)
    return Figure(
        name="tokens",
        title="Where prompt tokens came from",
        alt=f"Waterfall of prompt tokens, as tokens and share of all prompts: {said}.",
        draw=charts.waterfall(steps, max(step["end"] for step in steps)),
        tables=[tables[name] for name in ("tokens", "loss") if name in tables],
        notes=[
            "Prompts less new tokens are reusable: what an unbounded cache that computes at once would have served."
        ],
    )


def _steps(result: Report) -> Iterator[dict[str, Any]]:
    """Prompts less new tokens are reusable; the tiers and the losses fill what is reusable."""
    tokens, loss = result.tokens, result.loss
    prompt, ideal = tokens["prompt"] or 0, tokens["ideal"]

    def step(name: str, part: str, start: float, n: float) -> dict[str, Any]:
        text = f"{units.tokens(n)} ({units.share(n, prompt)})"
        return {"step": name, "part": part, "start": start, "end": start + n, "text": text}

    yield step("prompts", "ideal", 0, prompt)
    if ideal is not None:
        yield step("new tokens", "new", ideal, prompt - ideal)
        yield step("reusable", "ideal", 0, ideal)
    at = 0
    for tier in CACHED:
        if tokens[tier]:
            yield step(charts.label(tier), tier, at, tokens[tier] or 0)
            at += tokens[tier] or 0
    if loss["total"] is None:
        if tokens["computed"]:
            yield step("computed", "computed", at, tokens["computed"])
        return
    rest = loss["total"] - sum(loss[cause] or 0 for cause in LOSSES)
    causes = [(cause, loss[cause] or 0) for cause in LOSSES] + [("not explained", max(rest, 0))]
    for cause, n in causes:
        if n:
            part = "evicted" if cause == "evicted" else "lost"
            yield step(f"lost: {cause.replace('_', ' ')}", part, at, n)
            at += int(n)


def _ttft(result: Report, points: list[dict[str, Any]], tables: dict[str, Section]) -> Figure:
    groups = {row["served_from"]: row["n"] for row in points}
    said = ", ".join(
        f"{charts.label(group)} {units.seconds(result.ttft_s[group]['p50'])} s ({n:,} requests)"
        for group, n in groups.items()
    )
    return Figure(
        name="ttft",
        title="Time to first token",
        alt=f"Cumulative distributions of the time to first token. Medians: {said}.",
        draw=charts.distribution(
            [{**row, "group": row["served_from"]} for row in points], {group: group for group in groups}
        ),
        tables=[tables["ttft"]],
        notes=["Cumulative, by the slowest tier that a request read from, however little; further left is faster."],
    )


def _time(stretches: list[dict[str, Any]], evictions: list[dict[str, Any]]) -> Figure:
    lost = [row for row in stretches if row["part"] in _PARTS]
    panels = {"Prompt tokens, by where they came from": stretches}
    if lost:
        panels["Lost reuse alone, in tokens"] = lost
    evicted = [row for row in evictions if row["tokens"]]
    if evicted:
        panels["Tokens that tiers evicted"] = evicted
    said = "Nothing was lost."
    if lost:
        starts = {row["start"]: 0 for row in lost}
        for row in lost:
            starts[row["start"]] += row["tokens"]
        worst = max(starts, key=starts.__getitem__)
        said = (
            f"Most was lost at {units.duration(worst)}: {units.tokens(starts[worst])} of "
            f"{units.tokens(sum(starts.values()))} tokens."
        )
    return Figure(
        name="time",
        title="Tiers over time",
        alt=f"Stacked bars of prompt tokens over the run's time, by the tier that served them. {said}",
        draw=charts.over_time(panels),
        tables=[_time_table(stretches)],
        notes=["A request counts where it was sent, with all of its tokens."],
    )


def _time_table(stretches: list[dict[str, Any]], at_most: int = 24) -> Section:
    """Every stretch would be long to read out: a few are summed to one row."""
    parts = [part for part in charts.PARTS if any(row["part"] == part for row in stretches)]
    width = stretches[0]["stop"] - stretches[0]["start"]
    group = width * -(-72 // at_most)
    sums: dict[int, dict[str, int]] = {}
    for row in stretches:
        cells = sums.setdefault(int(row["start"] / group + 1e-9), dict.fromkeys(parts, 0))
        cells[row["part"]] += row["tokens"]
    scale, unit = charts.time_unit(stretches[-1]["stop"])
    rows = [
        (f"{units.digits(number * group / scale)}", *(units.tokens(cells[part]) for part in parts))
        for number, cells in sorted(sums.items())
    ]
    return Section(
        f"Prompt tokens in stretches of {units.duration(group)}",
        (f"from ({unit})", *(charts.label(part) for part in parts)),
        rows,
    )


def _lanes(rows: list[dict[str, Any]], tables: dict[str, Section]) -> Figure:
    shown, total = len({row["lane"] for row in rows}), rows[0]["sessions"]
    others = shown - len({row["lane"] for row in rows if row["worst"]})
    measure = "lost most" if rows[0]["session_loss"] is not None else "had the slowest first tokens"
    headings = (
        f"Sessions that {measure}",
        f"{others} of the other {units.count(total - shown + others, 'session')}, by start",
    )
    left = f"{shown} of {total:,} sessions are shown: those that {measure}, then others evenly spaced by their start."
    sampled = [left] if shown < total else []
    return Figure(
        name="sessions",
        title="Sessions and their pauses",
        alt=f"Swim lanes of {shown} of {units.count(total, 'session')} over the run's time; the first lane is "
        f"{units.plain(rows[0]['session'])}, with {units.tokens(rows[0]['session_loss'])} tokens lost.",
        draw=lanes([{**row, "session": units.plain(row["session"])} for row in rows], headings),
        tables=[_lane_table(rows), *([tables["sessions"]] if "sessions" in tables else [])],
        notes=[
            "A bar is one request, or several that came close together; a gap is a pause. Its height is the share of "
            "the prompt that came from a tier or was lost; what is missing to the full height is new tokens.",
            *sampled,
        ],
    )


def _lane_table(rows: list[dict[str, Any]]) -> Section:
    parts = [part for part in charts.PARTS if any(row.get(part) for row in rows)]
    cells = []
    for lane in sorted({row["lane"] for row in rows}):
        own = [row for row in rows if row["lane"] == lane]
        gap = max((b["start"] - a["stop"] for a, b in pairwise(own)), default=None)
        sums = (sum(row[part] or 0 for row in own) for part in parts)
        cells.append(
            (
                units.plain(own[0]["session"]),
                units.duration(own[0]["start"]),
                units.duration(own[-1]["stop"] - own[0]["start"]),
                units.duration(gap if gap is None or gap > 0 else 0.0),
                units.tokens(sum(row["requests"] for row in own)),
                *(units.tokens(n) for n in sums),
            )
        )
    columns = ("session", "starts", "lasts", "longest gap", "requests", *(charts.label(part) for part in parts))
    return Section("The sessions shown, in tokens", columns, cells)


def _pauses(result: Report, tables: dict[str, Section]) -> Figure:
    rows = []
    for row in result.pauses:
        if row["ideal"] and row["lost"] is not None:
            evicted = None if row["evicted"] is None else row["evicted"] / row["ideal"]
            other = row["lost"] / row["ideal"] - (evicted or 0)
            rows.append(
                {"bin": row["bin"], "n": row["requests"], "evicted": evicted, "lost": other}
                | {"text": units.share(row["lost"], row["ideal"])}
            )
    said = "; ".join(f"{row['bin']}: {row['text']} of {row['n']:,} requests' reusable tokens" for row in rows)
    return Figure(
        name="pauses",
        title="Loss against pause length",
        alt=f"Share of reusable tokens that were lost, by the pause before the request. {said}.",
        draw=charts.shares(rows, _PARTS, "pause before the request"),
        tables=[tables["pauses"]],
        notes=["n is the number of requests. First turns of sessions have no pause of their own."],
    )


def _self_check(result: Report) -> Section:
    check = result.self_check
    lag = check["loop_lag_p99_s"]
    rows: list[tuple[str, ...]] = [
        ("requests left late (p99)", f"{units.seconds(check['schedule_drift_p99_s'])} s"),
        ("event loop woke late (p99)", "not measured" if lag is None else f"{units.seconds(lag)} s"),
        ("most requests in flight", units.tokens(check["peak_in_flight"])),
        ("turns dropped", units.tokens(check["dropped_turns"])),
        ("cache before the run", units.plain(check["cache_before"] or "unknown")),
        ("attempts failed or cancelled", units.tokens(result.requests["errors"] + result.requests["cancelled"])),
        *(("warning", units.plain(text)) for text in check["warnings"]),
    ]
    return Section("Self-check", ("what the client noticed", "value"), rows, left=(0, 1), name="self-check")
