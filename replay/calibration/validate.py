"""Replays recorded runs of real engines on the model, and says how far apart the two are.

A contended run is chaotic: a request that comes ten milliseconds later may find its cache evicted, and all
that follows changes. The percentiles of one simulation are therefore one draw. Each run is simulated
several times, with sessions that start up to `SHIFT_S` later, and the median of the draws is compared;
their range is printed beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.backends import preset as presets
from replay.backends.connect import Where
from replay.calibration.recorded import Recorded
from replay.engine.fit import MicroTable
from replay.runs import simulate
from replay.trace import Header, Trace, Turn

SHIFT_S = 0.02
PERCENTILES = (50, 90, 99)
DRAWS = 15
"""Simulations of each run: the median of 7 still moves by a tenth."""

TABLES: dict[str, dict[str, tuple[str, str, list[str], int]]] = {
    "h200_measured": {
        "gpu_only_128000_tokens": ("h200", "vllm", ["tiers.gpu.tokens=128000"], 12),
        "vllm_offload_cpu_60GB_gpu_128000": (
            "h200", "vllm-offload-cpu", ["tiers.gpu.tokens=128000", "tiers.cpu.gib=60"], 12,
        ),
        "lmcache_cpu_60GB_gpu_128000": ("h200", "lmcache-cpu", ["tiers.gpu.tokens=128000", "tiers.cpu.gib=60"], 12),
        "lmcache_disk_12GB_staging_45GB_disk_gpu_64000": (
            "h200", "lmcache-disk", ["tiers.gpu.tokens=64000", "tiers.cpu.gib=12", "tiers.disk.gib=45"], 12,
        ),
    },
    "h100_published": {
        "gpu_only": ("h100", "vllm", ["tiers.gpu.tokens=388560"], 36),
        "lmcache_cpu_100GB": ("h100", "lmcache-cpu", ["tiers.gpu.tokens=388560"], 36),
        "lmcache_disk_20GB_buffer": ("h100", "lmcache-disk", ["tiers.gpu.tokens=388560"], 36),
    },
}  # fmt: skip
"""GPU profile, preset, its changes and how many other documents pushed the first one out, by the names of the
tables in a folder's ``micro.json``."""


@dataclass(frozen=True)
class Figure:
    """One figure of a run or table: measured, and simulated."""

    run: str
    figure: str
    """``cached share``, ``gpu share``, ``lower share``, ``ttft_p50``, ...; seconds, or shares of all prompt tokens."""
    measured: float
    simulated: float
    low: float
    """Least of the simulated draws."""
    high: float

    @property
    def error(self) -> float:
        """Difference: of shares in points over 100, of times relative to what was measured."""
        off = self.simulated - self.measured
        return off if self.figure.endswith("share") else off / self.measured

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "error": self.error}


def compare(recorded: Recorded, gpu: str | None = None, draws: int = DRAWS) -> list[Figure]:
    """The figures of one recorded run beside the model's.

    Args:
        recorded: the run.
        gpu: GPU profile; null: the run's.
        draws: simulations.

    Raises:
        ReplayError: the model cannot simulate the run.
    """
    rows = recorded.rows
    measured = {
        **_shares([r.prompt for r in rows], [r.cached for r in rows], [r.external for r in rows]),
        **_ttft([r.ttft_s for r in rows if r.ttft_s is not None]),
    }
    where = Where(recorded.preset, model=recorded.model, gpu=gpu or recorded.gpu)
    found = [_simulated(simulate(_shifted(recorded.trace, draw), where, recorded.settings)) for draw in range(draws)]
    figures = []
    for name, value in measured.items():
        if value is not None:
            values = [float(draw[name] or 0.0) for draw in found]
            figures.append(Figure(recorded.name, name, value, float(np.median(values)), min(values), max(values)))
    return figures


