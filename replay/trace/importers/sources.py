"""Finds and reads the files that an import names, and counts what happens to them."""

from __future__ import annotations

import lzma
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import zstandard

from replay.errors import ReplayError
from replay.trace.files import open_input

_SUFFIXES = (".json", ".jsonl")
_PACKED = (".gz", ".xz", ".zst")
_HEAD_BYTES = 1 << 18
_BROKEN_STREAM = (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


def expand(sources: Sequence[str | Path]) -> Iterator[tuple[Path, bool]]:
    """The files of `sources`, each once, in order (folders sorted), and whether the user named each one.

    Raises:
        ReplayError: a source does not exist.
    """
    seen: set[Path] = set()
    for source in map(Path, sources):
        if source.is_dir():
            found = [path for path in sorted(source.rglob("*")) if path.is_file() and _is_log(path)]
        else:
            found = [source]
        for path in found:
            real = path.resolve()
            if real not in seen:
                seen.add(real)
                yield path, not source.is_dir()


def _is_log(path: Path) -> bool:
    name = Path(path.stem) if path.suffix in _PACKED else path
    return name.suffix in _SUFFIXES


def read_bytes(path: Path) -> bytes:
    """The whole file, decompressed.

    Raises:
        ReplayError: it is missing, unreadable or cut short.
    """
    with open_input(path) as stream:
        try:
            return stream.read()
        except _BROKEN_STREAM as error:
            raise ReplayError(f"{path}: cannot be decompressed: {error}; fetch the file again") from None


def head(path: Path) -> bytes:
    """The first 256 KiB of a file, decompressed."""
    with open_input(path) as stream:
        try:
            return stream.read(_HEAD_BYTES)
        except _BROKEN_STREAM as error:
            raise ReplayError(f"{path}: cannot be decompressed: {error}; fetch the file again") from None


class Notes:
    """Counts what an importer had to estimate, drop or repair, and says it in one line a kind."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lines: list[str] = []

    def count(self, what: str, times: int = 1) -> None:
        """Adds to the number that the line ``"<what>: <number>"`` will show."""
        self._counts[what] += times

    def say(self, line: str) -> None:
        """Adds a line as it is, once."""
        if line not in self._lines:
            self._lines.append(line)

    def lines(self) -> list[str]:
        """All lines; kinds that never happened are absent."""
        return self._lines + [f"{what}: {count:,}" for what, count in self._counts.items() if count]
