"""The kinds of charts: from plain rows to Altair, each at a width in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from replay.results.html import theme
from replay.results.html.figure import Chart, Draw

Rows = Sequence[Mapping[str, Any]]
PARTS = ("gpu", "cpu", "disk", "remote", "external", "unnamed", "evicted", "lost", "new", "computed", "unknown")
"""What a prompt is made of, in the order in which it is stacked."""
LABELS = {
    "evicted": "lost: evicted",
    "lost": "lost: other",
    "new": "new tokens",
    "none": "nothing reused",
    "unnamed": "tier unknown",
}
_DASHES = {"cpu": [4, 2], "disk": [8, 3], "remote": [8, 2, 2, 2], "external": [12, 4], "none": [2, 2]}
_TOKENS: dict[str, Any] = {"format": "~s", "labelExpr": "datum.value ? datum.label : '0'"}
_GREEDY = alt.AutoSizeParams(type="fit-x", contains="padding")


def label(part: str) -> str:
    """How a part is called in legends and tables."""
    return LABELS.get(part, part)


def waterfall(rows: Rows, longest: float) -> Draw:
    """Horizontal bars from `start` to `end`, top to bottom, with `text` behind each.

    Args:
        rows: `step` (what to call it), `part` (its colour), `start`, `end`, `text`.
        longest: end of the longest bar.
    """

    def draw(width: int) -> Chart:
        room = 150 if width > 500 else 118  # for the text behind the longest bar
        base = alt.Chart(data(rows)).encode(
            y=alt.Y("step:N", sort=None, title=None, axis=alt.Axis(labelFontSize=13, labelColor=theme.colour("ink"))),
            x=alt.X(
                "start:Q",
                title="tokens",
                scale=alt.Scale(domain=[0, longest * (1 + room / (width - 90 - room))], nice=False),
                axis=alt.Axis(values=_ticks(longest, 5 if width > 500 else 3), **_TOKENS),
            ),
        )
        bars = base.mark_bar(size=18, strokeWidth=1.5).encode(
            x2="end:Q", color=_by("part", rows), stroke=_by("part", rows)
        )
        text = base.mark_text(align="left", dx=7).encode(x="end:Q", text="text:N")
        return fit(bars + text, width, height=alt.Step(28))

    return draw


def distribution(rows: Rows, colours: Mapping[str, str]) -> Draw:
    """Cumulative distributions over a logarithmic axis.

    Args:
        rows: `group`, `n` (requests in it), `ttft` and `share`.
        colours: role of each group's line, in the order of the legend.
    """
    sizes = {row["group"]: row["n"] for row in rows}
    names = {group: f"{label(group)} ({sizes[group]:,})" for group in colours}
    named = [{**row, "group": names[row["group"]]} for row in rows]
    lines = [*names.values()]
    scale = alt.Scale(domain=lines, range=[theme.colour(role) for role in colours.values()])
    low, high = min(row["ttft"] for row in rows), max(row["ttft"] for row in rows)
    dashes = alt.Scale(domain=lines, range=[_DASHES.get(role, [1, 0]) for role in colours.values()])

    def draw(width: int) -> Chart:
        legend = alt.Legend(
            columns=0 if width > 500 else 2, symbolType="stroke", symbolSize=400, symbolStrokeWidth=3, labelLimit=170
        )
        base = alt.Chart(data(named)).encode(
            x=alt.X(
                "ttft:Q",
                title="seconds to the first token (logarithmic)",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(format="~g", values=round_numbers(low, high, width > 500)),
            ),
            y=alt.Y(
                "share:Q",
                title="share of requests",
                scale=alt.Scale(domain=[0, 1]),
                axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 0.9, 1]),
            ),
            color=alt.Color("group:N", scale=scale, legend=legend),
        )
        curves = base.mark_line(interpolate="step-after", strokeWidth=2.5).encode(
            strokeDash=alt.StrokeDash("group:N", scale=dashes, legend=legend)
        )
        few = base.mark_point(filled=True, size=55, opacity=1).transform_filter("datum.n <= 10")
        return fit(curves + few, width, height=260)

    return draw


def over_time(panels: Mapping[str, Rows]) -> Draw:
    """Stacked bars over the run's time, a panel for each title: rows of `start`, `stop`, `part` and `tokens`."""
    everything = [row for rows in panels.values() for row in rows]
    last = max(row["stop"] for row in everything)
    scale, unit = time_unit(last)

    def draw(width: int) -> Chart:
        charts = []
        for number, (title, rows) in enumerate(panels.items()):
            end = number == len(panels) - 1
            bars = alt.Chart(data(_stacked(rows, scale))).mark_rect(strokeWidth=0)
            charts.append(
                bars.encode(
                    x=alt.X(
                        "from:Q",
                        title=f"{unit} from the start" if end else None,
                        scale=alt.Scale(domain=[0, last / scale], nice=False),
                        axis=alt.Axis(tickCount=8 if width > 500 else 5, labels=end, grid=False),
                    ),
                    x2="to:Q",
                    y=alt.Y("bottom:Q", title=None, axis=alt.Axis(tickCount=4, **_TOKENS)),
                    y2="top:Q",
                    color=_by("part", everything, alt.Legend(columns=0 if width > 500 else 2)),
                ).properties(
                    width=width - 60,
                    height=190 if number == 0 else 90,
                    title=_heading(title),
                )
            )
        return alt.vconcat(*charts, spacing=14)

    return draw


