"""NVIDIA Dynamo's offline replay of one trace; `engine_speed.py --dynamo PYTHON` runs this with that interpreter.

Dynamo is kept out of this project's environment. Its own declares packages that are not on PyPI and that the
replay does not need, hence ``--no-deps``:

    python3 -m venv dynamo-env
    dynamo-env/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    dynamo-env/bin/pip install aiohttp msgspec prometheus-client pyzmq tqdm zstandard pydantic uvloop pyyaml

Takes one argument, a JSON object with `file`, `engine` (settings of its engine model) and `options` (of
`run_trace_replay`); prints one JSON object, the fields of `engine_run.Measured`.
"""

from __future__ import annotations

import json
import resource
import sys


def main(job: dict) -> None:  # type: ignore[type-arg]
    """Replays and prints what it took."""
    from dynamo._core import _normalize_mocker_config  # 1.6.1 has no public name for it
    from dynamo.replay import run_trace_replay

    engine = _normalize_mocker_config({"engine": job["engine"]})
    summary = run_trace_replay([job["file"]], extra_engine_args=engine, **job["options"]).summary
    used = resource.getrusage(resource.RUSAGE_SELF)
    prompt = summary["total_input_tokens"]
    # Of a request's first admission: what a preempted one finds of its own does not count as reuse.
    cached = round(summary["first_admission_prefix_cache_reused_ratio"] * prompt)
    print(
        json.dumps(
            {
                "requests": summary["completed_requests"],
                "prompt_tokens": prompt,
                "cached_tokens": cached,
                "cpu_s": used.ru_utime + used.ru_stime,
                "replay_s": summary["wall_time_ms"] / 1000,
                "peak_gib": used.ru_maxrss / 2**20,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
