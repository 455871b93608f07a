"""A stand-in for vLLM: a package of that name whose server answers like one and misbehaves on demand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SERVER = r"""
import json, mmap, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

args = sys.argv
port = int(args[args.index("--port") + 1])
blocks = args[args.index("--num-gpu-blocks-override") + 1] if "--num-gpu-blocks-override" in args else "None"
size = args[args.index("--block-size") + 1]
mode = os.environ.get("FAKE_MODE", "")
print("INFO 11-29 12:00:00 [api.py:1] loading", flush=True)
print("PATH of sockets", os.environ["VLLM_RPC_BASE_PATH"], "secret" if "OPENAI_API_KEY" in os.environ else "none")
if mode == "one dies":
    try:
        open(os.environ["TMPDIR"] + "/first", "x").close()
    except FileExistsError:
        mode = "dies"
if mode == "dies":
    print("(EngineCore pid=7) ERROR 11-29 12:00:01 [core.py:2] ValueError: the KV cache is too small")
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)
if mode == "degraded":
    print("RuntimeError: No supported cpu connector found.")
    print(". System will operate in degraded mode (recompute).", flush=True)
if mode == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # child of the fake"])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode == "shm":
    handle = open("/dev/shm/replay-test-" + str(os.getpid()), "w+b")
    handle.truncate(4096)
    held = mmap.mmap(handle.fileno(), 4096)
ready = time.time() + float(os.environ.get("FAKE_DELAY", "0"))


class Handler(BaseHTTPRequestHandler):
    def reply(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        info = 'vllm:cache_config_info{block_size="%s",num_gpu_blocks="%s"} 1.0\n' % (size, blocks)
        body = info.encode() if self.path == "/metrics" else b""
        self.reply(body, 200 if mode != "deaf" and time.time() > ready else 503)

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/v1/completions" and mode == "vanishes":
            os._exit(7)
        if self.path == "/v1/completions" and mode == "refuses":
            return self.reply(b'{"error": "no such model"}', 404)
        print("POST", self.path, flush=True)
        self.reply(b'{"success":true}')
        if mode == "dies later" and self.path == "/reset_prefix_cache":
            print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
            os._exit(9)

    def log_message(self, *args):
        pass


ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the package, in PYTHONPATH for every process that a test starts."""
    site = tmp_path / "site"
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (site / "vllm", site / "vllm/entrypoints", package):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    (package / "cli_args.py").write_text("enable_prompt_tokens_details: bool = False\n")
    info = site / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.delenv("REPLAY_ENGINE_PYTHON", raising=False)
    return site


@pytest.fixture
def fake_gpu(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in as a CUDA build, on a machine that shows one GPU."""
    (fake_vllm / "vllm-0.32.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n"
    )
    smi = fake_vllm / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    return fake_vllm
