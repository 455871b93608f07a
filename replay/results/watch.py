"""Follows a run that is going on, from another process than the one that runs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from replay.results import layout, queries, render, units
from replay.results.report import CACHED, Report, report

REFRESH_S = 2.0
"""The writer stores rows about as often (`replay.results.store.BATCH_SECONDS`)."""
_SHOWN = ("tokens", "loss", "ttft")


def watch(
    path: str | Path, run: str | None = None, *, console: Console | None = None, refresh_s: float = REFRESH_S
) -> Report:
    """Shows how a run goes on until it has ended, and returns its report then.

    On a terminal the figures stay in place; elsewhere, and on a dumb one, each refresh is a line.

    Args:
        path: a results file.
        run: id, name, or unique start of either; null for the latest run. One that has ended is returned at once.
        console: where to show it; null for standard output.
        refresh_s: seconds between two looks.

    Raises:
        ReplayError: no such file or run.
        KeyboardInterrupt: Ctrl-C; the terminal is as it was, and the run goes on.
    """
    console = console or Console(highlight=False)
    states = _states(path, run, refresh_s)
    if not console.is_terminal or console.is_dumb_terminal:
        for state in states:
            if state.run["status"] == "running":
                console.file.write(f"{line(state)}\n")
                console.file.flush()
        return state
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for state in states:
            if state.run["status"] == "running":
                live.update(_view(state, console), refresh=True)
    return state


def line(state: Report) -> str:
    """A running report as one line."""
    tokens = state.tokens
    known = [n for tier in CACHED if (n := tokens[tier]) is not None]
    first = state.ttft_s["all"]
    parts = [
        _progress(state),
        f"served {units.share(sum(known) if known else None, tokens['prompt'])}",
        f"lost {units.tokens(state.loss['total'])}",
        f"TTFT p50 {units.duration(first['p50'])}, p95 {units.duration(first['p95'])}",
    ]
    counts = state.requests
    failed = counts["errors"] + counts["dropped"] - queries.left_out(counts)
    return ", ".join([*parts, *([f"{failed:,} failed"] if failed else [])])


def _states(path: str | Path, run: str | None, refresh_s: float) -> Iterator[Report]:
    while True:
        state = report(path, run)
        yield state
        if state.run["status"] != "running":
            return
        run = state.run["id"]
        time.sleep(refresh_s)


def _view(state: Report, console: Console) -> RenderableType:
    """What fits a small terminal: how far the run is, and the figures so far."""
    ascii_only = console.options.ascii_only
    parts: list[RenderableType] = []
    if banner := layout.banner(state):
        parts.append(Text(banner, style="bold black on yellow"))
    started = datetime.fromisoformat(state.run["started_at"].replace("Z", "+00:00"))
    elapsed = (datetime.now(timezone.utc) - started).total_seconds()
    parts += [
        Text(f"{units.plain(state.run['name'] or state.run['backend'])} {state.run['id']}, running for "
             f"{units.duration(elapsed)}. Ctrl-C leaves it to go on."),
        Text(f"{units.bar(state.requests['total'], state.run['turns'], 30, ascii_only=ascii_only)} {_progress(state)}"),
    ]  # fmt: skip
    for section in layout.sections(state, ascii_only=ascii_only):
        if section.name in _SHOWN:
            parts += [Text(), Text(section.title, style="bold")]
            parts += [render.section_table(section)] if section.rows else []
    return Group(*parts)


def _progress(state: Report) -> str:
    turns = units.count(state.run["turns"], "turn")
    return f"{state.requests['total']:,} of {turns}, run time {units.duration(state.throughput['seconds'])}"
