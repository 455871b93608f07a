"""A `Plan` as text for a terminal of 80 columns, with rich; plain when piped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from replay.plan.advice import SHORTFALL
from replay.plan.planner import Plan
from replay.plan.tiers import TierPlan
from replay.results import units
from replay.results.layout import Section
from replay.results.render import section_table

ROWS = 10
BAR = 24
FLOOR = 0.05
"""The table starts where the cache serves this share of the ceiling."""
BOUND = "upper bound: LRU without time or memory of running requests"
"""What the curve is."""


def render(plan: Plan, *, ascii_only: bool = False) -> RenderableType:
    """The whole plan: curve, tiers, break-even by context length, recommendation, notes."""
    return Group(*_parts(plan, ascii_only))


def _parts(plan: Plan, ascii_only: bool) -> Iterator[RenderableType]:
    live = f"{plan.sessions:,} live families of sessions" if plan.sessions else "sessions at their recorded times"
    yield Text(f"{plan.trace}: {plan.model} on {plan.gpu}, {live}", style="bold")
    yield Text(
        f"An unlimited cache serves {_percent(plan.ceiling['hit_share'])} of {plan.prompts['total']:,} prompt tokens. "
        f"Median prompt {plan.prompts['median']:,}, longest {plan.prompts['longest']:,}."
    )
    sections = [_curve(plan, ascii_only), _tiers(plan)]
    lower = [tier for tier in plan.tiers if tier.break_even]
    if lower:
        sections.append(_break_even(plan, lower))
    for section in (*sections, _candidates(plan)):
        yield Text()
        yield Text(section.title, style="bold")
        if section.rows:
            yield section_table(section)
        yield from map(Text, section.lines)
    yield Text()
    yield _advice(plan)
    for note in plan.notes:
        yield Text(f"Note: {note}.")


def _curve(plan: Plan, ascii_only: bool) -> Section:
    ceiling = plan.ceiling["hit_share"]
    rows = [row for row in plan.curve if row["hit_share"] >= FLOOR * ceiling]
    picked = sorted({round(k * (len(rows) - 1) / (ROWS - 1)) for k in range(ROWS)})
    knee_at = plan.knee["tokens"] if plan.knee else None
    shown = [rows[index] for index in picked]
    if plan.knee and all(row["tokens"] != knee_at for row in shown):
        shown = sorted([*shown, plan.knee], key=lambda row: row["tokens"])
    cells: list[tuple[str, ...]] = []
    for row in shown:
        bar = units.bar(row["hit_share"], ceiling, BAR, ascii_only=ascii_only)
        size = (units.tokens(row["tokens"]), gib(row["gib"]))
        cells.append((*size, _percent(row["hit_share"]), bar + (" knee" if row["tokens"] == knee_at else "")))
    columns = ("capacity", "GiB", "of prompts", "of the unlimited cache")
    return Section(f"Hits by capacity ({BOUND})", columns, cells, left=(3,))


def _tiers(plan: Plan) -> Section:
    total = plan.prompts["total"]
    rows: list[tuple[str, ...]] = [
        (
            tier.tier,
            units.tokens(tier.tokens),
            gib(tier.gib),
            _percent(tier.hit_share),
            _percent(tier.headroom_tokens / total),
            f"{100 * tier.next_10gb_tokens / total:.2f} %",
            *("-" if gbps is None else units.digits(gbps) for gbps in (tier.load_gbps, tier.bandwidth_gbps)),
            _verdict(tier.pays),
        )
        for tier in plan.tiers
    ]
    columns = ("tier", "capacity", "GiB", "hits", "left", "+10 GB", "load GB/s", "sustained", "pays")
    return Section("Tiers (hits, left below and +10 GB: from the curve)", columns, rows)


def _break_even(plan: Plan, lower: list[TierPlan]) -> Section:
    rows: list[tuple[str, ...]] = []
    for cells in zip(*(tier.break_even for tier in lower), strict=True):
        first = cells[0]
        loads = [f"{seconds(cell.load_s)} {'pays' if cell.pays else 'slower'}" for cell in cells]
        rows.append((f"{first.context // 1024}k", seconds(first.rebuild_s), f"{first.gbps:.1f} GB/s", *loads))
    columns = ("prefix", "rebuild", "break-even", *(f"{tier.tier} load" for tier in lower))
    return Section(
        f"Rebuild a prefix or load it (times from a {plan.cost_source} profile)", columns, rows, rates(lower)
    )


def rates(lower: list[TierPlan]) -> list[str]:
    """Says which rate the times of loads are of, where there are two."""
    return [
        f"{tier.tier} loads at the sustained {units.digits(tier.bandwidth_gbps)} GB/s, limited by writes; a load alone "
        f"runs at {units.digits(tier.load_gbps)} GB/s."
        for tier in lower
        if tier.load_gbps and tier.bandwidth_gbps and tier.bandwidth_gbps < tier.load_gbps
    ]


def _candidates(plan: Plan) -> Section:
    candidates = plan.recommendation["candidates"]
    rows: list[tuple[str, ...]] = []
    for row in candidates:
        predicted = row["predicted"] or {}
        rows.append(
            (
                units.plain(row["backend"]),
                "-" if row["served_share"] is None else _percent(row["served_share"]),
                _percent(row["hit_share"]),
                seconds(predicted.get("ttft_p50")),
                seconds(predicted.get("ttft_p95")),
                _verdict(row["meets_slo"]),
                "-" if row["cost_month"] is None else f"{row['cost_month']:,.0f}",
            )
        )
    slow = [f"{tier} of {units.plain(row['backend'])}" for row in candidates for tier in row["slow_tiers"]]
    lines = [f"Slower to load from than to rebuild: {', '.join(slow)}."] if slow else []
    if plan.recommendation["simulated"]:
        lines.append(f"Served and TTFT are simulated; {known_error(plan.recommendation)}.")
    lines.append("Bound: the curve at the size of the largest tier; reused output comes on top.")
    columns = ("backend", "served", "bound", "TTFT p50", "TTFT p95", "keeps SLO", "a month")
    return Section("Backends", columns, rows, lines)


def _advice(plan: Plan) -> Text:
    advice = plan.recommendation
    text = Text()
    text.append("Recommended: ", style="bold")
    text.append(f"{advice['backend'] or 'none of these'} ({advice['why']}).\n")
    text.append(capacity(advice))
    return text


def capacity(advice: dict[str, Any]) -> str:
    """What the recommended capacity serves: simulated where it was, beside its bound."""
    size = advice["capacity"]
    tokens, bound = f"{units.tokens(size['tokens'])} tokens ({gib(size['gib'])} GiB)", _percent(size["hit_share"])
    if size["served_share"] is None:
        return (
            f"{tokens} of cache serve at most {bound} of the prompts, 95 % of what an unlimited cache would: a bound, "
            "not simulated."
        )
    serve = f"{tokens} of GPU cache alone serve {_percent(size['served_share'])} of the prompts when simulated"
    if size["hit_share"] - size["served_share"] > SHORTFALL:
        return f"{serve}, not the {bound} of their bound: running requests need that memory too."
    return f"{serve}; their bound is {bound}, 95 % of what an unlimited cache would serve."


def known_error(advice: dict[str, Any]) -> str:
    """How far the model was off on recorded runs, with and without a disk."""
    if not advice["known_error"]:
        return "the model's error is not known here"
    text = ", ".join(f"{name} within {100 * value:.0f} %" for name, value in advice["known_error"].items())
    text = f"error on recorded runs of Qwen3-8B on H200s: {text}"
    if not advice["known_disk_error"]:
        return text
    disk = [
        f"{name} {100 * low:+.0f} to {100 * high:+.0f} %" for name, (low, high) in advice["known_disk_error"].items()
    ]
    return f"{text}; far more with a disk: {', '.join(disk)}"


def _verdict(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _percent(share: float) -> str:
    return units.share(share, 1)


def gib(value: float) -> str:
    """GiB with three digits, thousands grouped."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Milliseconds below one second; ``-`` where unknown."""
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{units.digits(value)} s"
