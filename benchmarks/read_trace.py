"""Time and memory of reading a trace of 50,000 turns with prompts around 120,000 tokens.

    python benchmarks/read_trace.py [--turns 50000]

Prints seconds and peak memory of `replay.trace.read` (parse, check, link), beside `json.loads` of the
same lines, which any reader of JSON Lines pays at least.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from replay.trace import Header, Turn, read, write
from replay.trace.model import FORMAT, VERSION

TURNS_PER_SESSION = 100


def turns(count: int) -> Iterator[Turn]:
    """Sessions that start at 65,300 tokens and append 857 tokens a turn, answered with 252."""
    for number in range(count):
        session, turn = divmod(number, TURNS_PER_SESSION)
        first = turn == 0
        new = (f"s{session}.{turn}", 53_000 if first else 857)
        yield Turn(
            session=f"s{session}",
            turn=turn,
            at=float(session) if first else None,
            pause=0.0 if first else 0.3,
            append=[("tools", 12_300), new] if first else [new],
            output=252,
            cause="start" if first else "tool",
        )


def peak_mib() -> float:
    """Peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50_000)
    count = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write(path, Header(format=FORMAT, version=VERSION, name="benchmark"), turns(count))
        before = peak_mib()
        start = time.perf_counter()
        trace = read(path)
        reading = time.perf_counter() - start
        memory = peak_mib() - before
        start = time.perf_counter()
        with path.open("rb") as lines:
            for line in lines:
                json.loads(line)
        plain = time.perf_counter() - start
        mean = trace.prompt_tokens / len(trace)
        print(f"{len(trace):,} turns, {mean:,.0f} prompt tokens on average, {path.stat().st_size / 2**20:.1f} MiB")
        print(f"read          {reading:6.2f} s   {memory:6.0f} MiB more")
        print(f"json.loads    {plain:6.2f} s   (ratio {reading / plain:.1f})")


if __name__ == "__main__":
    main()
