"""The one place that opens a results file: its schema, its versions, and what can be wrong with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import duckdb

from replay.errors import ReplayError
from replay.resources import data_path

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning; a new nullable column is simply added to older files."""
OLDEST_VERSION = 1
"""Older files cannot be migrated."""
TABLES = ("schema_version", "runs", "requests", "scrapes", "cache_events")


class Locked(ReplayError):
    """Another process has the results file open."""


# Files are exchanged between machines, so they are written for the oldest DuckDB that replay supports.
_STORAGE = {"storage_compatibility_version": "v1.3.0"}


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back until the block, or the function it decorates, is done.

    DuckDB looks for signals while it works, gives up the statement and raises a `RuntimeError` of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


# Files without the column `families` counted these as `sessions`.
_FAMILIES = """
UPDATE runs SET families = sessions, sessions = greatest(sessions, (
  SELECT count(DISTINCT session) FROM requests WHERE run_id = runs.id
))
"""


def open_writable(path: str | Path) -> duckdb.DuckDBPyConnection:
    """Opens a results file to write runs, and creates or migrates it where needed.

    Raises:
        ReplayError: it cannot be written, another process has it open, or it is no results file.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise ReplayError(f"{path}: no folder {path.parent}; create it or choose another --db")
    con = _connect(path, read_only=False)
    try:
        con.execute("BEGIN")
        _ensure_schema(con, path)
        con.execute("COMMIT")
    except BaseException:
        con.close()
        raise
    return con


def open_readable(path: str | Path) -> duckdb.DuckDBPyConnection:
    """Opens a results file read-only, cut off from other files, the network and its own configuration.

    An older file is migrated first, which needs write access once.

    Raises:
        Locked: another process is writing it; see `replay.results.snapshot`.
        ReplayError: it is missing, unreadable, or no results file.
    """
    path = Path(path)
    if not path.exists():
        raise ReplayError(f"{path}: no such results file; `replay run` writes one, --db names it")
    con = _connect(path, read_only=True)
    try:
        current = _is_current(con, path)
    except BaseException:
        con.close()
        raise
    if current:
        return con
    con.close()
    open_writable(path).close()
    return _connect(path, read_only=True)


def columns(con: duckdb.DuckDBPyConnection, table: str) -> dict[str, str]:
    """Names and SQL types of a table's or view's columns, in order; empty where there is none of that name."""
    found = con.execute(
        "SELECT column_name, data_type FROM duckdb_columns() "
        "WHERE database_name = current_database() AND schema_name = 'main' AND table_name = ? "
        "ORDER BY column_index",
        [table],
    ).fetchall()
    return dict(found)


def describe(error: duckdb.Error) -> str:
    """The first paragraph of a DuckDB error as one line, without its class and its pointer into the query."""
    text = re.sub(r"^[\w ]+ Error: ", "", str(error))
    return " ".join(re.split(r"\n\s*\n|\nLINE ", text)[0].split())


def _check_kind(path: Path) -> None:
    """DuckDB would take some other files, such as JSON, for something to load; so its mark is checked first."""
    if path.is_dir():
        raise ReplayError(f"{path}: a folder, not a results file; name a file with --db")
    try:
        start = _first_bytes(path)
    except OSError as error:
        raise ReplayError(f"{path}: cannot read it: {error.strerror}; check its permissions") from error
    if not start:
        raise ReplayError(f"{path}: an empty file, not a results file; remove it or choose another --db")
    if start[8:] != b"DUCK":
        raise ReplayError(f"{path}: not a DuckDB file; name a results file of replay with --db")


def _first_bytes(path: Path) -> bytes:
    """The first 12 bytes, through a descriptor that this process has of the file already, where it has one.

    POSIX ends all of a process's locks on a file, DuckDB's among them, when it closes any descriptor of that file.
    """
    there = path.stat()
    for entry in Path("/dev/fd").iterdir() if Path("/dev/fd").is_dir() else ():
        with contextlib.suppress(OSError):  # the descriptor of this listing itself, closed by now
            own = os.fstat(int(entry.name))
            if (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino):
                return os.pread(int(entry.name), 12, 0)
    with path.open("rb") as file:
        return file.read(12)


def _connect(path: Path, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    if path.exists():
        _check_kind(path)
    config: dict[str, str | bool | int | float | list[str]] = dict(_STORAGE)
    if read_only:
        config = {"enable_external_access": "false", "lock_configuration": "true"}
    try:
        return duckdb.connect(str(path.absolute()), read_only=read_only, config=config)
    except duckdb.Error as error:
        raise _explain(path, error) from error


def _explain(path: Path, error: duckdb.Error) -> ReplayError:
    text = str(error)
    if "set lock on file" in text:
        holder = re.search(r"\(PID \d+\)", text)
        return Locked(
            f"{path}: another process has this results file open {holder.group() if holder else ''}".rstrip()
            + "; wait for it to end or choose another --db"
        )
    if isinstance(error, duckdb.ConnectionException):
        return ReplayError(f"{path}: this process has the results file open in another mode; close it first")
    if "database file with version number" in text:
        return ReplayError(f"{path}: written by a newer DuckDB than {duckdb.__version__}; upgrade duckdb to read it")
    return ReplayError(f"{path}: cannot open the results file: {describe(error)}; check the path and its permissions")


def _file_version(con: duckdb.DuckDBPyConnection, path: Path) -> int | None:
    """Schema version of a results file, or null for a database without any table."""
    tables = {name for (name,) in con.execute("SELECT table_name FROM duckdb_tables() WHERE NOT internal").fetchall()}
    if not tables:
        return None
    if not {"schema_version", "runs"} <= tables:
        raise ReplayError(f"{path}: a DuckDB file, but not a results file of replay; choose another --db")
    row = con.execute("SELECT max(version) FROM schema_version").fetchone()
    version = row[0] if row else None
    if version is None or version < OLDEST_VERSION:
        raise ReplayError(
            f"{path}: schema version {version}, older than this replay can read ({OLDEST_VERSION}); "
            "read it with the release that wrote it, and write new runs to another --db"
        )
    if version > SCHEMA_VERSION:
        raise ReplayError(
            f"{path}: results of schema version {version}, this replay knows {SCHEMA_VERSION}; upgrade replay"
        )
    return int(version)


def _missing(con: duckdb.DuckDBPyConnection) -> list[tuple[str, str, str]]:
    """(table, column, type) that the schema has and this file's tables lack."""
    present = {table: columns(con, table) for table in TABLES}
    return [
        (table, name, kind)
        for table in TABLES
        for name, kind in _wanted()[table].items()
        if present[table] and name not in present[table]
    ]


