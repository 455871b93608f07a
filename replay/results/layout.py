"""What a report shows and in which words: sections of tables and lines, for terminal and Markdown alike."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from replay.results import queries, units
from replay.results.report import CACHED, LOSSES, SERVED_FROM, Report

BAR = 14
"""Characters of the longest bar."""
WORST = 5
"""Sessions shown."""


@dataclass(frozen=True)
class Section:
    """A title, a table and the lines below it. Cells are plain text, foreign text included."""

    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    left: tuple[int, ...] = (0,)
    """Columns of words and bars; the others hold figures and are aligned to the right."""
    name: str = ""
    """``tokens``, ``loss``, ``ttft``, ``pauses`` or ``sessions``."""


def banner(report: Report) -> str | None:
    """What must not be overlooked; null where engines were measured."""
    simulated = report.run["simulated"]
    return "SIMULATED: all times and tiers are the engine model's; no engine ran." if simulated else None


def header(report: Report) -> list[tuple[str, str]]:
    """Labels and texts that say which run this is and whether it may be trusted."""
    run = report.run
    name = f" ({run['name']})" if run["name"] != run["backend"] else ""
    trace = f"{run['trace'] or 'unknown'}{' (synthetic)' if run['synthetic'] else ''}"
    lines = [
        ("run", f"{run['id']}{name}"),
        ("backend", ", ".join([run["backend"], f"target {run['target']}", *_copies(report)])),
        ("model", f"{run['model'] or 'unknown'} on {run['gpu'] or 'an unknown GPU'}"),
        ("trace", f"{trace}: {', '.join([*_how(run), *_restart(report)])}"),
        ("outcome", _outcome(report)),
    ]
    if run["status"] == "running":
        return [*lines, ("verdict", "none yet: the run is going on, figures are of what was answered so far")]
    lines.append(("verdict", run["verdict"] + ("" if run["reasons"] else ": no check failed")))
    return [*lines, *(("", f"- {reason}") for reason in run["reasons"] or ())]


def sections(report: Report, *, ascii_only: bool = False) -> list[Section]:
    """The sections of a report, in reading order.

    Args:
        report: the run.
        ascii_only: draw bars with ``#``.
    """
    if not report.requests["ok"]:
        return [Section(f"No request was answered{' yet' if report.run['status'] == 'running' else ''}")]
    parts = (_tokens, _loss, _ttft, _pauses, _sessions)
    return [section for part in parts for section in part(report, ascii_only)]


def footer(report: Report) -> list[str]:
    """Pace, the other latencies, and what the client noticed."""
    per = report.throughput
    requests, output = units.rate(per["requests_per_s"]), units.rate(per["output_tokens_per_s"])
    e2e, itl = report.e2e_s["all"], report.itl_s["all"]
    check = report.self_check
    return [
        f"Pace: {requests} requests/s, {output} output tokens/s over {units.duration(per['seconds'])}.",
        f"End to end p50 {units.duration(e2e['p50'])}, p95 {units.duration(e2e['p95'])}; "
        f"inter-token p50 {units.milliseconds(itl['p50'])}, p95 {units.milliseconds(itl['p95'])}.",
        f"Client: p99 {units.seconds(check['schedule_drift_p99_s'])} s behind schedule, "
        f"at most {units.tokens(check['peak_in_flight'])} in flight.",
        f"Cache before the run: {units.plain(check['cache_before'] or 'unknown')}.",
    ]


MORE = "More, also as csv, md or html:"


def more(report: Report, db: str | None = None) -> list[str]:
    """Commands that show more of a run, as a shell takes them.

    Args:
        report: the run.
        db: its file, where that is not the one that commands read by themselves.
    """
    run = units.plain(report.run["id"])
    file = f" \\\n  --db {shlex.quote(db)}" if db else ""
    literal = run.replace("'", "''")
    statement = f"SELECT * FROM v_requests\n  WHERE run_id = '{literal}' LIMIT 5"
    quoted = shlex.quote(statement) if set(run) & set('"$`\\!') else f'"{statement}"'
    return f"replay report {shlex.quote(run)} --format json{file}\nreplay sql {quoted}{file}".split("\n")


def _copies(report: Report) -> Iterator[str]:
    """How many engines on how many GPUs, where that is not one on one."""
    preset = report.settings.get("preset") or {}
    ours = report.run["target"] in ("sim", "launch")  # what a server at a URL is, the preset does not say
    count = report.settings.get("instances") or (ours and preset.get("instances")) or 1
    gpus = (ours and preset.get("tensor_parallel")) or 1
    if count > 1:
        yield units.count(count, "instance") + (f" of {gpus} GPUs each" if gpus > 1 else "")
    elif gpus > 1:
        yield f"on {gpus} GPUs"


def _restart(report: Report) -> Iterator[str]:
    """When the engine was to be restarted, and whether it was."""
    asked = (report.settings.get("replay") or {}).get("restart_at")
    if asked is None:
        return
    at = report.self_check.get("restarted_at_s")
    if at is not None:
        yield f"engine restarted at {units.duration(at)}"
    elif report.run["status"] == "running":
        yield f"a restart at {units.duration(asked)}"
    else:
        yield f"a restart at {units.duration(asked)} was never reached"


def _how(run: dict[str, Any]) -> Iterator[str]:
    """How the trace was played, leaving out what is as recorded."""
    sessions, families = run["sessions"], run["families"]
    grouped = f" in {units.count(families, 'family')}" if families not in (None, sessions) else ""
    yield units.count(sessions, "session") + grouped
    yield units.count(run["turns"], "turn")
    if (run["duplication"] or 1) != 1:
        yield f"each family {run['duplication']:.3g} times"
    if run["concurrency"]:
        yield f"{run['concurrency']} at once"
    if (run["speed"] or 1) != 1:
        yield f"speed x{run['speed']:g}"
    if (run["scale_tokens"] or 1) != 1:
        yield f"tokens x{run['scale_tokens']:g}"
    if run["skip_idle"]:
        yield "idle time skipped"
    if run["seed"]:
        yield f"seed {run['seed']}"


def _outcome(report: Report) -> str:
    counts = report.requests
    after_failure = counts["dropped"] - queries.left_out(counts)
    shown = counts | {"dropped": after_failure}
    bad = [f"{shown[key]:,} {text}" for key, text in _BAD.items() if shown[key]]
    planned = report.run["turns"] or counts["total"]
    never = planned - counts["total"] if report.run["status"] == "partial" else 0
    if never > 0:
        bad.append(f"{never:,} never sent")
    return ", ".join([f"{counts['ok']:,} of {planned:,} requests answered", *bad])


_BAD = {
    "errors": "failed",
    "dropped": "dropped after a failure",
    "too_long": "too long",
    "after_too_long": "left out after them",
    "cancelled": "cancelled",
}


def _tokens(report: Report, ascii_only: bool) -> Iterator[Section]:
    tokens, prompt = report.tokens, report.tokens["prompt"]
    sizes = report.settings.get("capacity_tokens") or {}
    rows: list[tuple[str, ...]] = []
    for source in (*CACHED, "computed", "unknown"):
        n, use, size = tokens[source], report.tiers.get(source) or {}, sizes.get(source)
        if (n is None and not size) or (source == "unknown" and not n):
            continue
        speed, seconds, timed = use.get("gb_per_s"), use.get("seconds"), use.get("timed")
        rows.append(
            (
                _SOURCES.get(source, source),
                units.tokens(n),
                units.share(n, prompt),
                units.bar(n, prompt, BAR, ascii_only=ascii_only),
                units.tokens(use["loads"]) if use else "",
                units.seconds(seconds / timed) if seconds is not None and timed else "",
                units.digits(speed) if speed else "",
                units.tokens(size) if size else "",
            )
        )
    known = [n for tier in CACHED if (n := tokens[tier]) is not None]
    line = (
        f"The tiers served {units.share(sum(known) if known else None, prompt)} of prompt tokens; "
        f"an unbounded cache would serve {units.share(tokens['ideal'], prompt)}."
    )
    lines = [line, *_counters(report)]
    columns = ("from", "tokens", "share", "", "requests", "s/load", "GB/s", "holds")
    yield Section(
        f"Where {units.tokens(prompt)} prompt tokens came from", columns, rows, lines, left=(0, 3), name="tokens"
    )


_SOURCES = {"unnamed": "tier unknown"}


def _counters(report: Report) -> Iterator[str]:
    """What the engine's own counters say of the same tokens."""
    agree = report.self_check["counters_agree"]
    if agree is not None:
        yield f"The engine's own counters {'say the same' if agree else 'say otherwise, see the verdict'}."
    gpu, lower = (report.counters.get(kind, {}).get("engine") for kind in ("gpu", "lower"))
    if report.tokens["unnamed"] and gpu is not None and lower is not None:
        yield f"By them {units.tokens(gpu)} came from the GPU and {units.tokens(lower)} from the tiers below it."


