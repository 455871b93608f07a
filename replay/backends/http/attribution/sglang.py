"""SGLang: ``return_cached_tokens_details`` gives the tokens by tier of every request.

``sglext.cached_tokens_details`` holds ``device``, ``host``, ``storage`` and ``storage_backend``
(SGLang's ``entrypoints/openai/protocol.py``); ``storage`` is there only with a storage backend.
"""

from __future__ import annotations

from typing import Any

from replay.backends.http.attribution.served import Served, Usage, count, total_only
from replay.backends.preset import Preset

_DISK_BACKENDS = ("file", "nixl", "hf3fs", "seaweedfs")


def tiers(preset: Preset, counts: Usage, extra: dict[str, Any]) -> Served:
    """Device, host and storage tokens as GPU, CPU and disk or remote; else what the usage sums up."""
    details = (extra.get("sglext") or {}).get("cached_tokens_details")
    device, host, storage = (count(details, name) for name in ("device", "host", "storage"))
    if counts.prompt is None or device is None:
        return _without_details(preset, counts)
    cached = device + (host or 0) + (storage or 0)
    found = {"gpu": device, "cpu": host, _storage_tier(preset, details): storage}
    return Served(**found, computed=max(0, counts.prompt - cached), source="usage")


def _without_details(preset: Preset, counts: Usage) -> Served:
    if preset.connector == "none" and counts.prompt is not None and counts.cached is not None:
        return Served(gpu=counts.cached, computed=max(0, counts.prompt - counts.cached), source="usage")
    return total_only(counts)


def _storage_tier(preset: Preset, details: Any) -> str:
    if preset.tiers.disk is not None or preset.tiers.remote is not None:
        return "disk" if preset.tiers.remote is None else "remote"
    return "disk" if details.get("storage_backend") in _DISK_BACKENDS else "remote"
