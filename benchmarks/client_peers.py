"""Our command line beside other load generators, against an instant server, in one run.

    python benchmarks/client_peers.py [WORK...] [--corpus FOLDER] [--aiperf COMMAND] [--vllm PYTHON]

agents  20 recorded Claude Code sessions (1,220 requests, 93k tokens a prompt) at once, pauses removed, 100 streamed
        events a reply: CPU and time of the whole command, memory. Needs ``--corpus``, the folder ``traces`` of
        kv-cache-tester (JSON or .json.xz).
small   prompts of 128 tokens, 8 events, 64 at once: requests/s and CPU.
timed   800 requests a second of 512 tokens: how late each arrives at the server, after its time in the trace.
pauses  20 sessions of four requests, 5 s of pause before each but the first: cores used meanwhile, and how much longer
        than 15 s it takes.
long    prompts of 128k tokens, 100 events, alone and 16 at once: what the client adds to TTFT, which is its own TTFT
        less the server's time from reading the head of the request to writing the first byte of the answer.

All of them unless some are named. CPU is that of a client's whole process tree, user and system, from start to end,
data preparation and results included. ``--aiperf`` names the command of AIPerf, ``--vllm`` an interpreter that has
vLLM; the tokenizer they need is made here. Linux only.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from contenders import AIPerf, Bare, Client, Fixed, Job, Replay, Vllm
from meter import Measured, NullServer, measure

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engines"))
import tiny_model

WORK = ("agents", "small", "timed", "pauses", "long")
PORT = 20_000
PAUSE_S = 5.0
GOALS = {
    "agents": {"CPU ms/request": 5.0, "first request s": 1.0, "peak GB": 0.3},
    "small": {"requests/s": 5_000.0, "CPU ms/request, sending": 0.25},
    "timed": {"late ms p99": 3.0},
    "pauses": {},
    "long, 1 at once": {"added ms p50": 1.0},
    "long, 16 at once": {"added ms p50": 10.0},
}
Figures = dict[str, float]


def agents(done: Measured, job: Job) -> Figures:
    """What a whole run costs."""
    count = len(done.requests)
    return {
        "requests": count,
        "CPU ms/request": done.cpu_s / count * 1e3,
        "first request s": done.first_request_s,
        "wall s": done.wall_s,
        "peak GB": done.peak_gb,
        "MB/request": sum(seen.size for seen in done.requests) / count / 1e6,
    }


def small(done: Measured, job: Job) -> Figures:
    """Rate and CPU, without and with the start."""
    count = len(done.requests)
    return {
        "requests": count,
        "requests/s": (count - 1) / done.sending_s,
        "CPU ms/request, sending": (done.cpu_s - done.cpu_before_s) / count * 1e3,
        "CPU ms/request, all": done.cpu_s / count * 1e3,
        "server CPU ms/request": done.server_cpu_s / count * 1e3,
        "peak GB": done.peak_gb,
    }


def timed(done: Measured, job: Job, trace: Path) -> Figures:
    """Lateness against the trace, the earliest request being on time."""
    due = [json.loads(line)["timestamp"] / 1e3 for line in trace.read_text().splitlines()]
    arrived = sorted(seen.head for seen in done.requests)
    late = [at - when for at, when in zip(arrived, due, strict=True)]
    late = sorted(each - min(late) for each in late)
    count = len(late)
    return {
        "requests": count,
        "late ms p50": _percentile(late, 50),
        "late ms p99": _percentile(late, 99),
        "late ms max": late[-1] * 1e3,
        "CPU ms/request, sending": (done.cpu_s - done.cpu_before_s) / count * 1e3,
    }


def paused(done: Measured, job: Job) -> Figures:
    """What waiting costs."""
    return {
        "requests": len(done.requests),
        "cores": (done.cpu_s - done.cpu_before_s) / done.sending_s,
        "longer by ms": (done.sending_s - 3 * PAUSE_S) * 1e3,
    }


def long(done: Measured, job: Job) -> Figures:
    """TTFT as the client tells it, and its own part."""
    assert job.times is not None
    told = job.times()
    pairs = [(told.get(seen.name, told.get(seen.name.partition("-")[2])), seen) for seen in done.requests]
    known = [(ttft, ttft - (seen.wrote - seen.head)) for ttft, seen in pairs if ttft is not None]
    if len(known) < len(pairs):
        raise SystemExit(f"{len(pairs) - len(known)} of {len(pairs)} requests without a TTFT")
    added = [own for _, own in known]
    return {
        "requests": len(known),
        "added ms p50": _percentile(added, 50),
        "added ms p90": _percentile(added, 90),
        "TTFT ms p50": _percentile([ttft for ttft, _ in known], 50),
    }


def _percentile(seconds: list[float], percent: int) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * percent // 100)] * 1e3


def pick(corpus: Path, folder: Path) -> Path:
    """Twenty sessions of 10 to 150 requests up to 180k tokens, two of them with sub-agents, as plain JSON."""
    found = []
    for path in sorted(corpus.glob("*.json*")):
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as stream:
            trace = json.load(stream)
        requests = list(_requests(trace))
        if 10 <= len(requests) <= 150 and max(request["in"] for request in requests) <= 180_000:
            nested = any(request.get("type") == "subagent" for request in trace["requests"])
            found.append((path.name.split(".")[0], nested, trace))
    flat = [(name, trace) for name, nested, trace in found if not nested]
    if len(flat) < 18:
        raise SystemExit(f"--corpus {corpus}: no kv-cache-tester traces there, or too few")
    chosen = random.Random(7).sample(flat, 18) + [(name, trace) for name, nested, trace in found if nested][:2]
    for name, trace in chosen:
        (folder / f"{name}.json").write_text(json.dumps(trace))
    return folder


def _requests(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for request in trace["requests"]:
        if request.get("type") == "subagent":
            yield from _requests(request)
        else:
            yield request


def compare(
    title: str,
    clients: list[Client],
    job: Callable[[Client, str], Job | None],
    read: Callable[[Measured, Job], Figures],
    *,
    chunks: int,
    split: bool = False,
    absent: list[str],
) -> None:
    """Does one kind of work with every client and prints a table."""
    rows: dict[str, Figures | str] = {}
    port = PORT + random.randrange(2_000)
    for number, client in enumerate(clients):
        print(f"{title}: {client.name}", file=sys.stderr, flush=True)
        with NullServer(port + number, chunks, split=split) as server:
            asked = job(client, server.url)
            if asked is None:
                rows[client.name] = "cannot do this"
                continue
            figures = read(measure(asked.command, server, asked.env), asked)
        if asked.stored is not None and asked.stored() != figures["requests"]:
            raise SystemExit(f"{client.name}: {asked.stored()} rows for {figures['requests']} requests")
        rows[client.name] = figures
    show(title, rows | dict.fromkeys(absent, "not installed"))


def show(title: str, rows: dict[str, Figures | str]) -> None:
    """Prints a table, the figures of others with their ratio to ours, and ours against the goals."""
    ours = rows["replay"]
    assert not isinstance(ours, str)
    goals = GOALS[title]
    print(f"\n{title}\n\n| client | {' | '.join(ours)} |\n| --- |" + " ---: |" * len(ours))
    for name, figures in rows.items():
        cells = [figures] if isinstance(figures, str) else [_cell(n, v, ours[n]) for n, v in figures.items()]
        print(f"| {name} | {' | '.join(cells)} |")
    print("| goal | " + " | ".join(f"{goals[name]:,g}" if name in goals else "" for name in ours) + " |\n")
    for name, goal in goals.items():
        ratio = ours[name] / goal if name == "requests/s" else goal / ours[name]
        print(f"{title}: {name} {ratio:.2f}x of the goal")
    sys.stdout.flush()


def _cell(name: str, value: float, ours: float) -> str:
    text = f"{value:,.0f}" if name in ("requests", "requests/s") else f"{value:,.2f}"
    return text if value == ours or name in ("requests", "MB/request") or not ours else f"{text} ({value / ours:.1f}x)"


def main() -> None:
    """Prints a table for each kind of work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*", metavar="WORK", help=", ".join(WORK))
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--aiperf", metavar="COMMAND")
    parser.add_argument("--vllm", metavar="PYTHON")
    given = parser.parse_args()
    wanted = given.work or WORK
    if unknown := set(wanted) - set(WORK):
        parser.error(f"no such work: {', '.join(unknown)}; there is {', '.join(WORK)}")
    given.aiperf, given.vllm = (where and shutil.which(where) for where in (given.aiperf, given.vllm))
    load = "/".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores, load {load} before. In brackets: times ours.", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model.make(folder / "tokenizer")
        _run(wanted, given, folder)


