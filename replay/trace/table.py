"""A trace's description as tables for a terminal of 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from replay.trace.describe import Description

_TITLES = {
    "turns_per_session": "turns a session",
    "prompt": "prompt, tokens",
    "prefix": "prefix (ideal), tokens",
    "append": "append, tokens",
    "output": "output, tokens",
    "inter_arrival": "between requests, s",
    "session_inter_arrival": "between sessions, s",
    "pause": "pause, s",
}


def render(description: Description) -> RenderableType:
    """The description for `rich.console.Console.print`; at most 80 columns wide."""
    parts: list[RenderableType] = [_title(description), _summary(description), _percentiles(description)]
    parts.append(_working_set(description))
    if description.breaks.turns:
        parts.append(_breaks(description))
    parts.extend(_remark("warning", text, "yellow") for text in description.warnings)
    parts.extend(_remark("note", text, "dim") for text in description.notes)
    return Group(*(part if isinstance(part, Text) else Padding(part, (0, 0, 1, 0)) for part in parts))


def _title(found: Description) -> Text:
    title = Text(found.name, style="bold")
    if found.synthetic:
        title.append(" (synthetic)", style="not bold")
    return title.append(f"\n{found.origin}\n" if found.origin else "\n", style="not bold")


def _summary(found: Description) -> Table:
    rows = [
        ("sessions", f"{found.sessions:,} in {found.families:,} famil{'y' if found.families == 1 else 'ies'}"),
        ("turns", f"{found.turns:,} ({_counts(found.causes)})"),
        ("prompt tokens", f"{found.prompt_tokens:,}"),
        ("output tokens", f"{found.output_tokens:,}"),
        ("ideal reuse", f"{_percent(found.ideal_share)} of prompt tokens (unbounded cache)"),
        ("from other sessions", f"{_percent(found.shared_share)} of prompt tokens"),
        ("last turn sent", f"{_duration(found.duration_s)} after the first, if answers were instant"),
    ]
    if found.recorded:
        told = f"{_percent(found.recorded.cached_share)} cached, ideal {_percent(found.recorded.ideal_share)}"
        rows.append(("recorded server", f"{told} ({found.recorded.turns:,} turns)"))
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _percentiles(found: Description) -> Table:
    table = _table("", "p10", "p50", "p90", "p99", "max")
    for name, row in found.percentiles.items():
        title = _TITLES.get(name, f"  {name.removeprefix('pause_')}")
        table.add_row(Text(title), *map(_number, (row.p10, row.p50, row.p90, row.p99, row.max)))
    return table


def _working_set(found: Description) -> Table:
    table = _table("kept after last use", "tokens at most", "GiB", "serves of prompts")
    for window in found.windows:
        gib, share = _gib(window.gib), _percent(window.hit_share)
        table.add_row(_duration(window.seconds), _number(window.tokens), gib, share)
    table.add_row("for ever", _number(found.unique_tokens), _gib(found.unique_gib), _percent(found.ideal_share))
    return table


def _breaks(found: Description) -> Table:
    breaks = found.breaks
    table = _table("prefix broken at", "cause", "pause", "context", "lost tokens")
    for worst in breaks.worst:
        pause, tokens = _duration(worst.pause), (_number(worst.context_tokens), _number(worst.lost_tokens))
        table.add_row(Text(worst.turn), Text(worst.cause), pause, *tokens)
    table.add_row(
        Text(f"all {breaks.turns:,} turns"), Text(_counts(breaks.causes)), "", "", _number(breaks.lost_tokens)
    )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name == "cause" else "right")
    return table


def _remark(kind: str, text: str, style: str) -> Text:
    return Text.assemble((f"{kind}: ", style), text)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