def shares(rows: Rows, parts: Sequence[str], axis: str) -> Draw:
    """Stacked columns of shares: rows of `bin`, `n`, `text` and, for each of `parts`, its share."""
    tall = [
        {"bin": f"{row['bin']}|n={row['n']:,}", "part": part, "share": row[part], "order": number}
        for row in rows
        for number, part in enumerate(parts)
        if row[part] is not None
    ]
    tops = [
        {"bin": f"{row['bin']}|n={row['n']:,}", "top": sum(row[part] or 0 for part in parts), "text": row["text"]}
        for row in rows
    ]

    def draw(width: int) -> Chart:
        size = 12 if width > 500 else 10
        labels = alt.Axis(labelExpr="split(datum.label, '|')", labelAngle=0, labelFontSize=size, labelOverlap=False)
        x = alt.X("bin:N", sort=None, title=axis, axis=labels, scale=alt.Scale(paddingInner=0.35))
        top = max([row["top"] for row in tops], default=0) or 1
        bars = (
            alt.Chart(data(tall))
            .mark_bar()
            .encode(
                x=x,
                y=alt.Y(
                    "share:Q",
                    title="share of reusable tokens",
                    scale=alt.Scale(domain=[0, min(1.08, top * 1.15)], nice=False),
                    axis=alt.Axis(format=".0%" if top > 0.04 else ".1~%", tickCount=5),
                ),
                color=_by("part", tall, alt.Legend()),
                order="order:Q",
            )
        )
        text = alt.Chart(data(tops)).mark_text(dy=-8, fontSize=size).encode(x=x, y="top:Q", text="text:N")
        return fit(bars + text, width, height=220)

    return draw


def stacked(rows: Rows) -> Draw:
    """Horizontal stacked bars of tokens: rows of `bar` (what it is called), `part` and `tokens`."""
    shown = [
        {**row, "start": start, "end": end}
        for bar in {row["bar"]: None for row in rows}
        for row, start, end in _ends(rows, bar)
    ]

    def draw(width: int) -> Chart:
        axis = alt.Axis(labelColor=theme.colour("ink"), labelFontSize=13, labelLimit=130)
        bars = alt.Chart(data(shown)).mark_bar(size=22)
        bars = bars.encode(
            y=alt.Y("bar:N", sort=None, title=None, axis=axis),
            x=alt.X("start:Q", title="tokens", axis=alt.Axis(tickCount=5 if width > 500 else 3, **_TOKENS)),
            x2="end:Q",
            color=_by("part", shown, alt.Legend(columns=0 if width > 500 else 2)),
        )
        return fit(bars, width, height=alt.Step(36))

    return draw


