"""Picks the module that reads a preset's replies."""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution import hosted, lmcache, sglang, simulated, vllm
from replay.backends.http.attribution.served import Served
from replay.backends.preset import Preset


def tiers(preset: Preset, usage: dict[str, Any], extra: dict[str, Any]) -> Served:
    """Tokens by tier of one reply.

    Args:
        preset: names engine, connector and the tiers that exist.
        usage: the reply's last usage, ``{}`` where it has none.
        extra: the reply's `kv_transfer_params`, `sglext` and, from an LMCache server's event bus, `lookup`.
    """
    model = simulated.tiers(usage)
    if model is not None:
        return model
    if preset.engine == "sglang":
        return sglang.tiers(preset, usage, extra)
    if preset.engine != "vllm":
        return hosted.tiers(preset, usage, extra)
    if preset.connector.startswith("lmcache"):
        return lmcache.tiers(preset, usage, extra)
    return vllm.tiers(preset, usage, extra)
