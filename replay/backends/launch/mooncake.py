"""Mooncake's master, and vLLM's MooncakeStoreConnector, over TCP on this machine.

Flags: ``mooncake_master --help`` (0.3.13); keys: vLLM's ``distributed/.../mooncake/store``.
"""

from __future__ import annotations

import json
from typing import Any

from replay.backends.launch.command import LOOPBACK, Command, Services, free_port
from replay.backends.launch.probe import Probe, executable
from replay.backends.preset import LowerTier, Preset
from replay.errors import ReplayError


def master(probe: Probe, rpc_port: int, tier: LowerTier) -> Command:
    """The command of mooncake_master, which by default would listen on every interface.

    Without its metadata server: that one does so whatever its host flag says (seen with 0.3.13), and peers find each
    other without it.

    Raises:
        ReplayError: the program is missing.
    """
    program = executable("mooncake_master", probe.python)
    if program is None:
        raise ReplayError(
            "--target launch: no mooncake_master; pip install mooncake-transfer-engine in the engine's "
            "environment (it needs the system library libibverbs1)"
        )
    metrics = free_port()
    argv = [program, "-rpc_address", LOOPBACK, "-rpc_port", str(rpc_port)]
    argv += ["-metrics_host", LOOPBACK, "-metrics_port", str(metrics)]
    if tier.watermark is not None:
        argv += ["-eviction_high_watermark_ratio", f"{tier.watermark:g}", "-eviction_ratio", f"{tier.evict_ratio:g}"]
    return Command("mooncake", argv, {}, f"tcp://{LOOPBACK}:{rpc_port}")


def client(preset: Preset, services: Services) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """vLLM's KV transfer configuration, further arguments and environment; writes Mooncake's own file."""
    config = services.scratch / "mooncake.json"
    config.write_text(json.dumps({"mode": "embedded", **_setup(preset, services), "device_name": ""}))
    return {"kv_connector": "MooncakeStoreConnector"}, [], {"MOONCAKE_CONFIG_PATH": str(config)}


def hicache_env(preset: Preset, services: Services) -> dict[str, str]:
    """Environment of SGLang's HiCache with Mooncake as its storage."""
    setup = _setup(preset, services)
    return {
        "MOONCAKE_MASTER": setup["master_server_address"],
        "MOONCAKE_TE_META_DATA_SERVER": setup["metadata_server"],
        "MOONCAKE_PROTOCOL": setup["protocol"],
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(setup["global_segment_size"]),
    }


def _setup(preset: Preset, services: Services) -> dict[str, Any]:
    assert preset.tiers.remote is not None and services.remote is not None
    # Each instance lends its share of the pool.
    segment = int(preset.tiers.remote.gib * 2**30) // preset.instances
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": services.remote.partition("://")[2],
        "protocol": "tcp",
        "global_segment_size": segment,
        "local_buffer_size": min(segment, 4 * 2**30),
    }
