"""One server process of ours: started in its own session, its log in a file, stopped on every way out."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

# An engine ends in order on SIGTERM; one that hangs in a CUDA call or a lock needs the others.
STOP = ((signal.SIGTERM, 15.0), (signal.SIGINT, 5.0), (signal.SIGKILL, 5.0))
_PROC = Path("/proc")
_SHM = Path("/dev/shm")
_LISTEN = "0A"  # of the kernel's include/net/tcp_states.h, in hexadecimal
_TAIL_BYTES = 256 * 1024
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:\[?[A-Z]+\]? [\d-]+ [\d:.]+(?: \[[^\]]*\])?\s*)?")
_ERROR = re.compile(r"\b(?:\w*Error|\w*Exception|error|fatal|CRITICAL)\b: ?\S")
# vLLM's last line only points at an earlier one.
_EMPTY = re.compile(r"See root cause above|Engine core initialization failed|WorkerProc initialization failed")

# Should replay itself be killed with SIGKILL, the kernel ends its child (prctl's PR_SET_PDEATHSIG = 1).
_LEASH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"

_running: set[Process] = set()
_folders: set[Path] = set()


class Process:
    """A child process and all that it starts, which share a session (``setsid``)."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._shm: set[Path] = set()
        with log.open("ab") as out:
            self._log_begin = out.tell()
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LEASH, *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._child.pid
        _running.add(self)

    @property
    def exit_code(self) -> int | None:
        """Null while the process runs."""
        return self._child.poll()

    def members(self) -> list[int]:
        """Process ids of the session that still run."""
        found = []
        for entry in _PROC.iterdir():
            if entry.name.isdigit():
                try:
                    # After the command in parentheses: state, parent, process group, session.
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                except OSError:  # ended meanwhile
                    continue
                if int(session) == self.pid and state not in "ZX":
                    found.append(int(entry.name))
        return found

    def listens(self, port: int) -> bool:
        """Whether one of its processes listens at a TCP port: what answers there may be something else."""
        sockets = set()
        for table in ("net/tcp", "net/tcp6"):
            with contextlib.suppress(OSError):
                for line in (_PROC / "self" / table).read_text().splitlines()[1:]:
                    # Number, local address, remote address, state, ...; the inode is the tenth field.
                    fields = line.split()
                    if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                        sockets.add(f"socket:[{fields[9]}]")
        return any(_opened(pid) & sockets for pid in self.members())

    def note_shared_memory(self) -> None:
        """Remembers the files in /dev/shm that the processes map, to remove those that a kill leaves."""
        for pid in self.members():
            try:
                maps = (_PROC / str(pid) / "maps").read_text()
            except OSError:
                continue
            self._shm |= {Path(path) for path in re.findall(rf"({_SHM}/\S+)$", maps, re.MULTILINE)}

    def signal(self, number: int) -> None:
        """Sends a signal to every process of the session."""
        for pid in self.members():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def last_error(self) -> str:
        """The line of the log that says best why the process ended."""
        lines = self._lines(_TAIL_BYTES)
        errors = [line for line in lines if _ERROR.search(line) and not _EMPTY.search(line)]
        return (errors or lines or ["it wrote nothing"])[-1][:300]

    def last_line(self) -> str:
        """The newest line of the log, for a progress display."""
        return (self._lines(4096) or [""])[-1]

    def text(self, last_bytes: int | None = None) -> str:
        """What this process wrote to the log, or the end of it; not what earlier ones wrote."""
        size = self.log.stat().st_size
        with self.log.open("rb") as file:
            file.seek(max(self._log_begin, size - last_bytes if last_bytes else 0))
            return file.read().decode(errors="replace")

    def _lines(self, last_bytes: int) -> list[str]:
        lines = map(_plain, self.text(last_bytes).splitlines())
        return [line for line in lines if line]

    def forget(self) -> None:
        """After the end: reaps the child and removes shared memory that it left and no other of ours uses."""
        self._child.poll()
        _running.discard(self)
        for other in _running:
            other.note_shared_memory()
            self._shm -= other._shm
        for path in self._shm:
            path.unlink(missing_ok=True)


def stop(processes: Iterable[Process]) -> None:
    """Ends processes and what they started, all at once; blocks for at most 25 s."""
    left = list(processes)
    for process in left:
        process.note_shared_memory()
    for number, grace in STOP:
        for process in left:
            process.signal(number)
        end = time.monotonic() + grace
        while left and time.monotonic() < end:
            ended = [process for process in left if process.exit_code is not None and not process.members()]
            for process in ended:
                process.forget()
            left = [process for process in left if process not in ended]
            if left:
                time.sleep(0.05)
    for process in left:
        process.forget()


def temporary_folder() -> Path:
    """A new folder, removed with `remove` or at exit. Its path is short: engines put sockets into it."""
    folder = Path(tempfile.mkdtemp(prefix="replay-"))
    _folders.add(folder)
    return folder


def remove(folder: Path) -> None:
    """Removes a temporary folder."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.discard(folder)


@atexit.register
def _stop_all() -> None:
    stop(list(_running))
    for folder in list(_folders):
        remove(folder)


def _opened(pid: int) -> set[str]:
    """What the descriptors of a process stand for."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return found


def _plain(line: str) -> str:
    return _PREFIX.sub("", _ESCAPES.sub("", line)).strip()
