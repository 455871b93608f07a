"""Block references a second of the LRU kernel for one capacity, beside a pure-Python LRU of the same semantics.

    python benchmarks/cache_kernel.py [--corpus DIR] [--traces N] [--capacity TOKENS]

Two workloads: synthetic chains (sessions that append to their prompt, interleaved), and the hash ids of
`claude-code-blocks` traces, in order of time, where the corpus is there. The Python LRU is an `OrderedDict`
run over a part of the workload, in the same process. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from replay.engine.lru import serial_hits

Workload = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]


def chains(sessions: int = 200, turns: int = 60, first: int = 1500, append: int = 55, seed: int = 0) -> Workload:
    """Sessions whose every prompt is the one before and `append` more blocks, in random order of turns."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(np.repeat(np.arange(sessions), turns))
    longest = first + turns * append
    done = np.zeros(sessions, np.int64)
    prompts = []
    for session in order:
        length = first + done[session] * append
        done[session] += 1
        prompts.append(np.arange(length, dtype=np.int32) + np.int32(session * longest))
    return np.concatenate(prompts), np.cumsum([len(prompt) for prompt in prompts])


def claude_code(corpus: Path, traces: int) -> Workload:
    """Hash ids of the first traces, each trace's ids apart from the others', requests in order of time."""
    requests: list[tuple[float, npt.NDArray[np.int32]]] = []
    given = 0
    for path in sorted((corpus / "claude-code-blocks" / "traces").glob("*.json.xz"))[:traces]:
        trace = json.loads(lzma.decompress(path.read_bytes()))
        ids: dict[int, int] = {}
        for at, hashes in _requests(trace["requests"]):
            requests.append((at, np.array([given + ids.setdefault(h, len(ids)) for h in hashes], np.int32)))
        given += len(ids)
    requests.sort(key=lambda request: request[0])
    prompts = [ids for _, ids in requests]
    return np.concatenate(prompts), np.cumsum([len(prompt) for prompt in prompts])


def _requests(rows: list[dict], base: float = 0.0):  # type: ignore[no-untyped-def, type-arg]
    for row in rows:
        at = row.get("t") or base
        if "requests" in row:
            yield from _requests(row["requests"], at)
        elif row.get("hash_ids"):
            yield at, row["hash_ids"]


def python_lru(ids: npt.NDArray[np.int32], ends: npt.NDArray[np.int64], capacity: int) -> list[int]:
    """The same hits from an `OrderedDict`, oldest first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits, start = [], 0
    for end in ends.tolist():
        prompt = ids[start:end].tolist()
        start = end
        hit = next((place for place, block in enumerate(prompt) if block not in cache), len(prompt))
        hits.append(hit)
        for block in reversed(prompt):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def measure(name: str, workload: Workload, capacity: int, repeats: int = 5) -> float:
    """Prints and returns block references a second, in millions: the median of `repeats` runs."""
    ids, ends = workload
    serial_hits(ids[:10], np.array([10]), 5)
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        hits = serial_hits(ids, ends, capacity)
        times.append(time.process_time() - begin)
    rate = len(ids) / float(np.median(times)) / 1e6
    part = int(np.searchsorted(ends, min(len(ids), 4_000_000)))
    begin = time.process_time()
    slow = python_lru(ids[: ends[part - 1]], ends[:part], capacity)
    slow_rate = int(ends[part - 1]) / (time.process_time() - begin) / 1e6
    if slow != hits[:part].tolist():
        raise SystemExit(f"{name}: the kernel and the Python LRU disagree")
    share = hits.sum() / len(ids)
    print(
        f"{name}: {len(ends):,} requests, {len(ids):,} block references, capacity {capacity:,} blocks, hit share "
        f"{share:.1%}: {rate:.0f} M refs/s (slowest {len(ids) / max(times) / 1e6:.0f}), OrderedDict {slow_rate:.2f} M "
        f"refs/s, {rate / slow_rate:.0f} times"
    )
    return rate


def main() -> None:
    """Runs both workloads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=Path(__file__).parents[2] / "shared" / "corpus")
    parser.add_argument("--traces", type=int, default=100)
    parser.add_argument("--capacity", type=int, default=6_400_000, help="tokens")
    args = parser.parse_args()
    measure("synthetic chains", chains(), args.capacity // 64)
    if (args.corpus / "claude-code-blocks").exists():
        measure("claude-code-blocks", claude_code(args.corpus, args.traces), args.capacity // 64)
    else:
        print(f"claude-code-blocks: {args.corpus} is not there")


if __name__ == "__main__":
    main()
