"""Opens files that may be compressed: gzip, xz and zstd are told by their first bytes, not their name."""

from __future__ import annotations

import gzip
import io
import lzma
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from replay.errors import ReplayError

_BUFFER = 1 << 17
_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"


class _Reader(io.BufferedReader):
    """Reads a decompressing stream and closes the file below it, which gzip and lzma leave open."""

    def __init__(self, stream: Any, file: BinaryIO):
        super().__init__(stream, _BUFFER)
        self._file = file

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()


class _Writer(io.BufferedWriter):
    """Writes to a compressing stream and closes the file below it."""

    def __init__(self, stream: Any, file: BinaryIO):
        super().__init__(stream, _BUFFER)
        self._file = file

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._file.close()


class _Zstd(io.RawIOBase):
    """Decompresses zstd frames; `zstandard`'s own reader takes a frame that is cut short for a whole one."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data or self._file.read(_BUFFER)
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._inside = False
            if not data:
                if self._inside:
                    raise EOFError("compressed file ended before the end of its last frame")
                return 0
            self._ready, self._inside = self._frame.decompress(data), True
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def open_input(path: str | Path) -> BinaryIO:
    """A binary stream of the file's content, decompressed.

    Raises:
        ReplayError: the file is missing, a folder, or unreadable.
    """
    try:
        raw = Path(path).open("rb")  # noqa: SIM115 - the caller closes it
        head = raw.peek(6)
    except OSError as error:
        raise ReplayError(f"{path}: {(error.strerror or str(error)).lower()}; check the path") from None
    if head.startswith(_GZIP):
        return _Reader(gzip.open(raw), raw)
    if head.startswith(_XZ):
        return _Reader(lzma.open(raw), raw)
    if head.startswith(_ZSTD):
        return _Reader(_Zstd(raw), raw)
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
        # No time stamp and no name, so that equal content is an equal file.
        return _Writer(gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0), raw)
    if path.suffix == ".xz":
        return _Writer(lzma.open(raw, "wb"), raw)
    if path.suffix == ".zst":
        return _Writer(zstandard.ZstdCompressor(level=10).stream_writer(raw, closefd=False), raw)
    return raw
