"""LMCache beside vLLM: in the engine's process (variables LMCACHE_*) or as a server (``lmcache server``).

Keys and flags: lmcache's ``v1/config.py``, ``v1/multiprocess/config.py`` and ``v1/distributed/config.py``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from replay.backends.launch.command import LOOPBACK, Command, Services, compact
from replay.backends.launch.probe import Probe
from replay.backends.preset import LowerTier, Preset
from replay.errors import ReplayError

_CHUNK = 256
_IN_PROCESS = Path(__file__).parents[1] / "lmcache_tiers.py"
_CLIENT = Path(__file__).parents[1] / "lmcache_client.py"
_GB = 2**30  # LMCache's "GB" of a buffer is 2**30 bytes


def in_process(preset: Preset, services: Services) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """vLLM's KV transfer configuration, further arguments and environment for LMCache in vLLM's process.

    Raises:
        ReplayError: no CPU memory, which LMCache needs as a buffer even for a disk tier.
    """
    cpu, disk = preset.tiers.cpu, preset.tiers.disk
    if cpu is None:
        raise ReplayError(f"backend {preset.name}: LMCache needs a CPU buffer; set tiers.cpu.gib")
    env = {
        "LMCACHE_CHUNK_SIZE": str(preset.chunk_tokens or _CHUNK),
        # False: the buffer only stages loads and stores, and serves no hits.
        "LMCACHE_LOCAL_CPU": str(not cpu.staging),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{cpu.gib:g}",
        "LMCACHE_CACHE_POLICY": (cpu.policy or "lru").upper(),
        "LMCACHE_EXTRA_CONFIG": compact({"enable_cache_usage_details_in_response": True}),
        "LMCACHE_INTERNAL_API_SERVER_HOST": LOOPBACK,
    }
    if disk is not None:
        env["LMCACHE_LOCAL_DISK"] = f"file://{disk.path}/"
        env["LMCACHE_MAX_LOCAL_DISK_SIZE"] = f"{disk.gib:g}"
    if services.remote:
        env["LMCACHE_REMOTE_URL"] = services.remote
    config = {"kv_connector": "InProcess", "kv_connector_module_path": _IN_PROCESS.stem}
    return config, [], {**env, **_noting(services)}


def _modules(files: tuple[Path, ...], services: Services) -> dict[str, str]:
    """Lets a server import files of ours: copies in a folder of their own, since beside them stands all of replay."""
    for file in files:
        shutil.copy(file, services.scratch)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(services.scratch), os.environ.get("PYTHONPATH")]))}


def client(services: Services) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """vLLM's KV transfer configuration, further arguments and environment for an LMCache server."""
    config = {
        "kv_connector": "ServerClient",
        "kv_connector_module_path": _CLIENT.stem,
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{LOOPBACK}",
            "lmcache.mp.port": services.lmcache_port,
        },
    }
    return config, [], _noting(services)


def _noting(services: Services) -> dict[str, str]:
    """Environment in which vLLM finds our connectors and they find their file."""
    return {"REPLAY_LMCACHE_EVENTS": str(services.events), **_modules((_IN_PROCESS, _CLIENT), services)}


def server(preset: Preset, probe: Probe, services: Services, recorder: Path | None) -> Command:
    """The command of ``lmcache server``: CPU memory as L1, disk or a remote store as L2.

    `recorder` is a Python file with `build_server_modules`; it writes to `services.events`.

    Raises:
        ReplayError: LMCache is missing, or the preset gives its server no CPU memory.
    """
    if "lmcache" not in probe.versions:
        raise ReplayError(f"--target launch: {probe.python} has no lmcache; install it there ('replay doctor')")
    cpu = preset.tiers.cpu
    if cpu is None:
        raise ReplayError(f"backend {preset.name}: an LMCache server needs CPU memory; set tiers.cpu.gib")
    argv = [probe.python, "-m", "lmcache.cli.main", "server"]
    argv += ["--host", LOOPBACK, "--port", str(services.lmcache_port)]
    argv += ["--http-host", LOOPBACK, "--http-port", str(services.lmcache_http)]
    argv += [
        "--chunk-size",
        str(preset.chunk_tokens or _CHUNK),
        "--l1-size-gb",
        f"{cpu.gib:g}",
        "--no-l1-use-lazy",
    ]
    argv += ["--eviction-policy", (cpu.policy or "lru").upper(), "--eviction-ratio", f"{cpu.evict_ratio:g}"]
    if cpu.watermark:
        argv += ["--eviction-trigger-watermark", f"{cpu.watermark:g}"]
    if probe.device == "cpu":
        # The default hands over CUDA memory; without a GPU vLLM would hang when it registers its cache.
        argv += ["--supported-transfer-mode", "engine_driven", "--shm-name", services.scratch.name]
    for adapter in _adapters(preset, services):
        argv += ["--l2-adapter", compact(adapter)]
    if preset.lower()[1:] and cpu.staging:
        argv += ["--l2-store-policy", "skip_l1"]
    env: dict[str, str] = {}
    if recorder is not None and probe.knows("--server-module"):
        module = {"module_path": recorder.stem, "config": {"path": str(services.events)}}
        argv += ["--server-module", compact(module)]
        env |= _modules((recorder,), services)
    return Command("lmcache", argv, env, f"http://{LOOPBACK}:{services.lmcache_http}/healthcheck")


def _adapters(preset: Preset, services: Services) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    disk, remote = preset.tiers.disk, preset.tiers.remote
    if disk is not None:
        found.append({"type": "fs_native", "base_path": disk.path, **_limit(disk)})
    if remote is not None and services.remote:
        where = urlsplit(services.remote)
        found.append({"type": "resp", "host": where.hostname, "port": where.port, **_limit(remote)})
    return found


def _limit(tier: LowerTier) -> dict[str, Any]:
    # LMCache enforces the capacity only where an eviction policy stands beside it.
    return {"max_capacity_gb": tier.gib, "eviction": {"eviction_policy": (tier.policy or "lru").upper()}}
