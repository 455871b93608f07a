"""Fits `StepFit` and `Link` to measurements, by least squares on the relative error.

`fit_steps` takes what `replay`'s calibration folders hold: `prefill.jsonl` (time to first token of one
request alone, by cached prefix and new tokens) and `decode.jsonl` (batches of equal prompts). The step
formula of `replay.engine.cost` is linear in its coefficients once it is known which branch of each
maximum a step takes, so the fit alternates between solving and choosing branches until they agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.engine.cost import chunks
from replay.engine.power import HOT_S
from replay.engine.profiles import Link, StepFit
from replay.errors import ReplayError

Floats = npt.NDArray[np.float64]
ROUNDS = 50


@dataclass(frozen=True)
class Prefill:
    """One request alone: tokens from the GPU's cache, tokens computed, seconds to the first token."""

    cached: int
    new: int
    ttft_s: float


@dataclass(frozen=True)
class Decode:
    """Decode-only steps of `batch` requests of `context` tokens each: mean seconds a step."""

    batch: int
    context: float
    step_s: float


def least_squares(columns: Floats, times: Floats, known: Floats | float = 0.0) -> Floats:
    """Non-negative x that minimise the relative error of ``columns @ x + known`` against `times`.

    Columns (n, k), times and known (n,) -> (k,). A coefficient that would be negative is left at 0.
    """
    scaled, target = columns / times[:, None], (times - known) / times
    norm = np.linalg.norm(scaled, axis=0)
    used, found = norm > 0, np.zeros(columns.shape[1])
    while used.any():
        solution = np.linalg.lstsq(scaled[:, used] / norm[used], target, rcond=None)[0]
        found[:] = 0
        found[used] = np.maximum(solution, 0) / norm[used]
        if (solution >= 0).all():
            break
        used[np.flatnonzero(used)[solution < 0]] = False
    return found


def fit_decode(rows: Sequence[Decode]) -> tuple[float, float, float]:
    """-> seconds a step, a request in the batch, a token of context."""
    columns = np.array([[1.0, row.batch, row.batch * row.context] for row in rows])
    weights_s, sequence_s, context_s = least_squares(columns, np.array([row.step_s for row in rows]))
    return float(weights_s), float(sequence_s), float(context_s)


def fit_steps(
    prefill: Sequence[Prefill],
    decode: tuple[float, float, float],
    *,
    overhead_s: float,
    prepare_s: float = 0.0,
    power_cap: float = 1.0,
    max_batched_tokens: int = 8192,
    graph_tokens: int = 512,
) -> StepFit:
    """Fits the coefficients of prefill, given those of decoding (see `fit_decode`).

    A request alone shows only the sum of what passes around its steps (`overhead_s`) and of what launching
    its first step takes; the two differ for the others: they wait for a launch. So `overhead_s` is given,
    and so are `prepare_s` and `power_cap`, which shows only where prefill goes on for long.

    Raises:
        ReplayError: the rows do not determine a coefficient that must be positive.
    """
    weights_s, sequence_s, context_s = decode
    times = np.array([row.ttft_s for row in prefill])
    slow = min((row.ttft_s for row in prefill if row.new > graph_tokens), default=0.0)
    fast = min((row.ttft_s for row in prefill if row.new <= graph_tokens), default=0.0)
    coefficients = np.array([0.0, weights_s / 256, weights_s / 1e7, fast, slow])
    for _ in range(ROUNDS):
        rows = [
            _columns(row, coefficients, weights_s, prepare_s, power_cap, max_batched_tokens, graph_tokens)
            for row in prefill
        ]
        columns, known = np.array([row[:-1] for row in rows]), np.array([row[-1] for row in rows]) + overhead_s
        solved = least_squares(columns, times, known)
        if np.allclose(solved, coefficients, rtol=1e-9, atol=0):
            break
        coefficients = solved
    per_token, token_s, attention_s, graph_launch_s, launch_s = (float(value) for value in coefficients)
    if token_s <= 0 or attention_s <= 0:
        raise ReplayError("the prefill measurements do not separate time per token from attention; add long prompts")
    return StepFit(
        overhead_s=overhead_s,
        prepare_s=prepare_s,
        overhead_per_token_s=per_token,
        weights_s=weights_s,
        token_s=token_s,
        attention_s=attention_s,
        power_cap=power_cap,
        launch_s=launch_s,
        graph_launch_s=graph_launch_s,
        graph_tokens=graph_tokens,
        sequence_s=sequence_s,
        context_s=context_s,
    )


