"""vLLM with prefix caching in its own memory: hits follow from the trace, and the engine model agrees."""

from __future__ import annotations

import pytest

PRESET = ("vllm",)
BLOCK = 128


def test_the_gpu_tier_has_the_size_that_the_preset_gives(bench):
    assert bench.launched.capacity == {"gpu": bench.preset.tiers.gpu.tokens}


def test_without_eviction_every_full_block_that_was_seen_before_is_a_hit(bench, trace):
    rows = bench.play(trace(seed=5, sessions=2, turns=6), salt="no-eviction")
    assert any(row["ideal_tokens"] > BLOCK for row in rows)
    for row in rows:
        assert row["gpu_tokens"] == min(row["ideal_tokens"], row["prompt_tokens"] - 1) // BLOCK * BLOCK
        assert row["gpu_tokens"] + row["computed_tokens"] == row["prompt_tokens"] == row["planned_tokens"]
        assert row["served_from"] == ("gpu" if row["gpu_tokens"] else "none")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_engine_model_serves_the_same_tokens_of_every_request(bench, trace, simulated, seed):
    bench.reset()
    asked = trace(seed=seed, sessions=5, turns=30)
    real = bench.play(asked, salt=f"model-{seed}")
    model = simulated(bench.preset, asked)
    columns = ("session", "turn", "prompt_tokens", "output_tokens", "ideal_tokens", "gpu_tokens", "computed_tokens")
    assert [[row[c] for c in columns] for row in real] == [[row[c] for c in columns] for row in model]
    assert sum(row["lost_evicted"] for row in model) > 0  # the trace overflows the GPU tier


def test_a_salt_keeps_runs_apart(bench, trace):
    asked = trace(seed=7, sessions=1, turns=1)
    bench.play(asked, salt="first")
    (again,) = bench.play(asked, salt="first")
    (apart,) = bench.play(asked, salt="second")
    assert again["gpu_tokens"] > 0
    assert apart["gpu_tokens"] == 0


def test_a_reset_empties_the_gpu_tier(bench, trace):
    asked = trace(seed=8, sessions=1, turns=1)
    bench.play(asked, salt="reset")
    assert bench.wait(bench.launched.reset())
    (row,) = bench.play(asked, salt="reset")
    assert row["gpu_tokens"] == 0
