"""Questions of the user's own to a results file, read-only and cut off from everything else."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any, Literal

import duckdb
import msgspec

from replay.errors import ReplayError
from replay.results import units
from replay.results.database import describe
from replay.results.snapshot import open_live

Format = Literal["table", "csv", "json"]
MAX_ROWS = 1_000
"""Rows that a table shows; CSV and JSON show all."""


def query(path: str | Path, sql: str, fmt: Format = "table", *, width: int = 80) -> str:
    """The result of a query as text. Tables and views: ``docs/results.md``.

    The connection cannot write, read other files, reach the network or change its configuration. While another
    process writes the file, it sees what was stored a moment ago.

    Args:
        path: a results file.
        sql: one statement.
        fmt: ``table`` (a paragraph a record where rows do not fit), ``csv`` or ``json`` (a list of objects).
        width: columns of the terminal.

    Raises:
        ReplayError: the file cannot be read, or DuckDB refuses the query or has no result for it, or
            there are several.
    """
    con, _ = open_live(path)
    try:
        statements = con.extract_statements(sql)
        if len(statements) > 1:
            raise ReplayError(f"SQL: {len(statements)} statements; one at a time, as only a result's rows are shown")
        con.execute(sql)
        names = [column[0] for column in con.description or ()]
        if not names:
            raise ReplayError('SQL: no result, as the statement is empty; try replay sql "SELECT * FROM v_runs"')
        rows = con.fetchall()
    except duckdb.Error as error:
        raise ReplayError(f"SQL: {describe(error)}") from error
    finally:
        con.close()
    if fmt == "json":
        objects = [dict(zip(names, row, strict=True)) for row in rows]
        encoded = msgspec.json.encode(objects, enc_hook=str)
        return msgspec.json.format(encoded, indent=2).decode() + "\n"
    if fmt == "csv":
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([names, *rows])
        return buffer.getvalue()
    return _table(names, rows, width)


def _table(names: list[str], rows: list[tuple[Any, ...]], width: int) -> str:
    shown = [[_cell(value) for value in row] for row in rows[:MAX_ROWS]]
    widths = [max([len(name), *(len(row[i]) for row in shown)]) for i, name in enumerate(names)]
    if sum(widths) + 2 * len(widths) > width:
        label = max(map(len, names))
        text = "\n".join("".join(f"{n:<{label}}  {c}\n" for n, c in zip(names, row, strict=True)) for row in shown)
    else:
        figures = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(names))]
        marks = [">" if figure else "<" for figure in figures]
        lines = [
            "  ".join(f"{cell:{mark}{size}}" for cell, mark, size in zip(row, marks, widths, strict=True)).rstrip()
            for row in (names, ["-" * size for size in widths], *shown)
        ]
        text = "\n".join(lines) + "\n" if names else ""
    if len(rows) > MAX_ROWS:
        text += f"... and {len(rows) - MAX_ROWS:,} more rows; --format csv shows all\n"
    return text


def _cell(value: Any) -> str:
    return "NULL" if value is None else units.plain(f"{value:g}" if isinstance(value, float) else value)
