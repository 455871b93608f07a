"""Model and hardware profiles: what a token weighs, what a GPU can do, and which of it was measured.

Bundled ones are YAML files in `replay/engine/profiles/`, described by `schemas/profile.schema.json`.
A user's own is a path: a profile in YAML, or a Hugging Face ``config.json`` or its folder for a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from replay.backends.preset import Preset
from replay.engine.model_config import KV_BYTES, Shape, shape
from replay.errors import ReplayError, unknown_name
from replay.schema import DIALECT, definitions

PROFILES = Path(__file__).parent / "profiles"
GIB = 2**30

MEMORY_USE = 0.92
"""Share of GPU memory that vLLM takes (its ``--gpu-memory-utilization`` default since 0.30)."""
ACTIVATION_RESERVE_GIB = 4.2
"""GPU memory that activations and CUDA graphs take beside weights and KV: what remains of an 80 GB H100
after Qwen3-8B's weights and the 388,560 KV tokens that vLLM 0.30 reported there (8,192 batched tokens)."""

Positive = Annotated[float, Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, Meta(ge=0, le=1e12)]


class Link(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The way between the GPU and one lower tier. Bandwidths in GB/s (10**9 bytes), times in seconds.

    A load is the whole way from the tier to the GPU; a store is what this tier adds to the stores of the
    tiers above it (LMCache writes a chunk to its CPU buffer and then to disk).
    """

    load_gbps: Positive
    """Tier to GPU."""
    store_gbps: Positive
    """GPU to tier, as seen by the engine step that stores."""
    request_s: NotNegative = 0.0
    """Around every request, whether it loads or not: the connector's look-ups and hooks."""
    latency_s: NotNegative = 0.0
    """Once for a load."""
    per_chunk_s: NotNegative = 0.0
    """Software cost of each loaded chunk."""
    store_per_chunk_s: NotNegative = 0.0
    """Software cost of each stored chunk."""
    blocking_load: bool = True
    """True: the engine's steps wait for the load (LMCache in process); false: only the request waits."""
    blocking_store: bool = True
    """True: the engine's steps wait for the store; false: it overlaps with them."""
    busy_launch_s: NotNegative = 0.0
    """More for launching a step with prefill while chunks are being drained: the writers are threads of the engine."""
    crowded_store_s: NotNegative = 0.0
    """More for each chunk that is stored while the buffer above this tier is full, so that another must leave."""
    flush_every_gb: Positive | None = None
    """Written bytes, in GB, after which the host writes its page cache back and steps that store wait; null: never."""
    flush_s: NotNegative = 0.0
    """How long they wait altogether for one such write-back."""
    flush_pause_s: NotNegative = 0.0
    """How long one step waits for it at most."""
    drain_gbps: Positive | None = None
    """Sustained rate at which stored chunks leave the staging buffer; null: as fast as they arrive."""
    source: Literal["measured", "derived"] = "derived"

    @property
    def sustained_gbps(self) -> float:
        """What the tier gives back for long: no faster than the stores of the same bytes leave the buffer above."""
        return min(self.load_gbps, self.drain_gbps or self.load_gbps)

    def load_seconds(self, nbytes: float, chunks: int) -> float:
        """Time to bring `chunks` chunks of `nbytes` bytes altogether into GPU memory."""
        return self.latency_s + chunks * self.per_chunk_s + nbytes / (self.load_gbps * 1e9)

    def store_seconds(self, nbytes: float, chunks: int) -> float:
        """Time to hand `chunks` chunks of `nbytes` bytes altogether to the tier."""
        return chunks * self.store_per_chunk_s + nbytes / (self.store_gbps * 1e9)


class StepFit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Measured coefficients of one model on one GPU; all in seconds. `replay.engine.cost` has the formula."""

    overhead_s: NotNegative
    """Around a request: HTTP, scheduling, detokenising."""
    overhead_per_token_s: NotNegative
    """Around a request, for each prompt token: parsing and block hashes."""
    weights_s: Positive
    """Shortest step: reading all weights once."""
    token_s: Positive
    """For each prefilled token."""
    attention_s: Positive
    """For each pair of a prefilled token and a token that it attends to."""
    power_cap: Annotated[float, Meta(ge=1)] = 1.0
    """Factor on `token_s` while the GPU's power cap holds its clock down; see `replay.engine.power`."""
    prepare_s: NotNegative = 0.0
    """CPU time of a step with prefill before the GPU can begin: inputs, block tables."""
    launch_s: NotNegative
    """Preparing and launching the kernels of a step with prefill that has no CUDA graph: CPU time."""
    graph_launch_s: NotNegative = 0.0
    """The same with (piecewise) CUDA graphs."""
    graph_tokens: Annotated[int, Meta(ge=0)]
    """Largest step that runs as a CUDA graph, in tokens."""
    sequence_s: NotNegative
    """For each decoding request in a step."""
    context_s: Positive
    """For each token of context of a decoding request."""


class GpuProfile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One GPU and the host around it."""

    name: str = ""
    """Default: the file's name."""
    summary: str = ""
    """One line for ``replay profiles``."""
    source: Literal["measured", "derived"]
    """Whether any of `fits` and `links` was measured on such a machine."""
    sources: list[str] = []
    """Where the figures come from."""
    memory_gib: Positive
    hbm_gbps: Positive
    """Memory bandwidth in GB/s."""
    bf16_tflops: Positive
    """Dense BF16 peak."""
    fp8_tflops: Positive | None = None
    """Dense FP8 peak; null: FP8 weights compute at the BF16 rate."""
    peer_gbps: Positive
    """Between the GPUs of a host, one direction, in GB/s."""
    fits: dict[str, StepFit] = {}
    """Measured coefficients by model name."""
    scaled_from: str | None = None
    """GPU whose measurement other models are scaled from; null: this one's own."""
    links: dict[str, dict[str, Link]]
    """Links by connector (``lmcache``, ``offload``; ``default`` for others), then by tier."""


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model's name and the figures derived from its configuration."""

    name: str
    summary: str = ""
    sources: list[str] = []
    shape: Shape

    @property
    def max_context(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.shape.max_context

    @property
    def weight_gib(self) -> float:
        """Weights in GiB, over all GPUs."""
        return self.shape.params * self.shape.weight_bytes / GIB

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is an upper bound rather than exact."""
        return self.shape.warnings

    def kv_bytes_per_token(self, kv_dtype: str = "auto") -> int:
        """Bytes that one token takes in a cache tier; ``auto`` is 16 bits, as vLLM stores KV by default.

        Raises:
            ReplayError: unknown type.
        """
        if kv_dtype != "auto" and kv_dtype not in KV_BYTES:
            raise unknown_name("KV cache type", kv_dtype, ["auto", *KV_BYTES])
        return round(self.shape.kv_elements * KV_BYTES.get(kv_dtype, 2.0))

    def kv_copies(self, tensor_parallel: int) -> int:
        """How often each KV element is held by `tensor_parallel` GPUs: more than once where heads run out."""
        return max(1, tensor_parallel // self.shape.kv_heads)


class _ModelFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A model profile in YAML."""

    name: str = ""
    """Default: the file's name."""
    summary: str = ""
    """One line for ``replay profiles``."""
    sources: list[str] = []
    """Where the figures come from."""
    config: dict[str, Any]
    """Fields of the model's Hugging Face ``config.json``."""


def names(kind: Literal["models", "gpus"]) -> list[str]:
    """Names of the bundled profiles."""
    return sorted(path.stem for path in (PROFILES / kind).glob("*.yaml"))


def summary(kind: Literal["models", "gpus"], name: str) -> str:
    """One line about a bundled profile; a GPU's says whether it was measured or derived."""
    data = _mapping(PROFILES / kind / f"{name}.yaml")
    return f"{data.get('summary', '')}{' [' + data['source'] + ']' if 'source' in data else ''}"


def show(name: str) -> str:
    """A bundled profile's YAML.

    Raises:
        ReplayError: unknown name.
    """
    for kind in ("models", "gpus"):
        path = PROFILES / kind / f"{name}.yaml"
        if path.exists():
            return path.read_text()
    raise unknown_name("profile", name, [*names("models"), *names("gpus")], "'replay profiles' lists them")


def model(name_or_path: str) -> ModelProfile:
    """A bundled model, a model profile in YAML, or a Hugging Face ``config.json`` (or its folder).

    Raises:
        ReplayError: unknown name, unreadable file, or an architecture that cannot be modelled.
    """
    path = Path(name_or_path)
    if name_or_path in names("models"):
        path = PROFILES / "models" / f"{name_or_path}.yaml"
    elif path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return ModelProfile(name=name, sources=[path.name], shape=shape(_mapping(path), str(path)))
    if path.suffix not in (".yaml", ".yml"):
        hint = "a path to a Hugging Face config.json works too"
        raise unknown_name("model", name_or_path, names("models"), hint)
    read = _convert(path, _mapping(path), _ModelFile)
    return ModelProfile(name=read.name, summary=read.summary, sources=read.sources, shape=shape(read.config, str(path)))


def gpu(name_or_path: str) -> GpuProfile:
    """A bundled GPU or a user's profile in YAML.

    Raises:
        ReplayError: unknown name, or a file that does not fit (a missing field, a bandwidth of zero).
    """
    path = Path(name_or_path)
    if name_or_path in names("gpus"):
        path = PROFILES / "gpus" / f"{name_or_path}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        hint = "'replay profiles' lists them; a path to your own profile in YAML works too"
        raise unknown_name("GPU", name_or_path, names("gpus"), hint)
    profile: GpuProfile = _convert(path, _mapping(path), GpuProfile)
    return profile


def gpu_kv_tokens(model: ModelProfile, gpu: GpuProfile, preset: Preset) -> int:
    """Tokens of KV that the GPU tier of one engine instance holds.

    The preset's ``tiers.gpu.tokens``, else its ``tiers.gpu.gib``, else what `MEMORY_USE` of the memory leaves
    beside the weights and `ACTIVATION_RESERVE_GIB` on each GPU.

    Raises:
        ReplayError: too little is asked for or left, or the heads cannot be split over ``tensor_parallel`` GPUs.
    """
    tier, size = preset.tiers.gpu, preset.tensor_parallel
    if model.shape.heads % size:
        raise ReplayError(f"{model.name}: {model.shape.heads} attention heads cannot be split over {size} GPUs")
    per_token = model.kv_bytes_per_token(preset.kv_dtype) * model.kv_copies(size)
    asked, usable = tier.tokens or tier.gib, gpu.memory_gib * MEMORY_USE - ACTIVATION_RESERVE_GIB
    tokens = tier.tokens or int((tier.gib or size * usable - model.weight_gib) * GIB / per_token)
    if tokens >= 2 * preset.block_tokens:
        return tokens
    if asked:
        raise ReplayError(
            f"backend {preset.name}: a GPU tier of {tokens:,} tokens is less than two blocks of {preset.block_tokens} "
            "tokens; raise tiers.gpu.tokens or tiers.gpu.gib"
        )
    ranks = next((n for n in (2, 4, 8, 16, 32) if n > size and n * usable > model.weight_gib), None)
    raise ReplayError(
        f"{model.name} ({model.weight_gib:.1f} GiB of weights) leaves no room for KV on {size} x {gpu.name} "
        f"({gpu.memory_gib:.0f} GiB each); take a larger GPU{f' or --set tensor_parallel={ranks}' if ranks else ''}"
    )


def _mapping(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ReplayError(f"{path}: no such profile file; check the path")
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ReplayError(f"{path}: not readable: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ReplayError(f"{path}: a profile is a mapping; see schemas/profile.schema.json")
    return data


def _convert(path: Path, data: dict[str, Any], kind: type[Any]) -> Any:
    data.setdefault("name", path.stem)
    try:
        return msgspec.convert(data, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ReplayError(f"{path}: {error}; see schemas/profile.schema.json") from None


def json_schema() -> dict[str, Any]:
    """JSON Schema of a profile file of either kind; `schemas/profile.schema.json` holds it."""
    either, components = definitions(GpuProfile, _ModelFile)
    title = "A replay model or hardware profile"
    return {"$schema": DIALECT, "title": title, "anyOf": either, "$defs": components}
