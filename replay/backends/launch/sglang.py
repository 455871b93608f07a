"""A preset as SGLang's command line (0.5.23's ``srt/server_args.py``); HiCache is its own tiering."""

from __future__ import annotations

from replay.backends.launch import devices, mooncake
from replay.backends.launch.command import LOOPBACK, Command, Options, Services
from replay.backends.launch.probe import Probe
from replay.backends.preset import Preset
from replay.errors import ReplayError

_KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}


def serve(preset: Preset, options: Options, probe: Probe, services: Services, *, port: int, instance: int) -> Command:
    """The command of one instance.

    Raises:
        ReplayError: SGLang is missing, or the preset asks for what it does not have.
    """
    if "sglang" not in probe.versions:
        raise ReplayError(f"--target launch: {probe.python} has no sglang; install it there ('replay doctor')")
    devices.check(preset, probe)
    argv = [probe.python, "-m", "sglang.launch_server", "--model-path", options.model]
    argv += ["--served-model-name", options.served_name, "--host", LOOPBACK, "--port", str(port)]
    argv += [
        "--page-size",
        str(preset.block_tokens),
        "--chunked-prefill-size",
        str(preset.max_batched_tokens),
    ]
    argv += ["--max-running-requests", str(preset.max_seqs), "--enable-cache-report", "--enable-metrics"]
    if not preset.prefix_caching:
        argv.append("--disable-radix-cache")
    if preset.tiers.gpu.tokens:
        argv += ["--max-total-tokens", str(preset.tiers.gpu.tokens)]
    if options.max_model_len:
        argv += ["--context-length", str(options.max_model_len)]
    if options.dummy_weights:
        argv += ["--load-format", "dummy"]
    if preset.kv_dtype in _KV_DTYPES:
        argv += ["--kv-cache-dtype", _KV_DTYPES[preset.kv_dtype]]
    if preset.tensor_parallel > 1:
        argv += ["--tp-size", str(preset.tensor_parallel)]
    if probe.device == "cpu":
        argv += ["--device", "cpu"]
    more, env = _hicache(preset, services)
    return Command(
        f"sglang-{instance}",
        [*argv, *more, *preset.launch.args],
        {**env, **preset.launch.env, **devices.environment(preset, probe, instance)},
        f"http://{LOOPBACK}:{port}/health",
    )


def _hicache(preset: Preset, services: Services) -> tuple[list[str], dict[str, str]]:
    if preset.connector == "none":
        return [], {}
    cpu, disk = preset.tiers.cpu, preset.tiers.disk
    if preset.connector not in ("hicache", "mooncake") or cpu is None:
        raise ReplayError(f"backend {preset.name}: SGLang's tiers need connector: hicache and tiers.cpu.gib")
    argv = ["--enable-hierarchical-cache", "--hicache-size", str(max(1, round(cpu.gib)))]
    argv += ["--hicache-write-policy", f"write_{cpu.write or 'through'}"]
    storage = disk or preset.tiers.remote
    if storage and storage.prefetch:
        argv += ["--hicache-storage-prefetch-policy", storage.prefetch]
    if preset.connector == "mooncake":
        return [*argv, "--hicache-storage-backend", "mooncake"], mooncake.hicache_env(preset, services)
    if disk is not None:
        return [*argv, "--hicache-storage-backend", "file"], {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(disk.path)}
    return argv, {}
