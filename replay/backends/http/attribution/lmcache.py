"""vLLM with LMCache: which tokens were vLLM's own, and which of LMCache's came from memory or disk.

Per request, from best to worst:
- ``kv_transfer_params.cached_token_stats`` of LMCache's server connector (LMCache 0.5.5 and later; on streams
  since vLLM 0.33): ``num_vllm_cached_tokens`` are the GPU's, the rest of vLLM's ``cached_tokens`` was loaded.
- ``kv_transfer_params.num_lmcache_cached_tokens`` of the connector in vLLM's process.
- ``lookup``: what `lookups` found for the request. The record of `replay.backends.lmcache_recorder` on the
  server's event bus has the hit tokens of L1 (memory) and of L2 (disk or a remote store), the log line of the
  connector in vLLM's process the tokens that vLLM had itself (``engine_tokens``).

LMCache's hits count from the start of the prompt and so overlap what the GPU had: L1 is the prefix that
memory serves alone, L2 its extension.
"""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution.served import Served, Usage, count, total_only
from replay.backends.preset import Preset


def tiers(preset: Preset, counts: Usage, extra: dict[str, Any]) -> Served:
    """GPU, CPU and disk or remote tokens, as far as the fields at hand tell them apart."""
    if counts.prompt is None or counts.cached is None:
        return Served()
    lookup = extra.get("lookup")
    gpu = _gpu(counts, extra, lookup)
    if gpu is None:
        return total_only(counts)
    loaded = counts.cached - gpu
    computed = max(0, counts.prompt - counts.cached)
    source = "events" if lookup else "connector"
    lower = [name for name, tier in preset.lower() if not tier.staging]
    if loaded == 0:
        return Served(gpu=gpu, **dict.fromkeys(lower, 0), computed=computed, source=source)
    if len(lower) == 1:
        return Served(gpu=gpu, **{lower[0]: loaded}, computed=computed, source=source)
    l1 = count(lookup, "l1_hit_tokens")
    if l1 is None or len(lower) != 2 or lower[0] != "cpu":
        return Served(gpu=gpu, external=loaded, computed=computed, source=source)
    from_l1 = min(loaded, max(0, l1 - gpu))
    return Served(gpu=gpu, **{"cpu": from_l1, lower[1]: loaded - from_l1}, computed=computed, source=source)


def _gpu(counts: Usage, extra: dict[str, Any], lookup: Any) -> int | None:
    """Tokens of vLLM's own cache."""
    assert counts.cached is not None
    fields = extra.get("kv_transfer_params") or {}
    own = count(fields.get("cached_token_stats"), "num_vllm_cached_tokens")
    if own is not None:
        return min(own, counts.cached)
    own = count(lookup, "engine_tokens")
    if own is not None:
        return min(own, counts.cached)
    hit = count(fields, "num_lmcache_cached_tokens")
    if hit is None:
        hit = count(lookup, "hit_tokens")
    # Nothing of LMCache's was used where its prefix is shorter than what vLLM says was cached.
    if hit is not None and (hit == 0 or hit < counts.cached):
        return counts.cached
    return 0 if counts.cached == 0 else None
