"""Runs of real engines that the model is compared with: calibration folders and results files.

A calibration folder holds a trace and, for each run, a file with a line per request. What the runs were
is in its ``runs.yaml``::

    model: qwen3-8b
    gpu: h200
    trace: trace48.json
    runs:
      - file: replay48-gpu64k.vllm.jsonl
        backend: vllm
        set: [tiers.gpu.tokens=64000]

Where there is none, a name such as ``replay48-gpu64k.lmcache-disk.jsonl`` says it: the trace's number, the
GPU tier in thousands of tokens, and one of `NAMED`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import yaml

from replay.backends import preset as presets
from replay.backends.preset import Preset
from replay.errors import ReplayError
from replay.load.schedule import Settings
from replay.trace import Header, Trace, Turn, read

MODEL, GPU = "qwen3-8b", "h200"
"""Model and GPU of a folder without ``runs.yaml``."""

NAMED: dict[str, tuple[str, list[str]]] = {
    "vllm": ("vllm", []),
    "offload": ("vllm-offload-cpu", ["tiers.cpu.gib=60"]),
    "lmcache-cpu": ("lmcache-cpu", ["tiers.cpu.gib=60"]),
    "lmcache-disk": ("lmcache-disk", ["tiers.cpu.gib=12", "tiers.disk.gib=45"]),
}
"""Preset and tier sizes by what a recorded run's file is called (``vllm-offload`` and ``vllm-offload-cpu`` are
``offload``); the sizes are those of the folder's description."""

_NAME = re.compile(r"replay(\d+)-gpu(\d+)k\.(?:vllm-)?(vllm|offload|lmcache-cpu|lmcache-disk)(?:-cpu)?\.jsonl")


@dataclass(frozen=True)
class Row:
    """One request of a recorded run."""

    prompt: int
    cached: int | None
    """Prompt tokens that any tier served; null if unknown."""
    external: int | None
    """Those of them that came from below the GPU; null if unknown."""
    ttft_s: float | None
    """Seconds from sent to the first token; null if there was none."""


@dataclass(frozen=True)
class Recorded:
    """One run of a real engine, and what is needed to simulate it."""

    name: str
    preset: Preset
    model: str
    gpu: str
    trace: Trace
    rows: list[Row]
    settings: Settings = field(default_factory=Settings)
    """How it was asked: sessions at once, speed and so on."""


class _Run(msgspec.Struct, forbid_unknown_fields=True):
    file: str
    backend: str
    set: list[str] = []


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    gpu: str
    trace: str
    runs: list[_Run]


def runs(source: Path, trace: Path | None = None) -> list[Recorded]:
    """The recorded runs of a calibration folder, or the runs on real engines of a results file.

    Args:
        source: the folder, or the file.
        trace: what was replayed, for a results file; it does not hold the trace.

    Raises:
        ReplayError: there are none, or it is not known what they ran.
    """
    if source.is_dir():
        found = _folder(source)
    else:
        if trace is None:
            raise ReplayError(f"{source}: a results file does not hold the trace; name it with --trace")
        found = _results(source, read(trace))
    if not found:
        raise ReplayError(f"{source}: holds no run of a real engine; a folder names its runs in runs.yaml")
    return found


def _folder(folder: Path) -> list[Recorded]:
    manifest = _manifest(folder)
    if not manifest.runs:
        return []
    trace = _trace(folder / manifest.trace)
    return [
        Recorded(
            name=Path(run.file).stem,
            preset=presets.load(run.backend, run.set),
            model=manifest.model,
            gpu=manifest.gpu,
            trace=trace,
            rows=[_row(line) for line in _lines(folder / run.file)],
        )
        for run in manifest.runs
    ]


def _manifest(folder: Path) -> _Manifest:
    path = folder / "runs.yaml"
    if path.exists():
        try:
            return msgspec.convert(yaml.safe_load(path.read_text()), _Manifest)
        except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
            raise ReplayError(f"{path}: {' '.join(str(error).split())}") from None
    runs, traces = [], set()
    for file in sorted(folder.glob("*.jsonl")):
        if match := _NAME.fullmatch(file.name):
            number, thousands, kind = match.groups()
            backend, sizes = NAMED[kind]
            traces.add(f"trace{number}.json")
            runs.append(_Run(file.name, backend, [f"tiers.gpu.tokens={thousands}000", *sizes]))
    if len(traces) > 1:
        raise ReplayError(f"{folder}: recorded runs of several traces; say in runs.yaml which")
    return _Manifest(MODEL, GPU, traces.pop() if traces else "", runs)


