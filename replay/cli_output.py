"""Where the commands' output goes: a stream, a file, a page, charts."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from replay.errors import ReplayError

if TYPE_CHECKING:
    from replay.results.html.page import Page

PAGES = ("html", "png", "svg")
"""Formats to look at."""


def page_options(*formats: str) -> Callable[[Any], Any]:
    """Adds ``--format`` (the first of `formats` is the default; `PAGES` come after them), ``-o`` and ``--chart``."""

    def add(function: Any) -> Any:
        for option in (
            click.option("--chart", metavar="NAME", help="With png or svg: only this chart, e.g. tokens."),
            click.option("-o", "--output", help="File to write, not standard output; a folder for png and svg."),
            click.option(
                "--format", "fmt", type=click.Choice([*formats, *PAGES]), default=formats[0], show_default=True,
                help="html is one page that works offline; png and svg are a file for each chart.",
            ),
        ):  # fmt: skip
            function = option(function)
        return function

    return add


def write_page(page: Page, fmt: str, output: str | None, chart: str | None) -> None:
    """Writes a page, or its charts as images.

    Raises:
        ReplayError: images without a folder to write them to, a chart of a page, no such chart, or it cannot be
            written.
    """
    from replay.results.html.figure import save

    if fmt == "html" and chart is not None:
        raise ReplayError("--chart picks one image: use it with --format png or svg")
    if fmt == "html":
        emit(page.html(), output)
        return
    if output is None:
        raise ReplayError(f"--format {fmt} writes files: name a folder for them with -o")
    for file in save(page.figures, fmt, output, page.mark, chart):  # type: ignore[arg-type]
        click.echo(str(file), err=True)


def ascii_only() -> bool:
    """Whether standard output takes ASCII alone, as in the locale ``C``."""
    return not (sys.stdout.encoding or "ascii").lower().startswith("utf")


def survive_ascii() -> None:
    """Lets a character that the output's encoding lacks come out as ``?`` instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")


def listing(rows: Sequence[tuple[str, str]], indent: str = "") -> None:
    """Prints names and what they stand for: wrapped on a terminal, a line each elsewhere."""
    width = max((len(name) for name, _ in rows), default=0) + 2
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for name, text in rows:
        start = f"{indent}{name:{width}}"
        room = columns - len(start) if columns else 0
        lines = textwrap.wrap(text, room) if room >= 20 else [text]
        click.echo(start + f"\n{' ' * len(start)}".join(lines))


def emit(text: str, output: str | None) -> None:
    """Writes text to a file, or to standard output where none is named.

    Raises:
        ReplayError: the file cannot be written.
    """
    if output is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    try:
        Path(output).write_text(text, "utf-8")
    except OSError as error:
        raise ReplayError(f"{output}: cannot write: {(error.strerror or str(error)).lower()}") from None
