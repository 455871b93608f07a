"""Tables of `validate`, for a terminal and as Markdown."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from replay.calibration.measure import Residual
from replay.calibration.validate import Figure
from replay.results.units import plain

HEAD = ("run", "figure", "measured", "simulated", "draws", "error")


def text(figures: list[Figure], tables: list[Figure], *, markdown: bool = False) -> str:
    """The figures of runs, and of document tests if there are any. Simulated figures are labelled as such."""
    parts = [("Recorded runs and the engine model (simulated)", figures)]
    if tables:
        parts.append(("Document tests, one request at a time, and the engine model (simulated)", tables))
    return "\n".join(_markdown(*part) if markdown else _table(*part) for part in parts)


def _cells(figure: Figure) -> tuple[str, str, str, str, str, str]:
    share = figure.figure.endswith("share")

    def show(value: float) -> str:
        return f"{100 * value:.1f} %" if share else f"{1000 * value:,.0f} ms"

    draws = f"{show(figure.low)} to {show(figure.high)}" if figure.low != figure.high else ""
    error = f"{100 * figure.error:+.1f} {'points' if share else '%'}"
    return figure.run, figure.figure, show(figure.measured), show(figure.simulated), draws, error


def _table(title: str, figures: list[Figure]) -> str:
    """A run's name stands above its figures, so that the table is at home in 80 columns."""
    rows = [_cells(figure) for figure in figures]
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)][1:]

    def line(cells: tuple[str, ...]) -> str:
        figure, *rest = zip(cells, widths, strict=True)
        padded = [f"{figure[0]:<{figure[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]
        return "  ".join(["", *padded]).rstrip()

    lines, run = [title, "", line(HEAD[1:])], None
    for name, *cells in rows:
        lines += [] if name == run else [plain(name)]
        lines.append(line(tuple(cells)))
        run = name
    return "\n".join(lines) + "\n"


def _markdown(title: str, figures: list[Figure]) -> str:
    lines = [f"**{title}**", "", "| " + " | ".join(HEAD) + " |", "| --- | --- |" + " ---: |" * 4]
    lines += ["| " + " | ".join(_cells(figure)) + " |" for figure in figures]
    return "\n".join(lines) + "\n"


def residuals(found: list[Residual]) -> str:
    """The figures that a profile was fitted to, and what it gives for them."""
    table = Table(title="Residuals of the fit", title_justify="left")
    for number, name in enumerate(("figure", "measured", "fitted", "error")):
        table.add_column(name, justify="right" if number else "left")
    for each in found:
        error = f"{100 * (each.fitted / each.measured - 1):+.1f} %"
        table.add_row(each.what, f"{1000 * each.measured:,.1f} ms", f"{1000 * each.fitted:,.1f} ms", error)
    out = io.StringIO()
    Console(file=out, width=80, highlight=False).print(table)
    return out.getvalue()
