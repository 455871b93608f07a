"""Shows a report: on a terminal, as plain text, Markdown, JSON or CSV."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TextIO

import polars as pl
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from replay.results import layout, queries, units
from replay.results.report import Report, connection
from replay.results.store import Store

WIDTH = 80
_FIRST = 16
"""Characters of a table's first column that should be seen."""
_STYLES = {
    "gpu": "green",
    "cpu": "cyan",
    "disk": "yellow",
    "remote": "magenta",
    "external": "magenta",
    "computed": "red",
    "evicted": "red",
    "valid": "bold green",
    "partial": "bold yellow",
    "invalid": "bold red",
}


def show(report: Report, console: Console | None = None, *, db: str | None = None) -> None:
    """Prints a report, plain where that is no terminal, colourless where ``NO_COLOR`` is set; `db`: see `table`."""
    console = console or Console(highlight=False)
    emit(table(report, ascii_only=console.options.ascii_only, db=db), console)


def emit(shown: RenderableType, console: Console | None = None) -> None:
    """Prints something of ours; plain where the output is no terminal."""
    console = console or Console(highlight=False)
    console.width = min(console.width, 2 * WIDTH)
    if console.is_terminal:
        console.print(shown)
    else:
        console.file.write(plain(shown, width=console.width))


def plain(shown: RenderableType, *, width: int = WIDTH) -> str:
    """Something of ours as plain text, without padding at the ends of lines."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None, force_terminal=False, highlight=False).print(shown)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def table(report: Report, *, ascii_only: bool = False, db: str | None = None) -> RenderableType:
    """A report as a rich renderable, at home in 80 columns.

    Args:
        report: the run.
        ascii_only: draw bars with ``#``.
        db: the results file, for the commands at the end; null: the one that they read by themselves.
    """
    parts: list[RenderableType] = []
    if banner := layout.banner(report):
        parts += [Text(f" {banner} ", style="bold black on yellow"), Text()]
    grid = Table.grid(padding=(0, 2))
    for label, text in layout.header(report):
        style = _STYLES.get(report.run["verdict"], "") if label == "verdict" else ""
        grid.add_row(Text(label, style="dim"), Text(units.plain(text), style=style))
    parts.append(grid)
    for section in layout.sections(report, ascii_only=ascii_only):
        parts += [Text(), Text(section.title, style="bold")]
        if section.rows:
            parts.append(section_table(section))
        parts += [Text(line) for line in section.lines]
    parts += [Text(), *(Text(line, style="dim") for line in (*layout.footer(report), layout.MORE))]
    # To be pasted: a line that is too long for the terminal must not become two.
    parts += [Text(f"  {line}", "dim", no_wrap=True, overflow="ignore") for line in layout.more(report, db)]
    return Group(*parts)


def text(report: Report, *, width: int = WIDTH, ascii_only: bool = False, db: str | None = None) -> str:
    """A report as plain text, without padding at the ends of lines; `db`: see `table`."""
    return plain(table(report, ascii_only=ascii_only, db=db), width=width)


def markdown(report: Report, *, ascii_only: bool = False, db: str | None = None) -> str:
    """A report as GitHub-flavoured Markdown; bars drawn with ``#`` where asked for; `db`: see `table`."""
    lines = [f"# Run {_md(report.run['id'])}", ""]
    if banner := layout.banner(report):
        lines += [f"**{_md(banner)}**", ""]
    for label, value in layout.header(report):
        lines.append(f"- {label}: {_md(value)}" if label else f"  {_md(value)}")
    for section in layout.sections(report, ascii_only=ascii_only):
        lines += ["", f"## {_md(section.title)}", ""]
        if section.rows:
            marks = ["---" if i in section.left else "---:" for i in range(len(section.columns))]
            lines += [_md_row(section.columns), f"| {' | '.join(marks)} |", *map(_md_row, section.rows)]
        lines += ["", *map(_md, section.lines)] if section.lines else []
    lines += ["", *(f"{_md(line)}  " for line in layout.footer(report)), "", layout.MORE, ""]
    return "\n".join([*lines, "```sh", *layout.more(report, db), "```"]) + "\n"


def csv(source: Store | str | Path, run: str | None = None, *, file: TextIO | None = None) -> str:
    """The run's rows of `v_requests` as CSV with a header, by session and position; an empty cell is unknown.

    Args:
        source: an open store or the path of a results file.
        run: id, name, or unique start of either; null for the latest run.
        file: where to write; null to only return the text.

    Raises:
        ReplayError: no such file or run.
    """
    with connection(source) as (con, _):
        run_id = queries.find_run(con, run, source=str(source.path if isinstance(source, Store) else source))
        rows = con.sql(
            "SELECT * FROM v_requests WHERE run_id = $run ORDER BY session, position, turn",
            params={"run": run_id},
        )
        written = pl.DataFrame(rows).write_csv()
    if file is not None:
        file.write(written)
    return written


def section_table(section: layout.Section) -> Table:
    """A section's table as a rich renderable; only its first column may be cut. Dense where 80 columns are few."""
    widths = [max([len(name), *(len(row[i]) for row in section.rows)]) for i, name in enumerate(section.columns)]
    tight = min(widths[0], _FIRST) + sum(2 + width for width in widths[1:]) > WIDTH
    grid = Table(box=None, pad_edge=False, padding=(0, 1 if tight else 2, 0, 0), header_style="dim")
    for i, name in enumerate(section.columns):
        grid.add_column(
            Text(name), justify="left" if i in section.left else "right", no_wrap=True, overflow="ellipsis",
            min_width=widths[i] if i else None,
            max_width=max(1, WIDTH - sum(1 + width for width in widths[1:])) if tight and not i else None,
        )  # fmt: skip
    for row in section.rows:
        style = _STYLES.get(row[0], "")
        grid.add_row(*(Text(cell, style=style if i in section.left else "") for i, cell in enumerate(row)))
    return grid


def _md(text: str) -> str:
    """Foreign text in Markdown: no markup, no HTML, no cell separator."""
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", units.plain(text)).replace("<", "&lt;").replace(">", "&gt;")


def _md_row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(_md(cell) for cell in cells)} |"
