"""Model and hardware profiles: bundled files, sizes that follow from them, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from replay.backends import preset
from replay.engine import profiles
from replay.errors import ReplayError
from replay.resources import data_path

SCHEMA = json.loads(data_path("schemas", "profile.schema.json").read_text())
FILES = sorted(profiles.PROFILES.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_every_bundled_profile_fits_the_schema_and_names_its_sources(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)
    read = profiles.model(path.stem) if path.parent.name == "models" else profiles.gpu(path.stem)
    assert read.sources and read.summary and read.name == path.stem


def test_the_schema_file_is_the_one_that_the_code_describes() -> None:
    assert json.loads(json.dumps(profiles.json_schema())) == SCHEMA


def test_only_measured_gpus_claim_to_be_measured() -> None:
    sources = {name: profiles.gpu(name).source for name in profiles.names("gpus")}
    assert {name for name, source in sources.items() if source == "measured"} == {"h100", "h200", "h200-dual"}
    for name, source in sources.items():
        links = [link for tiers in profiles.gpu(name).links.values() for link in tiers.values()]
        assert source == "measured" or all(link.source == "derived" for link in links)


def test_room_for_kv_on_an_h100_is_what_vllm_reported() -> None:
    room = profiles.gpu_kv_tokens(profiles.model("qwen3-8b"), profiles.gpu("h100"), preset.load("vllm"))
    assert room == pytest.approx(388_560, rel=0.002)


def test_the_preset_decides_the_gpu_tier_when_it_says_so() -> None:
    model, gpu = profiles.model("qwen3-8b"), profiles.gpu("h100")
    in_gib = preset.load("vllm", ["tiers.gpu.gib=9"])
    assert profiles.gpu_kv_tokens(model, gpu, in_gib) == 9 * 2**30 // 147_456
    both = preset.load("vllm", ["tiers.gpu.gib=9", "tiers.gpu.tokens=1000"])
    assert profiles.gpu_kv_tokens(model, gpu, both) == 1000


def test_fp8_kv_and_more_gpus_hold_more_tokens() -> None:
    model, gpu = profiles.model("qwen3-8b"), profiles.gpu("h100")
    plain = profiles.gpu_kv_tokens(model, gpu, preset.load("vllm"))
    assert profiles.gpu_kv_tokens(model, gpu, preset.load("vllm", ["kv_dtype=fp8"])) in (
        2 * plain,
        2 * plain + 1,
    )
    assert profiles.gpu_kv_tokens(model, gpu, preset.load("vllm", ["tensor_parallel=2"])) > 2 * plain


def test_ranks_hold_copies_once_kv_heads_run_out() -> None:
    assert [profiles.model("qwen3-coder-30b-a3b").kv_copies(ranks) for ranks in (1, 4, 8)] == [1, 1, 2]
    assert profiles.model("deepseek-v3").kv_copies(8) == 8


def test_a_model_larger_than_the_gpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(ReplayError, match=r"llama-3\.1-70b .* leaves no room .* tensor_parallel=2"):
        profiles.gpu_kv_tokens(profiles.model("llama-3.1-70b"), profiles.gpu("h100"), preset.load("vllm"))


def test_as_many_gpus_are_named_as_the_weights_need() -> None:
    with pytest.raises(ReplayError, match="take a larger GPU or --set tensor_parallel=32"):
        profiles.gpu_kv_tokens(profiles.model("deepseek-v3"), profiles.gpu("l40s"), preset.load("vllm"))


@pytest.mark.parametrize("size", ["tokens=5", "gib=0.001"])
def test_a_gpu_tier_of_less_than_two_blocks_is_refused(size: str) -> None:
    with pytest.raises(ReplayError, match=r"less than two blocks of 16 tokens; raise tiers\.gpu\.tokens"):
        small = preset.load("vllm", [f"tiers.gpu.{size}"])
        profiles.gpu_kv_tokens(profiles.model("qwen3-8b"), profiles.gpu("h100"), small)


def test_heads_that_do_not_split_over_the_gpus_are_refused() -> None:
    with pytest.raises(ReplayError, match="32 attention heads cannot be split over 3 GPUs"):
        three = preset.load("vllm", ["tensor_parallel=3"])
        profiles.gpu_kv_tokens(profiles.model("qwen3-8b"), profiles.gpu("h100"), three)


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(ReplayError, match="unknown model 'qwen3-8'; nearest: qwen3-8b"):
        profiles.model("qwen3-8")
    with pytest.raises(ReplayError, match=r"unknown GPU 'h300'; nearest: .*h100"):
        profiles.gpu("h300")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hbm_gbps": 0}, "hbm_gbps"),
        ({"hbm_gbps": float("nan")}, "hbm_gbps"),
        ({"hbm_gbps": float("inf")}, "hbm_gbps"),
        ({"hbm_gbps": -5}, "hbm_gbps"),
        ({"hbm_gbps": "fast"}, "hbm_gbps"),
        ({"memory_gib": None}, "memory_gib"),
        ({"links": {"lmcache": {"cpu": {"load_gbps": 0, "store_gbps": 1}}}}, "load_gbps"),
        ({"colour": "green"}, "colour"),
    ],
)
def test_a_profile_that_does_not_fit_names_the_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = yaml.safe_load((profiles.PROFILES / "gpus" / "generic.yaml").read_text()) | change
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ReplayError, match=message) as raised:
        profiles.gpu(str(path))
    assert str(path) in str(raised.value)


def test_a_missing_field_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    data = yaml.safe_load((profiles.PROFILES / "gpus" / "generic.yaml").read_text())
    del data["bf16_tflops"]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ReplayError, match="missing required field `bf16_tflops`"):
        profiles.gpu(str(path))
    with pytest.raises(ReplayError, match="no such profile file"):
        profiles.gpu(str(tmp_path / "absent.yaml"))
