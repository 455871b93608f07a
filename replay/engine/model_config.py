"""What a model costs per token, read from any Hugging Face ``config.json``.

Field names follow the `transformers` configuration classes. What this module cannot model is refused
(recurrent layers, encoder-decoders, sparse-attention indexers, shared KV layers, unknown quantisation)
or, where an upper bound is right, noted in `Shape.warnings` (sliding windows). Nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replay.errors import ReplayError

KV_BYTES = {"fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
_DTYPES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "float8_e4m3fn": 1.0}
_QUANTISED = {"fp8": 1.0, "fbgemm_fp8": 1.0, "awq": 0.5, "gptq": 0.5, "mxfp4": 17 / 32}
"""Bytes a weight where the method fixes them; mxfp4 is 4 bits and an 8-bit scale for each 32 weights."""
_RECURRENT = (
    "linear_attention",
    "mamba",
    "mamba2",
    "recurrent",
    "ssm",
    "rwkv",
    "conv",
    "hybrid",
    "lightning",
)
_RECURRENT_TYPES = ("mamba", "rwkv", "jamba", "bamba", "zamba", "nemotron_h", "falcon_h1", "recurrent_gemma")
_RECURRENT_FIELDS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_num_heads",
    "linear_num_value_heads",
    "attn_type_list",
)

_OUTER = ("torch_dtype", "dtype", "quantization_config")
"""Fields that a multimodal configuration keeps outside its language part."""

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that cost time and memory. Parameters are counts, not bytes."""

    layers: int
    hidden: int
    heads: int
    """Attention heads a layer."""
    kv_heads: int
    """KV heads a layer; 1 for MLA, whose latent is shared by all heads."""
    kv_elements: int
    """Elements that one token adds to the KV cache, all layers."""
    latent: bool
    """True for multi-head latent attention: every tensor-parallel rank then holds the whole cache."""
    attention_flops: int
    """Floating point operations for one new token attending to one cached token, all layers."""
    embedding_params: int
    """Input embedding and output head: no work for a prefilled token but the last."""
    dense_params: int
    """Parameters that every token passes through."""
    expert_params: int
    """Parameters of all routed experts; 0 for a dense model."""
    experts: int
    experts_per_token: int
    weight_bytes: float
    """Bytes of one weight."""
    max_context: int
    warnings: tuple[str, ...] = ()

    @property
    def params(self) -> int:
        """All parameters (norms and biases, under 0.1 %, are left out)."""
        return self.embedding_params + self.dense_params + self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one prefilled token is multiplied with, without embeddings."""
        routed = self.expert_params * self.experts_per_token // self.experts if self.experts else 0
        return self.dense_params + routed


class _Config:
    """A config with the aliases of its fields, and errors that name file and field."""

    def __init__(self, config: dict[str, Any], where: str):
        self.config, self.where = config, where

    def get(self, *names: str) -> int | None:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.refuse(f"{name} is {value!r}, not a whole number")
            return value
        return None

    def need(self, *names: str) -> int:
        value = self.get(*names)
        if not value:
            raise self.refuse(f"{names[0]} is missing; a language model's config.json has it")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.config.get(name))

    def refuse(self, what: str) -> ReplayError:
        return ReplayError(f"{self.where}: {what}")


def shape(config: dict[str, Any], where: str = "config.json") -> Shape:
    """Reads a Hugging Face configuration (a multimodal one's language part).

    Raises:
        ReplayError: a field is missing or the architecture is one that cannot be modelled.
    """
    text = config.get("text_config") or config.get("llm_config") or config.get("language_config")
    if isinstance(text, dict):
        outer: dict[str, Any] = {key: config[key] for key in _OUTER if key in config}
        config = outer | text
    cfg = _Config(config, where)
    _refuse_unknown_kinds(cfg)
    layers, hidden, heads = cfg.need(*_LAYERS), cfg.need(*_HIDDEN), cfg.need(*_HEADS)
    if cfg.get("kv_lora_rank"):
        kv_heads, kv_elements, pair_flops, attention = _latent_attention(cfg, layers, hidden, heads)
    else:
        kv_heads, kv_elements, pair_flops, attention = _head_attention(cfg, layers, hidden, heads)
    dense, routed, experts, top_k = _feed_forward(cfg, layers, hidden)
    vocabulary = cfg.need("vocab_size") * hidden
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        kv_elements=kv_elements,
        latent=bool(cfg.get("kv_lora_rank")),
        attention_flops=pair_flops,
        embedding_params=vocabulary if cfg.flag("tie_word_embeddings") else 2 * vocabulary,
        dense_params=attention + dense,
        expert_params=routed,
        experts=experts,
        experts_per_token=top_k,
        weight_bytes=_weight_bytes(cfg),
        max_context=_context(cfg),
        warnings=_window_warnings(cfg, layers),
    )


def _refuse_unknown_kinds(cfg: _Config) -> None:
    config = cfg.config
    kind = str(config.get("model_type", ""))
    layer_types = set(config.get("layer_types") or config.get("layers_block_type") or ())
    recurrent = sorted(layer_types.intersection(_RECURRENT)) or [f for f in _RECURRENT_FIELDS if config.get(f)]
    if recurrent or kind.startswith(_RECURRENT_TYPES):
        raise cfg.refuse(
            f"layers with recurrent state ({', '.join(recurrent) or kind}) keep no KV per token; "
            "such hybrid models are not modelled"
        )
    if config.get("is_encoder_decoder"):
        raise cfg.refuse("an encoder-decoder model's cross-attention cache is not modelled")
    for field in (
        "index_topk",
        "index_head_dim",
        "num_kv_shared_layers",
        "cross_layer_kv_sharing",
        "cla_share_factor",
    ):
        if config.get(field):
            raise cfg.refuse(f"{field} is set: sparse or shared KV layers are not modelled")
    for field in ("num_key_value_heads", "num_attention_heads", "block_configs"):
        if isinstance(config.get(field), list):
            raise cfg.refuse(f"{field} differs by layer; such models are not modelled")


def _head_attention(cfg: _Config, layers: int, hidden: int, heads: int) -> tuple[int, int, int, int]:
    """MHA, GQA and MQA -> KV heads, KV elements a token, FLOPs a pair, parameters; all layers."""
    nested = cfg.config.get("attn_config")
    kv_heads = nested.get("kv_n_heads") if isinstance(nested, dict) else None
    if cfg.flag("multi_query") and not cfg.flag("new_decoder_architecture"):
        kv_heads = 1
    kv_heads = kv_heads or cfg.get(*_KV_HEADS) or heads
    head_dim = cfg.get("head_dim", "kv_channels")
    if not head_dim:
        if hidden % heads:
            raise cfg.refuse(f"head_dim is missing and hidden_size {hidden} is no multiple of {heads} heads")
        head_dim = hidden // heads
    if heads % kv_heads:
        raise cfg.refuse(f"{heads} attention heads are no multiple of {kv_heads} KV heads")
    params = layers * hidden * head_dim * (2 * heads + 2 * kv_heads)
    return kv_heads, 2 * layers * kv_heads * head_dim, 4 * layers * heads * head_dim, params


def _latent_attention(cfg: _Config, layers: int, hidden: int, heads: int) -> tuple[int, int, int, int]:
    """MLA (DeepSeek-V2, section 2.1): the cache holds one latent and one rotary key a token and layer."""
    latent, rope = cfg.need("kv_lora_rank"), cfg.need("qk_rope_head_dim")
    plain, value = cfg.need("qk_nope_head_dim"), cfg.need("v_head_dim")
    query_rank = cfg.get("q_lora_rank")
    query = heads * (plain + rope)
    query_params = query_rank * (hidden + query) if query_rank else hidden * query
    key_params = hidden * (latent + rope) + latent * heads * (plain + value)
    params = layers * (query_params + key_params + heads * value * hidden)
    return 1, layers * (latent + rope), 2 * layers * heads * (plain + rope + value), params


def _feed_forward(cfg: _Config, layers: int, hidden: int) -> tuple[int, int, int, int]:
    """Parameters that all tokens use, parameters of routed experts, experts, experts a token."""
    experts = cfg.get(*_EXPERTS) or 0
    inner = cfg.get("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "inner_hidden_size")
    if inner is None and not experts:
        inner = 4 * hidden  # what GPT-2, BLOOM, MPT and Falcon define when the field is absent
    matrices = 2 if str(cfg.config.get("model_type", "")).startswith(_UNGATED) else 3
    if not experts:
        return layers * matrices * hidden * (inner or 0), 0, 0, 0
    top_k = cfg.need(*_TOP_K)
    if top_k > experts:
        raise cfg.refuse(f"{top_k} experts a token of {experts}")
    expert_inner = cfg.get("moe_intermediate_size", "intermediate_size", "ffn_hidden_size")
    if not expert_inner:
        raise cfg.refuse("moe_intermediate_size is missing")
    moe_layers = _moe_layers(cfg, layers)
    shared_inner = cfg.get("shared_expert_intermediate_size")
    if shared_inner is None:
        shared_inner = (cfg.get("n_shared_experts") or 0) * expert_inner
    dense = (layers - moe_layers) * matrices * hidden * (inner or 0)
    dense += moe_layers * (matrices * hidden * shared_inner + hidden * experts)
    return dense, moe_layers * experts * matrices * hidden * expert_inner, experts, top_k


_UNGATED = ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "bloom", "opt", "mpt", "falcon", "phi", "starcoder2")


def _moe_layers(cfg: _Config, layers: int) -> int:
    first_dense = cfg.get("first_k_dense_replace") or 0
    step = cfg.get("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    only_dense = set(cfg.config.get("mlp_only_layers") or ())
    return sum(1 for layer in range(first_dense, layers) if layer not in only_dense and (layer + 1) % step == 0)


def _weight_bytes(cfg: _Config) -> float:
    quantisation = cfg.config.get("quantization_config")
    if isinstance(quantisation, dict):
        method = str(quantisation.get("quant_method"))
        bits = quantisation.get("bits") or quantisation.get("w_bit")
        if method in ("awq", "gptq") and isinstance(bits, int):
            return bits / 8
        if method in _QUANTISED:
            return _QUANTISED[method]
        raise cfg.refuse(f"quantisation method {method!r} is not modelled; known: {', '.join(sorted(_QUANTISED))}")
    dtype = str(cfg.config.get("torch_dtype") or cfg.config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise cfg.refuse(f"torch_dtype {dtype!r} is not modelled; known: {', '.join(sorted(_DTYPES))}")
    return 2.0 if dtype == "float32" else _DTYPES[dtype]  # vLLM serves float32 checkpoints in 16 bits


def _context(cfg: _Config) -> int:
    """Longest context; YaRN's factor counts from the original length, as in vLLM's `ModelConfig`."""
    length = cfg.need(*_CONTEXT)
    scaling = cfg.config.get("rope_scaling") or cfg.config.get("rope_parameters")
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in (
        "yarn",
        "deepseek_yarn",
    ):
        original = scaling.get("original_max_position_embeddings")
        if original and scaling.get("factor"):
            return int(original * scaling["factor"])
    return length


def _window_warnings(cfg: _Config, layers: int) -> tuple[str, ...]:
    config = cfg.config
    kinds = [str(kind) for kind in config.get("layer_types") or ()]
    if kinds:
        bounded = sum(kind != "full_attention" for kind in kinds)
    else:
        on = config.get("use_sliding_window", True) and config.get("sliding_window")
        bounded = layers if on or config.get("attention_chunk_size") else 0
    if not bounded:
        return ()
    return (
        f"{cfg.where}: {bounded} of {layers} layers attend to a window and are counted as full attention; "
        "KV size and attention time are upper bounds",
    )
