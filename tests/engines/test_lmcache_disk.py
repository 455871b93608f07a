"""vLLM with LMCache's server, memory in front of a disk: what each tier serves follows from the trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from replay import runs
from replay.backends.connect import Where
from replay.load.schedule import Settings
from replay.results.store import Store
from replay.trace import read

ROOT = Path(__file__).parents[2]

PRESET = ("lmcache-disk", "connector=lmcache-mp", "tiers.cpu.gib=0.0625", "tiers.disk.gib=0.5")
CHUNK = 256


@pytest.fixture
def asked(trace):
    # LMCache stores behind the reply, within a tenth of a second: the pause makes what it holds certain.
    return trace(seed=4, sessions=3, turns=8, pause=0.4)


def whole_chunks(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


def loaded(row: dict, chunks: int) -> int:
    """Tokens that LMCache adds to what the GPU has, where it holds the first `chunks` tokens of the prompt."""
    return max(0, min(chunks, row["prompt_tokens"] - 1) - row["gpu_tokens"])


def columns(rows: list[dict], name: str) -> list:
    return [row[name] for row in rows]


def test_a_first_run_is_served_by_memory_where_the_gpu_has_evicted(bench, trace, stored_prefix):
    bench.reset()
    rows = bench.play(trace(seed=1, sessions=5, turns=14, pause=0.4), salt="first")
    for row, stored in zip(rows, stored_prefix(rows), strict=True):
        assert row["cpu_tokens"] == loaded(row, whole_chunks(stored))
        assert row["disk_tokens"] == 0
        assert row["gpu_tokens"] + row["cpu_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        assert row["tier_source"] == "events"
    assert "cpu" in columns(rows, "served_from")


def test_with_an_empty_gpu_the_same_prompts_come_from_memory(bench, asked):
    bench.play(asked, salt="memory")
    bench.reset(l1=False)
    rows = bench.play(asked, salt="memory")
    assert columns(rows, "cpu_tokens") == [loaded(row, whole_chunks(row["prompt_tokens"])) for row in rows]
    assert set(columns(rows, "disk_tokens")) == {0}
    assert rows[0]["served_from"] == "cpu"


def test_with_empty_gpu_and_memory_they_come_from_disk(bench, asked):
    bench.play(asked, salt="disk")
    bench.reset()
    rows = bench.play(asked, salt="disk")
    assert columns(rows, "disk_tokens") == [loaded(row, whole_chunks(row["prompt_tokens"])) for row in rows]
    assert set(columns(rows, "cpu_tokens")) == {0}
    assert rows[0]["served_from"] == "disk"


def test_a_restarted_engine_finds_what_the_lower_tiers_kept(bench, asked):
    bench.play(asked, salt="restart")
    bench.wait(bench.launched.restart())
    bench.reset()
    rows = bench.play(asked, salt="restart")
    assert rows[0]["gpu_tokens"] == 0
    assert rows[0]["disk_tokens"] == whole_chunks(rows[0]["prompt_tokens"])
    assert columns(rows, "disk_tokens") == [loaded(row, whole_chunks(row["prompt_tokens"])) for row in rows]


def test_rows_agree_with_the_counters_of_both_servers(bench, asked, counters):
    bench.reset()
    before = counters(bench)
    rows = bench.play(asked, salt="counters")
    rows += bench.play(asked, salt="counters")
    bench.reset()
    rows += bench.play(asked, salt="counters")
    bench.wait(asyncio.sleep(0.5))
    moved = {name: value - before.get(name, 0) for name, value in counters(bench).items()}
    assert moved["vllm:prompt_tokens_total"] == sum(columns(rows, "prompt_tokens"))
    assert moved["vllm:prefix_cache_hits_total"] == sum(columns(rows, "gpu_tokens"))
    lower = sum(columns(rows, "cpu_tokens")) + sum(columns(rows, "disk_tokens"))
    assert moved["vllm:external_prefix_cache_hits_total"] == lower


def test_a_coding_agents_trace_goes_through_the_whole_program(bench, tmp_path):
    settings = Settings(outputs="live", sessions=2, scale_tokens=0.015, skip_idle=True, speed=1000, too_long="drop")
    where = Where(bench.preset, "launch", "tiny", dummy_weights=True, max_model_len=3900, engine=bench.launched)
    with Store.create_or_open(str(tmp_path / "results.duckdb")) as store:
        run = runs.execute(read(str(ROOT / "traces/claude_code.jsonl")), where, settings, store)
        with store.reader() as con:
            statement = (
                "SELECT count(*), count(*) FILTER (status = 'ok'), "
                "sum(prompt_tokens - gpu_tokens - cpu_tokens - disk_tokens - computed_tokens), "
                "sum(gpu_tokens + cpu_tokens + disk_tokens) / sum(ideal_tokens) FROM requests WHERE run_id = ?"
            )
            turns, answered, unexplained, reused = con.execute(statement, [run]).fetchone()
            simulated, settings = con.execute("SELECT simulated, settings FROM runs WHERE id = ?", [run]).fetchone()
    assert turns == answered > 10
    assert unexplained == 0
    assert 0.5 < reused <= 1
    assert not simulated
    assert json.loads(settings)["versions"]["lmcache"] == bench.launched.probe.versions["lmcache"]
