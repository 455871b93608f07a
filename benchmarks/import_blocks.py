"""Times the import of block-hash traces: python benchmarks/import_blocks.py FOLDER_OR_FILE...

Prints wall and CPU seconds, peak memory, turns and prompt tokens. Goal: 465 files (31.6k requests,
58 M block ids) in at most 60 s on two cores.
"""

from __future__ import annotations

import resource
import sys
import time

from replay.trace import Trace
from replay.trace.importers import load


def main(sources: list[str]) -> None:
    """Imports `sources` and prints what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = load(sources)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    trace = Trace(result.header, result.turns)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{wall:.1f} s wall, {cpu:.1f} s CPU, {peak:.0f} MiB peak: {trace!r}, {trace.prompt_tokens:,} prompt tokens")
    for note in result.notes:
        print(f"  {note}")


if __name__ == "__main__":
    main(sys.argv[1:])
