"""Two vLLM instances that share one LMCache server, in memory: one computes, the other loads."""

from __future__ import annotations

import msgspec

PRESET = ("lmcache-cpu", "connector=lmcache-mp", "instances=2", "tiers.cpu.gib=0.125")
CHUNK = 256
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
