"""The one exception that reaches users."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ReplayError(Exception):
    """A mistake in what the user gave us, as one line: what, where, what to do.

    The command line prints it on stderr and exits with code 2. Anything else that escapes is a bug.
    """


def unknown_name(what: str, name: str, known: Iterable[str], hint: str = "") -> ReplayError:
    """An unknown preset, profile, model or run, with the nearest known names."""
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5) or names[:8]
    text = f"unknown {what} {name!r}; nearest: {', '.join(near)}" if near else f"unknown {what} {name!r}"
    return ReplayError(f"{text}{'; ' + hint if hint else ''}")