def changes(panels: Mapping[str, Rows], unit: str) -> Draw:
    """Differences with their intervals around a line at 0, a panel for each title.

    Args:
        panels: rows of `what`, `change`, `low`, `high` (the ends are null where there is no interval) and `tone`:
            ``good``, ``bad`` or ``none``.
        unit: of the differences; ``%`` takes shares.
    """
    tones = {"good": "better", "bad": "worse", "none": "not shown to differ"}
    scale = alt.Scale(domain=[*tones.values()], range=[theme.colour(tone) for tone in tones])
    named = {title: [{**row, "tone": tones[row["tone"]]} for row in rows] for title, rows in panels.items()}
    ends = [value for rows in panels.values() for row in rows for value in (row["change"], row["low"], row["high"])]
    known = [value for value in ends if value is not None]
    room = 0.05 * (max(0, *known) - min(0, *known)) or 0.01
    domain = [min(0, *known) - room, max(0, *known) + room]
    axis, title = ("+.0%", "change") if unit == "%" else ("+~g", f"difference in {unit}")

    def draw(width: int) -> Chart:
        side = 150 if width > 500 else 104
        charts = []
        for number, (heading, rows) in enumerate(named.items()):
            base = alt.Chart(data(rows)).encode(
                y=alt.Y(
                    "what:N",
                    sort=[row["what"] for row in rows],
                    title=None,
                    axis=alt.Axis(
                        labelColor=theme.colour("ink"), labelLimit=side - 8, minExtent=side, maxExtent=side, grid=True
                    ),
                ),
                color=alt.Color(
                    "tone:N", scale=scale, legend=alt.Legend(symbolType="circle", columns=0 if width > 500 else 2)
                ),
            )
            x = alt.X(
                "change:Q",
                title=title if number == len(named) - 1 else None,
                scale=alt.Scale(domain=domain, nice=False),
                axis=alt.Axis(format=axis, tickCount=7 if width > 500 else 4),
            )
            zero = alt.Chart(data([{"zero": 0}])).mark_rule(color=theme.colour("muted"), strokeWidth=1.5)
            interval = base.mark_rule(strokeWidth=3).encode(
                x=alt.X("low:Q", scale=alt.Scale(domain=domain)), x2="high:Q"
            )
            layers = [zero.encode(x="zero:Q"), interval, base.mark_point(filled=True, size=75, opacity=1).encode(x=x)]
            charts.append(
                alt.layer(*layers).properties(width=width - side - 20, height=alt.Step(24), title=_heading(heading))
            )
        return alt.vconcat(*charts, spacing=14)

    return draw


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit in which a length of time is best shown, and its name."""
    return (1.0, "seconds") if seconds < 300 else (60.0, "minutes") if seconds < 10_800 else (3600.0, "hours")


def _heading(text: str) -> alt.TitleParams:
    return alt.TitleParams(text, fontSize=13, fontWeight="normal", color=theme.colour("muted"))


def _ends(rows: Rows, bar: str) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    at = 0.0
    for row in sorted((row for row in rows if row["bar"] == bar), key=lambda row: _place(row["part"])):
        yield row, at, at + row["tokens"]
        at += row["tokens"]


def _stacked(rows: Rows, scale: float) -> list[dict[str, Any]]:
    tops: dict[float, float] = {}
    bars = []
    for row in sorted(rows, key=lambda row: _place(row["part"])):
        bottom = tops.get(row["start"], 0)
        top = tops[row["start"]] = bottom + row["tokens"]
        x = {"from": row["start"] / scale, "to": row["stop"] / scale}
        bars.append({**x, "bottom": bottom, "top": top, "part": row["part"]})
    return bars


def data(rows: Iterable[Mapping[str, Any]]) -> alt.InlineData:
    """Rows as data of a chart."""
    return alt.InlineData(values=[dict(row) for row in rows])


def fit(chart: alt.Chart | alt.LayerChart, width: int, height: int | alt.Step) -> Chart:
    """A chart that takes `width` pixels with its axes and legend."""
    fitted: Chart = chart.properties(width=width, height=height, autosize=_GREEDY)
    return fitted


def _by(field: str, rows: Rows, legend: alt.Legend | None = None) -> alt.Color:
    """Colour by part, in the order of `PARTS`, with those parts in the legend that there are."""
    present = sorted({row[field] for row in rows}, key=_place)
    scale = alt.Scale(domain=[*present], range=[theme.colour(part) for part in present])
    if legend is not None:
        names = ", ".join(f"'{part}': '{label(part)}'" for part in present if part in LABELS)
        legend.labelExpr = f"{{{names}}}[datum.label] || datum.label"
    return alt.Color(f"{field}:N", scale=scale, legend=legend, sort=None)


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else len(PARTS)


def _ticks(longest: float, at_most: int) -> list[float]:
    """Round numbers from 0 to `longest`."""
    if longest <= 0:
        return [0]
    step = 10.0 ** (len(str(int(longest))) - 1)
    for factor in (0.1, 0.2, 0.5, 1, 2, 5, 10):
        if longest / (step * factor) <= at_most:
            step *= factor
            break
    return [step * k for k in range(int(longest / step) + 1)]


def round_numbers(low: float, high: float, many: bool) -> list[float]:
    """1, 2 and 5 of each power of ten between two numbers above 0; powers alone where there is little room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if many and len(powers) <= 6 else (1,) if len(powers) > 2 else (1, 3)
    return [x for power in powers for factor in factors if low <= (x := factor * 10.0**power) <= high]
