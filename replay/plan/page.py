"""A `Plan` as a page: see `replay.results.html`."""

from __future__ import annotations

from collections.abc import Iterator

from replay.plan import charts
from replay.plan.planner import Plan
from replay.plan.render import capacity, known_error, rates
from replay.results import units
from replay.results.html.figure import Figure
from replay.results.html.page import Item, Page
from replay.results.layout import Section

_ROWS = 24


def page(plan: Plan) -> Page:
    """The page of a plan. Predicted latencies and what a backend serves are simulated; the hit curve is a bound."""
    advice = plan.recommendation
    simulated = bool(advice["simulated"])
    live = f"{plan.sessions:,} live families of sessions" if plan.sessions else "sessions at their recorded times"
    return Page(
        title=f"{plan.trace} with {plan.model} on {plan.gpu}",
        kind="Cache plan",
        mark=" · ".join([*(["SIMULATED"] if simulated else []), plan.trace, plan.model, plan.gpu, live]),
        banner="SIMULATED: predicted latencies and served shares are the engine model's; no engine ran. "
        "The hit curve is an upper bound."
        if simulated
        else None,
        verdict=None,
        facts=[
            ("trace", f"{plan.trace}, {live}"),
            ("model", f"{plan.model} on {plan.gpu}, times from a {plan.cost_source} profile"),
            ("prompts", f"{units.tokens(plan.prompts['total'])} tokens, median {plan.prompts['median']:,}, longest "
                        f"{plan.prompts['longest']:,}; blocks of {plan.block_tokens}"),
            ("recommended", f"{advice['backend'] or 'none of these'}: {advice['why']}"),
            ("capacity", capacity(advice)),
            *(("note", note) for note in plan.notes),
        ],
        highlights=list(_highlights(plan)),
        items=list(_items(plan)),
    )  # fmt: skip


def _highlights(plan: Plan) -> Iterator[tuple[str, str, str]]:
    total, size = plan.prompts["total"], plan.recommendation["capacity"]
    advised = [row for row in plan.recommendation["candidates"] if row["backend"] == plan.recommendation["backend"]]
    for row in advised:
        if row["served_share"] is not None:
            yield f"{units.plain(row['backend'])} serves", units.share(row["served_share"], 1), "simulated; recommended"
    yield "an unlimited cache serves", units.share(plan.ceiling["hit_tokens"], total), "of prompt tokens"
    yield (
        "95 % of that takes at least",
        f"{units.digits(size['gib'])} GiB",
        f"{units.tokens(size['tokens'])} tokens of cache",
    )
    if plan.knee:
        knee = plan.knee
        yield (
            "knee of the curve",
            f"{units.digits(knee['gib'])} GiB",
            f"serves at most {units.share(knee['hit_tokens'], total)}",
        )
    gpu = plan.tiers[0]
    yield "GPU alone serves at most", units.share(gpu.hit_tokens, total), f"with {units.tokens(gpu.tokens)} tokens"


def _items(plan: Plan) -> Iterator[Item]:
    if plan.ceiling["hit_tokens"]:
        yield _curve(plan)
    yield _tiers(plan)
    if any(tier.break_even for tier in plan.tiers):
        yield _break_even(plan)
    yield _candidates(plan)


def _curve(plan: Plan) -> Figure:
    total = plan.prompts["total"]
    rows = [row for row in plan.curve if row["hit_tokens"]]
    picked = sorted({round(k * (len(rows) - 1) / (_ROWS - 1)) for k in range(_ROWS)})
    cells: list[tuple[str, ...]] = [
        (
            units.tokens(rows[index]["tokens"]),
            units.digits(rows[index]["gib"]),
            units.tokens(rows[index]["hit_tokens"]),
            units.share(rows[index]["hit_tokens"], total),
        )
        for index in picked
    ]
    said = "; ".join(f"{mark['what']}: {mark['size']}, {mark['share']:.1%}" for mark in charts.marks(plan))
    return Figure(
        name="curve",
        title="Hits by capacity",
        alt=f"Share of prompt tokens that an LRU cache serves at most, rising with its capacity to "
        f"{units.share(plan.ceiling['hit_tokens'], total)}. {said}.",
        draw=charts.curve(plan),
        badge="upper bound",
        tables=[Section("Hits by capacity", ("tokens of cache", "GiB", "hit tokens", "of prompts"), cells)],
        notes=[
            "An upper bound for a least-recently-used prefix cache: prompts come in order without time, and no running "
            "request holds memory. The dashed line is an unlimited cache. A tier stands at what it "
            "and those above it serve: lower tiers hold what higher ones hold."
        ],
    )


