"""A preset as vLLM's command line (0.26 to 0.33; flags that a version lacks are left out).

Flags and their meaning: vLLM's ``vllm/engine/arg_utils.py`` and ``vllm/config/``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from replay.backends.launch import devices, lmcache, mooncake
from replay.backends.launch.command import LOOPBACK, Command, Options, Services, compact
from replay.backends.launch.probe import Probe
from replay.backends.preset import Preset
from replay.engine.model_config import shape
from replay.errors import ReplayError

_KV_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "fp8"}
_CPU_DEFAULT_BYTES = 2**30
# Wanted where the version has them: hits per request in the usage, engine-side timings, ids that we choose.
_REPORTS = ("--enable-prompt-tokens-details", "--enable-per-request-metrics", "--enable-request-id-headers")


def serve(preset: Preset, options: Options, probe: Probe, services: Services, *, port: int, instance: int) -> Command:
    """The command of one instance.

    Raises:
        ReplayError: the preset cannot run with this build or machine.
    """
    _check(preset, probe)
    transfer, extra, env = _connector(preset, probe, services)
    argv = [probe.python, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", options.model, "--served-model-name", options.served_name]
    argv += ["--host", LOOPBACK, "--port", str(port)]
    argv += ["--block-size", str(preset.block_tokens)]
    argv += [
        "--max-num-batched-tokens",
        str(preset.max_batched_tokens),
        "--max-num-seqs",
        str(preset.max_seqs),
    ]
    argv += ["--generation-config", "vllm"]  # a model's own sampling defaults must not change lengths
    argv += [flag for flag in _REPORTS if probe.knows(flag)]
    argv.append("--enable-prefix-caching" if preset.prefix_caching else "--no-enable-prefix-caching")
    argv += _gpu_tier(preset, options, probe)
    if options.max_model_len:
        argv += ["--max-model-len", str(options.max_model_len)]
    if options.dummy_weights:
        argv += ["--load-format", "dummy"]
        if not (Path(options.model) / "tokenizer.json").exists():
            argv.append("--skip-tokenizer-init")
    if preset.kv_dtype in _KV_DTYPES:
        argv += ["--kv-cache-dtype", _KV_DTYPES[preset.kv_dtype]]
    if preset.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(preset.tensor_parallel)]
    if transfer:
        argv += ["--kv-transfer-config", compact({"kv_role": "kv_both", **transfer})]
    env = {**_threads(preset, probe, instance), **env}
    # /reset_prefix_cache exists in dev mode only; sockets go where they are removed with the launch.
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_RPC_BASE_PATH": str(services.scratch)}
    if Path(options.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"  # all there is to load is there; without a network vLLM would wait for one
    if probe.device == "cuda" and "flashinfer" not in probe.versions:
        env["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # 0.26 imports it unasked and ends where it is not installed
    return Command(
        f"vllm-{instance}",
        [*argv, *extra, *preset.launch.args],
        {**env, **preset.launch.env, **devices.environment(preset, probe, instance)},
        f"http://{LOOPBACK}:{port}/health",
    )


def _check(preset: Preset, probe: Probe) -> None:
    if "vllm" not in probe.versions:
        raise ReplayError(
            f"--target launch: {probe.python} has no vllm; install it there, or set REPLAY_ENGINE_PYTHON "
            "to the python that has it ('replay doctor' shows what is found)"
        )
    if probe.device == "cpu" and preset.connector in ("offload", "lmcache", "mooncake"):
        advice = "--set connector=lmcache-mp" if preset.connector == "lmcache" else "a preset with lmcache-mp"
        raise ReplayError(
            f"--target launch: connector {preset.connector} of backend {preset.name} needs a GPU, this vLLM "
            f"runs on the CPU; use {advice}"
        )
    devices.check(preset, probe)


def _gpu_tier(preset: Preset, options: Options, probe: Probe) -> list[str]:
    gpu = preset.tiers.gpu
    if gpu.tokens:
        blocks = -(-gpu.tokens // preset.block_tokens)
        sizes = ["--num-gpu-blocks-override", str(blocks)]
        if probe.device == "cpu":
            sizes += ["--kv-cache-memory-bytes", str(_kv_bytes(options.model, blocks * preset.block_tokens))]
        return sizes
    if gpu.gib or probe.device == "cpu":
        return ["--kv-cache-memory-bytes", str(int(gpu.gib * 2**30) if gpu.gib else _CPU_DEFAULT_BYTES)]
    return []


def _kv_bytes(model: str, tokens: int) -> int:
    """Bytes that hold a number of tokens: on the CPU vLLM wants them said even beside a number of blocks."""
    config = Path(model) / "config.json"
    if not config.exists():
        return _CPU_DEFAULT_BYTES
    return shape(json.loads(config.read_text()), str(config)).kv_elements * 2 * tokens  # BF16


def _connector(
    preset: Preset, probe: Probe, services: Services
) -> tuple[dict[str, Any] | None, list[str], dict[str, str]]:
    """KV transfer configuration, further arguments, environment."""
    if preset.connector == "lmcache":
        return lmcache.in_process(preset, services)
    if preset.connector == "lmcache-mp":
        return lmcache.client(services)
    if preset.connector == "mooncake":
        return mooncake.client(preset, services)
    if preset.connector == "offload":
        return _offload(preset, probe)
    if preset.connector == "none":
        return None, [], {}
    raise ReplayError(f"backend {preset.name}: connector {preset.connector} is not one of vLLM's; use engine: sglang")


def _offload(preset: Preset, probe: Probe) -> tuple[dict[str, Any] | None, list[str], dict[str, str]]:
    cpu, disk = preset.tiers.cpu, preset.tiers.disk
    if cpu is None:
        raise ReplayError(f"backend {preset.name}: vLLM's offload needs CPU memory; set tiers.cpu.gib")
    if cpu.inclusion == "exclusive":
        raise ReplayError(f"--target launch: backend {preset.name}: vLLM has no exclusive CPU tier; use --target sim")
    if cpu.write == "back":
        lazy = {"cpu_bytes_to_use": int(cpu.gib * 2**30), "lazy_offload": True}
        return {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": lazy}, [], {}
    if disk is None and preset.chunk_tokens is None and probe.knows("--kv-offloading-size"):
        return None, ["--kv-offloading-size", f"{cpu.gib:g}"], {}
    config: dict[str, Any] = {"cpu_bytes_to_use": int(cpu.gib * 2**30), "eviction_policy": "lru"}
    if preset.chunk_tokens:
        config["block_size"] = preset.chunk_tokens
    if disk is not None:
        config["spec_name"] = "TieringOffloadingSpec"
        config["secondary_tiers"] = [{"type": "fs", "root_dir": disk.path}]
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": config}, [], {}


def _threads(preset: Preset, probe: Probe, instance: int) -> dict[str, str]:
    if probe.device == "cuda":
        return {}
    # Unset, vLLM binds one core fewer with a KV connector than without and comparisons are unfair
    # (vllm/utils/ompmultiprocessing.py). One core stays for the API server and the load generator.
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[:-1] or cores
    share = max(1, len(cores) // preset.instances)
    mine = [cores[(instance * share + i) % len(cores)] for i in range(share)]
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))}
