"""Tables of `validate`, for a terminal and as Markdown."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from replay.calibration.measure import Residual
from replay.calibration.validate import Figure

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
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(HEAD):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number < 2)
    run = None
    for figure in figures:
        cells = _cells(figure)
        if run not in (None, figure.run):
            table.add_section()
        table.add_row(cells[0] if figure.run != run else "", *cells[1:])
        run = figure.run
    out = io.StringIO()
    Console(file=out, width=120, highlight=False).print(table)
    return out.getvalue()


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
    Console(file=out, width=120, highlight=False).print(table)
    return out.getvalue()
