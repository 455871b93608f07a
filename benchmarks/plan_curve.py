"""The exact hit curve of all Claude Code block traces: time, and hits against independently computed ones.

    python benchmarks/plan_curve.py TRACES_DIR

TRACES_DIR holds ``trace_*.json.xz`` of kv-cache-tester (465 files, 31,722 requests, 3.7 G prompt tokens).
Trace k starts at 30 k seconds and requests are sent at their recorded times; only full blocks of 64 tokens
count, ids are scoped to their trace and outputs are not inserted. Reading takes far longer than the curve.
"""

from __future__ import annotations

import lzma
import resource
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from replay.plan import HitCurve, hit_curve
from replay.trace.tree import Ids

BLOCK = 64
EXPECTED = {1e6: 11_548_524, 5e6: 45_220_707, 50e6: 56_159_406, float("inf"): 56_178_711}
"""Hit blocks by capacity in tokens, from a simulated LRU of each capacity."""


class Entry(msgspec.Struct, gc=False):
    """A request, or a sub-agent with its requests."""

    t: float
    tokens: int = msgspec.field(name="in", default=0)
    hash_ids: list[int] = []
    requests: list[Entry] | None = None


class File(msgspec.Struct, gc=False):
    """One trace."""

    requests: list[Entry]


def read(folder: Path) -> list[tuple[Ids, int]]:
    """Block ids, numbered densely over all traces, and prompt tokens of each request in order of time."""
    found: list[tuple[float, int, Ids, int]] = []
    count = 0
    for number, path in enumerate(sorted(folder.glob("trace_*.json.xz"))):
        requests: list[tuple[float, Entry]] = []
        flatten(msgspec.json.decode(lzma.decompress(path.read_bytes()), type=File).requests, 30.0 * number, requests)
        flat = np.concatenate([np.array(entry.hash_ids, np.int64) for _, entry in requests])
        distinct, inverse = np.unique(flat, return_inverse=True)
        ids = (inverse + count).astype(np.int32)
        count += len(distinct)
        ends = np.cumsum([len(entry.hash_ids) for _, entry in requests])
        for (start, entry), end in zip(requests, ends.tolist(), strict=True):
            found.append((start, number, ids[end - len(entry.hash_ids) : end], entry.tokens))
    found.sort(key=lambda row: row[:2])
    return [(ids, tokens) for _, _, ids, tokens in found]


def flatten(entries: list[Entry], start: float, out: list[tuple[float, Entry]]) -> None:
    """Appends all requests with their time, sub-agents' among them, in the order of the file."""
    for entry in entries:
        if entry.requests is None:
            out.append((start + entry.t, entry))
        else:
            flatten(entry.requests, start + entry.t, out)


def main() -> int:
    """Prints the figures; 1 if a hit count differs."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    begin = time.process_time()
    prompts = read(Path(sys.argv[1]))
    read_s = time.process_time() - begin
    hit_curve(prompts[:1], BLOCK)  # compiles
    begin = time.process_time()
    curve: HitCurve = hit_curve(prompts, BLOCK)
    curve_s = time.process_time() - begin
    references = sum(len(ids) for ids, _ in prompts)
    print(f"{len(prompts):,} requests, {references:,} block references, {len(curve.blocks) - 1:,} distinct blocks")
    print(f"reading {read_s:.1f} s of CPU; curve {curve_s:.2f} s ({references / curve_s / 1e6:.0f} M references/s)")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    wrong = 0
    for capacity, expected in EXPECTED.items():
        found = curve.hit_blocks(min(capacity, 1e15))
        wrong += found != expected
        print(f"{capacity / 1e6:>6g} M tokens: {found:>12,} hit blocks, expected {expected:,}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
