"""A chart with its words and its table, and how it is drawn: inline SVG for a page, or an image file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import altair as alt
import vl_convert

from replay.errors import ReplayError, unknown_name
from replay.results.html import theme
from replay.results.layout import Section

Chart = alt.Chart | alt.LayerChart | alt.VConcatChart
Draw = Callable[[int], Chart]
"""Makes a chart for a width in pixels."""
WIDE, NARROW = 860, 336
"""Pixels of a chart on a page: it is drawn for both, and the reader's screen decides."""
IMAGE = 900
"""Pixels of a chart image; PNG has twice as many."""


@dataclass(frozen=True)
class Figure:
    """A chart. What it shows must also be said by `alt` and by its tables."""

    name: str
    """Anchor on the page and name of the image file."""
    title: str
    alt: str
    """What the chart says, in words, for those who do not see it."""
    draw: Draw
    badge: str = ""
    """What sort of figures these are, beside the title, e.g. ``simulated``; empty where they were measured."""
    tables: Sequence[Section] = ()
    notes: Sequence[str] = field(default=())
    """How to read it, and what was left out."""

    @property
    def wide(self) -> str:
        """SVG for a screen or paper."""
        return self._inline(WIDE)

    @property
    def narrow(self) -> str:
        """SVG for a phone."""
        return self._inline(NARROW)

    def _inline(self, width: int) -> str:
        svg = vl_convert.vegalite_to_svg(_spec(self.draw(width)))
        return re.sub(r"<[^>]*>", lambda tag: _for_page(tag[0]), svg)


def save(
    figures: Sequence[Figure], kind: Literal["png", "svg"], output: str | Path, mark: str, only: str | None = None
) -> list[Path]:
    """Writes chart images: each with its title and, below it, what it shows.

    Args:
        figures: the charts.
        kind: of image.
        output: a folder, made where missing; for one chart it may be a file that ends in ``.png`` or ``.svg``.
        mark: the line below each title: which run, and whether it is simulated.
        only: name of the one chart to write.

    Raises:
        ReplayError: no such chart, several charts for one file, or it cannot be written.
    """
    if only is not None and all(figure.name != only for figure in figures):
        raise unknown_name("chart", only, [figure.name for figure in figures])
    output = Path(output)
    chosen = [figure for figure in figures if only in (None, figure.name)]
    is_file = output.suffix in (".png", ".svg") and not output.is_dir()
    if is_file and output.suffix != f".{kind}":
        raise ReplayError(f"-o {output}: the images are {kind}; name a .{kind} file, or a folder")
    if is_file and len(chosen) > 1:
        names = ", ".join(figure.name for figure in chosen)
        raise ReplayError(f"-o {output}: {len(chosen)} charts for one file; name a folder, or pick one of {names} "
                          "with --chart")  # fmt: skip
    files = [output if is_file else output / f"{figure.name}.{kind}" for figure in chosen]
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for figure, file in zip(chosen, files, strict=True):
            file.write_bytes(_image(figure, kind, mark))
    except OSError as error:
        raise ReplayError(
            f"{error.filename or output}: cannot write: {(error.strerror or str(error)).lower()}"
        ) from None
    return files


def _image(figure: Figure, kind: str, mark: str) -> bytes:
    spec = _spec(figure.draw(IMAGE))
    spec["title"] = {"text": figure.title, "subtitle": mark, "subtitlePadding": 4}
    spec["background"] = theme.colour("surface")
    spec["padding"] = 16
    if kind == "png":
        return vl_convert.vegalite_to_png(spec, scale=2)
    return vl_convert.vegalite_to_svg(spec).encode()


def _spec(chart: Chart) -> dict[str, Any]:
    spec: dict[str, Any] = chart.to_dict()
    spec["config"] = theme.config()
    return spec


def _for_page(tag: str) -> str:
    """A tag of a drawing in the page's colours and type, without what a page has no use for."""
    tag = re.sub(r' (?:role|aria-\w+|pointer-events|class|xmlns(?::xlink)?)="[^"]*"', "", tag)
    tag = re.sub(r' opacity="1"| font-family="[^"]*"', "", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    return theme.follow_reader(tag)
