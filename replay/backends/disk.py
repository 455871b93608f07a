"""How fast a folder's disk is, raw and as cache software reads it."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replay.backends.launch.services import filesystem
from replay.errors import ReplayError

RAW_THREADS = 16
# LMCache 0.5.3 to 0.5.6 read with 4 threads (`disk_io_threads` in v1/storage_backend/local_disk_backend.py).
CACHE_THREADS = 4
_RAW_READ = 4 << 20


@dataclass(frozen=True)
class Disk:
    """A measured folder. Rates are GB/s (10^9 bytes), cold reads where the system lets go of its page cache."""

    path: str
    filesystem: str | None
    free_gib: float
    raw_gbps: float
    """All data read by 16 threads, past the page cache (O_DIRECT) where the file system allows it."""
    direct: bool
    """Whether the raw figure is past the page cache; false: it may be memory speed."""
    cache_gbps: float
    """The same files read whole, by 4 threads into new buffers, as LMCache does."""
    write_gbps: float
    """Written and synced, one thread."""
    chunk_bytes: int
    """Size of a file."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure(folder: Path, *, chunk_bytes: int = 36 << 20, total_bytes: int = 512 << 20) -> Disk:
    """Writes about `total_bytes` in chunk files, reads them back cold, and removes them.

    Args:
        folder: where the tier would be.
        chunk_bytes: size of one file; 36 MiB are 256 tokens of Qwen3-8B in BF16.
        total_bytes: data to write; at least 4 chunks, at most a tenth of what is free.

    Raises:
        ReplayError: there is no such folder, it cannot be written, or has too little room.
    """
    if not folder.exists():  # made here, it would lie on another disk than the one that is not mounted
        raise ReplayError(f"{folder}: no such folder; make it, on the disk that is to be measured, or name another")
    try:
        free = shutil.disk_usage(folder).free
        count = max(CACHE_THREADS, min(total_bytes, free // 10) // chunk_bytes)
        if count * chunk_bytes > free:
            raise ReplayError(f"{folder}: {free / 2**30:.1f} GiB free, too little to measure; name another folder")
        work = Path(tempfile.mkdtemp(prefix="replay-disk-", dir=folder))
    except OSError as error:
        raise ReplayError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
    try:
        files, write_s = _write(work, count, chunk_bytes)
        direct = _takes_direct(files[0])
        raw = _rate(files, RAW_THREADS, lambda path: _read_raw(path, direct))
        cache = _rate(files, CACHE_THREADS, lambda path: _read_whole(path, chunk_bytes))
    except OSError as error:
        raise ReplayError(f"{folder}: measuring failed ({error.strerror}); name another folder") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Disk(
        path=str(folder),
        filesystem=filesystem(folder),
        free_gib=round(free / 2**30, 1),
        raw_gbps=raw,
        direct=direct,
        cache_gbps=cache,
        write_gbps=round(count * chunk_bytes / write_s / 1e9, 3),
        chunk_bytes=chunk_bytes,
    )


def _write(work: Path, count: int, size: int) -> tuple[list[Path], float]:
    noise = os.urandom(size)  # nothing that a disk or hypervisor could store as zeros
    files = [work / f"chunk-{index}" for index in range(count)]
    begin = time.perf_counter()
    for index, path in enumerate(files):
        with path.open("wb") as file:
            file.write(index.to_bytes(8, "little") + noise[8:])
            file.flush()
            os.fsync(file.fileno())
    return files, time.perf_counter() - begin


def _rate(files: list[Path], threads: int, read: Callable[[Path], int]) -> float:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, files))
    return round(total / (time.perf_counter() - begin) / 1e9, 3)


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):  # refused by tmpfs; unknown outside Linux
        return False
    return True


def _read_raw(path: Path, direct: bool) -> int:
    handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffer = mmap.mmap(-1, _RAW_READ)  # page-aligned, as O_DIRECT demands
    total = 0
    try:
        while got := os.preadv(handle, [buffer], total):
            total += got
    finally:
        os.close(handle)
        buffer.close()
    return total


def _read_whole(path: Path, size: int) -> int:
    buffer = bytearray(size)
    with path.open("rb") as file:
        return file.readinto(buffer)
