"""A page: what stands on it, and its HTML from ``reports/page.html``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jinja2

from replay import __version__
from replay.resources import data_path
from replay.results.html import theme
from replay.results.html.figure import Figure
from replay.results.layout import Section

Item = Figure | Section
_BAR = set("█▏▎▍▌▋▊▉")


@dataclass(frozen=True)
class Verdict:
    """Whether the figures may be trusted, or pass."""

    label: str
    word: str
    tone: Literal["good", "doubt", "bad"]
    reasons: Sequence[str]


@dataclass(frozen=True)
class Page:
    """Everything on a page, as plain text; the template escapes it."""

    title: str
    kind: str
    """What sort of page it is, above the title."""
    mark: str
    """Whose figures these are, in one line; it stands below charts that leave the page."""
    banner: str | None
    """What must not be overlooked, such as that figures are simulated."""
    verdict: Verdict | None
    """Null where nothing is judged."""
    facts: Sequence[tuple[str, str]]
    """Labels and texts that say what this is about."""
    highlights: Sequence[tuple[str, str, str]]
    """The figures to read first: label, figure, what it refers to."""
    items: Sequence[Item]
    """Charts and tables, in reading order."""

    @property
    def figures(self) -> list[Figure]:
        """The charts alone."""
        return [item for item in self.items if isinstance(item, Figure)]

    def html(self) -> str:
        """The page as one file without scripts, which loads nothing."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(data_path("reports")),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.tests["figure"] = lambda item: isinstance(item, Figure)
        environment.globals["shown"] = _shown
        template = environment.get_template("page.html")
        return template.render(page=self, version=__version__, light=theme.variables(0), dark=theme.variables(1))


def _shown(section: Section) -> list[int]:
    """Columns that a page shows: bars of characters are left to terminals."""
    return [
        index
        for index, name in enumerate(section.columns)
        if name or not all(set(row[index]) <= _BAR for row in section.rows)
    ]
