"""Times a whole run on the engine model: python benchmarks/engine_speed.py TRACE.jsonl[.zst] [BACKEND...] [--steps]

Replays the trace with 100 live sessions on each backend, in a process of its own, into a results file, as
``replay run TRACE --concurrency 100 --backend BACKEND --target sim`` does; prints CPU and wall seconds, requests
a CPU second and peak memory of that process. ``--steps`` replays the first 2,000 turns twice instead, with
and without taking steps together, prints the ratio of the CPU times, and fails if an answer differs.

Goals, for the 465 traces of claude-code-blocks imported (31,644 turns, 3.7 G prompt tokens) on two cores:
``lmcache-cpu`` in at most 30 s of CPU and 4 GiB, ``lmcache-disk`` in at most 45 s.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SESSIONS = 100
FIRST_TURNS = 2000


def whole(path: str, backend: str) -> None:
    """One stored run; prints what it took."""
    wall = time.perf_counter()
    from replay import runs
    from replay.backends import preset
    from replay.backends.connect import Where
    from replay.load.schedule import Settings
    from replay.results.store import Store
    from replay.trace import read

    trace = read(path)
    with tempfile.TemporaryDirectory() as folder, Store.create_or_open(Path(folder) / "runs.duckdb") as store:
        runs.execute(trace, Where(preset.load(backend)), Settings(concurrency=SESSIONS), store)
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime
    print(
        f"{backend:14} {cpu:6.1f} s CPU {time.perf_counter() - wall:6.1f} s wall {used.ru_maxrss / 2**20:5.2f} GiB "
        f"{len(trace.turns) / cpu:7,.0f} requests a CPU second",
        flush=True,
    )


def answers(path: str, backend: str, skip: bool) -> tuple[float, list[dict[str, Any]]]:
    """CPU seconds and rows of a run of the trace's first turns."""
    from replay.backends import preset
    from replay.backends.connect import Where, connect
    from replay.load import clock
    from replay.load.driver import Driver
    from replay.load.schedule import Schedule, Settings
    from replay.trace import Trace, read

    trace = read(path)
    trace = Trace(trace.header, trace.turns[:FIRST_TURNS])
    rows: list[dict[str, Any]] = []

    async def play() -> None:
        run_clock = clock.RunClock()
        where = Where(preset.load(backend))
        schedule = Schedule(trace, Settings(concurrency=SESSIONS), where.max_context())
        async with connect(where, run_clock, seed=0, outputs="recorded") as sim:
            sim.engine.scheduler.skip = skip  # type: ignore[attr-defined]
            await Driver(schedule, sim, rows.append).run(run_clock)

    began = time.process_time()
    clock.run(play(), virtual=True)
    used = time.process_time() - began
    return used, sorted(rows, key=lambda row: (row["session"], row["turn"]))


def steps(path: str, backend: str) -> None:
    """Compares a run that takes steps together with one that takes each by itself."""
    answers(path, backend, skip=True)  # compiles
    fast, taken = answers(path, backend, skip=True)
    slow, single = answers(path, backend, skip=False)
    differ = sum(
        not (a == b or (isinstance(a, float) and isinstance(b, float) and abs(a - b) < 1e-6))
        for one, other in zip(taken, single, strict=True)
        for a, b in zip(one.values(), other.values(), strict=True)
    )
    print(
        f"{backend:14} {fast:6.1f} s CPU, {slow:6.1f} s step by step, ratio {slow / fast:.1f}; {differ} values differ"
    )
    if differ:
        sys.exit(1)


def main(arguments: list[str]) -> None:
    """Runs what the command line asks for."""
    path, *backends = [each for each in arguments if not each.startswith("--")]
    measure = steps if "--steps" in arguments else whole
    context = multiprocessing.get_context("spawn")
    for backend in backends or ["lmcache-cpu", "lmcache-disk"]:
        process = context.Process(target=measure, args=(path, backend))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main(sys.argv[1:])
