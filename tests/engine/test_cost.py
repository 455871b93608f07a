"""The cost model against the measurements it was fitted to, and the mechanism it follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends import preset
from replay.engine import fit, profiles
from replay.engine.cost import CostModel, cost_model
from replay.errors import ReplayError

KV_BYTES = 147_456
Table = dict[str, Any]


@pytest.fixture(scope="module")
def micro(calibration: Path) -> dict[str, Table]:
    tables: dict[str, Table] = json.loads((calibration / "h200-qwen3-8b" / "micro.json").read_text())
    return {"h100": tables["h100_published"], "h200": tables["h200_measured"]}


ALONE = {"h100": "gpu_only", "h200": "gpu_only_128000_tokens"}
TIERS = {
    "h100": {"lmcache-cpu": "lmcache_cpu_100GB", "lmcache-disk": "lmcache_disk_20GB_buffer"},
    "h200": {
        "vllm-offload-cpu": "vllm_offload_cpu_60GB_gpu_128000",
        "lmcache-cpu": "lmcache_cpu_60GB_gpu_128000",
        "lmcache-disk": "lmcache_disk_12GB_staging_45GB_disk_gpu_64000",
    },
}


def costs(model: str = "qwen3-8b", gpu: str = "h200", backend: str = "vllm", *changes: str) -> CostModel:
    return cost_model(profiles.model(model), profiles.gpu(gpu), preset.load(backend, changes))


def ttft(cost: CostModel, cached: int, new: int) -> float:
    return cost.request_overhead(cached + new) + cost.prefill_seconds(new, cached)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("tokens", [1024, 4096, 16384])
@pytest.mark.parametrize("kind", ["miss", "hit"])
def test_times_of_one_request_are_within_ten_percent(micro: dict[str, Table], gpu: str, tokens: int, kind: str) -> None:
    cached, new = (tokens, 32) if kind == "hit" else (0, tokens + 32)
    rows = fit.MicroTable.read(micro[gpu][ALONE[gpu]]).prefill
    measured = np.mean([row.ttft_s for row in rows if (row.cached, row.new) == (cached, new)])
    assert ttft(costs(gpu=gpu), cached, new) == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("row", [(0, 4096), (8192, 4096), (16384, 32), (32768, 1024), (32768, 4096)])
def test_prefill_grid_is_within_ten_percent(calibration: Path, row: tuple[int, int]) -> None:
    rows = fit.read_prefill(calibration / "h200-qwen3-8b" / "prefill.jsonl")
    measured = np.mean([item.ttft_s for item in rows if (item.cached, item.new) == row])
    assert ttft(costs(), *row) == pytest.approx(measured, rel=0.10)


def test_decode_steps_are_within_two_percent(calibration: Path) -> None:
    cost = costs()
    for row in fit.read_decode(calibration / "h200-qwen3-8b" / "decode.jsonl"):
        step = cost.step_seconds((), row.batch, int(row.batch * row.context))
        assert step == pytest.approx(row.step_s, rel=0.02)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_coming_back_from_a_tier_takes_what_was_measured(micro: dict[str, Table], gpu: str) -> None:
    """From a disk it is also a wait for its writers: tests of validation have that."""
    for backend, table in TIERS[gpu].items():
        if backend == "lmcache-disk":
            continue
        cost = costs("qwen3-8b", gpu, backend)
        chunk = preset.load(backend).chunk_tokens or 16
        load = cost.links["cpu"].load_seconds(16384 * KV_BYTES, 16384 // chunk)
        measured = fit.MicroTable.read(micro[gpu][table]).after_others
        assert ttft(cost, 16384, 32) + load == pytest.approx(measured, rel=0.10), backend


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_miss_pays_the_write_through_that_was_measured(micro: dict[str, Table], gpu: str) -> None:
    for backend, table in TIERS[gpu].items():
        if (gpu, backend) == ("h100", "lmcache-disk"):
            continue  # its table mixes misses on an idle and on a busy disk: tests of validation have those
        cost = costs("qwen3-8b", gpu, backend)
        chunk = preset.load(backend).chunk_tokens or 16
        stores = sum(
            link.store_seconds(16384 * KV_BYTES, 16384 // chunk) for link in cost.links.values() if link.blocking_store
        )
        measured = fit.MicroTable.read(micro[gpu][table]).first
        assert ttft(cost, 0, 16416) + stores == pytest.approx(measured, rel=0.10), backend


def test_the_bundled_fits_are_what_the_fit_gives(calibration: Path, micro: dict[str, Table]) -> None:
    folder = calibration / "h200-qwen3-8b"
    h200, h100 = profiles.gpu("h200"), profiles.gpu("h100")
    decode = fit.fit_decode(fit.read_decode(folder / "decode.jsonl"))
    alone = fit.MicroTable.read(micro["h200"][ALONE["h200"]])
    assert_close([*fit.read_prefill(folder / "prefill.jsonl"), *alone.prefill], decode, h200.fits["qwen3-8b"])
    slower = h200.hbm_gbps / h100.hbm_gbps
    published = fit.MicroTable.read(micro["h100"][ALONE["h100"]])
    scaled = (decode[0] * slower, decode[1], decode[2] * slower)
    assert_close(published.prefill, scaled, h100.fits["qwen3-8b"])


def test_the_bundled_links_are_what_the_tables_give(micro: dict[str, Table]) -> None:
    for gpu, backends in TIERS.items():
        tables = micro[gpu]
        alone = fit.MicroTable.read(tables[ALONE[gpu]])
        for backend, name in backends.items():
            disk, chunk = backend == "lmcache-disk", preset.load(backend).chunk_tokens or 16
            above = fit.MicroTable.read(tables[backends["lmcache-cpu"]]) if disk else alone
            link = fit.link_from_tables(
                fit.MicroTable.read(tables[name]),
                alone,
                above,
                bytes_per_token=KV_BYTES,
                chunk_tokens=chunk,
                wire_gbps=None if disk else 55,
            )
            connector = preset.load(backend).connector
            bundled = profiles.gpu(gpu).links[connector]["disk" if disk else "cpu"]
            # Loads of the H200's disk were in the page cache; stores of the H100's share a time with its writers.
            loads = () if (gpu, disk) == ("h200", True) else ("load_gbps", "per_chunk_s")
            stores = () if (gpu, disk) == ("h100", True) else ("store_gbps", "store_per_chunk_s")
            for field in (*loads, *stores):
                assert getattr(bundled, field) == pytest.approx(getattr(link, field), rel=0.001), (
                    gpu,
                    backend,
                    field,
                )


def assert_close(rows: Sequence[fit.Prefill], decode: tuple[float, float, float], bundled: profiles.StepFit) -> None:
    known = {"overhead_s": bundled.overhead_s, "prepare_s": bundled.prepare_s, "power_cap": bundled.power_cap}
    fitted = fit.fit_steps(rows, decode, **known)
    for field, value in msgspec.structs.asdict(bundled).items():
        assert value == pytest.approx(getattr(fitted, field), rel=0.001), field


def test_the_fit_recovers_coefficients_from_its_own_times() -> None:
    truth = profiles.gpu("h200").fits["qwen3-8b"]
    cost = CostModel("measured", truth, {}, 8192)
    grid = [(cached, new) for cached in (0, 4096, 32768) for new in (32, 256, 700, 1024, 4096, 16384)]
    rows = [fit.Prefill(cached, new, ttft(cost, cached, new)) for cached, new in grid]
    steps = [fit.Decode(b, n, cost.step_seconds((), b, b * n)) for b in (1, 8, 32) for n in (1000, 9000)]
    known = {"overhead_s": truth.overhead_s, "prepare_s": truth.prepare_s, "power_cap": truth.power_cap}
    fitted = fit.fit_steps(rows, fit.fit_decode(steps), **known)
    for field, value in msgspec.structs.asdict(truth).items():
        assert getattr(fitted, field) == pytest.approx(value, rel=1e-3), field


def test_a_grid_without_long_prompts_cannot_be_fitted() -> None:
    rows = [fit.Prefill(0, 16, 0.02), fit.Prefill(0, 32, 0.02)]
    with pytest.raises(ReplayError, match="add long prompts"):
        fit.fit_steps(rows, (0.005, 0.0, 1e-8), overhead_s=0.0)


def test_a_chunk_is_launched_while_the_one_before_it_runs() -> None:
    cost = costs()
    first, second = cost.step_seconds([(8192, 100)], 0, 0), cost.work_seconds([(808, 8292)], 0, 0)
    assert second < cost.launch_seconds([(808, 8292)], 0)
    capped = (cost.fit.power_cap - 1) * cost.fit.token_s * 808
    assert cost.prefill_seconds(9000, 100) == pytest.approx(first + second + capped)
    assert cost.prefill_seconds(0, 5000) == 0


@given(
    chunk=st.tuples(st.integers(1, 8192), st.integers(0, 200_000)),
    batch=st.integers(0, 255),
    context=st.integers(0, 1_000_000),
    more=st.integers(1, 5000),
    model=st.sampled_from(["qwen3-8b", "qwen3-coder-30b-a3b"]),
)
def test_more_work_never_takes_less_time(
    chunk: tuple[int, int], batch: int, context: int, more: int, model: str
) -> None:
    cost, (new, cached) = costs(model), chunk
    base = cost.step_seconds([(new, cached)], batch, context)
    assert base > 0
    assert cost.step_seconds([(new + more, cached)], batch, context) >= base
    assert cost.step_seconds([(new, cached + more)], batch, context) >= base
    assert cost.step_seconds([(new, cached)], batch + more, context) >= base
    assert cost.step_seconds([(new, cached)], batch, context + more) >= base


@given(batch=st.integers(1, 256), context=st.integers(0, 10_000_000))
def test_a_decode_step_splits_into_base_and_context(batch: int, context: int) -> None:
    for cost in (costs(), costs("qwen3-coder-30b-a3b")):
        parts = cost.decode_base(batch) + cost.decode_context_s * context
        assert cost.step_seconds((), batch, context) == pytest.approx(parts)


def test_scaling_a_measured_model_onto_its_own_gpu_changes_nothing() -> None:
    measured = costs()
    fp8 = costs("qwen3-8b", "h200", "vllm", "kv_dtype=fp8")
    assert (measured.source, fp8.source) == ("measured", "derived")
    assert fp8.prefill_seconds(16384, 4096) == pytest.approx(measured.prefill_seconds(16384, 4096))
    assert fp8.decode_base(8) == pytest.approx(measured.decode_base(8))
    assert fp8.decode_context_s == pytest.approx(measured.decode_context_s / 2)


def test_derived_times_scale_by_flops_and_bytes() -> None:
    small, large = costs("qwen3-8b", "a100"), costs("qwen3-32b", "a100")
    assert small.source == large.source == "derived"
    shapes = [profiles.model(name).shape for name in ("qwen3-8b", "qwen3-32b")]
    assert large.fit.token_s / small.fit.token_s == pytest.approx(shapes[1].active_params / shapes[0].active_params)
    assert large.fit.attention_s / small.fit.attention_s == pytest.approx(64 * 64 / (36 * 32))
    assert large.fit.context_s / small.fit.context_s == pytest.approx(262_144 / 147_456)
    assert costs("qwen3-8b", "a100").fit.token_s / costs().fit.token_s == pytest.approx(989 / 312)


def test_a_mixture_of_experts_reads_more_weights_as_a_batch_grows() -> None:
    cost = costs("qwen3-coder-30b-a3b")
    shape = profiles.model("qwen3-coder-30b-a3b").shape
    alone, many = cost.weights_read(1), cost.weights_read(1000)
    dense = shape.dense_params + shape.embedding_params / 2
    assert many / alone == pytest.approx((dense + shape.expert_params) / (dense + shape.expert_params / 16), rel=1e-6)
    assert alone < cost.weights_read(8) < cost.weights_read(64) < many


def test_tensor_parallelism_divides_work_and_adds_reductions() -> None:
    one, four = costs("llama-3.1-8b"), costs("llama-3.1-8b", "h200", "vllm", "tensor_parallel=4")
    assert one.fit.token_s / 4 < four.fit.token_s < one.fit.token_s / 2
    assert one.fit.weights_s / 4 < four.fit.weights_s < one.fit.weights_s / 2
    assert four.fit.context_s == pytest.approx(one.fit.context_s / 4)


def test_fp8_weights_compute_faster_where_the_gpu_has_the_units() -> None:
    quick = costs("deepseek-v3", "b200", "vllm", "tensor_parallel=8").fit
    linear = quick.token_s / profiles.model("deepseek-v3").shape.active_params
    plain = costs("llama-3.1-8b", "b200", "vllm", "tensor_parallel=8").fit
    assert linear < plain.token_s / profiles.model("llama-3.1-8b").shape.active_params


def test_a_tiers_given_bandwidth_replaces_the_profiles() -> None:
    given_link = costs("qwen3-8b", "h200", "lmcache-disk", "tiers.disk.gbps=7").links["disk"]
    bundled = costs("qwen3-8b", "h200", "lmcache-disk").links["disk"]
    assert (given_link.load_gbps, given_link.source) == (7, "derived")
    assert (given_link.store_gbps, bundled.source) == (bundled.store_gbps, "measured")


def test_links_exist_for_the_presets_tiers_alone() -> None:
    assert set(costs().links) == set()
    assert set(costs("qwen3-8b", "h200", "lmcache-cpu").links) == {"cpu"}
    assert set(costs("qwen3-8b", "l40s", "lmcache-disk").links) == {"cpu", "disk"}


@pytest.mark.parametrize("gpu", profiles.names("gpus"))
def test_every_bundled_preset_has_its_links_on_every_gpu(gpu: str) -> None:
    for name in preset.names():
        backend = preset.load(name)
        cost = costs("llama-3.1-8b", gpu, name)
        assert set(cost.links) == {tier for tier, _ in backend.lower()}
        for link in cost.links.values():
            assert link.load_seconds(1e9, 30) > 1e9 / 100e9


def test_a_profile_without_the_needed_link_or_fit_is_refused() -> None:
    gpu = profiles.gpu("h200")
    bare = msgspec.structs.replace(gpu, links={})
    with pytest.raises(ReplayError, match="no link to tier 'cpu'"):
        cost_model(profiles.model("qwen3-8b"), bare, preset.load("lmcache-cpu"))
    unfitted = msgspec.structs.replace(gpu, fits={})
    with pytest.raises(ReplayError, match="set scaled_from"):
        cost_model(profiles.model("qwen3-8b"), unfitted, preset.load("vllm"))
