"""Shows a comparison in 80 columns: terminal, or plain text where piped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from replay.results import units
from replay.results.bootstrap import RESAMPLES
from replay.results.compare import Against, Comparison
from replay.results.gates import Result
from replay.results.layout import Section
from replay.results.metrics import METRICS, Cell
from replay.results.render import WIDTH, emit, plain, section_table

_VERDICTS = {"better": "green", "worse": "red", "unknown": "dim", "no interval": "dim"}
TIMES = {
    "ttft_mean": "TTFT mean", "ttft_p50": "TTFT p50", "ttft_p90": "TTFT p90", "ttft_p95": "TTFT p95",
    "ttft_p99": "TTFT p99", "e2e_mean": "e2e mean", "e2e_p50": "e2e p50", "e2e_p90": "e2e p90",
    "itl_p50": "token p50", "throughput": "requests/s", "output_tokens_per_s": "output tok/s",
}  # fmt: skip
_TOKENS = {
    "gpu_tokens": "gpu", "cpu_tokens": "cpu", "disk_tokens": "disk", "remote_tokens": "remote",
    "external_tokens": "external", "unnamed_tokens": "tier unknown", "computed_tokens": "computed",
    "hit_share": "served", "loss": "lost",
    "lost_evicted": "  evicted", "lost_granularity": "  granularity", "lost_never_stored": "  never stored",
    "lost_cold": "  cold", "lost_diverged": "  diverged", "lost_unknown": "  unknown",
}  # fmt: skip
_BY = {
    "prefix": "reusable prefix, tokens", "pause": "pause before", "served_from": "slowest tier read, A > B",
    "position": "position in session",
}  # fmt: skip


def show(comparison: Comparison, console: Console | None = None) -> None:
    """Prints a comparison; plain where the output is no terminal, colourless where ``NO_COLOR`` is set."""
    emit(table(comparison), console)


def text(comparison: Comparison, *, width: int = WIDTH) -> str:
    """A comparison as plain text."""
    return plain(table(comparison), width=width)


def table(comparison: Comparison) -> RenderableType:
    """A comparison as a rich renderable, one run against the first after the other."""
    parts = [part for against in comparison.runs for part in _against(comparison.baseline, against)]
    if comparison.passed is not None:
        text = "All gates passed." if comparison.passed else "A gate FAILED."
        parts.append(Text(text, style="bold green" if comparison.passed else "bold red"))
    return Group(*parts)


def _against(a: dict[str, Any], against: Against) -> Iterator[RenderableType]:
    if warning := banner(a, against.run):
        yield Text(f" {warning} ", style="bold black on yellow")
        yield Text()
    grid = Table.grid(padding=(0, 2))
    for label, line in header(a, against):
        grid.add_row(Text(label, style="dim"), Text(units.plain(line)))
    yield grid
    for section in sections(against):
        yield Text()
        yield Text(section.title, style="bold")
        if section.rows:
            yield section_table(section)
        yield from (Text(line) for line in section.lines)
    yield Text()
    for line in _footer(against):
        yield Text(line, style="dim")
    yield Text()


def banner(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """What must not be overlooked; null where both runs were measured."""
    if a["simulated"] and b["simulated"]:
        return "SIMULATED: all times and tiers are the engine model's; no engine ran."
    if a["simulated"] or b["simulated"]:
        return f"{'A' if a['simulated'] else 'B'} is SIMULATED by the engine model; the other run was measured."
    return None


def header(a: dict[str, Any], against: Against) -> Iterator[tuple[str, str]]:
    """Labels and texts that say which runs these are and what to be wary of."""
    b = against.run
    for letter, run in (("A", a), ("B", b)):
        name = f"{run['name']}, " if run["name"] != run["backend"] else ""
        yield letter, f"{name}{run['backend']}, {run['target']}, {run['verdict'] or 'running'}, {run['id']}"
    model = f"{a['model'] or 'unknown model'} on {a['gpu'] or 'unknown GPU'}"
    yield "asked", f"{a['trace'] or 'unknown'}{' (synthetic)' if a['synthetic'] else ''}; {model}"
    yield "pairs", f"{against.pairs['pairs']:,} turns that both answered"
    for warning in against.warnings:
        yield "warning", warning


def sections(against: Against) -> Iterator[Section]:
    """The sections of a comparison, in reading order."""
    columns = ("", "A", "B", "change", "95 % interval", "")
    metrics = against.metrics
    yield Section(
        "Time in seconds",
        columns,
        [_time(label, metrics[key]) for key, label in TIMES.items()],
        left=(0, 5),
        name="times",
    )
    rows = [_tokens(key, label, metrics[key]) for key, label in _TOKENS.items() if _worth_a_row(key, metrics[key])]
    prompt = units.tokens(metrics["prompt_tokens"].b)
    yield Section(f"Where {prompt} prompt tokens came from, and lost reuse", columns, rows, left=(0, 5), name="tokens")
    yield _why(against)
    yield from _groups(against)
    yield from _turns(against)
    if against.gates:
        yield Section(
            "Gates", ("", "gate", "B"), [_gate(result) for result in against.gates], left=(0, 1, 2), name="gates"
        )


def _time(label: str, cell: Cell) -> tuple[str, ...]:
    ends = _ends(_percent(cell.change_low), _percent(cell.change_high))
    return (label, units.seconds(cell.a), units.seconds(cell.b), _percent(cell.change), ends, cell.verdict)


def _tokens(name: str, label: str, cell: Cell) -> tuple[str, ...]:
    if METRICS[name].kind == "share":
        points = [_signed(units.digits, value and 100 * value) for value in (cell.difference, cell.low, cell.high)]
        return (
            label,
            units.share(cell.a, 1),
            units.share(cell.b, 1),
            f"{points[0]} pp",
            _ends(*points[1:]),
            cell.verdict,
        )
    low, high = (_signed(units.tokens, value) for value in (cell.low, cell.high))
    change = _signed(units.tokens, cell.difference)
    return (label, units.tokens(cell.a), units.tokens(cell.b), change, _ends(low, high), cell.verdict)


def _worth_a_row(name: str, cell: Cell) -> bool:
    return bool(cell.a or cell.b) or name in ("computed_tokens", "hit_share", "loss")


def _why(against: Against) -> Section:
    why = against.why
    rows: list[tuple[str, ...]] = [(row["from"], row["to"], units.tokens(row["tokens"])) for row in against.moved[:5]]
    lines = []
    if why["ttft_s"] is not None:
        lines.append(f"All first tokens together: {_span(why['ttft_s'])}.")
    if why["recompute_s"] is not None:
        lines.append(f"Prefill of lost reuse: {_span(why['recompute_s'])}. Loads: {_span(why['load_s'])}.")
    if why["rest_s"] is not None:
        lines.append(f"The rest, mostly waiting for other requests: {_span(why['rest_s'])}.")
    title = "Why: prompt tokens that came from elsewhere" if rows else "Why: no prompt token came from elsewhere"
    return Section(title, ("in A", "in B", "tokens"), rows, lines, left=(0, 1), name="why")


def _groups(against: Against) -> Iterator[Section]:
    for by, title in _BY.items():
        rows: list[tuple[str, ...]] = [
            (
                group.group,
                *map(units.tokens, (group.n, group.better, group.worse)),
                *map(units.seconds, (group.a_mean, group.b_mean)),
                _percent(group.difference / group.a_mean if group.a_mean else None),
                group.verdict,
            )
            for group in against.groups
            if group.by == by
        ]
        if rows:
            columns = ("", "turns", "better", "worse", "A", "B", "change", "")
            yield Section(f"Mean TTFT by {title}", columns, rows, left=(0, 7), name=by)


def _turns(against: Against) -> Iterator[Section]:
    rows: list[tuple[str, ...]] = [
        (
            f"{units.plain(row['session'])}/{row['turn']}",
            units.tokens(row["prompt"]),
            f"{row['a_served_from'] or 'unknown'} > {row['b_served_from'] or 'unknown'}",
            units.seconds(row["a_ttft"]),
            units.seconds(row["b_ttft"]),
            _signed(units.tokens, row["computed"]),
            _signed(units.seconds, row["recompute_s"]),
        )
        for row in against.turns
    ]
    columns = ("turn", "prompt", "from", "A", "B", "computed", "prefill s")
    if rows:
        yield Section("Turns whose TTFT changed most", columns, rows, left=(0, 2), name="turns")


def _gate(result: Result) -> tuple[str, ...]:
    mark = "pass" if result.passed else "FAIL"
    if result.value is None:
        return (mark, result.gate, result.reason)
    metric = METRICS[result.gate.split("<")[0].split(">")[0].strip()]
    doubt = "" if result.certain in (True, None) else " (its interval reaches across the limit)"
    return (mark, result.gate, _figure(metric.kind, result) + doubt)


def _figure(kind: str, result: Result) -> str:
    value = result.value
    if result.scope == "change":
        return _percent(value)
    written = {
        "seconds": lambda x: f"{units.seconds(x)} s",
        "share": lambda x: units.share(x, 1),
        "rate": units.rate,
    }.get(kind, units.tokens)
    return _signed(written, value) if result.scope == "difference" else written(value)


def _footer(against: Against) -> list[str]:
    drawn = units.count(against.units, against.resampled)
    return [
        f"Intervals: paired bootstrap, {RESAMPLES:,} draws of {drawn}: how far other",
        "sessions of this kind could differ, not how far a repeated run would.",
        "Better or worse turns: TTFT changed by more than 5 % and 1 ms. More: --json",
    ]


def _ends(low: str, high: str) -> str:
    return units.UNKNOWN if units.UNKNOWN in (low, high) else f"{low} .. {high}"


def _percent(value: float | None) -> str:
    if value is None:
        return units.UNKNOWN
    percent = 100 * value
    if not percent:
        return "0 %"
    if abs(percent) < 0.05:
        return "< 0.1 %"
    return f"{percent:+.1f} %" if abs(percent) < 1000 else f"{percent:+,.0f} %"


def _signed(written: Any, value: float | None) -> str:
    if value is None:
        return units.UNKNOWN
    return str(written(value)) if value <= 0 else f"+{written(value)}"


def _span(value: float | None) -> str:
    return "unknown" if value is None else f"{_signed(units.duration, value)}"
