"""Results between files: export to Parquet, and the merge of results files from several machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb

from replay.errors import ReplayError
from replay.results import queries
from replay.results.database import describe, open_readable, open_writable

VIEWS = {"runs": "v_runs", "requests": "v_requests", "scrapes": "scrapes", "cache_events": "cache_events"}
"""File of an export -> what it holds: the views, which have the tables' columns and what follows from them."""
_TABLES = ("requests", "scrapes", "cache_events")
# Not every reader of Parquet knows its JSON type: some give bytes.
_COLUMNS = {"runs": "* REPLACE (settings::VARCHAR AS settings, self_check::VARCHAR AS self_check)"}


def export(source: str | Path, folder: str | Path, runs: Sequence[str] = ()) -> dict[Path, int]:
    """Writes runs as Parquet (zstd), a file for each of `VIEWS`, replacing older ones; -> rows by file.

    Args:
        source: a results file.
        folder: where to write, made where missing.
        runs: ids, names, or unique starts of either; all where there are none.

    Raises:
        ReplayError: no such file or run, or it cannot be written.
    """
    folder = Path(folder)
    with open_readable(source) as con:
        ids = [queries.find_run(con, run, source=str(source)) for run in runs]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplayError(f"{folder}: cannot make this folder: {(error.strerror or str(error)).lower()}") from None
    written = {}
    # A connection of its own: those of `open_readable` are cut off from other files.
    with duckdb.connect(":memory:") as con:
        con.execute(f"ATTACH {_quoted(source)} AS source (READ_ONLY)")
        con.execute("USE source")
        for name, view in VIEWS.items():
            key = "id" if name == "runs" else "run_id"
            which = f"WHERE {key} IN ({', '.join('?' * len(ids))})" if ids else ""
            columns = _COLUMNS.get(name, "*")
            file = folder / f"{name}.parquet"
            part = folder / f".{name}.parquet.part"  # a file that is half written must not look like one
            try:
                rows = f"SELECT {columns} FROM {view} {which}"
                copy = f"COPY ({rows}) TO {_quoted(part)} (FORMAT parquet, COMPRESSION zstd)"
                copied = con.execute(copy, ids).fetchone()
                part.replace(file)
            except (duckdb.Error, OSError) as error:
                part.unlink(missing_ok=True)
                said = describe(error) if isinstance(error, duckdb.Error) else str(error)
                raise ReplayError(f"{file}: cannot write: {said}") from error
            written[file] = int(copied[0]) if copied else 0
    return written


def merge(target: str | Path, sources: Sequence[str | Path]) -> dict[Path, tuple[int, int]]:
    """Adds the runs of results files to another one, all or nothing; -> runs added and runs there already, by source.

    A run's id is made to be unique among all machines. One that the target holds already with the same content
    is left out, so that merging twice does no harm.

    Args:
        target: a results file, made where missing.
        sources: results files, each closed by the process that wrote it.

    Raises:
        ReplayError: a file cannot be read or written, is its own source, or holds another run of the same id.
    """
    paths = list(dict.fromkeys(Path(source) for source in sources))
    for path in paths:
        if path.resolve() == Path(target).resolve():
            raise ReplayError(f"{path}: a results file cannot be merged into itself; name another one with -o")
        open_readable(path).close()  # says what is wrong with it, and brings an older one to today's schema
    con = open_writable(target)
    try:
        counts = {}
        for number, path in enumerate(paths):
            con.execute(f"ATTACH {_quoted(path)} AS source{number} (READ_ONLY)")
        con.execute("BEGIN")
        for number, path in enumerate(paths):
            counts[path] = _add(con, f"source{number}", path)
        con.execute("COMMIT")
        return counts
    except duckdb.Error as error:
        raise ReplayError(f"{target}: cannot merge: {describe(error)}") from error
    finally:
        con.close()


def _add(con: duckdb.DuckDBPyConnection, source: str, path: Path) -> tuple[int, int]:
    ids = [id for (id,) in con.execute(f"SELECT id FROM {source}.runs ORDER BY started_at, id").fetchall()]
    here = {id for (id,) in con.execute("SELECT id FROM main.runs").fetchall()}
    present = [id for id in ids if id in here]
    for id in present:
        if _fingerprint(con, "main", id) != _fingerprint(con, source, id):
            raise ReplayError(
                f"{path}: its run {id} is not the run of that id that the target or an earlier source holds; "
                "one of them was changed, so merge only one of the two files"
            )
    fresh = [id for id in ids if id not in here]
    con.execute(f"INSERT INTO main.runs BY NAME SELECT * FROM {source}.runs WHERE id IN (SELECT unnest(?))", [fresh])
    for table in _TABLES:
        con.execute(
            f"INSERT INTO main.{table} BY NAME SELECT * FROM {source}.{table} WHERE run_id IN (SELECT unnest(?))",
            [fresh],
        )
    return len(fresh), len(present)


def _fingerprint(con: duckdb.DuckDBPyConnection, database: str, id: str) -> list[tuple[object, ...] | None]:
    """Number and content of a run's rows, whatever their order and that of the columns.

    How the run ended is left out: a run whose process was killed is marked as partial by whoever opens the file next.
    """
    found = []
    for table in ("runs", *_TABLES):
        names = con.execute(
            "SELECT column_name FROM duckdb_columns() WHERE database_name = ? AND table_name = ? ORDER BY column_name",
            [database if database != "main" else _name(con), table],
        ).fetchall()
        cells = ", ".join(f'"{name}"' for (name,) in names if name not in ("status", "verdict", "reasons"))
        key = "id" if table == "runs" else "run_id"
        query = f"SELECT count(*), sum(hash({cells})) FROM {database}.{table} WHERE {key} = ?"
        found.append(con.execute(query, [id]).fetchone())
    return found


def _name(con: duckdb.DuckDBPyConnection) -> str:
    row = con.execute("SELECT current_database()").fetchone()
    return str(row[0]) if row else ""


def _quoted(path: str | Path) -> str:
    """A path as an SQL string."""
    return "'" + str(Path(path).absolute()).replace("'", "''") + "'"
