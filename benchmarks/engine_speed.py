"""How fast the engine model is: ``python benchmarks/engine_speed.py [--dynamo PYTHON] [--whole] [--corpus DIR]``.

Without a trace: replays recorded traces into a results file beside NVIDIA Dynamo's offline replay of the same
traces, whose interpreter ``--dynamo`` names (`dynamo_replay.py` says how to install it), prints requests a CPU
second of both and their ratio, and fails if an unlimited cache does not serve the same tokens in both. ``--whole``
adds all of claude-code-blocks, and the goals below, each with what was measured as a ratio to it; minutes.

With a trace: ``engine_speed.py TRACE.jsonl[.zst] [BACKEND...]`` replays that one, with 100 live sessions, on each
backend. ``--steps`` replays its first 2,000 turns twice instead, with and without taking steps together, prints
the ratio of the CPU times, and fails if an answer differs.

Goals, for the 465 traces of claude-code-blocks imported (31,644 turns, 3.7 G prompt tokens) on two cores:
``lmcache-cpu`` in at most 30 s of CPU, ``lmcache-disk`` in at most 45 s, both in 4 GiB; the cache kernel 150 M block
references a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_beside_dynamo import CASES, LEFT_OUT, WHOLE, check, claude_files, compare, warm_up
from engine_run import own_process, spent, stored_run

SESSIONS = 100
FIRST_TURNS = 2000
GOALS = {"lmcache-cpu": 30.0, "lmcache-disk": 45.0}
"""CPU seconds."""
GIB_GOAL = 4.0
KERNEL_GOAL = 150.0
"""Million block references a second."""


def goals(corpus: Path, folder: Path) -> None:
    """Prints what the goals' runs take, and the ratio to each goal."""
    trace = folder / "claude-code-blocks.jsonl.zst"
    cpu, peak = own_process(imported, claude_files(0, corpus), trace)
    print(f"\nAll Claude Code traces, {SESSIONS} live sessions\n  import {cpu:.1f} s CPU, {peak:.2f} GiB")
    for backend, seconds in GOALS.items():
        took = own_process(stored_run, [trace], backend, (), SESSIONS)
        goal = f"{took.cpu_s / seconds:.2f} of the goal of {seconds:.0f} s CPU"
        total = f"{(took.cpu_s + cpu) / seconds:.2f} with the import"
        memory = f"{took.peak_gib / GIB_GOAL:.2f} of {GIB_GOAL:.0f} GiB"
        print(f"  {backend} {took}\n    {goal} ({total}), {memory}")
    rate = own_process(kernel, corpus)
    print(f"  cache kernel {rate:.0f} M references a second, {rate / KERNEL_GOAL:.2f} of the goal of {KERNEL_GOAL:.0f}")


def imported(sources: list[Path], path: Path) -> tuple[float, float]:
    """Imports traces into one file; returns CPU seconds and GiB."""
    from replay.trace import write
    from replay.trace.importers import load

    found = load(sources)
    write(path, found.header, found.turns)
    return spent()


def kernel(corpus: Path) -> float:
    """Million block references a second of the cache kernel, of the first 100 traces."""
    from cache_kernel import claude_code, measure

    return measure("  claude-code-blocks", claude_code(corpus, 100), 100_000)


def answers(path: Path, backend: str, skip: bool) -> tuple[float, list[dict[str, Any]]]:
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


def steps(path: Path, backend: str) -> bool:
    """Compares a run that takes steps together with one that takes each by itself; returns whether they agree."""
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
    return not differ


def corpus_runs(corpus: Path, dynamo: str | None, all_traces: bool) -> bool:
    """The cases beside Dynamo and, of all traces, the goals; returns whether both agree where they must."""
    if dynamo:
        check(dynamo)
    print(f"{LEFT_OUT}\nLoad average {_load()}: it inflates wall times, and CPU times a little.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up(corpus, folder)
        agree = [compare(case, corpus, folder, dynamo) for case in CASES]
        if all_traces:
            goals(corpus, folder)
            agree.append(compare(WHOLE, corpus, folder, dynamo))
    print(f"\nLoad average {_load()}")
    return all(agree)


def _load() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("backends", nargs="*", default=list(GOALS))
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--dynamo", metavar="PYTHON", help="interpreter of an environment that has Dynamo")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--corpus", type=Path, default=Path(__file__).parents[2] / "shared" / "corpus")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if args.trace is None:
        for folder in ("claude-code-blocks", "mooncake"):
            if not (args.corpus / folder).is_dir():
                parser.error(f"--corpus {args.corpus}: no folder {folder} in it")
        sys.exit(not corpus_runs(args.corpus, args.dynamo, args.whole))
    for backend in args.backends:
        if args.steps:
            if not own_process(steps, args.trace, backend):
                sys.exit(1)
        else:
            print(f"{backend:14} {own_process(stored_run, [args.trace], backend, (), SESSIONS)}")


if __name__ == "__main__":
    main()
