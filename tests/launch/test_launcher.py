"""Starting, watching and stopping an engine, on a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from replay.backends.launch import Launched
from replay.backends.launch.command import Options
from replay.backends.launch.process import Process
from replay.backends.launch.services import with_disk_folder
from replay.backends.preset import load
from replay.errors import ReplayError

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="engines run on Linux")

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}

Ready = Callable[[Launched], Coroutine[Any, Any, Any]]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start(tmp_path: Path, then: Ready, *sets: str, mode: str = "", model: str = "tiny-model", **options: Any) -> Any:
    """Launches preset vllm on the stand-in and awaits `then` while it runs."""
    preset = load("vllm", ["tiers.gpu.tokens=1600", f"launch.env={{FAKE_MODE: {mode!r}}}", *sets])

    async def main() -> Any:
        launched = Launched(preset, Options(model), log_dir=tmp_path / "logs", **options)
        async with launched:
            return await then(launched)

    return asyncio.run(main())


async def pids(launched: Launched) -> list[int]:
    return [pid for _, process in launched._engines for pid in process.members()]


def test_the_engine_runs_inside_the_block_and_is_gone_after(fake_vllm, tmp_path):
    async def look(launched):
        (pid,) = await pids(launched)
        assert alive(pid)
        assert launched.failure() is None
        return pid, launched.describe(), launched.urls, launched._scratch

    pid, described, urls, scratch = start(tmp_path, look)
    assert not alive(pid)
    assert not scratch.exists()
    assert described["versions"]["vllm"] == "0.32.0+cpu"
    assert described["capacity_tokens"] == {"gpu": 1600}
    assert described["cache_before"] == "empty: new engine"
    assert urls[0].startswith("http://127.0.0.1:")
    assert "--num-gpu-blocks-override 100" in described["commands"]["vllm-0"]


def test_flags_that_a_version_lacks_are_left_out(fake_vllm, tmp_path):
    async def command(launched):
        return launched.describe()["commands"]["vllm-0"]

    shown = start(tmp_path, command)
    assert "--enable-prompt-tokens-details" in shown
    assert "--enable-per-request-metrics" not in shown


def test_an_engine_that_dies_while_starting_is_an_error_with_the_cause_from_its_log(fake_vllm, tmp_path):
    with pytest.raises(ReplayError, match=r"exit code 3 .*ValueError: the KV cache is too small.*vllm-0\.log"):
        start(tmp_path, pids, mode="dies")


def test_an_instance_that_dies_while_starting_takes_the_others_with_it(fake_vllm, tmp_path, monkeypatch):
    started = []
    spawn = Process.__init__

    def noted(process, *arguments):
        spawn(process, *arguments)
        started.append(process.pid)

    monkeypatch.setattr(Process, "__init__", noted)
    with pytest.raises(ReplayError, match=r"vllm-[01] ended with exit code 3 .*the KV cache is too small"):
        start(tmp_path, pids, "instances=2", mode="one dies")
    assert len(started) == 2
    assert not any(map(alive, started))


def test_a_restart_restarts_every_instance_where_it_was(fake_vllm, tmp_path):
    async def again(launched):
        before, urls = await pids(launched), list(launched.urls)
        await launched.restart()
        return before, await pids(launched), urls == launched.urls, launched.capacity

    before, after, same, capacity = start(tmp_path, again, "instances=2")
    assert len(set(before) | set(after)) == 4 and same
    assert capacity == {"gpu": 3200}
    assert not any(map(alive, [*before, *after]))


def test_an_engine_that_never_answers_is_stopped_and_reported(fake_vllm, tmp_path):
    lines = []
    with pytest.raises(ReplayError, match="did not answer within 1 s"):
        start(tmp_path, pids, mode="deaf", timeout_s=1.0, progress=lines.append)
    assert any(line.startswith("starting vllm-0: 0 s") for line in lines)


class _Yes(BaseHTTPRequestHandler):
    """Says 200 to anything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_another_server_at_the_engines_port_is_not_taken_for_it(fake_vllm, tmp_path, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Yes) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        monkeypatch.setattr("replay.backends.launch.launcher.free_port", lambda: other.server_port)
        try:
            with pytest.raises(ReplayError, match=r"vllm-0 ended with exit code 1 .*Address already in use"):
                start(tmp_path, pids)
        finally:
            other.shutdown()
            thread.join()


