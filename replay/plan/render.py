"""A `Plan` as text for a terminal of 80 columns, with rich; plain when piped."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from replay.plan.planner import Plan
from replay.plan.tiers import TierPlan
from replay.results import units
from replay.results.layout import Section
from replay.results.render import section_table

ROWS = 10
BAR = 24
FLOOR = 0.05
"""The table starts where the cache serves this share of the ceiling."""


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
    return Section("Hits by capacity (LRU, exact)", columns, cells, left=(3,))


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
            "-" if tier.bandwidth_gbps is None else units.digits(tier.bandwidth_gbps),
            _verdict(tier.pays),
        )
        for tier in plan.tiers
    ]
    columns = ("tier", "capacity", "GiB", "hits here", "left below", "+10 GB", "GB/s", "pays")
    return Section("Tiers", columns, rows)


def _break_even(plan: Plan, lower: list[TierPlan]) -> Section:
    rows: list[tuple[str, ...]] = []
    for cells in zip(*(tier.break_even for tier in lower), strict=True):
        first = cells[0]
        loads = [f"{seconds(cell.load_s)} {'pays' if cell.pays else 'slower'}" for cell in cells]
        rows.append((f"{first.context // 1024}k", seconds(first.rebuild_s), f"{first.gbps:.1f} GB/s", *loads))
    columns = ("prefix", "rebuild", "break-even", *(f"{tier.tier} load" for tier in lower))
    return Section(f"Rebuild a prefix or load it ({plan.cost_source} times)", columns, rows)


def _candidates(plan: Plan) -> Section:
    candidates = plan.recommendation["candidates"]
    rows: list[tuple[str, ...]] = []
    for row in candidates:
        predicted = row["predicted"] or {}
        rows.append(
            (
                units.plain(row["backend"]),
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
        error = plan.recommendation["known_error"]
        known = "; ".join(f"{name} within {100 * value:.0f} %" for name, value in (error or {}).items())
        lines.append(f"TTFT is simulated{f' ({known} on recorded runs)' if known else ''}.")
    columns = ("backend", "hits", "TTFT p50", "TTFT p95", "keeps SLO", "a month")
    return Section("Backends", columns, rows, lines)


def _advice(plan: Plan) -> Text:
    advice, size = plan.recommendation, plan.recommendation["capacity"]
    text = Text()
    text.append("Recommended: ", style="bold")
    text.append(f"{advice['backend'] or 'none of these'} ({advice['why']}).\n")
    text.append(
        f"{units.tokens(size['tokens'])} tokens ({gib(size['gib'])} GiB) of cache serve "
        f"{_percent(size['hit_share'])} of the prompts, 95 % of what an unlimited cache would."
    )
    return text


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
