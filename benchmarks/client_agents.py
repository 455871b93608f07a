"""What a whole run costs the client: ``python benchmarks/client_agents.py [TRACE.jsonl] [--peer COMMAND...]``.

Replays agent sessions, 20 at once with their pauses removed, through the command line against an instant
server with 100 streamed events a reply, every row stored. Prints CPU per request (start-up, report and
results file included), the time until the first request, and peak memory, each against its goal. After
``--peer`` comes the command of another load generator to run against the same server in the same way, with
``{url}`` where the server's address belongs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORT = 18_600
GOALS = {"cpu_ms_per_request": 5.0, "first_request_s": 1.0, "peak_gb": 0.3}


def measure(command: list[str], port: int) -> dict[str, float]:
    """Runs a command to its end and measures its process tree: CPU seconds of all that ended, largest memory of one."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/log"):
        pass  # empties the log
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        said = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/log") as reply:
        rows = json.load(reply)
    if not rows:
        raise SystemExit(f"no request arrived (exit code {child.returncode}): {said.decode()[-500:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "requests": len(rows),
        "cpu_ms_per_request": cpu / len(rows) * 1e3,
        "first_request_s": min(row[1] for row in rows) - started,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
        "wall_s": wall,
        "body_mb_per_request": sum(row[4] for row in rows) / len(rows) / 1e6,
    }


def main() -> None:
    """Prints a line a client; a ratio of 1 or more meets the goal."""
    arguments, _, peer = " ".join(sys.argv[1:]).partition("--peer")
    trace = arguments.strip() or str(ROOT / "traces" / "claude_code.jsonl")
    url = f"http://127.0.0.1:{PORT}"
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("client_null_server.py")), str(PORT), "100"]
    )
    try:
        time.sleep(1.0)
        with tempfile.TemporaryDirectory() as folder:
            ours = [sys.executable, "-m", "replay", "run", trace, "--backend", "vllm", "--target", url]
            ours += ["--speed", "1e9", "--concurrency", "20", "--outputs", "recorded", "--db", f"{folder}/runs.duckdb"]
            found = measure(ours, PORT)
        ratios = ", ".join(f"{name} {goal / found[name]:.2f}x of goal {goal:g}" for name, goal in GOALS.items())
        print("replay:", json.dumps({k: round(v, 3) for k, v in found.items()}), f"[{ratios}]", flush=True)
        if peer:
            other = measure([word.format(url=url) for word in peer.split()], PORT)
            ratios = ", ".join(f"{name} {other[name] / found[name]:.2f}x ours" for name in GOALS)
            print("peer:  ", json.dumps({k: round(v, 3) for k, v in other.items()}), f"[{ratios}]")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
