"""Reads a results file while another process writes it: a copy of what is on disk at one moment.

DuckDB lets nobody in beside a writer, but what it has committed lies in the file and its write-ahead log (``.wal``).
Both are copied to a private temporary folder and opened there. A copy during which the file changed is made again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import duckdb

from replay.errors import ReplayError
from replay.results.database import Locked, open_readable

TRIES = 5
WAIT_S = 0.2
"""Between two tries."""


def open_live(path: str | Path) -> tuple[duckdb.DuckDBPyConnection, bool]:
    """A read-only connection to a results file, and whether a run may be going on in it.

    While another process writes the file, the connection is to a copy of what that process has committed so far,
    which is at most a few seconds old.

    Raises:
        ReplayError: it is missing, unreadable, no results file, or could not be copied.
    """
    try:
        return open_readable(path), False
    except Locked:
        return _snapshot(Path(path)), True


def _snapshot(path: Path) -> duckdb.DuckDBPyConnection:
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT_S)
        # The folder goes at once: the open connection keeps the copy, and nothing is left however this process ends.
        with tempfile.TemporaryDirectory(prefix="replay-") as folder:
            try:
                before = _state(path)
                copy = _copy(path, Path(folder))
                if _state(path) == before:
                    return open_readable(copy)
            except OSError as error:
                said = error.strerror or str(error)
                raise ReplayError(f"{path}: a run is going on and a copy to read cannot be made: {said}") from error
            except (ReplayError, duckdb.Error):
                pass  # torn: the log was cut in the middle of an entry
    raise ReplayError(f"{path}: a run writes it too fast for a copy to be made; try again, or when the run has ended")


def _state(path: Path) -> tuple[int, int, int]:
    """Changes when DuckDB moves its log into the file. A log that only grows does no harm."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _copy(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    shutil.copyfile(path, copy)
    log = Path(f"{path}.wal")
    if log.exists():
        shutil.copyfile(log, Path(f"{copy}.wal"))
    return copy
