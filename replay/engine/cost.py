"""How long an engine step takes: `CostModel`, measured where a fit exists, else scaled from one.

One step of continuous batching runs the prefill chunks of some requests and one token of each decoding
request. Its time follows the mechanism, as a roofline over a launch floor::

    work  = max(weights, token_s * new tokens)             weights are read once, or compute dominates
                                                           (token_s * power_cap: see `replay.engine.power`)
          + attention_s * sum of new * (cached + new / 2)  causal attention of each chunk
          + sequence_s * batch + context_s * context       decoding requests read their own KV
    step  = max(prepare_s + work, launch)                  if nothing ran before it

The CPU prepares a step with prefill, then launches its kernels while the GPU works on them. A launch,
preparation included, takes `launch_s` above `graph_tokens` tokens and `graph_launch_s` up to there; that of a
decode-only step is one CUDA graph and does not show. The CPU runs ahead of the GPU: in a sequence of steps
only what exceeds the GPU's work shows.

Around the steps of a request lie `overhead_s` and `overhead_per_token_s` for each prompt token (HTTP,
parsing, block hashes). A mixture of experts reads the experts that the tokens of a step hit: the
expected share of `experts` when each token picks `experts_per_token` of them independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from replay.backends.preset import Preset
from replay.engine.power import PowerCap
from replay.engine.profiles import GpuProfile, Link, ModelProfile, StepFit, gpu_kv_tokens
from replay.engine.profiles import gpu as gpu_profile
from replay.engine.profiles import model as model_profile
from replay.errors import ReplayError

ALLREDUCE_S = 8e-6
"""Latency of one all-reduce between GPUs of a host, about what NCCL's ring takes for small messages."""

Chunk = tuple[int, int]
"""New tokens of a prefill chunk, and tokens of its request that are already in the GPU's cache."""


@dataclass(frozen=True)
class CostModel:
    """Times of one engine instance in seconds. Build it with `cost_model`."""

    source: Literal["measured", "derived"]
    """``measured``: fitted to this model on this GPU; ``derived``: scaled by FLOPs and bytes."""
    fit: StepFit
    """Coefficients; `fit.weights_s` is the read of what every token passes through."""
    links: dict[str, Link]
    """Link of each lower tier that the preset has."""
    max_batched_tokens: int
    experts_s: float = 0.0
    """Reading all routed experts once; 0 for a dense model."""
    expert_share: float = 0.0
    """Share of the experts that one token passes through."""

    @property
    def overhead_s(self) -> float:
        """Fixed seconds around the steps of a request; see `request_overhead` for the part that grows."""
        return self.fit.overhead_s + sum(link.request_s for link in self.links.values())

    def request_overhead(self, prompt_tokens: int) -> float:
        """Seconds around the steps of a request with this prompt; they delay it and not other requests."""
        return self.overhead_s + self.fit.overhead_per_token_s * prompt_tokens

    def weights_read(self, tokens: int) -> float:
        """Seconds to read the weights that a step of `tokens` tokens needs."""
        if not self.experts_s:
            return self.fit.weights_s
        return self.fit.weights_s + self.experts_s * (1 - (1 - self.expert_share) ** tokens)

    def step_seconds(self, prefill: Sequence[Chunk], decode_batch: int, decode_context: int) -> float:
        """Time of one step alone: prefill chunks, and one token for each of `decode_batch` requests.

        `decode_context` is the context of those requests in tokens, summed.
        """
        prepare = self.fit.prepare_s if prefill else 0.0
        work = prepare + self.work_seconds(prefill, decode_batch, decode_context)
        return max(work, self.launch_seconds(prefill, decode_batch))

    def launch_seconds(self, prefill: Sequence[Chunk], decode_batch: int) -> float:
        """CPU time to launch a step; a decode-only step is one CUDA graph, launched while the last one runs."""
        if not prefill:
            return 0.0
        tokens = sum(new for new, _ in prefill) + decode_batch
        return self.fit.launch_s if tokens > self.fit.graph_tokens else self.fit.graph_launch_s

    def work_seconds(self, prefill: Sequence[Chunk], decode_batch: int, decode_context: int) -> float:
        """GPU time of one step; see `step_seconds` for the arguments.

        It is linear in cached tokens and in context: where chunks of one size follow each other, each adds as much.
        """
        fit = self.fit
        new = attended = 0
        for tokens, cached in prefill:
            new += tokens
            attended += tokens * (2 * cached + tokens)
        tokens = new + decode_batch
        if not tokens:
            return 0.0
        work = max(self.weights_read(tokens), fit.token_s * new) + fit.attention_s * attended / 2
        return work + fit.sequence_s * decode_batch + fit.context_s * decode_context

    def decode_base(self, batch: int) -> float:
        """Part of a decode-only step that does not depend on context, see `decode_context_s`."""
        return self.step_seconds((), batch, 0)

    @property
    def decode_context_s(self) -> float:
        """Seconds of a decode-only step for each token of context."""
        return self.fit.context_s

    def prefill_seconds(self, new: int, cached: int) -> float:
        """Steps of one request alone: `new` tokens after `cached` ones, in chunks, without overheads.

        A chunk is launched while the one before it runs.
        """
        launched = end = 0.0
        power = PowerCap(self.fit)
        whole, rest = divmod(new, self.max_batched_tokens)
        for size, steps in ((self.max_batched_tokens, whole), (rest, int(rest > 0))):
            if not steps:
                continue
            launch, work = self.launch_seconds([(size, cached)], 0), self.work_seconds([(size, cached)], 0, 0)
            more = self.work_seconds([(size, cached + size)], 0, 0) - work
            for _ in range(steps):
                start = max(end, launched + self.fit.prepare_s)
                launched += launch
                end = max(start + power.step(start, size, work), launched)
                work += more
            cached += steps * size
        return end


