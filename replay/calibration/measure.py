"""Measures a small grid on a running engine and fits a GPU profile to it.

The grid is a trace like any other, replayed through the same client, one request at a time except where a
batch is the point:

- *prefill*: so many new tokens after so many that the GPU holds, one token of output;
- *decode*: batches of equal prompts that decode together;
- *mixed*: prompts that come while one request decodes. What it loses to each is a launch, which lone requests do not
  tell from the time around their steps, and which takes longer on a CPU that has more to do;
- *sustained*: long prompts one right after the other, for the power cap;
- *back*: a document, others until it has left the tiers above the slowest, and the document again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np

from replay import runs
from replay.backends.connect import Where
from replay.backends.preset import Preset
from replay.engine import fit
from replay.engine.cost import CostModel, chunks
from replay.engine.power import HOT_S
from replay.engine.profiles import GIB, GpuProfile, Link, ModelProfile, StepFit
from replay.errors import ReplayError
from replay.load.schedule import Settings
from replay.results.recorder import Recorder
from replay.trace import Header, Trace, Turn

CACHED = (0, 4096, 16384)
NEW = (32, 256, 1024, 2048, 4096, 8192, 16384)
LONGEST = 24_576
"""Longest prompt of the grid."""
BATCHES = ((1, 1024), (1, 8192), (8, 1024), (8, 4096), (32, 1024))
STEPS = 96
"""Tokens that each request of a batch decodes."""
REPEATS = 3
WARM = 4
"""Requests before the first that counts: connections, compiled code, a clock that has woken up."""
MIXED, SMALLS = {"small": 32, "eager": 768}, 8
"""Tokens of the prompts that interrupt, with and without a CUDA graph, and how many of each do."""
DOCUMENT, QUESTION = 8192, 32
"""Tokens of a document and of the question that makes each of its prompts another; without one the last token alone
would be computed, and LMCache 0.5 does not load what such a prompt needs."""
FULL, SUSTAINED = 8192, 12
"""New tokens of a step that fills its budget, and how many of them follow each other."""
CAP_ROUNDS = 4
PREPARE = np.arange(0.0, 0.0201, 0.0005)
"""Candidates for the seconds that a step is prepared in: the formula is linear in the rest."""


@dataclass
class Grid:
    """What was measured, in seconds."""

    prefill: list[fit.Prefill] = field(default_factory=list)
    decode: list[fit.Decode] = field(default_factory=list)
    sustained_s: float | None = None
    """TTFT of `FULL` new tokens right after as many others; null: not measured."""
    interrupted_s: float = 0.0
    """What a decoding request loses to a small prompt that comes meanwhile."""
    eager_s: float | None = None
    """The same for a prompt that runs without a CUDA graph; null: not measured."""
    back_s: float | None = None
    """Coming back of `DOCUMENT` tokens from the slowest tier; null without one."""


@dataclass(frozen=True)
class Residual:
    """A figure of the grid and what the fit gives for it, in seconds."""

    what: str
    measured: float
    fitted: float


def grid_trace(others: int) -> Trace:
    """The grid as a trace.

    Args:
        others: documents that push the first one out of all tiers but the slowest; 0: there is only the GPU.
    """
    turns: list[Turn] = []

    def add(
        session: str, number: int, tokens: int, output: int, after: list[str], document: str = "", pause: float = 0.06
    ) -> str:
        own = [(f"{session}.{number}", tokens)]
        if document:
            own.insert(0, (document, DOCUMENT))
        at = None if after else 0.0
        turns.append(
            Turn(session=session, turn=number, at=at, after=after or None, pause=pause, append=own, output=output)
        )
        return f"{session}/{number}"

    last: list[str] = []
    for n in range(WARM):
        last = [add(f"warm {n}", 0, 32 + 700 * n, 2, last)]
    cells = [(cached, new) for cached in CACHED for new in NEW if cached + new <= LONGEST]
    for (cached, new), repeat in itertools.product(cells, range(REPEATS)):
        session, number = f"prefill {cached} {new} {repeat}", 0
        if cached:
            last = [add(session, 0, cached, 1, last)]
            number = 1
        # The one generated token of the prefix is no part of the GPU's cached blocks.
        last = [add(session, number, new, 1, last)]
    for n in range(SUSTAINED):
        last = [add(f"sustained {n}", 0, FULL, 1, last, pause=0.0)]
    for batch, context in BATCHES:
        last = [add(f"decode {batch} {context} {n}", 0, context, STEPS, last) for n in range(batch)]
    last = [add("mixed alone", 0, 512, STEPS * 6, last)]
    for kind, tokens in MIXED.items():
        start, last = last, [add(f"mixed {kind}", 0, 512, STEPS * 6, last)]
        for n in range(SMALLS):
            last.append(add(f"{kind} {n}", 0, tokens, 1, start, pause=0.3 + 0.15 * n))
    if others:
        for number, name in enumerate(["first", *(f"other{n}" for n in range(others)), "first"]):
            last = [add(f"back {number}", 0, QUESTION, 1, last, document=name)]
    return Trace(Header(format="replay-trace", version=1, name="calibration", synthetic=True), turns)


def others(preset: Preset, model: ModelProfile) -> int:
    """Documents that fill every tier but the slowest, and a fifth more; 0 where there is only the GPU.

    Raises:
        ReplayError: the size of the GPU tier is not given.
    """
    lower = preset.lower()
    if not lower:
        return 0
    if preset.tiers.gpu.tokens is None:
        raise ReplayError(f"backend {preset.name}: say how large the GPU tier is, with --set tiers.gpu.tokens=N")
    per_token = model.kv_bytes_per_token(preset.kv_dtype) * model.kv_copies(preset.tensor_parallel)
    above = preset.tiers.gpu.tokens + sum(tier.gib * GIB / per_token for _, tier in lower[:-1])
    return int(1.2 * above / DOCUMENT) + 1


def measure(where: Where, others: int, say: Callable[[str], None] = lambda line: None) -> Grid:
    """Replays the grid.

    Raises:
        ReplayError: a request of it failed.
    """
    trace = grid_trace(others)
    recorder = Recorder()
    total = len(trace)
    settings = Settings(outputs="recorded")
    runs.execute(trace, where, settings, recorder, watch=lambda p: say(f"request {p.done:,} of {total:,}"), say=say)
    rows = {}
    for row in recorder.rows:
        if row["status"] != "ok":
            raise ReplayError(f"{where.preset.name}: request {row['session']!r} failed: {row['error']}")
        rows[row["session"], row["turn"]] = row
    return _read(rows, others)


def _read(rows: dict[tuple[str, int], Any], others: int) -> Grid:
    grid = Grid()
    batches: dict[tuple[int, int], list[Any]] = {}
    for (session, turn), row in rows.items():
        kind, *numbers = session.split()
        if kind == "prefill" and (turn == 1 or numbers[0] == "0"):
            cached = row["prompt_tokens"] - row["computed_tokens"]
            grid.prefill.append(fit.Prefill(cached, row["computed_tokens"], row["first_token"] - row["sent"]))
        elif kind == "decode":
            batches.setdefault((int(numbers[0]), int(numbers[1])), []).append(row)
    late = [rows[f"sustained {n}", 0] for n in range(SUSTAINED // 2, SUSTAINED)]
    grid.sustained_s = mean(row["first_token"] - row["sent"] for row in late)
    for (batch, context), members in batches.items():
        last = max(members, key=lambda row: float(row["first_token"]))
        steps = last["output_tokens"] - 1
        grid.decode.append(fit.Decode(batch, context + steps / 2, (last["last_token"] - last["first_token"]) / steps))
    spent = {
        name: row["last_token"] - row["first_token"] for (name, _), row in rows.items() if name.startswith("mixed")
    }
    lost = {kind: max(0.0, (spent[f"mixed {kind}"] - spent["mixed alone"]) / SMALLS) for kind in MIXED}
    grid.interrupted_s, grid.eager_s = lost["small"], lost["eager"]
    if others:
        row = rows[f"back {others + 1}", 0]
        grid.back_s = row["first_token"] - row["sent"]
    return grid


def fit_profile(
    grid: Grid, model: ModelProfile, base: GpuProfile, preset: Preset, name: str
) -> tuple[GpuProfile, list[Residual]]:
    """The profile of the machine that a grid was measured on, and the residuals of the fit.

    Without tiers below the GPU, the steps are fitted. With such tiers they are taken from `base`, since a miss
    shows only the sum of its steps and its stores, and the link of the slowest tier is fitted.

    Args:
        grid: what was measured.
        model: the model that was served.
        base: data sheet figures, and what the grid does not measure.
        preset: that was asked.
        name: of the new profile.

    Raises:
        ReplayError: there are tiers, and `base` has no measured steps of this model.
    """
    measured: dict[str, Any]
    most = preset.max_batched_tokens
    if preset.lower():
        if model.name not in base.fits:
            raise ReplayError(
                f"GPU profile {base.name}: has no measured steps of {model.name}; calibrate with a backend without "
                "lower tiers first, and give its profile with --gpu"
            )
        links, residuals = _fit_link(grid, model, base, preset)
        measured = {"links": links}
    else:
        steps = _fit_steps(grid, most)
        links = {key: {tier: _derived(link) for tier, link in tiers.items()} for key, tiers in base.links.items()}
        residuals = _residuals(grid, steps, most)
        measured = {"fits": {model.name: steps}, "links": links, "scaled_from": None}
    source = f"replay calibrate on {preset.name} with {model.name}; what that does not measure is of {base.name}"
    sources = [*base.sources, source]
    summary = f"Measured with {model.name}"
    return msgspec.structs.replace(
        base, name=name, summary=summary, source="measured", sources=sources, **measured
    ), residuals


def _fit_steps(grid: Grid, most: int) -> StepFit:
    decode = fit.fit_decode(grid.decode)
    step = decode[0] + decode[1]
    alone = min((row.ttft_s for row in grid.prefill if row.new <= 512 and not row.cached), default=0.0)
    # A launch hides behind the step under way, and takes the place of another (replay.engine.scheduler).
    launch = min(alone, grid.interrupted_s + 2 * step)
    overhead = max(0.0, alone - max(launch, decode[0]))
    rested = [row.ttft_s for row in grid.prefill if (row.cached, row.new) == (0, FULL)]
    power_cap = 1.0
    for _ in range(CAP_ROUNDS):  # each depends on the other, a little
        fits = [
            fit.fit_steps(
                grid.prefill,
                decode,
                overhead_s=overhead,
                prepare_s=float(p),
                power_cap=power_cap,
                max_batched_tokens=most,
            )
            for p in PREPARE
        ]
        best = min(fits, key=lambda f: sum((_ttft(row, f, most) / row.ttft_s - 1) ** 2 for row in grid.prefill))
        if grid.sustained_s is None or not rested:
            break
        power_cap = max(1.0, 1 + (grid.sustained_s - mean(rested)) / (best.token_s * cool_tokens(best, most)))
    eager = grid.eager_s + 2 * step if grid.eager_s is not None else 0.0
    return msgspec.structs.replace(best, launch_s=max(best.launch_s, eager))


def cool_tokens(steps: StepFit, most: int) -> int:
    """Of `FULL` new tokens alone, those that are computed before the power cap shows."""
    cost, tokens, since = CostModel("measured", steps, {}, most), 0, 0.0
    for size, held in chunks(FULL, 0, most):
        if since < HOT_S:
            tokens += size
        since += cost.work_seconds([(size, held)], 0, 0)
    return tokens


def _ttft(row: fit.Prefill, fitted: StepFit, most: int, links: dict[str, Link] | None = None) -> float:
    cost = CostModel("measured", fitted, links or {}, most)
    return cost.request_overhead(row.cached + row.new) + cost.prefill_seconds(row.new, row.cached)


def _residuals(grid: Grid, fitted: StepFit, most: int) -> list[Residual]:
    cost = CostModel("measured", fitted, {}, most)
    cells = sorted({(row.cached, row.new) for row in grid.prefill})
    found = []
    for cached, new in cells:
        times = [row.ttft_s for row in grid.prefill if (row.cached, row.new) == (cached, new)]
        what = f"prefill of {new:,} after {cached:,}"
        found.append(Residual(what, mean(times), _ttft(fit.Prefill(cached, new, 0.0), fitted, most)))
    for row in grid.decode:
        step = cost.step_seconds((), row.batch, int(row.batch * row.context))
        found.append(Residual(f"decode step of {row.batch} at {row.context:,.0f}", row.step_s, step))
    return found


def _fit_link(
    grid: Grid, model: ModelProfile, base: GpuProfile, preset: Preset
) -> tuple[dict[str, dict[str, Link]], list[Residual]]:
    """Links with that of the slowest tier: what coming back takes beyond a hit, and a miss beyond its steps."""
    (tier, _), steps, most = preset.lower()[-1], base.fits[model.name], preset.max_batched_tokens
    known = base.links.get("default", {}) | base.links.get(preset.connector, {})
    if tier not in known or grid.back_s is None:
        raise ReplayError(f"GPU profile {base.name}: no link to tier {tier!r} to start from; add one under links")
    chunk = preset.chunk_tokens or preset.block_tokens
    per_token = model.kv_bytes_per_token(preset.kv_dtype)
    above = {name: known[name] for name, _ in preset.lower()[:-1]}

    def beyond(row: fit.Prefill) -> float:
        """What a request took beyond its steps and the tiers above, stores among it."""
        count = (row.cached + row.new) // chunk - row.cached // chunk
        stores = sum(up.store_seconds(count * chunk * per_token, count) for up in above.values() if up.blocking_store)
        return row.ttft_s - _ttft(row, steps, most, above) - stores

    # Short requests store little: what they take beyond is the connector's.
    request_s = max(0.0, median(beyond(row) for row in grid.prefill if row.new <= steps.graph_tokens))
    moved = DOCUMENT // chunk * chunk
    hit = _ttft(fit.Prefill(moved, DOCUMENT + QUESTION - moved, 0.0), steps, most, above) + request_s
    load_gbps = moved * per_token / max(1e-6, grid.back_s - hit) / 1e9
    link = msgspec.structs.replace(
        known[tier], request_s=request_s, load_gbps=load_gbps, per_chunk_s=0.0, latency_s=0.0, source="measured"
    )
    if link.blocking_store:
        long = [row for row in grid.prefill if not row.cached and row.new >= chunk * 8]
        rate = mean((beyond(row) - request_s) / (row.new // chunk * chunk * per_token) for row in long)
        link = msgspec.structs.replace(link, store_gbps=1 / max(1e-6, rate * 1e9), store_per_chunk_s=0.0)
    back = Residual(f"back from {tier}", grid.back_s, hit + link.load_seconds(moved * per_token, moved // chunk))
    return base.links | {preset.connector: base.links.get(preset.connector, {}) | {tier: link}}, [back]


def _derived(link: Link) -> Link:
    return msgspec.structs.replace(link, source="derived")


def plain(profile: GpuProfile) -> dict[str, Any]:
    """A profile as plain data for its YAML file, figures to four digits."""

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shorten(item) for key, item in value.items()}
        return float(f"{value:.4g}") if isinstance(value, float) else value

    found: dict[str, Any] = shorten(msgspec.to_builtins(profile))
    return found
