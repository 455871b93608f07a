"""Reading Hugging Face configurations: published figures of known models, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay.engine import profiles
from replay.engine.model_config import shape
from replay.errors import ReplayError

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "multi_query": True,
    "new_decoder_architecture": False,
    "vocab_size": 65024,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("name", "kv_bytes", "params_b", "active_b"),
    [
        ("qwen3-8b", 147_456, 8.2, 8.2),
        ("qwen3-32b", 262_144, 32.8, 32.8),
        ("qwen3-coder-30b-a3b", 98_304, 30.5, 3.3),
        ("llama-3.1-8b", 131_072, 8.0, 8.0),
        ("llama-3.1-70b", 327_680, 70.6, 70.6),
        ("deepseek-v3", 70_272, 671, 37),
        ("deepseek-v2-lite", 31_104, 15.7, 2.7),
    ],
)
def test_bundled_models_have_their_published_sizes(name: str, kv_bytes: int, params_b: float, active_b: float) -> None:
    model = profiles.model(name)
    assert model.kv_bytes_per_token() == kv_bytes
    assert model.shape.params / 1e9 == pytest.approx(params_b, rel=0.01)
    active = model.shape.active_params + model.shape.embedding_params
    assert active / 1e9 == pytest.approx(active_b, rel=0.03)


def test_kv_type_halves_the_bytes_and_an_unknown_one_is_refused() -> None:
    model = profiles.model("qwen3-8b")
    assert model.kv_bytes_per_token("fp8") * 2 == model.kv_bytes_per_token("bf16") == model.kv_bytes_per_token("fp16")
    with pytest.raises(ReplayError, match="unknown KV cache type 'int3'"):
        model.kv_bytes_per_token("int3")


def test_plain_multi_head_attention_uses_every_head() -> None:
    gpt2 = shape(GPT2)
    assert gpt2.kv_elements == 2 * 12 * 768
    assert gpt2.params == pytest.approx(124e6, rel=0.35)  # the published count ties the two embeddings
    assert shape(GPT2 | {"tie_word_embeddings": True}).params == pytest.approx(124e6, rel=0.01)


def test_multi_query_attention_has_one_head() -> None:
    falcon = shape(FALCON_7B)
    assert (falcon.kv_heads, falcon.kv_elements) == (1, 32 * 2 * 64)


def test_head_dim_is_derived_when_absent_and_read_when_present() -> None:
    assert shape(LLAMA).kv_elements == 4 * 2 * 2 * 64
    assert shape(LLAMA | {"head_dim": 128}).kv_elements == 4 * 2 * 2 * 128


def test_a_multimodal_config_is_read_from_its_language_part() -> None:
    nested = {
        "model_type": "llava",
        "text_config": LLAMA,
        "vision_config": {"hidden_size": 7},
        "dtype": "float16",
    }
    assert shape(nested) == shape(LLAMA)


@pytest.mark.parametrize(
    ("extra", "weight_bytes"),
    [
        ({}, 2.0),
        ({"torch_dtype": "float32"}, 2.0),
        ({"quantization_config": {"quant_method": "fp8"}}, 1.0),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, 1.0),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, 0.5),
    ],
)
def test_weight_bytes_follow_type_and_quantisation(extra: dict[str, Any], weight_bytes: float) -> None:
    assert shape(LLAMA | extra).weight_bytes == weight_bytes


def test_sliding_windows_are_counted_as_full_attention_with_a_warning() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    windowed = shape(LLAMA | {"layer_types": kinds, "sliding_window": 512})
    assert windowed.kv_elements == shape(LLAMA).kv_elements
    assert "2 of 4 layers" in windowed.warnings[0] and "upper bounds" in windowed.warnings[0]
    assert shape(LLAMA | {"sliding_window": 512, "use_sliding_window": False}).warnings == ()
    assert "4 of 4 layers" in shape(LLAMA | {"sliding_window": 512}).warnings[0]


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert shape(LLAMA | {"rope_scaling": yarn}).max_context == 16384
    assert shape(LLAMA | {"rope_scaling": yarn | {"rope_type": "llama3"}}).max_context == 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "recurrent state"),
        ({"model_type": "mamba2"}, "recurrent state"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"index_topk": 2048}, "index_topk"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"num_key_value_heads": [2, 4, 4, 2]}, "differs by layer"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_attention_heads": 7}, "head_dim is missing"),
        ({"num_key_value_heads": 3}, "no multiple of 3 KV heads"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"num_experts": 8}, "num_experts_per_tok is missing"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "9 experts a token of 8"),
        ({"torch_dtype": "int7"}, "int7"),
        ({"quantization_config": {"quant_method": "secret"}}, "'secret' is not modelled"),
    ],
)
def test_what_cannot_be_modelled_is_refused_with_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message) as raised:
        shape(LLAMA | change, "some/config.json")
    assert str(raised.value).startswith("some/config.json: ")


def test_a_model_is_read_from_a_config_file_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    by_file, by_folder = profiles.model(str(folder / "config.json")), profiles.model(str(folder))
    assert by_file.shape == by_folder.shape == shape(LLAMA)
    assert by_file.name == by_folder.name == "my-model"
    (folder / "config.json").write_text("{")
    with pytest.raises(ReplayError, match="not readable"):
        profiles.model(str(folder))