def _loss(report: Report, ascii_only: bool) -> Iterator[Section]:
    loss, total = report.loss, report.loss["total"]
    if total is None:
        yield Section("Lost reuse: unknown, the backend does not say what it served", name="loss")
        return
    if total == 0:
        yield Section("Lost reuse: none")
        return
    title = f"Lost reuse: {units.tokens(total)} tokens, {units.share(total, report.tokens['ideal'])} of the ideal"
    if loss["recompute_s"] is not None:
        title += f", rebuilt in {units.duration(loss['recompute_s'])} of prefill"
    rows: list[tuple[str, ...]] = [
        (
            cause.replace("_", " "),
            units.tokens(loss[cause]),
            units.share(loss[cause], total),
            units.bar(loss[cause], total, BAR, ascii_only=ascii_only),
            units.duration(report.loss_s[cause]),
        )
        for cause in LOSSES
        if loss[cause] or (cause == "evicted" and loss[cause] is not None)
    ]
    if not rows:
        title += "; the backend does not say why"
    yield Section(title, ("cause", "tokens", "share", "", "prefill"), rows, left=(0, 3), name="loss")


def _ttft(report: Report, ascii_only: bool) -> Iterator[Section]:
    keys = ("mean", "p50", "p90", "p95", "p99")

    def line(label: str, cell: dict[str, float | None]) -> tuple[str, ...]:
        return (label, units.tokens(cell["n"]), *(units.seconds(cell[key]) for key in keys))

    rows = [line(group, report.ttft_s[group]) for group in SERVED_FROM if report.ttft_s[group]["n"]]
    rows.append(line("all", report.ttft_s["all"]))
    if report.ttft_due_s["all"] != report.ttft_s["all"]:
        rows.append(line("all, from due", report.ttft_due_s["all"]))
    yield Section(
        "Time to first token in seconds, by slowest tier read", ("served from", "requests", *keys), rows, name="ttft"
    )