def _tiers(plan: Plan) -> Section:
    total = plan.prompts["total"]
    rows: list[tuple[str, ...]] = [
        (
            tier.tier,
            tier.backend,
            units.tokens(tier.tokens),
            units.digits(tier.gib),
            units.share(tier.hit_tokens, total),
            units.share(tier.headroom_tokens, total),
            units.share(tier.next_10gb_tokens, total),
            *(units.UNKNOWN if gbps is None else units.digits(gbps) for gbps in (tier.load_gbps, tier.bandwidth_gbps)),
            tier.bandwidth_source or units.UNKNOWN,
            _yes(tier.pays),
        )
        for tier in plan.tiers
    ]
    shares = ("hits here", "left", "+10 GB")
    columns = ("tier", "of", "tokens", "GiB", *shares, "load GB/s", "sustained", "source", "pays")
    lines = [
        "Hits, what is left below and +10 GB are the curve's. Sustained is limited by writes of the same bytes.",
        "A tier pays where loading the median prompt from it is faster than rebuilding it on an idle GPU.",
    ]
    return Section("Tiers", columns, rows, lines, left=(0, 1, 9, 10), name="tiers")


def _break_even(plan: Plan) -> Figure:
    lower = [tier for tier in plan.tiers if tier.break_even]
    rows: list[tuple[str, ...]] = []
    for cells in zip(*(tier.break_even for tier in lower), strict=True):
        first = cells[0]
        loads = (f"{units.seconds(cell.load_s)} s, {'pays' if cell.pays else 'slower'}" for cell in cells)
        rebuild = f"{units.seconds(first.rebuild_s)} s"
        rows.append((f"{first.context // 1024}k", rebuild, units.digits(first.gbps), *loads))
    said = "; ".join(
        f"{tier.tier} pays for {', '.join(f'{c.context // 1024}k' for c in tier.break_even if c.pays) or 'no length'}"
        for tier in lower
    )
    columns = ("prefix", "rebuild", "break-even GB/s", *(f"load from {tier.tier}" for tier in lower))
    return Figure(
        name="break-even",
        title="Rebuild a prefix, or load it",
        alt=f"Seconds to rebuild a prefix or to load it, by its length. {said}.",
        draw=charts.break_even(plan),
        badge=f"times from a {plan.cost_source} profile",
        tables=[Section(f"Rebuild or load (times from a {plan.cost_source} profile)", columns, rows)],
        notes=[
            "A tier pays at the lengths where its line runs below the one of rebuilding. GPU and link are idle.",
            *rates(lower),
        ],
    )


def _candidates(plan: Plan) -> Item:
    rows: list[tuple[str, ...]] = []
    for row in plan.recommendation["candidates"]:
        times = row["predicted"] or {}
        rows.append(
            (
                units.plain(row["backend"]),
                units.share(row["served_share"], 1),
                units.share(row["hit_share"], 1),
                f"{units.seconds(times.get('ttft_p50'))} s",
                f"{units.seconds(times.get('ttft_p95'))} s",
                _yes(row["meets_slo"]),
                units.UNKNOWN if row["cost_month"] is None else f"{row['cost_month']:,.0f}",
                ", ".join(row["slow_tiers"]) or units.UNKNOWN,
            )
        )
    columns = ("backend", "served", "bound", "TTFT p50", "TTFT p95", "keeps SLO", "a month", "slow tiers")
    lines = ["Bound: the curve at the size of the largest tier; reused output comes on top."]
    if plan.recommendation["simulated"]:
        lines.insert(0, f"Served and TTFT are simulated; {known_error(plan.recommendation)}.")
    table = Section("Backends", columns, rows, lines, left=(0, 5, 7), name="backends")
    timed = [row for row in rows if f"{units.UNKNOWN} s" not in row[3:5]]
    if not timed:
        return table
    slo = plan.recommendation["slo"]
    limit = f" The limit is {slo['metric']} <= {slo['seconds']:g} s." if slo else ""
    served = f"Served when simulated: {', '.join(f'{row[0]} {row[1]} (bound {row[2]})' for row in rows)}."
    said = "; ".join(f"{row[0]} p50 {row[3]}, p95 {row[4]}" for row in timed)
    return Figure(
        name="backends",
        title="Predicted time to first token",
        alt=f"Predicted time to first token of each backend: {said}.{limit}",
        draw=charts.predicted(plan),
        badge="simulated",
        tables=[table],
        notes=[
            "Predicted by the engine model: circles are p50, squares p95.",
            served,
            *([limit.strip()] if limit else []),
        ],
    )


def _yes(value: bool | None) -> str:
    return units.UNKNOWN if value is None else "yes" if value else "no"