def _shifted(trace: Trace, seed: int) -> Trace:
    """The same sessions, each starting a little later; seed 0 changes nothing."""
    if not seed:
        return trace
    by = np.random.default_rng(seed)
    turns = [
        turn if turn.at is None else msgspec.structs.replace(turn, at=turn.at + float(by.uniform(0, SHIFT_S)))
        for turn in trace.turns
    ]
    return Trace(trace.header, turns)


def _simulated(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    done = [row for row in rows if row["status"] == "ok"]
    prompts = [row["prompt_tokens"] for row in done]
    cached = [row["prompt_tokens"] - row["computed_tokens"] for row in done]
    lower = [n - row["gpu_tokens"] for n, row in zip(cached, done, strict=True)]
    return {**_shares(prompts, cached, lower), **_ttft([row["first_token"] - row["sent"] for row in done])}


def _shares(prompts: list[int], cached: list[int | None] | list[int], lower: list[Any]) -> dict[str, float | None]:
    """Shares of all prompt tokens that any tier, the GPU and the tiers below it served; null where unknown."""
    total = sum(prompts)
    if None in cached:
        return {"cached share": None, "gpu share": None, "lower share": None}
    share = sum(n or 0 for n in cached) / total
    if None in lower:
        return {"cached share": share, "gpu share": None, "lower share": None}
    below = sum(lower) / total
    return {"cached share": share, "gpu share": share - below, "lower share": below}


def _ttft(seconds: list[float]) -> dict[str, float | None]:
    return {f"ttft_p{p}": float(np.percentile(seconds, p)) if seconds else None for p in PERCENTILES}


def micro(path: Path, say: Callable[[str], None] = lambda line: None) -> list[Figure]:
    """The document tests of a folder's ``micro.json`` beside the model's; nothing where the file is absent."""
    if not path.exists():
        return []
    tables = json.loads(path.read_text())
    figures = []
    for group, configurations in TABLES.items():
        for name, (gpu, backend, changes, others) in configurations.items():
            if name not in tables.get(group, {}):
                continue
            say(f"document test {name}")
            table = MicroTable.read(tables[group][name])
            where = Where(presets.load(backend, changes), model="qwen3-8b", gpu=gpu)
            times = [row["first_token"] - row["sent"] for row in simulate(documents(table, others), where)]
            label = f"{gpu} {backend}"
            pairs: list[tuple[str, float | None, float]] = [
                ("first 16k", table.first, times[0]),
                ("again 16k", table.again, times[1]),
                ("back 16k", table.after_others, times[-1]),
            ]
            pairs += [(f"{kind} 4k", *_four(tables[group][name], kind, table, where)) for kind in ("miss", "hit")]
            figures += [Figure(label, what, m, s, s, s) for what, m, s in pairs if m]
    return figures


def documents(table: MicroTable, others: int, tokens: int | None = None) -> Trace:
    """One document, the same again, `others` and the first again; each with its own question, one at a time."""
    names = ["first", "first", *(f"other{n}" for n in range(others)), "first"]
    return _alone([(name, tokens or table.tokens) for name in names], table.question)


def _alone(asked: list[tuple[str, int]], question: int) -> Trace:
    turns = [
        Turn(
            session="documents", turn=n, at=0.0 if n == 0 else None, keep=None if n == 0 else 0,
            append=[document, (f"question{n}", question)], output=1,
        )
        for n, document in enumerate(asked)
    ]  # fmt: skip
    return Trace(Header(format="replay-trace", version=1, name="documents", synthetic=True), turns)


def _four(data: dict[str, Any], kind: str, table: MicroTable, where: Where) -> tuple[float | None, float]:
    """Measured and simulated seconds of a document of 4,096 tokens, new or asked again."""
    measured = data.get(kind, {}).get("4096")
    rows = simulate(_alone([("first", 4096), ("first", 4096)], table.question), where)
    row = rows[0 if kind == "miss" else 1]
    return float(np.mean(measured)) / 1e3 if measured else None, row["first_token"] - row["sent"]