@cache
def _wanted() -> dict[str, dict[str, str]]:
    """Columns of today's tables and views."""
    with duckdb.connect(":memory:") as model:
        model.execute(data_path("schemas", "results.sql").read_text("utf-8"))
        return {table: columns(model, table) for table in (*TABLES, *_views(model))}


def _views(con: duckdb.DuckDBPyConnection) -> list[str]:
    found = con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal AND schema_name = 'main'").fetchall()
    return [name for (name,) in found]


def _is_current(con: duckdb.DuckDBPyConnection, path: Path) -> bool:
    version = _file_version(con, path)
    if version is None:
        raise ReplayError(f"{path}: an empty database, not a results file; `replay run` writes one")
    has_all = all(cells.keys() <= columns(con, name).keys() for name, cells in _wanted().items())
    return version == SCHEMA_VERSION and has_all


def _ensure_schema(con: duckdb.DuckDBPyConnection, path: Path) -> None:
    version = _file_version(con, path)
    missing = _missing(con)
    for table, name, kind in missing:
        con.execute(f'ALTER TABLE {table} ADD COLUMN "{name}" {kind}')
    if ("runs", "families", "BIGINT") in missing:
        con.execute(_FAMILIES)
    con.execute(data_path("schemas", "results.sql").read_text("utf-8"))
    if version is None:
        con.execute("INSERT INTO schema_version VALUES (?)", [SCHEMA_VERSION])
