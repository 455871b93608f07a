"""The engine model beside NVIDIA Dynamo's offline replay: same traces, block, batch and tier sizes.

`engine_speed.py` runs it; `dynamo_replay.py` says how Dynamo is installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from engine_run import Measured, own_process, stored_run

BLOCK = 64
"""Tokens of a block in every tier, and of a block of the Claude Code traces."""
GPU_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 16_384, 65_536, 400_000
"""For Mooncake's trace; the first is Dynamo's default."""
CLAUDE_BLOCKS = 312_500
TOKEN_BYTES = 57_344
"""KV bytes of a token of the model that runs default to, qwen2.5-7b-1m."""
HOST_GBPS, DISK_READ_GBPS, DISK_WRITE_GBPS = 50, 6, 3

LEFT_OUT = """\
Both: CPU seconds are those of the whole process, which reads the recording and replays it; "cached" is the share of
prompt tokens served from any tier at a request's first admission.
Ours leaves out TensorRT-LLM's scheduler and prefill and decode on separate GPUs, which Dynamo has. It stores a row
for each request: its timeline, tokens of each tier, loss by cause.
Dynamo leaves out all of these here: it keeps a summary only (its rows a request are off, which is its fastest), and
has no disk share of a request and no loss. Its times are its default polynomial, of no named GPU and model; ours are
a model's on a GPU. So queues differ, and what is evicted when: a bounded cache's shares may differ, an unlimited
one's must not."""


@dataclass(frozen=True)
class Case:
    """One trace on one set of tiers, in the words of both."""

    name: str
    backend: str
    overrides: tuple[str, ...]
    engine: dict[str, Any]
    sessions: int | None = None
    """Live at once; null: requests come at their recorded times."""
    traces: int | None = None
    """The first so many Claude Code traces (0: all); null: Mooncake's trace."""
    first: int | None = None
    """Only so many requests of Mooncake's trace."""
    same: bool = False
    """Nothing is ever evicted: both must serve the same number of tokens."""
    only_ours: str = ""
    """Why Dynamo does not run this."""
    options: dict[str, Any] = field(default_factory=dict)
    """Dynamo's, beside those of its engine model."""


def _gib(blocks: int) -> float:
    return blocks * BLOCK * TOKEN_BYTES / 2**30


def _mooncake(
    name: str, backend: str = "vllm", host: bool = False, disk: bool = False, first: int | None = None
) -> Case:
    overrides = [f"block_tokens={BLOCK}", f"tiers.gpu.tokens={GPU_BLOCKS * BLOCK}"]
    engine: dict[str, Any] = {"num_gpu_blocks": GPU_BLOCKS, "block_size": BLOCK}
    if host:
        links = (f"tiers.cpu.gbps={HOST_GBPS}", f"tiers.cpu.store_gbps={HOST_GBPS}")
        overrides += [f"chunk_tokens={BLOCK}", f"tiers.cpu.gib={_gib(HOST_BLOCKS)}", *links]
        engine["kv_cache_bytes_per_token"] = TOKEN_BYTES
        engine["native_host_offload"] = {
            "num_host_blocks": HOST_BLOCKS,
            "d2h_bandwidth_gbps": HOST_GBPS,
            "h2d_bandwidth_gbps": HOST_GBPS,
        }
    if disk:
        links = (f"tiers.disk.gbps={DISK_READ_GBPS}", f"tiers.disk.store_gbps={DISK_WRITE_GBPS}")
        overrides += [f"tiers.disk.gib={_gib(DISK_BLOCKS)}", *links]
        engine["g3_offload"] = {
            "scope": "worker_local",
            "num_g3_blocks": DISK_BLOCKS,
            "read_bandwidth_gbps": DISK_READ_GBPS,
            "write_bandwidth_gbps": DISK_WRITE_GBPS,
        }
    return Case(name, backend, tuple(overrides), engine, first=first, options={"trace_block_size": 512})


def _claude(name: str, traces: int, sessions: int, same: bool = False) -> Case:
    overrides = (f"block_tokens={BLOCK}", f"tiers.gpu.tokens={CLAUDE_BLOCKS * BLOCK}")
    engine = {"num_gpu_blocks": CLAUDE_BLOCKS, "block_size": BLOCK}
    options = {"trace_format": "weka", "execution_model": "any", "agentic_lanes": sessions}
    return Case(name, "vllm", overrides, engine, sessions, traces, same=same, options=options)