def _columns(
    row: Prefill,
    coefficients: Floats,
    weights_s: float,
    prepare_s: float,
    power_cap: float,
    most: int,
    graph_tokens: int,
) -> tuple[float, float, float, float, float, float]:
    """Columns of overhead a token, token, attention and launches, and the seconds already known.

    Only the first chunk can wait for its launch: that of the next one hides behind a full chunk's work.
    """
    _, token_s, attention_s, *launch = coefficients
    tokens = pairs = known = 0.0
    launches, since = [0.0, 0.0], 0.0
    for place, (new, cached) in enumerate(chunks(row.new, row.cached, most)):
        attended = new * (cached + new / 2)
        compute, work = token_s * new > weights_s, max(weights_s, token_s * new) + attention_s * attended
        kind = int(new > graph_tokens)
        if place == 0 and launch[kind] > prepare_s + work:
            launches[kind] = 1.0
            continue
        known += prepare_s if place == 0 else 0.0
        pairs += attended
        if compute:
            tokens += new * (power_cap if since >= HOT_S else 1.0)
            since += work
        else:
            known += weights_s
    return row.cached + row.new, tokens, pairs, launches[0], launches[1], known


def read_prefill(path: Path) -> list[Prefill]:
    """Rows of a `prefill.jsonl`."""
    rows = _rows(path)
    return [Prefill(row["cached_prefix"], row["new_tokens"], row["ttft_ms"] / 1e3) for row in rows]


def read_decode(path: Path) -> list[Decode]:
    """Decode-only stretches of a `decode.jsonl`: after a batch's last first token, all of it decodes."""
    found = []
    for (batch, context), group in groupby(_rows(path), lambda row: (row["batch"], row["context"])):
        last = max(group, key=lambda row: float(row["ttft_ms"]))
        steps = last["output_tokens"] - 1
        step_s = (last["e2e_ms"] - last["ttft_ms"]) / 1e3 / steps
        found.append(Decode(batch, context + steps / 2, step_s))
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: not readable as measurements: {error}") from None


def fit_link(nbytes: float, chunks: int, seconds: float, wire_gbps: float | None) -> tuple[float, float]:
    """Splits one measured transfer into wire and software -> GB/s, seconds a chunk.

    `wire_gbps` is what the wire delivers (PCIe 5.0 x16: about 55 GB/s). What the transfer took beyond that
    is charged to its chunks. Where the wire's rate is unknown (null), or the transfer was faster, the
    transfer's own bandwidth is the answer, and no software cost.
    """
    wire_s = nbytes / (wire_gbps * 1e9) if wire_gbps else seconds
    if not wire_gbps or seconds <= wire_s:
        return nbytes / seconds / 1e9, 0.0
    return wire_gbps, (seconds - wire_s) / chunks


@dataclass(frozen=True)
class MicroTable:
    """Mean seconds of the document test, one request at a time, from one table of a `micro.json`.

    A document of `tokens` tokens and a short question: first time, again at once, and again after other
    documents pushed it out of GPU memory.
    """

    tokens: int
    question: int
    first: float
    again: float
    after_others: float
    prefill: tuple[Prefill, ...]
    """Every time of the table that the GPU alone explains, where no lower tier was there."""

    @classmethod
    def read(cls, table: dict[str, Any], *, tokens: int = 16384, question: int = 32) -> MicroTable:
        """Reads one configuration's object of `micro.json` (milliseconds, single values or lists)."""
        evict = table.get("evict16k", table)
        others = next(_seconds(value) for key, value in evict.items() if key.startswith("others"))
        firsts = _seconds(evict["first"]) + others + _seconds(table.get("miss", {}).get(str(tokens), []))
        agains = _seconds(evict["again"]) + _seconds(table.get("hit", {}).get(str(tokens), []))
        backs = _seconds(evict["after_others"])
        rows = [Prefill(0, int(n) + question, t) for n, v in table.get("miss", {}).items() for t in _seconds(v)]
        rows += [Prefill(int(n), question, t) for n, v in table.get("hit", {}).items() for t in _seconds(v)]
        rows += [Prefill(0, tokens + question, t) for t in _seconds(evict["first"]) + others + backs]
        rows += [Prefill(tokens, question, t) for t in _seconds(evict["again"])]
        return cls(tokens, question, _mean(firsts), _mean(agains), _mean(backs), tuple(rows))


def _seconds(value: float | list[float]) -> list[float]:
    return [item / 1e3 for item in (value if isinstance(value, list) else [value])]


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def link_from_tables(
    tier: MicroTable,
    alone: MicroTable,
    above: MicroTable,
    *,
    bytes_per_token: int,
    chunk_tokens: int,
    wire_gbps: float | None,
) -> Link:
    """The link of a tier from its document test and the same test of the GPU alone.

    Loading is what coming back costs beyond a hit in the GPU's memory when it is `alone`. Storing is what a
    miss costs beyond one with only the tiers `above` (`alone` again for the first tier below the GPU).
    """
    nbytes, moved = tier.tokens * bytes_per_token, tier.tokens // chunk_tokens
    load_gbps, per_chunk = fit_link(nbytes, moved, tier.after_others - alone.again, wire_gbps)
    store_gbps, store_chunk = fit_link(nbytes, moved, tier.first - above.first, wire_gbps)
    return Link(
        load_gbps=load_gbps,
        per_chunk_s=per_chunk,
        store_gbps=store_gbps,
        store_per_chunk_s=store_chunk,
        source="measured",
    )
