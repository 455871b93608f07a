"""Runs the SQL files of `reports/`, and finds the run that a user means."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

import duckdb
import msgspec

from replay.errors import ReplayError, unknown_name
from replay.resources import data_path


def rows(con: duckdb.DuckDBPyConnection, report: str, run_id: str) -> list[dict[str, Any]]:
    """The rows of ``reports/<report>.sql`` for a run, as dicts by column name."""
    return select(con, report, run=run_id)


def select(con: duckdb.DuckDBPyConnection, report: str, **params: Any) -> list[dict[str, Any]]:
    """The rows of ``reports/<report>.sql``, as dicts by column name.

    Args:
        con: connection to a results file.
        report: name of the file.
        params: what it calls ``$name``.
    """
    cursor = con.execute(text(report), params or None)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def row(con: duckdb.DuckDBPyConnection, report: str, run_id: str) -> dict[str, Any]:
    """The one row of a report that always has one."""
    return rows(con, report, run_id)[0]


def run(con: duckdb.DuckDBPyConnection, run_id: str) -> dict[str, Any]:
    """A row of `runs`, with `settings` and `self_check` decoded (empty dicts where null)."""
    cursor = con.execute("SELECT * FROM runs WHERE id = ?", [run_id])
    names = [column[0] for column in cursor.description or ()]
    found = cursor.fetchone()
    if found is None:
        raise KeyError(run_id)
    values = dict(zip(names, found, strict=True))
    for name in ("settings", "self_check"):
        values[name] = msgspec.json.decode(values[name]) if values[name] else {}
    return values


def left_out(counts: Mapping[str, Any]) -> int:
    """Turns that ``--too-long drop`` left out: `dropped` counts them too, but none of them failed."""
    found: int = counts["too_long"] + counts["after_too_long"]
    return found


def find_run(con: duckdb.DuckDBPyConnection, wanted: str | None, *, source: str | None = None) -> str:
    """The id of the run that `wanted` names: an id, a name (its latest run), or a unique start of either.

    Args:
        con: connection to a results file.
        wanted: null for the latest run.
        source: the file, for errors.

    Raises:
        ReplayError: there is none, or several.
    """
    found = con.execute("SELECT id, name FROM runs ORDER BY started_at DESC, rowid DESC").fetchall()
    file = source or "the results file"
    if not found:
        raise ReplayError(f"{file}: no runs yet; `replay run` adds one")
    if wanted is None:
        return str(found[0][0])
    exact = [id for id, name in found if wanted in (id, name)]
    if exact:
        return str(exact[0])
    close = [id for id, name in found if wanted and (id.startswith(wanted) or (name or "").startswith(wanted))]
    if len(close) == 1:
        return str(close[0])
    if close:
        shown = ", ".join(close[:5]) + (", ..." if len(close) > 5 else "")
        raise ReplayError(f"{file}: {wanted!r} could be any of {len(close)} runs: {shown}; type more of the id")
    names = {name for _, name in found if name} or {id for id, _ in found}
    named = f" --db {shlex.quote(source)}" if source else ""
    raise unknown_name(
        "run", wanted, names, hint=f'`replay sql "SELECT id, name, trace FROM v_runs"{named}` lists them'
    )


@cache
def text(report: str) -> str:
    """The statement in ``reports/<report>.sql``."""
    return data_path("reports", f"{report}.sql").read_text("utf-8")
