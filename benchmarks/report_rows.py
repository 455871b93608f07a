"""Time to write and to report a run of N rows: ``python benchmarks/report_rows.py [N]``.

Prints seconds for one million rows (or N) and the ratio to the three seconds that a report may take.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import polars as pl

from replay.results import Store
from replay.results.render import text
from replay.results.report import report

LIMIT_S = 3.0
_SQL = """
INSERT INTO requests BY NAME
SELECT
  $run AS run_id, 's' || i // 40 AS session, i % 40 AS turn, i % 40 AS position, 'tool' AS cause,
  exp(u * 12 - 3) AS pause, i / 50 AS due, due AS sent, sent + 0.05 + v * 3 AS first_byte,
  first_byte AS first_token, first_token + u * 9 AS last_token, last_token AS closed, 'ok' AS status,
  120000 + (v * 50000)::BIGINT AS prompt_tokens, prompt_tokens AS planned_tokens,
  1 + (u * 900)::BIGINT AS output_tokens, prompt_tokens - 900 AS ideal_tokens,
  (u * 60000)::BIGINT AS gpu_tokens, (v * 30000)::BIGINT AS cpu_tokens, (u * 20000)::BIGINT AS disk_tokens,
  prompt_tokens - gpu_tokens - cpu_tokens - disk_tokens AS computed_tokens,
  200 AS lost_granularity, computed_tokens - 900 - 200 AS lost_evicted,
  ['gpu', 'cpu', 'disk', 'none'][1 + i % 4] AS served_from, 'simulated' AS tier_source,
  v * 5 AS recompute_s, u AS load_s
FROM (SELECT i, hash(i) % 9973 / 9973 AS u, hash(i + 1) % 9967 / 9967 AS v FROM range($rows) AS numbers(i))
"""


def main() -> None:
    """Writes the rows and reads the report, each timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="?", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.duckdb"
        with Store.create_or_open(path) as store:
            run_id = store.begin_run({"backend": "vllm", "target": "sim", "simulated": True})
            reader = store.reader()
            reader.execute(_SQL, {"run": run_id, "rows": rows})
            sample = pl.DataFrame(reader.sql("SELECT * EXCLUDE (run_id) FROM requests LIMIT 100000")).to_dicts()
            reader.close()
            other = store.begin_run({"backend": "vllm", "target": "sim", "simulated": True})
            started = time.perf_counter()
            for row in sample:
                store.add(row, run_id=other)
            store.flush()
            took = time.perf_counter() - started
            print(f"added {len(sample):,} rows one by one: {len(sample) / took:,.0f} rows/s")
            started = time.perf_counter()
            store.finish_run(run_id, duration_s=3600.0)
            print(f"finished the run and judged it: {time.perf_counter() - started:.2f} s")
        started = time.perf_counter()
        shown = text(report(path, run_id))
        took = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"reported {rows:,} rows: {took:.2f} s, {took / LIMIT_S:.2f} of the {LIMIT_S:g} s allowed")
    print(f"{len(shown.splitlines())} lines shown, peak memory {peak:,.0f} MiB")


if __name__ == "__main__":
    main()
