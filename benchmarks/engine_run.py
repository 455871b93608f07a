"""One simulated run, stored in a results file and measured in a process of its own."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Measured:
    """What a process took that read a trace and replayed it."""

    requests: int
    """Those that were answered."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens served from any tier."""
    cpu_s: float
    """User and system time of the whole process, its start and the reading of the trace included."""
    replay_s: float
    """Wall time of the replay alone."""
    peak_gib: float

    @property
    def rate(self) -> float:
        """Requests a CPU second."""
        return self.requests / self.cpu_s

    def __str__(self) -> str:
        return (
            f"{self.requests:>7,} requests {self.cpu_s:6.1f} s CPU {self.rate:7,.0f} requests a CPU second, "
            f"{self.peak_gib:5.2f} GiB, {self.cached_tokens / self.prompt_tokens:7.3%} cached, "
            f"replay alone {self.replay_s:5.1f} s of wall"
        )


def own_process(task: Callable[..., Result], *arguments: object) -> Result:
    """What `task` returns, run in a fresh process; ends this one where that one fails."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, task, arguments), daemon=True)
    process.start()
    there.close()
    try:
        result: Result = here.recv()
    except EOFError:  # it has printed why
        process.join()
        sys.exit(process.exitcode or 1)
    process.join()
    return result


def _answer(pipe: Connection, task: Callable[..., object], arguments: tuple[object, ...]) -> None:
    pipe.send(task(*arguments))


def spent() -> tuple[float, float]:
    """CPU seconds and peak memory in GiB of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20


def stored_run(
    sources: Sequence[Path], backend: str, overrides: Sequence[str] = (), concurrency: int | None = None
) -> Measured:
    """Does what ``replay run`` does, on the engine model; foreign logs are imported first.

    Args:
        sources: one trace in the native format, or foreign logs.
        backend: a preset.
        overrides: changes to it, as ``--set`` takes them.
        concurrency: sessions live at once; null: each starts at its recorded time.
    """
    from replay import runs
    from replay.backends import preset
    from replay.backends.connect import Where
    from replay.load.schedule import Settings
    from replay.results import Store
    from replay.results.opened import open_results
    from replay.trace import Trace, read
    from replay.trace.importers import detect, load
    from replay.trace.importers.sources import head

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.duckdb"
        if detect(head(sources[0])):
            imported = load(sources)
            trace = Trace(imported.header, imported.turns)
        else:
            trace = read(sources[0])
        wall = time.perf_counter()
        with Store.create_or_open(path) as store:
            where, settings = Where(preset.load(backend, list(overrides))), Settings(concurrency=concurrency)
            runs.execute(trace, where, settings, store)
        wall = time.perf_counter() - wall
        cpu, peak = spent()
        with open_results(path) as results:
            count, prompt, computed = results.sql(
                "SELECT count(*), sum(prompt_tokens), sum(computed_tokens) FROM requests WHERE status = 'ok'"
            ).fetchall()[0]
    return Measured(count, int(prompt), int(prompt - computed), cpu, wall, peak)
