"""Charts of a plan: the hit curve with its tiers, rebuilding against loading, and predicted latencies."""

from __future__ import annotations

from typing import Any

import altair as alt

from replay.plan.planner import Plan
from replay.results import units
from replay.results.html import theme
from replay.results.html.charts import data, fit, round_numbers
from replay.results.html.figure import Chart, Draw

_MARKS = {"knee": "ink", "enough": "doubt"}


def marks(plan: Plan) -> list[dict[str, Any]]:
    """Points of the curve that matter: `what` it is, `role` (its colour), its own `size`, and where the
    curve then is: `tokens` and `share` of prompts."""
    served, above, found = 0.0, 0, []
    for tier in plan.tiers:
        served, above = served + tier.hit_share, max(above, tier.tokens)
        size = f"{units.tokens(tier.tokens)}, {units.digits(tier.gib)} GiB"
        found.append({"what": tier.tier, "role": tier.tier, "tokens": above, "share": served, "size": size})
    for what, role, row in (("knee", "knee", plan.knee), ("95 % of all", "enough", plan.recommendation["capacity"])):
        if row and row["tokens"]:
            size = f"{units.tokens(row['tokens'])}, {units.digits(row['gib'])} GiB"
            found.append({"what": what, "role": role, "tokens": row["tokens"], "share": row["hit_share"], "size": size})
    return found


def curve(plan: Plan) -> Draw:
    """Share of prompt tokens served, by capacity on a logarithmic axis; the ceiling is dashed."""
    points = marks(plan)
    names = [f"{point['what']}: {point['size']}, {point['share']:.1%}" for point in points]
    for number, (point, name) in enumerate(zip(points, names, strict=True)):
        point |= {"name": name, "area": max(240 * 0.45**number, 60)}  # those at the same place stay visible
    colours = [theme.colour(_MARKS.get(point["role"], point["role"])) for point in points]
    shapes = [{"knee": "diamond", "enough": "triangle-up"}.get(point["role"], "circle") for point in points]
    rows = [row for row in plan.curve if row["hit_share"] >= 0.01 * plan.ceiling["hit_share"]]
    low = min(row["tokens"] for row in rows)
    high = max([rows[-1]["tokens"], *(point["tokens"] for point in points)])
    rows = [*rows, {**rows[-1], "tokens": high}]

    def draw(width: int) -> Chart:
        legend = alt.Legend(columns=2 if width > 500 else 1, labelLimit=420, symbolType="circle")
        x = alt.X(
            "tokens:Q",
            title="tokens of cache (logarithmic)",
            scale=alt.Scale(type="log", domain=[low, high], nice=False),
            axis=alt.Axis(format="~s", values=round_numbers(low, high, width > 500)),
        )
        y = alt.Scale(domain=[0, 1])
        line = (
            alt.Chart(data(rows))
            .mark_line(strokeWidth=2.5, color=theme.colour("ideal"))
            .encode(x=x, y=alt.Y("hit_share:Q", title="share of prompt tokens", scale=y, axis=alt.Axis(format="%")))
        )
        top = alt.Chart(data([{"share": plan.ceiling["hit_share"]}]))
        ceiling = top.mark_rule(strokeDash=[5, 4], color=theme.colour("muted")).encode(y=alt.Y("share:Q", scale=y))
        points_drawn = (
            alt.Chart(data(points))
            .mark_point(filled=True, opacity=1)
            .encode(
                x=x,
                y=alt.Y("share:Q", scale=y),
                color=alt.Color("name:N", scale=alt.Scale(domain=names, range=colours), legend=legend),
                size=alt.Size("area:Q", scale=None, legend=None),
                shape=alt.Shape("name:N", scale=alt.Scale(domain=names, range=shapes), legend=legend),
            )
        )
        stems = points_drawn.mark_rule(opacity=1).encode(size=alt.value(1), shape=alt.value("circle"), y2=alt.datum(0))
        return fit(ceiling + line + stems + points_drawn, width, height=300)

    return draw


