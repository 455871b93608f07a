"""Presets as command lines: what each engine, version and device gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from replay.backends.connect import default_target
from replay.backends.launch import lmcache, mooncake, sglang, vllm
from replay.backends.launch.command import Command, Options, Services, environment, free_port
from replay.backends.launch.probe import Gpu, Probe, can_launch, probe
from replay.backends.launch.services import of_instance, plan, with_disk_folder
from replay.backends.preset import load
from replay.errors import ReplayError

FLAGS = frozenset({"enable_prompt_tokens_details", "kv_offloading_size", "server_module"})
VERSIONS = {"python": "3.12.3", "vllm": "0.26.0", "lmcache": "0.5.3", "sglang": "0.5.23"}
H200 = Probe("python3", VERSIONS, flags=FLAGS, gpus=(Gpu("NVIDIA H200", 140.4),))
CPU = Probe("python3", VERSIONS, cpu_build=True, flags=FLAGS)


@pytest.fixture
def services(tmp_path: Path) -> Services:
    return Services(tmp_path, 5555, 5580)


def command(services: Services, name: str, *sets: str, where: Probe = H200, **options) -> Command:
    preset = load(name, sets)
    serve = sglang.serve if preset.engine == "sglang" else vllm.serve
    return serve(preset, Options("models/m", **options), where, services, port=8123, instance=0)


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def transfer(argv: list[str]) -> dict:
    return json.loads(value(argv, "--kv-transfer-config"))


def test_vllm_gets_its_sizes_and_reports_what_was_cached(services):
    argv = command(services, "vllm", "tiers.gpu.tokens=64000", "max_seqs=64", max_model_len=40000).argv
    assert argv[:3] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert value(argv, "--host") == "127.0.0.1"
    assert value(argv, "--num-gpu-blocks-override") == "4000"
    assert value(argv, "--max-num-seqs") == "64"
    assert value(argv, "--max-model-len") == "40000"
    assert "--enable-prompt-tokens-details" in argv
    assert "--kv-cache-memory-bytes" not in argv
    assert "--kv-transfer-config" not in argv


def test_a_gpu_tier_in_gib_is_given_in_bytes_and_the_default_is_left_to_vllm(services):
    assert value(command(services, "vllm", "tiers.gpu.gib=1.5").argv, "--kv-cache-memory-bytes") == "1610612736"
    assert "--kv-cache-memory-bytes" not in command(services, "vllm").argv


def test_on_the_cpu_the_size_is_always_given_and_threads_are_bound(services, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3",
                "hidden_size": 128,
                "intermediate_size": 384,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 64,
                "vocab_size": 32768,
                "max_position_embeddings": 40960,
            }
        )
    )
    preset = load("vllm", ["tiers.gpu.tokens=1600"])
    made = vllm.serve(preset, Options(str(tmp_path)), CPU, services, port=1, instance=0)
    assert value(made.argv, "--kv-cache-memory-bytes") == str(1600 * 512)  # 2 layers x 64 x key and value x 2 bytes
    assert made.env["VLLM_CPU_OMP_THREADS_BIND"]
    assert "--kv-cache-memory-bytes" in command(services, "vllm", where=CPU).argv


def test_without_prefix_caching_vllm_is_told_so(services):
    assert "--no-enable-prefix-caching" in command(services, "vllm-no-cache").argv
    assert "--enable-prefix-caching" in command(services, "vllm").argv


def test_dummy_weights_need_no_tokenizer(services, tmp_path):
    assert "--skip-tokenizer-init" in command(services, "vllm", dummy_weights=True).argv
    (tmp_path / "tokenizer.json").touch()
    made = vllm.serve(load("vllm"), Options(str(tmp_path), dummy_weights=True), H200, services, port=1, instance=0)
    assert value(made.argv, "--load-format") == "dummy"
    assert "--skip-tokenizer-init" not in made.argv


def test_vllm_on_a_gpu_goes_without_flashinfers_sampler_where_flashinfer_is_not_installed(services):
    switch = "VLLM_USE_FLASHINFER_SAMPLER"
    assert command(services, "vllm").env[switch] == "0"
    with_it = replace(H200, versions={**VERSIONS, "flashinfer": "0.6.0"})
    assert switch not in command(services, "vllm", where=with_it).env
    assert switch not in command(services, "vllm", where=CPU).env
    assert command(services, "vllm", f"launch.env.{switch}='1'").env[switch] == "1"


def test_offload_uses_the_short_flag_where_it_says_everything(services):
    argv = command(services, "vllm-offload-cpu", "tiers.cpu.gib=60").argv
    assert value(argv, "--kv-offloading-size") == "60"


def test_offload_with_a_disk_is_vllms_tiering(services):
    disk = "tiers.disk={gib: 100, path: /data}"
    config = transfer(command(services, "vllm-offload-cpu", disk).argv)
    assert config["kv_connector"] == "OffloadingConnector"
    extra = config["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": "/data"}]
    assert extra["cpu_bytes_to_use"] == 100 * 2**30


def test_lmcache_in_the_engine_is_set_by_variables(services):
    disk = "tiers.disk={gib: 45, path: /data}"
    made = command(services, "lmcache-disk", "tiers.cpu.gib=12", disk)
    assert made.env["LMCACHE_CHUNK_SIZE"] == "256"
    assert made.env["LMCACHE_LOCAL_CPU"] == "True"
    assert made.env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "12"
    assert made.env["LMCACHE_LOCAL_DISK"] == "file:///data/"
    assert made.env["LMCACHE_MAX_LOCAL_DISK_SIZE"] == "45"
    assert transfer(made.argv)["kv_role"] == "kv_both"
    assert (services.scratch / "lmcache_tiers.py").exists()
    assert made.env["PYTHONPATH"].split(":")[0] == str(services.scratch)


def test_a_staging_buffer_serves_no_hits(services):
    disk = "tiers.disk={gib: 45, path: /data}"
    assert command(services, "lmcache-disk", "tiers.cpu.staging=true", disk).env["LMCACHE_LOCAL_CPU"] == "False"


def test_lmcaches_server_gets_memory_disk_and_the_recorder(services, tmp_path):
    recorder = tmp_path / "elsewhere" / "recorder.py"
    recorder.parent.mkdir()
    recorder.touch()
    disk = "tiers.disk={gib: 2, path: /data}"
    preset = load("lmcache-disk", ["connector=lmcache-mp", "tiers.cpu={gib: 1, watermark: 0.9}", disk])
    made = lmcache.server(preset, H200, services, recorder)
    assert value(made.argv, "--l1-size-gb") == "1"
    assert value(made.argv, "--eviction-trigger-watermark") == "0.9"
    adapter = json.loads(value(made.argv, "--l2-adapter"))
    assert adapter["base_path"] == "/data"
    assert adapter["max_capacity_gb"] == 2
    assert adapter["eviction"]["eviction_policy"] == "LRU"
    assert json.loads(value(made.argv, "--server-module"))["config"]["path"] == str(services.events)
    assert "--supported-transfer-mode" not in made.argv
    on_cpu = lmcache.server(preset, CPU, services, recorder).argv
    assert value(on_cpu, "--supported-transfer-mode") == "engine_driven"


def test_an_older_lmcache_server_goes_without_the_recorder(services, tmp_path):
    old = Probe("python3", VERSIONS, gpus=H200.gpus)
    made = lmcache.server(load("lmcache-cpu", ["connector=lmcache-mp"]), old, services, tmp_path / "recorder.py")
    assert "--server-module" not in made.argv


def test_a_remote_tier_that_runs_already_is_used_by_server_and_engine(services, tmp_path):
    url = "tiers.remote={gib: 9, url: 'redis://10.0.0.7:6379'}"
    preset = load("lmcache-remote", [url, "instances=1"])
    planned, commands = plan(preset, H200, tmp_path, None)
    (server,) = commands
    assert json.loads(value(server.argv, "--l2-adapter"))["host"] == "10.0.0.7"
    assert planned.remote == "redis://10.0.0.7:6379"
    in_process = load("lmcache-remote", [url, "instances=1", "connector=lmcache"])
    planned, commands = plan(in_process, H200, tmp_path, None)
    assert not commands
    assert lmcache.in_process(in_process, planned)[2]["LMCACHE_REMOTE_URL"] == "redis://10.0.0.7:6379"


def test_a_missing_program_of_a_service_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReplayError, match=r"needs redis-server.*tiers.remote.url"):
        plan(load("lmcache-remote"), H200, tmp_path, None)
    with pytest.raises(ReplayError, match="no mooncake_master"):
        plan(load("mooncake"), H200, tmp_path, None)


def test_mooncake_listens_on_loopback_and_its_clients_find_it(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "mooncake_master"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    preset = load("mooncake", ["tiers.remote.gib=8", "tiers.remote.watermark=0.8"])
    services, (master,) = plan(preset, H200, tmp_path, None)
    assert value(master.argv, "-rpc_address") == "127.0.0.1"
    assert value(master.argv, "-metrics_host") == "127.0.0.1"
    assert value(master.argv, "-eviction_high_watermark_ratio") == "0.8"
    connector, _, env = mooncake.client(preset, services)
    config = json.loads(Path(env["MOONCAKE_CONFIG_PATH"]).read_text())
    assert connector == {"kv_connector": "MooncakeStoreConnector"}
    assert config["master_server_address"] == f"127.0.0.1:{value(master.argv, '-rpc_port')}"
    assert config["global_segment_size"] == 8 * 2**30


def test_sglang_gets_its_flags(services):
    argv = command(services, "sglang", "tiers.gpu.tokens=64000").argv
    assert value(argv, "--max-total-tokens") == "64000"
    assert value(argv, "--page-size") == "1"
    assert "--enable-hierarchical-cache" not in argv


def test_hicache_gets_memory_and_a_folder(services):
    made = command(services, "sglang-hicache", "tiers.cpu.gib=60", "tiers.disk={gib: 100, path: /data}")
    assert value(made.argv, "--hicache-size") == "60"
    assert value(made.argv, "--hicache-storage-backend") == "file"
    assert made.env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == "/data"


def test_hicache_is_told_how_to_write_and_to_prefetch(services):
    assert value(command(services, "sglang-hicache").argv, "--hicache-write-policy") == "write_through"
    disk = "tiers.disk={gib: 100, path: /data, prefetch: wait_complete}"
    argv = command(services, "sglang-hicache", "tiers.cpu.write=back", disk).argv
    assert value(argv, "--hicache-write-policy") == "write_back"
    assert value(argv, "--hicache-storage-prefetch-policy") == "wait_complete"


def test_offload_that_writes_back_is_vllms_lazy_one(services):
    config = transfer(command(services, "vllm-offload-cpu", "tiers.cpu={gib: 60, write: back}").argv)
    assert config["kv_connector"] == "SimpleCPUOffloadConnector"
    assert config["kv_connector_extra_config"] == {"cpu_bytes_to_use": 60 * 2**30, "lazy_offload": True}
    with pytest.raises(ReplayError, match="vLLM has no exclusive CPU tier; use --target sim"):
        command(services, "vllm-offload-cpu", "tiers.cpu={gib: 60, write: back, inclusion: exclusive}")


def test_the_users_own_arguments_and_variables_come_last(services):
    made = command(services, "vllm", "launch.args=[--block-size, '32']", "launch.env={VLLM_SERVER_DEV_MODE: '0'}")
    assert made.argv[-2:] == ["--block-size", "32"]
    assert made.env["VLLM_SERVER_DEV_MODE"] == "0"


def devices(services: Services, where: Probe, name: str, *sets: str) -> list[str | None]:
    """What each instance of a preset sees of the GPUs."""
    preset = load(name, sets)
    serve = sglang.serve if preset.engine == "sglang" else vllm.serve
    made = [serve(preset, Options("m"), where, services, port=1, instance=n) for n in range(preset.instances)]
    return [each.env.get("CUDA_VISIBLE_DEVICES") for each in made]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_instance_gets_gpus_of_its_own(services, engine, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    four = replace(H200, gpus=H200.gpus * 4)
    assert devices(services, four, engine, "instances=3") == ["0", "1", "2"]
    assert devices(services, four, engine, "instances=2", "tensor_parallel=2") == ["0,1", "2,3"]
    assert devices(services, four, engine, "tensor_parallel=4") == [None], "one instance gets what there is"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1")
    assert devices(services, four, engine, "instances=2") == ["3", "1"], "only those that the user lets it see"
    assert devices(services, four, engine, "instances=2", "launch.env={CUDA_VISIBLE_DEVICES: '0,2'}") == ["0", "2"]
    assert devices(services, CPU, engine, "instances=2") == [None, None]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("sets", "visible", "said"),
    [
        (("instances=2",), None, r"needs 2 GPUs \(2 instances\), this machine has 1; lower it with --set instances=1$"),
        (("instances=2", "tensor_parallel=2"), None, r"needs 4 GPUs \(2 instances of 2 GPUs\), .*tensor_parallel=1$"),
        (("tensor_parallel=2",), None, r"needs 2 GPUs \(1 instance of 2 GPUs\), .* has 1; .*tensor_parallel=1$"),
        (("instances=3",), "4,5", r"needs 3 GPUs \(3 instances\), CUDA_VISIBLE_DEVICES names 2; .* instances=2$"),
    ],
)
def test_fewer_gpus_than_needed_are_one_line(services, engine, sets, visible, said, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ReplayError, match=said):
        command(services, engine, *sets)


def test_ports_are_not_those_of_outgoing_connections_and_no_two_are_the_same():
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    local = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if local.exists():
        assert max(ports) < max(32_768, int(local.read_text().split()[0]))


def test_each_instance_has_a_disk_tier_of_its_own_unless_a_server_holds_it_for_all(tmp_path):
    disk = f"tiers.disk={{gib: 0.001, path: {tmp_path}}}"
    apart = with_disk_folder(load("lmcache-disk", [disk, "instances=2"]), tmp_path)
    folders = [Path(of_instance(apart, n).tiers.disk.path) for n in range(2)]
    assert folders == [tmp_path / "instance-0", tmp_path / "instance-1"]
    assert all(folder.is_dir() for folder in folders)
    for shared in ("connector=lmcache-mp", "instances=1"):
        preset = with_disk_folder(load("lmcache-disk", [disk, "instances=2", shared]), tmp_path)
        assert of_instance(preset, 1).tiers.disk.path == str(tmp_path)
    huge = load("lmcache-disk", [f"tiers.disk={{gib: 9000000, path: {tmp_path}}}", "instances=2"])
    with pytest.raises(ReplayError, match=r"is 9e\+06 for each of 2 instances, .* GiB free"):
        with_disk_folder(huge, tmp_path)


def test_a_tier_without_its_memory_is_refused(services):
    with pytest.raises(ReplayError, match=r"set tiers\.cpu\.gib"):
        command(services, "vllm", "connector=lmcache")
    with pytest.raises(ReplayError, match=r"set tiers\.cpu\.gib"):
        command(services, "vllm", "connector=offload")
    with pytest.raises(ReplayError, match="use engine: sglang"):
        command(services, "vllm", "connector=hicache", "tiers.cpu.gib=1")


def test_secrets_are_masked_in_what_is_shown():
    shown = Command("x", ["server", "--api-key", "sk-1", "--hf-token=hf_2", "--max-tokens", "5", "--port", "1"]).shown()
    assert shown == "server --api-key *** --hf-token=*** --max-tokens 5 --port 1"


def test_children_get_no_api_keys(monkeypatch, tmp_path):
    monkeypatch.setenv("ANTHROPIC_API_KEY", "secret")
    assert "secret" not in environment({}, tmp_path).values()


def test_an_interpreter_is_probed_without_importing_engines(fake_vllm):
    found = probe()
    assert found.versions["vllm"] == "0.32.0+cpu"
    assert found.device == "cpu"
    assert found.knows("--enable-prompt-tokens-details")
    assert not found.knows("--enable-per-request-metrics")
    assert "flashinfer" not in found.versions
    info = fake_vllm / "flashinfer_python-0.6.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.0\n")
    assert probe().versions["flashinfer"] == "0.6.0"


def test_an_engine_python_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("REPLAY_ENGINE_PYTHON", "/nowhere/python")
    with pytest.raises(ReplayError, match="REPLAY_ENGINE_PYTHON=/nowhere/python: no such executable"):
        probe()


def test_launching_is_the_default_where_a_gpu_and_the_engine_are(fake_gpu, monkeypatch):
    assert default_target() == "launch"
    monkeypatch.setenv("PYTHONPATH", "")
    assert default_target() == "sim"


def test_a_cpu_build_is_launched_only_when_asked_to(fake_vllm):
    assert not can_launch("vllm")