_TOO_SLOW = "not run: see above what its first 1,000 requests take"
CASES = [
    _claude("20 Claude Code traces, 20 live sessions, GPU tier never full", 20, 20, same=True),
    _mooncake("Mooncake, GPU 1.05 M tokens", "vllm"),
    _mooncake("Mooncake, GPU 1.05 M, host 4.2 M tokens", "vllm-offload-cpu", host=True),
    _mooncake("Mooncake, first 1,000 requests, GPU, host, disk 25.6 M tokens", "lmcache-disk", True, True, first=1000),
    replace(_mooncake("Mooncake, GPU, host, disk 25.6 M tokens", "lmcache-disk", True, True), only_ours=_TOO_SLOW),
]
WHOLE = _claude("all Claude Code traces, 32 live sessions, GPU 20 M tokens", 0, 32)


def warm_up(corpus: Path, folder: Path) -> None:
    """Compiles the engine model's loops where they are not yet: that must not count."""
    for backend, case in {case.backend: case for case in CASES if case.traces is None}.items():
        sources = _mooncake_file(replace(case, first=1000), corpus, folder)
        own_process(stored_run, sources, backend, case.overrides)


def compare(case: Case, corpus: Path, folder: Path, dynamo: str | None) -> bool:
    """Prints what both take for a case; returns whether they agree where they must.

    Args:
        case: what to run.
        corpus: folder of `claude-code-blocks` and `mooncake`.
        folder: for unpacked traces.
        dynamo: interpreter of an environment that has Dynamo.
    """
    sources = _mooncake_file(case, corpus, folder) if case.traces is None else claude_files(case.traces, corpus)
    ours = own_process(stored_run, sources, case.backend, case.overrides, case.sessions)
    print(f"\n{case.name}\n  ours   {ours}")
    if dynamo is None:
        print("  Dynamo not installed: name an interpreter that has it with --dynamo (see dynamo_replay.py)")
        return True
    if case.only_ours:
        print(f"  Dynamo {case.only_ours}")
        return True
    file = sources[0] if case.traces is None else own_process(_one_file, sources, folder / "claude.jsonl")
    theirs = _dynamo(dynamo, {"file": str(file), "engine": case.engine, "options": case.options})
    print(f"  Dynamo {theirs}")
    print(f"  ours / Dynamo: {ours.rate / theirs.rate:.2f} requests a CPU second; {_agreement(ours, theirs)}")
    return not case.same or (ours.requests, ours.cached_tokens) == (theirs.requests, theirs.cached_tokens)


def _agreement(ours: Measured, theirs: Measured) -> str:
    if (ours.requests, ours.prompt_tokens) != (theirs.requests, theirs.prompt_tokens):
        return f"NOT THE SAME REQUESTS: {ours.prompt_tokens:,} and {theirs.prompt_tokens:,} prompt tokens"
    apart = ours.cached_tokens - theirs.cached_tokens
    points = f"{100 * apart / ours.prompt_tokens:+.2f} points" if apart else "equal to the token"
    return f"cached tokens {ours.cached_tokens:,} and {theirs.cached_tokens:,}: {points}"


def check(dynamo: str) -> None:
    """Ends with one line, exit code 2, where the interpreter cannot import Dynamo."""
    _run([dynamo, "-c", "import dynamo.replay"])


def _dynamo(python: str, job: dict[str, Any]) -> Measured:
    out = _run([python, str(Path(__file__).with_name("dynamo_replay.py")), json.dumps(job)])
    return Measured(**json.loads(out.splitlines()[-1]))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        _fail(f"--dynamo {command[0]}: {error.strerror}; name an interpreter that has Dynamo")
    if done.returncode:
        _fail(f"--dynamo {command[0]}: {(done.stderr.strip().splitlines() or ['it ended without a word'])[-1]}")
    return done.stdout


def _fail(line: str) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(2)


def _mooncake_file(case: Case, corpus: Path, folder: Path) -> list[Path]:
    """Mooncake's trace or its beginning, unpacked: Dynamo reads no compressed files."""
    with gzip.open(corpus / "mooncake" / "conversation_trace.jsonl.gz") as stream:
        lines = stream.readlines()[: case.first]
    path = folder / "mooncake.jsonl"
    path.write_bytes(b"".join(lines))
    return [path]


def claude_files(count: int, corpus: Path) -> list[Path]:
    return sorted((corpus / "claude-code-blocks" / "traces").glob("*.json.xz"))[: count or None]


def _one_file(sources: list[Path], path: Path) -> Path:
    """Claude Code traces as Dynamo takes them: one file, no exact copies (as our import), every model declared."""
    seen: set[bytes] = set()
    with path.open("w") as stream:
        for source in sources:
            trace = json.loads(lzma.decompress(source.read_bytes()))
            content = hashlib.blake2b(json.dumps(trace["requests"]).encode()).digest()
            if content not in seen:
                seen.add(content)
                trace["models"] = sorted({*trace["models"], *_models(trace["requests"])})
                stream.write(json.dumps(trace) + "\n")
    return path


def _models(requests: list[dict[str, Any]]) -> Iterator[str]:
    for request in requests:
        if "requests" in request:
            yield from _models(request["requests"])
        else:
            yield request["model"]
