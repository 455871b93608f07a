"""A `Plan` as text for a terminal of 80 columns, with rich; plain when piped."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from replay.plan.planner import Plan
from replay.plan.tiers import TierPlan

ROWS = 10
BAR = 20
FLOOR = 0.05
"""The table starts where the cache serves this share of the ceiling."""


def render(plan: Plan) -> RenderableType:
    """The whole plan: curve, tiers, break-even by context length, recommendation, notes."""
    return Group(*_parts(plan))


def _parts(plan: Plan) -> Iterator[RenderableType]:
    live = f"{plan.sessions:,} live sessions" if plan.sessions else "sessions at their recorded times"
    yield Text(f"{plan.trace}: {plan.model} on {plan.gpu}, {live}", style="bold")
    yield Text(
        f"An unlimited cache serves {plan.ceiling['hit_share']:.1%} of {plan.prompts['total']:,} prompt tokens. "
        f"Median prompt {plan.prompts['median']:,}, longest {plan.prompts['longest']:,}."
    )
    yield _curve(plan)
    yield _tiers(plan)
    lower = [tier for tier in plan.tiers if tier.break_even]
    if lower:
        yield _break_even(plan, lower)
    yield _candidates(plan)
    yield _advice(plan)
    for note in plan.notes:
        yield Text(f"Note: {note}.")


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    return table


def _curve(plan: Plan) -> Table:
    table = _table("Hits by capacity (LRU, exact)", "capacity", "GiB", "of prompts", "", left=0)
    table.columns[3].justify = "left"
    rows = [row for row in plan.curve if row["hit_share"] >= FLOOR * plan.ceiling["hit_share"]]
    picked = sorted({round(k * (len(rows) - 1) / (ROWS - 1)) for k in range(ROWS)})
    knee_at = plan.knee["tokens"] if plan.knee else None
    shown = [rows[index] for index in picked]
    if plan.knee and all(row["tokens"] != knee_at for row in shown):
        shown = sorted([*shown, plan.knee], key=lambda row: row["tokens"])
    for row in shown:
        bar = "█" * round(BAR * row["hit_share"]) + (" knee" if row["tokens"] == knee_at else "")
        table.add_row(tokens(row["tokens"]), gib(row["gib"]), f"{row['hit_share']:.1%}", bar)
    return table


def _tiers(plan: Plan) -> Table:
    table = _table("Tiers", "tier", "capacity", "GiB", "hits here", "left below", "+10 GB", "GB/s", "pays")
    total = plan.prompts["total"]
    for tier in plan.tiers:
        table.add_row(
            tier.tier,
            tokens(tier.tokens),
            gib(tier.gib),
            f"{tier.hit_share:.1%}",
            f"{tier.headroom_tokens / total:.1%}",
            f"{tier.next_10gb_tokens / total:.2%}",
            "-" if tier.bandwidth_gbps is None else f"{tier.bandwidth_gbps:.3g}",
            _verdict(tier.pays),
        )
    return table


def _break_even(plan: Plan, lower: list[TierPlan]) -> Table:
    names = [tier.tier for tier in lower]
    table = _table(
        f"Rebuild a prefix or load it ({plan.cost_source} times)",
        "prefix",
        "rebuild",
        "break-even",
        *(f"{name} load" for name in names),
    )
    for cells in zip(*(tier.break_even for tier in lower), strict=True):
        first = cells[0]
        loads = [f"{seconds(cell.load_s)} {'pays' if cell.pays else 'slower'}" for cell in cells]
        table.add_row(f"{first.context // 1024}k", seconds(first.rebuild_s), f"{first.gbps:.1f} GB/s", *loads)
    return table


def _candidates(plan: Plan) -> Table:
    table = _table("Backends", "backend", "hits", "TTFT p50", "p95", "keeps SLO", "a month", "slow tiers")
    for row in plan.recommendation["candidates"]:
        predicted = row["predicted"] or {}
        table.add_row(
            Text(row["backend"]),
            f"{row['hit_share']:.1%}",
            seconds(predicted.get("ttft_p50")),
            seconds(predicted.get("ttft_p95")),
            _verdict(row["meets_slo"]),
            "-" if row["cost_month"] is None else f"{row['cost_month']:,.0f}",
            ", ".join(row["slow_tiers"]) or "-",
        )
    if plan.recommendation["simulated"]:
        error = plan.recommendation["known_error"]
        known = "; ".join(f"{name} within {value:.0%}" for name, value in (error or {}).items())
        table.caption = f"TTFT is simulated{f' ({known} on recorded runs)' if known else ''}."
        table.caption_justify = "left"
    return table


def _advice(plan: Plan) -> Text:
    advice, size = plan.recommendation, plan.recommendation["capacity"]
    text = Text()
    text.append("Recommended: ", style="bold")
    text.append(f"{advice['backend'] or 'none of these'} ({advice['why']}).\n")
    text.append(
        f"{tokens(size['tokens'])} tokens ({gib(size['gib'])} GiB) of cache serve {size['hit_share']:.1%} "
        "of the prompts, 95 % of what an unlimited cache would."
    )
    return text


def _verdict(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def tokens(count: float) -> str:
    """1,536 -> ``1.5k``; three digits at most."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def gib(value: float) -> str:
    """GiB with three digits, thousands grouped."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    """Milliseconds below one second; ``-`` where unknown."""
    if value is None:
        return "-"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.3g} s"
