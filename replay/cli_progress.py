"""The progress bar of a run, on a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from replay.results import units


class ToGo(ProgressColumn):
    """How long it goes on at least, counted down between two updates; nothing where that is not known.

    The field `until` is in seconds of `time.monotonic`.
    """

    def render(self, task: Task) -> Text:
        """The column's text."""
        until = task.fields.get("until")
        left = until - time.monotonic() if until is not None else 0.0
        return Text(f"at least {units.duration(left)} to go" if left >= 1 else "")


def bar() -> Progress:
    """The bar; it is drawn when told to, and goes when it ends."""
    done = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn())
    columns = (*done, TimeElapsedColumn(), ToGo())
    return Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
