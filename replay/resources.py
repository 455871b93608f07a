"""Finds the data folders (`schemas`, `reports`, `traces`) in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """The path of a bundled data file or folder, e.g. ``data_path("schemas", "results.sql")``.

    Raises:
        FileNotFoundError: the installation lacks it (a broken wheel, not a user's mistake).
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"bundled data {'/'.join(parts)} is missing from this installation of replay")
