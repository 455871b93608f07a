"""Sessions as swim lanes: when each asked, how long it paused, and where its prompts came from."""

from __future__ import annotations

from typing import Any

import altair as alt

from replay.results.html import theme
from replay.results.html.charts import PARTS, Rows, label, time_unit
from replay.results.html.figure import Chart, Draw

_LEAST = 0.04
"""Share of a prompt below which a part is less than a pixel, and is not drawn."""


def lanes(rows: Rows, headings: tuple[str, str]) -> Draw:
    """One lane for each session: a thin line from its first request to its last, on it a bar for each request.

    A bar is as high as the share of the prompt that could have been reused, split by where it came from.

    Args:
        rows: of ``reports/chart_sessions.sql``.
        headings: above the worst sessions, above the others.
    """
    scale, unit = time_unit(max(row["stop"] for row in rows))
    slots, titles = _slots(rows, headings)
    spans: dict[int, dict[str, Any]] = {}
    for row in rows:
        span = spans.setdefault(row["lane"], {"session": row["session"], "from": row["start"], "to": row["stop"]})
        span["to"] = max(span["to"], row["stop"])
    lines = [
        {"y": slots[lane] + 0.92, "middle": slots[lane] + 0.62, "session": span["session"]}
        | {"from": span["from"] / scale, "to": span["to"] / scale}
        for lane, span in spans.items()
    ]
    last = max(line["to"] for line in lines)
    depth = max(slots.values()) + 1

    def draw(width: int) -> Chart:
        side = 120 if width > 500 else 84
        plot = width - side - 12
        bars = [bar for row in rows for bar in _bars(row, slots[row["lane"]], scale, last * 2.5 / plot)]
        present = [part for part in PARTS if any(bar["part"] == part for bar in bars)]
        names = {part: label(part) for part in present}
        x = alt.X(
            "from:Q",
            title=f"{unit} from the start",
            scale=alt.Scale(domain=[0, last], nice=False),
            axis=alt.Axis(tickCount=8 if width > 500 else 5),
        )
        y = alt.Scale(domain=[0, depth], reverse=True, nice=False)
        span_marks = (
            alt.Chart(alt.InlineData(values=lines))
            .mark_rule(strokeWidth=1, color=theme.colour("new"))
            .encode(x=x, x2="to:Q", y=alt.Y("y:Q", scale=y, axis=None))
        )
        bar_marks = (
            alt.Chart(alt.InlineData(values=bars))
            .mark_rect()
            .encode(
                x=x,
                x2="to:Q",
                y=alt.Y("top:Q", scale=y, axis=None),
                y2="bottom:Q",
                color=alt.Color(
                    "name:N",
                    scale=alt.Scale(domain=[*names.values()], range=[theme.colour(part) for part in present]),
                    legend=alt.Legend(columns=0 if width > 500 else 2),
                ),
            )
        )
        texts = (
            alt.Chart(alt.InlineData(values=lines))
            .mark_text(align="right", dx=-8, limit=side - 10, fontSize=12)
            .encode(x=alt.value(0), y=alt.Y("middle:Q", scale=y, axis=None), text="session:N")
        )
        heads = (
            alt.Chart(alt.InlineData(values=[{"y": slot + 0.55, "text": text} for slot, text in titles]))
            .mark_text(align="left", dx=-side + 2, fontWeight=600, color=theme.colour("muted"))
            .encode(x=alt.value(0), y=alt.Y("y:Q", scale=y, axis=None), text="text:N")
        )
        chart: Chart = alt.layer(span_marks, bar_marks, texts, heads).properties(width=plot, height=22 * depth)
        return chart

    return draw


def _slots(rows: Rows, headings: tuple[str, str]) -> tuple[dict[int, int], list[tuple[int, str]]]:
    """Where each lane is drawn, counted in lanes from the top, and the headings between them."""
    slots: dict[int, int] = {}
    titles: list[tuple[int, str]] = []
    for worst, heading in zip((True, False), headings, strict=True):
        chosen = sorted({row["lane"] for row in rows if row["worst"] is worst})
        if chosen:
            titles.append((len(slots) + len(titles), heading))
            for lane in chosen:
                slots[lane] = len(slots) + len(titles)
    return slots, titles


def _bars(row: Any, slot: int, scale: float, least: float) -> list[dict[str, Any]]:
    start = row["start"] / scale
    stop = max(row["stop"] / scale, start + least)
    bottom, bars = slot + 0.92, []
    for part in PARTS:
        share = (row.get(part) or 0) / row["prompt"] if part != "new" and row["prompt"] else 0
        if share >= _LEAST:
            top = bottom - 0.8 * share
            bars.append({"from": start, "to": stop, "top": top, "bottom": bottom, "part": part, "name": label(part)})
            bottom = top
    return bars