def _pauses(report: Report, ascii_only: bool) -> Iterator[Section]:
    if not report.pauses:
        return
    what = "evicted" if any(row["evicted"] is not None for row in report.pauses) else "lost"
    rows: list[tuple[str, ...]] = [
        (
            row["bin"],
            units.tokens(row["requests"]),
            units.tokens(row["ideal"]),
            units.tokens(row[what]),
            units.share(row[what], row["ideal"]),
            units.bar(row[what], row["ideal"], BAR, ascii_only=ascii_only),
            units.seconds(row["ttft_p50"]),
        )
        for row in report.pauses
    ]
    columns = ("pause", "requests", "reusable", what, "share", "", "TTFT p50")
    title = "Which pauses cost evictions" if what == "evicted" else "Which pauses cost reuse, whatever the cause"
    yield Section(title, columns, rows, left=(0, 5), name="pauses")


def _sessions(report: Report, ascii_only: bool) -> Iterator[Section]:
    worst = [row for row in report.sessions if row["lost"] is None or row["lost"] > 0 or row["failed"]][:WORST]
    if len(report.sessions) < 2 or not worst:
        return
    columns: tuple[str, ...] = ("session", "requests", "lost", "evicted", "prefill", "TTFT max")
    rows: list[tuple[str, ...]] = [
        (
            units.plain(row["session"]),
            units.tokens(row["requests"]),
            units.tokens(row["lost"]),
            units.tokens(row["evicted"]),
            units.duration(row["recompute_s"]),
            units.seconds(row["ttft_max"]),
        )
        for row in worst
    ]
    if any(row["failed"] for row in worst):
        columns = (*columns, "failed")
        rows = [(*cells, units.tokens(row["failed"])) for cells, row in zip(rows, worst, strict=True)]
    yield Section("Sessions that lost most", columns, rows, name="sessions")