def break_even(plan: Plan) -> Draw:
    """Seconds to rebuild a prefix and to load it from each tier, by its length; both axes logarithmic."""
    rows: list[dict[str, Any]] = []
    for tier in plan.tiers:
        for cell in tier.break_even:
            length = f"{cell.context // 1024}k"
            rows.append({"length": length, "seconds": cell.rebuild_s, "way": "rebuild on the GPU", "role": "ideal"})
            rows.append({"length": length, "seconds": cell.load_s, "way": f"load from {tier.tier}", "role": tier.tier})
    ways = {row["way"]: row["role"] for row in rows}
    scale = alt.Scale(domain=[*ways], range=[theme.colour(role) for role in ways.values()])
    low, high = min(row["seconds"] for row in rows), max(row["seconds"] for row in rows)

    def draw(width: int) -> Chart:
        legend = alt.Legend(columns=0 if width > 500 else 2, symbolType="stroke", symbolStrokeWidth=3)
        base = alt.Chart(data(rows)).encode(
            x=alt.X("length:N", sort=None, title="tokens of the prefix", axis=alt.Axis(labelAngle=0)),
            y=alt.Y(
                "seconds:Q",
                title="seconds (logarithmic)",
                scale=alt.Scale(type="log", nice=False),
                axis=alt.Axis(format="~g", values=round_numbers(low, high, many=False)),
            ),
            color=alt.Color("way:N", scale=scale, legend=legend),
        )
        lines = base.mark_line(strokeWidth=2.5) + base.mark_point(filled=True, size=50, opacity=1)
        return fit(lines, width, height=260)

    return draw


def predicted(plan: Plan) -> Draw:
    """Predicted p50 to p95 of TTFT of each backend; a dashed line is the limit to keep."""
    rows = [
        {"backend": row["backend"], "p50": row["predicted"]["ttft_p50"], "p95": row["predicted"]["ttft_p95"]}
        for row in plan.recommendation["candidates"]
        if row["predicted"] and row["predicted"].get("ttft_p50") and row["predicted"].get("ttft_p95")
    ]
    for row in rows:
        row["text"] = f"{units.seconds(row['p50'])} / {units.seconds(row['p95'])} s"
    slo = plan.recommendation["slo"]
    values = [row[key] for row in rows for key in ("p50", "p95")] + ([slo["seconds"]] if slo else [])
    low, high = min(values) / 1.5, max(values) * 1.5

    def draw(width: int) -> Chart:
        x = alt.Scale(type="log", domain=[low, high * (1 if width > 500 else 6)], nice=False)
        axis = alt.Axis(format="~g", values=round_numbers(low, high, width > 500))
        base = alt.Chart(data(rows)).encode(
            y=alt.Y("backend:N", sort=None, title=None, axis=alt.Axis(labelColor=theme.colour("ink"), labelLimit=130)),
            x=alt.X("p50:Q", title="TTFT in seconds, p50 to p95 (logarithmic)", scale=x, axis=axis),
        )
        chart = base.mark_rule(strokeWidth=3, color=theme.colour("cpu")).encode(x2="p95:Q")
        chart += base.mark_point(filled=True, size=70, opacity=1, color=theme.colour("cpu"))
        ends = base.encode(x=alt.X("p95:Q", scale=x))
        chart += ends.mark_point(filled=True, size=70, opacity=1, color=theme.colour("disk"), shape="square")
        chart += ends.mark_text(align="left", dx=9).encode(text="text:N")
        if slo:
            limit = alt.Chart(data([{"limit": slo["seconds"]}])).encode(x=alt.X("limit:Q", scale=x))
            chart += limit.mark_rule(strokeDash=[5, 4], strokeWidth=2, color=theme.colour("evicted"))
        return fit(chart, width, height=alt.Step(30))

    return draw
