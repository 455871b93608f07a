"""Opens files that may be compressed: gzip, xz and zstd are told by their first bytes, not their name."""

from __future__ import annotations

import gzip
import io
import lzma
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from replay.errors import ReplayError

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"


def open_input(path: str | Path) -> BinaryIO:
    """A binary stream of the file's content, decompressed.

    Raises:
        ReplayError: the file is missing, a folder, or unreadable.
    """
    try:
        raw = Path(path).open("rb")
        head = raw.read(6)
        raw.seek(0)
    except OSError as error:
        raise ReplayError(f"{path}: {(error.strerror or str(error)).lower()}; check the path") from None
    if head.startswith(_GZIP):
        return cast(BinaryIO, gzip.open(raw))
    if head.startswith(_XZ):
        return cast(BinaryIO, lzma.open(raw))
    if head.startswith(_ZSTD):
        return cast(BinaryIO, io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, closefd=True)))
    return raw


def open_output(path: str | Path) -> BinaryIO:
    """A binary stream that writes the file, compressed as its suffix says (.gz, .xz, .zst).

    Raises:
        ReplayError: the file cannot be written.
    """
    path = Path(path)
    try:
        raw = path.open("wb")
    except OSError as error:
        raise ReplayError(f"{path}: cannot write: {(error.strerror or str(error)).lower()}") from None
    if path.suffix == ".gz":
        # A fixed time stamp, so that equal content is an equal file.
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(raw, "wb"))
    if path.suffix == ".zst":
        return cast(BinaryIO, zstandard.ZstdCompressor(level=10).stream_writer(raw, closefd=True))
    return raw