def test_an_engine_that_goes_away_before_its_first_request_is_an_error(fake_vllm, tmp_path):
    with pytest.raises(ReplayError, match=r"vllm-0 ended with exit code 7|does not answer its first request"):
        start(tmp_path, pids, mode="vanishes")


def test_capacities_are_those_of_all_instances(fake_gpu, tmp_path, monkeypatch):
    smi = fake_gpu / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA H200, 143771'\n")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))

    async def look(launched):
        return launched.describe()["capacity_tokens"], launched.engine_logs

    sets = ("instances=2", "connector=lmcache", "tiers.cpu.gib=1")
    capacity, logs = start(tmp_path, look, *sets, model=str(tmp_path))
    assert capacity == {"gpu": 3200, "cpu": 2 * (2**30 // 147_456)}
    assert logs == [tmp_path / "logs/vllm-0.log", tmp_path / "logs/vllm-1.log"]


def test_an_engine_that_refuses_its_first_request_is_an_error(fake_vllm, tmp_path):
    with pytest.raises(ReplayError, match=r"first request with 404: .*no such model"):
        start(tmp_path, pids, mode="refuses")


def test_an_engine_that_runs_without_its_lmcache_is_an_error(fake_gpu, tmp_path):
    with pytest.raises(ReplayError, match=r"run without it: RuntimeError: No supported cpu connector found\."):
        start(tmp_path, pids, "connector=lmcache", "tiers.cpu.gib=1", mode="degraded")


def test_what_an_earlier_engine_logged_is_not_held_against_the_next(fake_gpu, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/vllm-0.log").write_text("System will operate in degraded mode\nValueError: of last week\n")
    start(tmp_path, pids, "connector=lmcache", "tiers.cpu.gib=1")
    with pytest.raises(ReplayError, match="the KV cache is too small"):
        start(tmp_path, pids, mode="dies")
    assert "of last week" in (tmp_path / "logs/vllm-0.log").read_text()


def test_in_process_lmcache_is_told_where_to_note_what_it_served(fake_gpu, tmp_path):
    async def look(launched):
        return launched.describe(), launched.events, launched.engine_logs

    described, events, logs = start(tmp_path, look, "connector=lmcache", "tiers.cpu.gib=1")
    assert described["device"] == "cuda"
    assert described["gpu"] == "NVIDIA H200"
    assert described["capacity_tokens"]["cpu"] is None  # of a model that only the engine knows
    assert events.name == "lmcache-events.jsonl"
    assert logs == [tmp_path / "logs/vllm-0.log"]


def test_sizes_of_lower_tiers_are_told_in_tokens_of_the_model(fake_gpu, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))

    async def look(launched):
        return launched.describe()

    described = start(tmp_path, look, "connector=lmcache", "tiers.cpu.gib=1", model=str(tmp_path))
    assert described["kv_bytes_per_token"] == 147_456
    assert described["capacity_tokens"]["cpu"] == 2**30 // 147_456


def test_what_the_engine_started_is_stopped_with_it(fake_vllm, tmp_path):
    found = start(tmp_path, pids, mode="child")
    assert len(found) == 2
    assert not any(map(alive, found))


def test_a_process_that_ignores_the_polite_signals_is_killed(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("replay.backends.launch.process.STOP", ((15, 0.2), (2, 0.2), (9, 5.0)))
    (pid,) = start(tmp_path, pids, mode="stubborn")
    assert not alive(pid)


def test_shared_memory_of_a_killed_engine_is_removed(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("replay.backends.launch.process.STOP", ((9, 5.0),))
    (pid,) = start(tmp_path, pids, mode="shm")
    assert not Path(f"/dev/shm/replay-test-{pid}").exists()


def test_an_exception_in_the_block_stops_the_engine(fake_vllm, tmp_path):
    seen = []

    async def fail(launched):
        seen.extend(await pids(launched))
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        start(tmp_path, fail)
    assert seen
    assert not any(map(alive, seen))


def test_a_death_after_the_start_is_told_with_its_cause(fake_vllm, tmp_path):
    async def failure(launched):
        for _ in range(200):
            if launched.failure():
                break
            await asyncio.sleep(0.05)
        return launched.failure()

    # Warming up ends with a reset, at which this stand-in dies.
    told = start(tmp_path, failure, mode="dies later")
    assert told == "vllm-0 ended with exit code 9: torch.OutOfMemoryError: CUDA out of memory"


def test_a_restart_is_a_new_process_on_the_same_address_that_keeps_a_disk_tier(fake_vllm, tmp_path):
    async def again(launched):
        before, url = await pids(launched), launched.urls[0]
        kept = launched._scratch / "kept"
        kept.touch()
        await launched.restart()
        return before, await pids(launched), url == launched.urls[0], kept.exists()

    before, after, same_url, kept = start(tmp_path, again)
    assert not set(before) & set(after)
    assert same_url
    assert kept
    assert not any(map(alive, after))


def test_instances_get_addresses_of_their_own_and_their_tiers_add_up(fake_vllm, tmp_path):
    async def look(launched):
        return launched.urls, launched.capacity, await pids(launched)

    urls, capacity, found = start(tmp_path, look, "instances=2")
    assert len(set(urls)) == len(found) == 2
    assert capacity == {"gpu": 3200}


def test_api_keys_do_not_reach_the_engine_and_secrets_do_not_reach_the_run(fake_vllm, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")

    async def look(launched):
        return launched.describe()

    described = start(tmp_path, look, "launch.args=[--hf-token, hf-private, --other-key=abc]", mode="x", timeout_s=30)
    log = (tmp_path / "logs/vllm-0.log").read_text()
    for text in (str(described), log):
        assert "private" not in text
        assert "abc" not in text
    assert "--hf-token *** --other-key=***" in described["commands"]["vllm-0"]
    assert log.count("none") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_replay_ends_all_instances(fake_vllm, tmp_path, number):
    program = f"""
import asyncio, sys
from pathlib import Path
from replay.backends.launch import Launched
from replay.backends.launch.command import Options
from replay.backends.launch.process import Process
from replay.backends.preset import load
async def main():
    preset = load("vllm", ["instances=2"])
    async with Launched(preset, Options("m"), log_dir=Path({str(tmp_path)!r}) / "logs") as launched:
        print(launched._scratch, *[p for _, q in launched._engines for p in q.members()], flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    replay = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    scratch, *started = replay.stdout.readline().split()
    assert len(started) == 2
    os.kill(replay.pid, number)
    replay.communicate(timeout=30)
    end = time.monotonic() + 10
    while any(alive(int(pid)) for pid in started) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(int(pid)) for pid in started)
    if number == signal.SIGKILL:
        shutil.rmtree(scratch)  # nobody was left to do it
    assert not Path(scratch).exists()


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (("engine=openai",), "cannot be launched; give its URL"),
        (("connector=lmcache", "tiers.cpu.gib=1"), "needs a GPU.*--set connector=lmcache-mp"),
        (("connector=lmcache-mp", "tiers.cpu.gib=1"), "has no lmcache"),
        (
            ("connector=lmcache-mp", "tiers.cpu.gib=1", "tiers.disk.gib=9000000"),
            r"GiB free; lower it|--set tiers\.disk",
        ),
        (("engine=sglang",), "has no sglang"),
    ],
)
def test_what_cannot_run_here_says_what_to_do(fake_vllm, tmp_path, sets, problem):
    with pytest.raises(ReplayError, match=problem):
        start(tmp_path, pids, *sets)
    assert not list((tmp_path / "logs").glob("*.log"))


def test_a_user_folder_of_a_disk_tier_is_kept(fake_vllm, tmp_path):
    folder = tmp_path / "tier"
    preset = load("lmcache-disk", [f"tiers.disk={{gib: 0.001, path: {folder}}}"])
    assert with_disk_folder(preset, tmp_path / "scratch").tiers.disk.path == str(folder)
    assert folder.is_dir()


def test_a_disk_tier_without_a_folder_lies_in_the_scratch_folder(tmp_path):
    preset = load("lmcache-disk", ["tiers.disk.gib=0.001"])
    assert with_disk_folder(preset, tmp_path / "scratch").tiers.disk.path == str(tmp_path / "scratch/disk")
