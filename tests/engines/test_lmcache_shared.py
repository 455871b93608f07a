"""Two vLLM instances that share one LMCache server, in memory: one computes, the other loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay import runs
from replay.backends.connect import Where
from replay.load.schedule import Settings
from replay.results import Store, open_results
from replay.results.report import report

PRESET = ("lmcache-cpu", "connector=lmcache-mp", "instances=2", "tiers.cpu.gib=0.125")
BLOCK, CHUNK, SYSTEM = 128, 256, 600
BOTH, FIRST = slice(0, 2), slice(0, 1)


def whole_chunks(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


def test_each_instance_has_a_gpu_tier_of_its_own(bench):
    assert len(bench.launched.urls) == 2
    assert bench.launched.capacity == {"gpu": 2 * bench.preset.tiers.gpu.tokens}


def test_what_one_instance_computed_the_other_loads(bench, trace, stored_prefix):
    bench.reset()
    rows = bench.play(trace(seed=2, sessions=3, turns=12, pause=0.4), salt="shared", instances=BOTH)
    for row, stored in zip(rows, stored_prefix(rows), strict=True):
        served = max(row["gpu_tokens"], min(whole_chunks(stored), row["prompt_tokens"] - 1))
        assert row["gpu_tokens"] + row["cpu_tokens"] == served
        assert row["computed_tokens"] == row["prompt_tokens"] - served
    # The second turn starts a session on the other instance, which has computed nothing yet.
    assert rows[1]["gpu_tokens"] == 0
    assert rows[1]["cpu_tokens"] == whole_chunks(rows[1]["ideal_tokens"]) > 0


def test_one_instance_alone_serves_what_the_engine_model_serves(bench, trace, simulated):
    bench.reset()
    asked = trace(seed=6, sessions=5, turns=24, pause=0.4)
    real = bench.play(asked, salt="model", instances=FIRST)
    # The model has LMCache in the engine's process; as long as nothing is evicted from memory, hits are the same.
    preset = msgspec.structs.replace(bench.preset, connector="lmcache", instances=1)
    model = simulated(preset, asked)
    names = ("session", "turn", "prompt_tokens", "gpu_tokens", "cpu_tokens", "computed_tokens")
    assert [[row[name] for name in names] for row in real] == [[row[name] for name in names] for row in model]
    assert sum(row["cpu_tokens"] for row in real) > 0


def test_a_full_repeat_is_served_by_memory_after_the_gpu_is_emptied(bench, trace):
    asked = trace(seed=9, sessions=2, turns=6, pause=0.4)
    bench.play(asked, salt="repeat", instances=FIRST)
    bench.reset(l1=False)
    rows = bench.play(asked, salt="repeat", instances=FIRST)
    for row in rows:
        chunks = min(whole_chunks(row["prompt_tokens"]), row["prompt_tokens"] - 1)
        assert row["cpu_tokens"] == max(0, chunks - row["gpu_tokens"])
    assert rows[0]["served_from"] == "cpu"


def routed(bench: Any, trace: Any, policy: str, path: Path) -> list[dict[str, Any]]:
    """Rows of a run through the whole program, with our router in front of both instances, in order of sending."""
    bench.reset()
    preset = msgspec.structs.replace(bench.preset, router=policy)
    where = Where(preset, "launch", "tiny", dummy_weights=True, max_model_len=3900, engine=bench.launched)
    asked = trace(seed=12, sessions=3, turns=8, pause=0.4)
    with Store.create_or_open(path) as store:
        runs.execute(asked, where, Settings(outputs="live"), store)
    with open_results(path) as results:
        return results.frame("SELECT * FROM v_requests ORDER BY sent").to_dicts()


@pytest.mark.parametrize("policy", ["round-robin", "session", "prefix"])
def test_behind_our_router_an_instance_has_what_it_was_sent_and_the_server_what_any_was(
    bench: Any, trace: Any, tmp_path: Path, policy: str
) -> None:
    rows = routed(bench, trace, policy, tmp_path / "r.duckdb")
    contexts: dict[tuple[int, str], int] = {}
    prompts: dict[str, int] = {}
    for row in rows:
        seen = any(instance == row["instance"] for instance, _ in contexts)
        held = contexts.get((row["instance"], row["session"]), SYSTEM if seen else 0)
        own = min(held, row["prompt_tokens"] - 1) // BLOCK * BLOCK
        # LMCache has prompts, not outputs, and adds what it has beyond the instance's own.
        stored = whole_chunks(prompts.get(row["session"], SYSTEM if prompts else 0))
        assert row["gpu_tokens"] == own
        assert row["cpu_tokens"] == max(0, min(stored, row["prompt_tokens"] - 1) - own)
        contexts[row["instance"], row["session"]] = row["prompt_tokens"] + row["output_tokens"]
        prompts[row["session"]] = row["prompt_tokens"]
    chosen = [row["instance"] for row in rows]
    if policy == "round-robin":
        assert chosen == [0, 1] * 4
        assert sum(row["cpu_tokens"] for row in rows) > 3 * CHUNK, "one instance computed what the other loads"
    else:
        assert len({(row["session"], row["instance"]) for row in rows}) == 3, "sessions stay where they are"
    # The system prompt is more than half of each prompt here: whoever saw it first is preferred.
    assert set(chosen) == ({0} if policy == "prefix" else {0, 1})
    shown = report(tmp_path / "r.duckdb")
    assert shown.self_check["counters_agree"]
    assert shown.settings["capacity_tokens"]["cpu"] == 2**27 // shown.settings["kv_bytes_per_token"], "one for all"