def _run(wanted: Collection[str], given: argparse.Namespace, folder: Path) -> None:
    home, tokenizer = folder / "aiperf", folder / "tokenizer"
    ours: list[Client] = [Replay(folder)]
    two: list[Client] = [Replay(folder, "--workers", "2")]
    peers: list[Client] = [Bare(folder)]
    if given.aiperf:
        peers.append(AIPerf(home, given.aiperf, tokenizer))
    if given.vllm:
        peers.append(Vllm(folder, given.vllm, tokenizer))
    absent = [name for name, where in (("AIPerf", given.aiperf), ("vllm bench serve", given.vllm)) if not where]
    if "agents" in wanted and given.corpus:
        (folder / "agents").mkdir()
        traces = pick(given.corpus, folder / "agents")
        first: list[Client] = [AIPerf(home, given.aiperf, tokenizer, cold=True)] if given.aiperf else []
        clients = [Replay(folder, imports=True), *ours, *two, *first, *peers]
        compare("agents", clients, lambda c, url: c.agents(url, traces), agents, chunks=100, absent=absent)
    elif "agents" in wanted:
        print("\nagents: skipped, no --corpus")
    if "small" in wanted:
        short = Fixed(8_000, 128, 64, 8)
        compare("small", ours + two + peers, lambda c, url: c.fixed(url, short), small, chunks=8, absent=absent)
    if "timed" in wanted:
        trace = arrivals(folder / "timed.jsonl", 4_000, 800.0)
        late = partial(timed, trace=trace)
        compare("timed", ours + peers, lambda c, url: c.timed(url, trace), late, chunks=8, absent=absent)
    if "pauses" in wanted:
        slow = slow_sessions(folder / "pauses")
        clients = [Replay(folder, imports=True), *peers]
        clients[0].name = "replay"
        compare("pauses", clients, lambda c, url: c.agents(url, slow, pauses=True), paused, chunks=8, absent=absent)
    for concurrency in (1, 16) if "long" in wanted else ():
        work = Fixed(4 * max(concurrency, 8), 128_000, concurrency, 100)
        ask = partial(_fixed, work=work)
        clients = ours + (two if concurrency > 1 else []) + peers
        compare(f"long, {concurrency} at once", clients, ask, long, chunks=100, split=True, absent=absent)