def chunks(new: int, cached: int, most: int) -> Iterator[Chunk]:
    """Chunked prefill: pieces of at most `most` tokens, each with what is in the cache when it runs."""
    while new > 0:
        size = min(new, most)
        yield size, cached
        cached += size
        new -= size


def cost_model(model: ModelProfile, gpu: GpuProfile, preset: Preset) -> CostModel:
    """The cost model of `model` on `gpu` (times ``preset.tensor_parallel``) behind `preset`.

    Raises:
        ReplayError: the model does not fit the GPU, or the profiles lack what the preset needs.
    """
    gpu_kv_tokens(model, gpu, preset)
    links = _links(gpu, preset)
    fit = gpu.fits.get(model.name)
    if fit and preset.tensor_parallel == 1 and preset.kv_dtype in ("auto", "bf16", "fp16"):
        return CostModel("measured", fit, links, preset.max_batched_tokens)
    return _derived(model, gpu, preset, links)


def _links(gpu: GpuProfile, preset: Preset) -> dict[str, Link]:
    connector = "lmcache" if preset.connector.startswith("lmcache") else preset.connector
    known = gpu.links.get("default", {}) | gpu.links.get(connector, {})
    links = {}
    for name, tier in preset.lower():
        if name not in known:
            raise ReplayError(f"GPU profile {gpu.name}: no link to tier {name!r}; add it under links.{connector}")
        link = known[name]
        load, store = tier.gbps or link.load_gbps, tier.store_gbps or link.store_gbps
        if preset.connector == "lmcache-mp":  # its server moves KV beside the engine's steps
            link = _replace(link, blocking_load=False, blocking_store=False, source="derived")
        if tier.gbps or tier.store_gbps:
            # Another device than the profile's: what it drains is what the user says it stores or reads.
            drain = link.drain_gbps and (tier.store_gbps or tier.gbps)
            link = _replace(link, load_gbps=load, store_gbps=store, drain_gbps=drain, source="derived")
        links[name] = link
    return links


def _replace(link: Link, **changes: object) -> Link:
    return msgspec.structs.replace(link, **changes)


def _anchor(gpu: GpuProfile) -> tuple[GpuProfile, ModelProfile, StepFit]:
    """The measurement that this GPU's times are scaled from."""
    base = gpu_profile(gpu.scaled_from) if gpu.scaled_from else gpu
    for name, fit in base.fits.items():
        return base, model_profile(name), fit
    raise ReplayError(f"GPU profile {gpu.name}: no fits to scale from; set scaled_from, e.g. to h200")


def _derived(model: ModelProfile, gpu: GpuProfile, preset: Preset, links: dict[str, Link]) -> CostModel:
    """Scales a fit by FLOPs over peak and by bytes over bandwidth: the share of the peak stays the same."""
    base, base_model, fit = _anchor(gpu)
    old, new, ranks = base_model.shape, model.shape, preset.tensor_parallel
    compute = base.bf16_tflops / _tflops(gpu, new.weight_bytes) / ranks
    memory = base.hbm_gbps / gpu.hbm_gbps
    kv_ratio = model.kv_bytes_per_token(preset.kv_dtype) / base_model.kv_bytes_per_token()
    read_s = fit.weights_s / (_read_params(old.dense_params, base_model) * old.weight_bytes) * memory / ranks
    attention = compute * _tflops(gpu, new.weight_bytes) / gpu.bf16_tflops  # attention stays in 16 bits
    reduce_s, reduce_token_s = _all_reduce(model, gpu, ranks)
    scaled = StepFit(
        overhead_s=fit.overhead_s,
        overhead_per_token_s=fit.overhead_per_token_s,
        weights_s=read_s * _read_params(new.dense_params, model) * new.weight_bytes + reduce_s,
        token_s=fit.token_s * new.active_params / old.active_params * compute + reduce_token_s,
        attention_s=fit.attention_s * new.attention_flops / old.attention_flops * attention,
        power_cap=fit.power_cap,
        prepare_s=fit.prepare_s,
        launch_s=fit.launch_s * new.layers / old.layers + reduce_s,
        graph_launch_s=fit.graph_launch_s * new.layers / old.layers + reduce_s,
        graph_tokens=fit.graph_tokens,
        sequence_s=fit.sequence_s,
        context_s=fit.context_s * kv_ratio * memory * model.kv_copies(ranks) / ranks,
    )
    share = new.experts_per_token / new.experts if new.experts else 0.0
    experts_s = read_s * new.expert_params * new.weight_bytes
    return CostModel("derived", scaled, links, preset.max_batched_tokens, experts_s, share)


def _read_params(dense_params: int, model: ModelProfile) -> int:
    """Parameters read in every step: the layers and the output head."""
    return dense_params + model.shape.embedding_params // 2


def _tflops(gpu: GpuProfile, weight_bytes: float) -> float:
    """Peak for this weight type: FP8 has its own units, 4-bit weights are multiplied in 16 bits."""
    return gpu.fp8_tflops if weight_bytes == 1.0 and gpu.fp8_tflops else gpu.bf16_tflops


def _all_reduce(model: ModelProfile, gpu: GpuProfile, ranks: int) -> tuple[float, float]:
    """Seconds that a step, and a token, adds under tensor parallelism: two ring all-reduces a layer."""
    if ranks == 1:
        return 0.0, 0.0
    times = 2 * model.shape.layers
    nbytes = 2 * model.shape.hidden * 2 * (ranks - 1) / ranks
    return times * ALLREDUCE_S, times * nbytes / (gpu.peer_gbps * 1e9)