def _trace(path: Path) -> Trace:
    """A trace file, or the short form of calibration folders: sessions with ``start``, ``shared`` and turns."""
    if path.suffix != ".json":
        return read(path)
    try:
        sessions = json.loads(path.read_text())
        turns = [turn for session in sessions for turn in _turns(session)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReplayError(f"{path}: not a trace of sessions with start, shared and turns: {error!r}") from None
    return Trace(Header(format="replay-trace", version=1, name=path.stem, synthetic=True), turns)


def _turns(session: dict[str, Any]) -> list[Turn]:
    """Each prompt is the whole one before, the output before and what is appended."""
    name, turns, prompt, before = str(session["session"]), [], 0, 0
    for number, turn in enumerate(session["turns"]):
        own = (f"{name}.{number}", turn["append"])
        if number == 0:
            append = [("shared", session["shared"]), own]
            turns.append(Turn(session=name, turn=0, at=session["start"], append=append, output=turn["output"]))
        else:
            append = [(f"{name}.out{number - 1}", before), own]
            pause, output = turn["pause"], turn["output"]
            turns.append(Turn(session=name, turn=number, pause=pause, keep=prompt, append=append, output=output))
        prompt += sum(tokens for _, tokens in append)
        before = turn["output"]
    return turns


def _row(line: dict[str, Any]) -> Row:
    return Row(line["prompt"], line["cached"], line["external"], line["ttft_ms"] / 1e3)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: not readable as rows of a run: {error}") from None


def _results(path: Path, trace: Trace) -> list[Recorded]:
    from replay.results import open_results

    found = []
    with open_results(path) as results:
        columns = "id, name, backend, model, gpu, trace, settings"
        runs = results.sql(f"SELECT {columns} FROM runs WHERE NOT simulated ORDER BY started_at").fetchall()
        for run_id, name, backend, model, gpu, recorded_trace, settings in runs:
            if recorded_trace != trace.header.name:
                continue
            rows = results.sql(
                "SELECT prompt_tokens, prompt_tokens - computed_tokens,"
                " CASE WHEN gpu_tokens IS NULL THEN NULL ELSE prompt_tokens - computed_tokens - gpu_tokens END,"
                " first_token - sent FROM requests WHERE run_id = $run AND status = 'ok'",
                run=run_id,
            ).fetchall()
            stored = msgspec.json.decode(settings)
            found.append(
                Recorded(
                    name or backend,
                    _preset(stored, backend, path),
                    _known(model, MODEL),
                    _known(gpu, GPU),
                    trace,
                    [Row(*r) for r in rows],
                    _settings(stored),
                )
            )
    return found


def _preset(settings: dict[str, Any], backend: str, path: Path) -> Preset:
    """The preset that a run had, its GPU tier as large as the engine said."""
    try:
        preset = msgspec.convert(settings["preset"], Preset)
    except (KeyError, msgspec.ValidationError) as error:
        raise ReplayError(
            f"{path}: run of {backend}: its settings name no preset that is known here: {error}"
        ) from None
    tokens = (settings.get("capacity_tokens") or {}).get("gpu")
    if not tokens:
        return preset
    gpu = msgspec.structs.replace(preset.tiers.gpu, tokens=tokens)
    return msgspec.structs.replace(preset, tiers=msgspec.structs.replace(preset.tiers, gpu=gpu))


def _settings(stored: dict[str, Any]) -> Settings:
    """How a run was asked; the model generates nothing, so recorded outputs stand for live ones."""
    known = {each.name for each in fields(Settings)}
    asked = {name: value for name, value in stored.get("replay", {}).items() if name in known}
    return Settings(**{**asked, "outputs": "recorded"})


def _known(name: str | None, default: str) -> str:
    """A profile's name for what a run calls its model or GPU (``Qwen/Qwen3-8B``, ``NVIDIA H200``)."""
    from replay.engine import profiles

    if not name:
        return default
    plain = Path(name).name.lower()
    for known in [*profiles.names("models"), *profiles.names("gpus")]:
        if known in plain:
            return known
    return name