def _fixed(client: Client, url: str, work: Fixed) -> Job | None:
    return client.fixed(url, work)


def slow_sessions(folder: Path) -> Path:
    """Writes sessions with pauses as kv-cache-tester JSON files."""
    folder.mkdir()
    for session in range(20):
        blocks = [100 + session + turn for turn in range(4)]
        requests = [
            {
                "t": turn * PAUSE_S,
                "type": "s",
                "model": "m",
                "in": 64 * count,
                "out": 8,
                "api_time": 0.0,
                "hash_ids": list(range(count)),
                "think_time": PAUSE_S if turn else 0.0,
                "stop": "",
            }
            for turn, count in enumerate(blocks)
        ]
        trace = {"id": f"pauses-{session}", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
        trace |= {"tool_tokens": 0, "system_tokens": 0, "requests": requests}
        (folder / f"{session:02}.json").write_text(json.dumps(trace))
    return folder


def arrivals(path: Path, count: int, rate: float) -> Path:
    """Writes a Mooncake trace of Poisson arrivals, `rate` a second, of 512 tokens each."""
    draw, at = random.Random(1), 0.0
    with path.open("w") as file:
        for number in range(count):
            at += draw.expovariate(rate)
            row = {"timestamp": round(at * 1e3), "input_length": 512, "output_length": 8, "hash_ids": [number]}
            file.write(json.dumps(row) + "\n")
    return path


if __name__ == "__main__":
    main()
