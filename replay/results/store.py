"""Writes runs: `Store` owns the results file's one writing connection."""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import duckdb
import msgspec
import polars as pl

from replay.errors import ReplayError
from replay.results.database import columns, describe, open_writable, uninterrupted
from replay.results.verdict import judge

BATCH_ROWS = 10_000
"""Buffered rows that are written at once."""
BATCH_SECONDS = 2.0
"""Longest time that a row waits in memory: what a crash can lose."""

Sample = tuple[str, str | None, float | None]
"""Name, labels as scraped, and value of a metric."""

_BUFFERED = ("requests", "scrapes", "cache_events")
_POLARS: dict[str, Any] = {"VARCHAR": pl.String, "BIGINT": pl.Int64, "DOUBLE": pl.Float64}
_JSON = ("settings", "self_check")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class Store:
    """A results file that is open for writing. Use as a context manager; `close` is what flushes.

    Rows are buffered and written by a thread of this object every `BATCH_SECONDS`, or by the caller's
    once `BATCH_ROWS` are waiting. Rows of a table keep the order in which they were added.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection, path: Path):
        self.path = path
        self._con = con
        self._columns = {table: columns(con, table) for table in (*_BUFFERED, "runs")}
        self._blank = {table: dict.fromkeys(self._columns[table]) for table in _BUFFERED}
        self._rows: dict[str, list[dict[str, Any]]] = {table: [] for table in _BUFFERED}
        # Of the buffers: held for moments, so that whoever measures does not wait for a disk.
        self._lock = threading.Lock()
        self._writing = threading.RLock()  # of the connection
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    @uninterrupted()
    def create_or_open(cls, path: str | Path) -> Store:
        """Opens the results file at `path`, creates it, or adds the columns that an older one lacks.

        Runs that a killed process left ``running`` become ``partial``.

        Raises:
            ReplayError: not writable, open in another process, not a results file, or of an unknown version;
                the file is as it was.
        """
        con = open_writable(path)
        con.execute(
            "UPDATE runs SET status = 'partial', verdict = 'partial', reasons = ['the run was killed'] "
            "WHERE status = 'running'"
        )
        return cls(con, Path(path))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @uninterrupted()
    def begin_run(self, run: Mapping[str, Any]) -> str:
        """Stores a run's description and returns its id, which no other run of any results file has.

        Args:
            run: columns of the table `runs`; `id`, `status` and `started_at` (UTC, ISO 8601) have defaults.

        Raises:
            ReplayError: the given id exists.
            ValueError: a key is not a column.
        """
        values = {"id": new_run_id(), "status": "running", "started_at": _utc_now(), **run}
        values["name"] = values.get("name") or values.get("backend")
        values["target"] = _without_secrets(str(values.get("target")))
        names, cells = self._run_values(values)
        sql = f"INSERT INTO runs ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        try:
            with self._writing:
                self._con.execute(sql, cells)
        except duckdb.ConstraintException as error:
            if "uplicate key" not in str(error):
                raise
            raise ReplayError(f"{self.path}: a run {values['id']!r} exists already; give another id") from error
        return str(values["id"])

    def add(self, row: Mapping[str, Any], *, run_id: str | None = None) -> None:
        """Adds a row to `requests`: columns by name, those left out are null.

        Args:
            row: the values; `run_id` may be among them.
            run_id: the run, where the row does not say it.

        Raises:
            ValueError: a key is not a column.
            ReplayError: a batch could not be written (disk full, ...).
        """
        self._add("requests", row, run_id)

    def add_scrapes(self, run_id: str, at: float, samples: Iterable[Sample]) -> None:
        """Adds one scrape of a metrics endpoint, made `at` seconds from the run's start."""
        for name, labels, value in samples:
            self._add("scrapes", {"at": at, "name": name, "labels": labels, "value": value}, run_id)

    def add_cache_events(self, run_id: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds rows to `cache_events`: `at`, `kind`, and what is known of the other columns."""
        for event in events:
            self._add("cache_events", event, run_id)

    @uninterrupted()
    def finish_run(self, run_id: str, **fields: Any) -> None:
        """Writes what is buffered, closes the run and judges it.

        Args:
            run_id: the run.
            fields: further columns of `runs`; `status` is ``complete`` unless given. `verdict` and `reasons`
                are judged from the rows and `self_check` unless given.
        """
        self.flush()
        names, cells = self._run_values({"status": "complete", **fields})
        with self._writing:
            self._con.execute(f"UPDATE runs SET {', '.join(f'{n} = ?' for n in names)} WHERE id = ?", [*cells, run_id])
            if "verdict" not in fields:
                verdict, reasons = judge(self._con, run_id)
                self._con.execute("UPDATE runs SET verdict = ?, reasons = ? WHERE id = ?", [verdict, reasons, run_id])

    def reader(self) -> duckdb.DuckDBPyConnection:
        """A connection that sees all that was added so far; close it after use."""
        self.flush()
        with self._writing:
            return self._con.cursor()

    @uninterrupted()
    def flush(self) -> None:
        """Writes what is buffered.

        Raises:
            ReplayError: it cannot be written; it stays buffered.
        """
        try:
            self._write()
        except duckdb.Error as error:
            raise ReplayError(f"{self.path}: cannot write results: {describe(error)}") from error

    @uninterrupted()
    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.flush()
        finally:
            self._con.close()

    def _add(self, table: str, row: Mapping[str, Any], run_id: str | None) -> None:
        if not row.keys() <= self._columns[table].keys():
            unknown = sorted(row.keys() - self._columns[table].keys())
            raise ValueError(f"the table {table} has no column {', '.join(unknown)}")
        complete = {**self._blank[table], **row}
        if run_id is not None:
            complete["run_id"] = run_id
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_regularly, name="results writer", daemon=True)
            self._thread.start()
        with self._lock:
            rows = self._rows[table]
            rows.append(complete)
            full = len(rows) >= BATCH_ROWS
        if full:
            self.flush()

    def _write_regularly(self) -> None:
        while not self._stop.wait(BATCH_SECONDS):
            # What cannot be written stays buffered; the next flush of the caller's thread reports it.
            with contextlib.suppress(duckdb.Error):
                self._write()

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                taken, self._rows = self._rows, {table: [] for table in _BUFFERED}
            try:
                for table in _BUFFERED:
                    self._insert(table, taken[table])
                    taken[table] = []
            except BaseException:
                with self._lock:
                    self._rows = {table: taken[table] + rows for table, rows in self._rows.items()}
                raise

    def _insert(self, table: str, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        self._con.register("batch", _Batch(_frame(rows, self._columns[table])))
        try:
            self._con.execute(f"INSERT INTO {table} BY NAME SELECT * FROM batch")
        finally:
            self._con.unregister("batch")

    def _run_values(self, values: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        """Column names and cells, JSON encoded."""
        unknown = values.keys() - self._columns["runs"].keys()
        if unknown:
            raise ValueError(f"the table runs has no column {', '.join(sorted(unknown))}")
        cells = {
            name: msgspec.json.encode(value).decode() if name in _JSON and value is not None else value
            for name, value in values.items()
        }
        return list(cells), list(cells.values())


class _Batch:
    """A frame as an Arrow stream: DuckDB reads it without pyarrow, which it wants for a polars frame."""

    def __init__(self, frame: pl.DataFrame):
        self._frame = frame

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self._frame.__arrow_c_stream__(requested_schema)


def _frame(rows: list[dict[str, Any]], kinds: dict[str, str]) -> pl.DataFrame:
    """Rows that have every column, as a frame; a value of the wrong type raises, it is not converted.

    Column by column, in steps between which another thread of Python gets its turn.
    """
    return pl.DataFrame(
        [pl.Series(name, [row[name] for row in rows], dtype=_POLARS[kind]) for name, kind in kinds.items()]
    )


def new_run_id() -> str:
    """UTC time and 30 random bits, e.g. ``20260131-094210-k3v9tq``: ids sort by time."""
    tail = "".join(secrets.choice(_ALPHABET) for _ in range(6))
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{tail}"


def _without_secrets(target: str) -> str:
    """URLs without user, password and query, which may hold keys; other targets as they are."""
    return ",".join(_without_secret(url) for url in re.split(r",(?=https?://)", target))


def _without_secret(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", "")) if parts.netloc else url


def _utc_now() -> datetime:
    return datetime.now(timezone.utc).replace(tzinfo=None)
