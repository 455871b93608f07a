"""What a client command costs: CPU and memory of its whole process tree, beside what the null server saw of it."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_SUBREAPER = 36
"""Linux's PR_SET_CHILD_SUBREAPER: processes that a client leaves behind become ours, so that their CPU counts."""
_POLL_S = 0.02
_MEMORY_EVERY = 10
_LIMIT_S = 300


@dataclass
class Seen:
    """A row of the server's log. Times are the machine's monotonic clock, in seconds."""

    name: str
    """The request's id header; empty without one."""
    head: float
    """The request's head was read."""
    body: float
    """Its body was read."""
    wrote: float
    """Just before the first byte of the answer was written."""
    size: int
    """Bytes of the body."""


@dataclass
class Measured:
    """One run of a command."""

    requests: list[Seen]
    cpu_s: float
    """CPU of all its processes, from start to end."""
    cpu_before_s: float
    """The part of it that was used when the first request arrived, to 20 ms."""
    first_request_s: float
    """Time from the command's start to the first request's arrival."""
    peak_gb: float
    """Largest sum of its processes' memory, shared pages counted once (PSS), sampled five times a second."""
    wall_s: float
    server_cpu_s: float
    said: str

    @property
    def sending_s(self) -> float:
        """From the first request's arrival to the last answer."""
        return max(seen.wrote for seen in self.requests) - min(seen.head for seen in self.requests)


class NullServer:
    """A null server in a process of its own; a context manager."""

    def __init__(self, port: int, chunks: int, *, split: bool = False):
        script = Path(__file__).with_name("client_null_server.py")
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._command = [sys.executable, str(script), str(port), str(chunks), *(["--split"] if split else [])]

    def __enter__(self) -> NullServer:
        self._process = subprocess.Popen(self._command)
        for _ in range(200):
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            try:
                self.ask("/count")
                return self
            except OSError:
                time.sleep(0.05)
        raise SystemExit("the null server did not start")

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, path: str) -> Any:
        """The JSON at a path."""
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())


def measure(command: list[str], server: NullServer, env: Mapping[str, str] = MappingProxyType({})) -> Measured:
    """Runs a command that sends to the server, to its end.

    Raises:
        SystemExit: it failed, sent nothing, or took longer than five minutes.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    server.ask("/log")  # empties it
    cpu_before, server_before = _reaped_cpu(), server.ask("/count")
    with tempfile.TemporaryFile("w+") as output:
        started = time.monotonic()
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env})
        first_cpu, peak, polls = None, 0, 0
        while child.poll() is None:
            if first_cpu is None and server.ask("/count")[0] > server_before[0]:
                first_cpu = _reaped_cpu() - cpu_before + sum(map(_cpu, _tree()))
            if polls % _MEMORY_EVERY == 0:
                peak = max(peak, sum(map(_memory, _tree())))
            polls += 1
            time.sleep(_POLL_S)
            if time.monotonic() > started + _LIMIT_S:
                child.kill()
        wall = time.monotonic() - started
        _reap_all()
        output.seek(0)
        said = output.read()
    rows = [Seen(*row) for row in server.ask("/log")]
    if not rows or child.returncode:
        raise SystemExit(f"{command[:4]} ended with {child.returncode} after {len(rows)} requests:\n{said[-2000:]}")
    first = min(row.head for row in rows) - started
    cpu, server_cpu = _reaped_cpu() - cpu_before, server.ask("/count")[1] - server_before[1]
    return Measured(rows, cpu, first_cpu or 0.0, first, peak / 1e9, wall, server_cpu, said)


def _reaped_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _reap_all() -> None:
    """Waits for what the command left behind; the null server stays."""
    while _tree():
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(_POLL_S)


def _tree() -> list[int]:
    """Our descendants, without the null server."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(process.name))
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(process.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if "client_null_server" not in _read(f"/proc/{pid}/cmdline"):
                found.append(pid)
                waiting.append(pid)
    return found


def _cpu(pid: int) -> float:
    """Seconds, its ended children included."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / _TICKS if fields else 0.0


def _memory(pid: int) -> int:
    lines = _read(f"/proc/{pid}/smaps_rollup").splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _stat(pid: int) -> list[str] | None:
    text = _read(f"/proc/{pid}/stat")
    return text[text.rindex(")") + 2 :].split() if text else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
