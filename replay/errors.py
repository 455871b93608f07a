"""The one exception that reaches users."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

NEAR = 0.65
"""How alike two names must be, as `difflib` counts, for one to be taken for the other's misspelling."""


class ReplayError(Exception):
    """A mistake in what the user gave us, as one line: what, where, what to do.

    The command line prints it on stderr and exits with code 2. Anything else that escapes is a bug.
    """


def unknown_name(what: str, name: str, known: Iterable[str], hint: str = "") -> ReplayError:
    """An unknown preset, profile, model or run, with the known names that are near.

    Args:
        what: kind of name.
        name: as it was written.
        known: the names that there are.
        hint: where they are listed; without it they are all named where none is near.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=NEAR)
    parts = [f"unknown {what} {name!r}"]
    if near:
        parts.append(f"nearest: {', '.join(near)}")
    elif names and not hint:
        parts.append(f"known: {', '.join(names)}")
    return ReplayError("; ".join([*parts, hint] if hint else parts))
