"""Time to compare two runs of N rows: ``python benchmarks/compare_rows.py [N]``. Prints seconds and memory."""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from replay.results import Store
from replay.results.compare import compare

_SQL = """
INSERT INTO requests BY NAME
SELECT
  $run AS run_id, 's' || i // 40 AS session, i % 40 AS turn, i % 40 AS position, 'tool' AS cause,
  exp(u * 12 - 3) AS pause, i / 50 AS due, due AS sent, sent + 0.05 + v * $slower AS first_byte,
  first_byte AS first_token, first_token + u * 9 AS last_token, last_token AS closed, 'ok' AS status,
  120000 + (v * 50000)::BIGINT AS prompt_tokens, prompt_tokens AS planned_tokens,
  1 + (u * 900)::BIGINT AS output_tokens, prompt_tokens - 900 AS ideal_tokens,
  (u * 60000)::BIGINT AS gpu_tokens, (v * 30000)::BIGINT AS cpu_tokens,
  prompt_tokens - gpu_tokens - cpu_tokens AS computed_tokens,
  computed_tokens - 900 AS lost_evicted, 'cpu' AS served_from, 'simulated' AS tier_source,
  v * 5 AS recompute_s, u AS load_s
FROM (SELECT i, hash(i) % 9973 / 9973 AS u, hash(i + 1) % 9967 / 9967 AS v FROM range($rows) AS numbers(i))
"""


def main() -> None:
    """Writes two runs and compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.duckdb"
        with Store.create_or_open(path) as store:
            for name, slower in (("a", 3.0), ("b", 3.1)):
                run = store.begin_run({"name": name, "backend": "vllm", "target": "sim", "simulated": True})
                with store.reader() as con:
                    con.execute(_SQL, {"run": run, "rows": rows, "slower": slower})
                store.finish_run(run, duration_s=3600.0)
        started, spent = time.perf_counter(), time.process_time()
        found = compare(path, ["a", "b"])
        took, cpu = time.perf_counter() - started, time.process_time() - spent
    cell = found.runs[0].metrics["ttft_p50"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"compared two runs of {rows:,} rows: {took:.2f} s ({cpu:.2f} s of CPU), peak memory {peak:,.0f} MiB")
    print(f"TTFT p50 {cell.a:.3f} and {cell.b:.3f} s, difference {cell.low:.4f} to {cell.high:.4f} s: {cell.verdict}")


if __name__ == "__main__":
    main()
