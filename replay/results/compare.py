"""Two runs, turn by turn: what changed, whether chance can explain it, for which turns, and why.

The turns are paired by `replay.results.pairs`; this puts runs against a first one and holds gates against that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from replay.errors import ReplayError
from replay.results import comparable, gates, queries
from replay.results.metrics import Cell
from replay.results.pairs import Group, Pairs, cell
from replay.results.report import TIERS, connection
from replay.results.store import Store


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """One run against the first."""

    run: dict[str, Any]
    """The run's row, as in a report."""
    warnings: list[str]
    pairs: dict[str, int]
    """Turns: `pairs`, `only_a_ok`, `only_b_ok`, `neither_ok`, `missing_in_a`, `missing_in_b`."""
    resampled: str
    """What the bootstrap draws: `session` or `turn`."""
    units: int
    """How many of these there are (groups of them where there are very many)."""
    metrics: dict[str, Cell]
    """By name (`replay.results.metrics`). Latencies, tokens and losses: of the pairs; rates and errors: of the runs."""
    groups: list[Group]
    turns: list[dict[str, Any]]
    """Rows of ``reports/compare_turns.sql``."""
    moved: list[dict[str, Any]]
    """Prompt tokens that came `from` one source in the first run and from another (`to`) in this one, most first."""
    why: dict[str, float | None]
    """Seconds over all pairs, this run less the first: `ttft_s`, of it `recompute_s` and `load_s`, and the `rest_s`."""
    gates: list[gates.Result]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Runs against a first one. The field names are the keys of ``replay compare --json`` and stay as they are."""

    baseline: dict[str, Any]
    """The first run's row."""
    runs: list[Against]
    passed: bool | None
    """Whether every gate holds for every run; null without gates."""

    def json(self) -> str:
        """This comparison as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def compare(
    source: Store | str | Path, runs: Sequence[str], *, limits: Sequence[str] = (), force: bool = False
) -> Comparison:
    """Compares runs with the first of them, over the turns that both answered.

    Args:
        source: an open store or the path of a results file.
        runs: ids, names, or unique starts of either; at least two.
        limits: gates, see `replay.results.gates`. With any, a run that is `invalid` fails unless `force` is given.
        force: compare runs that were not asked the same.

    Raises:
        ReplayError: no such run, runs that were not asked the same, no pair, or a gate that cannot be read.
    """
    if len(runs) < 2:
        raise ReplayError("compare: name at least two runs, e.g. `replay compare vllm lmcache-cpu`")
    parsed = [gates.parse(text) for text in limits]
    with connection(source) as (con, _):
        file = str(source.path if isinstance(source, Store) else source)
        first, *others = (queries.run(con, queries.find_run(con, run, source=file)) for run in runs)
        try:
            found = [_against(con, first, other, parsed, force) for other in others]
        except ReplayError as error:
            taken = _taken(con, runs, [first, *others])
            raise ReplayError(f"{error}. {taken}" if taken else str(error)) from None
    passed = all(result.passed for against in found for result in against.gates) if parsed else None
    return Comparison(baseline=_shown(first), runs=found, passed=passed)


def _against(
    con: duckdb.DuckDBPyConnection, a: dict[str, Any], b: dict[str, Any], limits: list[gates.Gate], force: bool
) -> Against:
    warnings = comparable.check(a, b, force=force)
    ids = {"a": a["id"], "b": b["id"]}
    counts = queries.select(con, "compare_counts", **ids)[0]
    if not counts["pairs"]:
        raise ReplayError(f"{a['name']} and {b['name']} answered no turn in common, so there is nothing to compare")
    warnings += _uneven(counts)
    pairs = Pairs(con, ids)
    metrics = {**_of_tiers(pairs.metrics(), a, b), **_of_runs(con, a["id"], b["id"])}
    results = [gates.check(gate, metrics) for gate in limits]
    if limits and not force:
        results += [_invalid(run) for run in (a, b) if run["verdict"] == "invalid"]
    return Against(
        run=_shown(b), warnings=warnings, pairs=counts, resampled=pairs.draw.by, units=pairs.draw.units,
        metrics=metrics, groups=list(pairs.groups()), turns=queries.select(con, "compare_turns"),
        moved=pairs.moved(), why=pairs.why(), gates=results,
    )  # fmt: skip


def _taken(con: duckdb.DuckDBPyConnection, wanted: Sequence[str], runs: Sequence[dict[str, Any]]) -> str:
    """Which run was taken for each name that several have, and which others there are; empty where each has one."""
    said = []
    for name, run in {name: run for name, run in zip(wanted, runs, strict=True) if name == run["name"]}.items():
        others = con.execute(
            "SELECT id, trace FROM runs WHERE name = ? AND id <> ? ORDER BY started_at DESC, rowid DESC",
            [run["name"], run["id"]],
        ).fetchall()
        if others:
            shown = ", ".join(f"{id} (trace {trace or 'unknown'})" for id, trace in others[:3])
            more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
            said.append(
                f"{name!r} is the name of {1 + len(others):,} runs; the latest was taken, {run['id']} "
                f"(trace {run['trace'] or 'unknown'}), not {shown}{more}"
            )
    if said:
        said.append("An id in place of the name picks another, and `replay run --name` tells runs apart")
    return ". ".join(said)


def _of_tiers(metrics: dict[str, Cell], a: dict[str, Any], b: dict[str, Any]) -> dict[str, Cell]:
    """The metrics, with tiers that only one of the presets has told from those of which nothing is known."""
    for tier in TIERS:
        has = [_has(run, tier) for run in (a, b)]
        if has[0] is has[1] or None in has:
            continue
        tokens = metrics[f"{tier}_tokens"]
        there, absent = (tokens.a, tokens.b) if has[0] else (tokens.b, tokens.a)
        if there is not None and absent is None:
            for name in (f"{tier}_tokens", f"{tier}_share"):
                metrics[name] = msgspec.structs.replace(metrics[name], verdict=f"only in {'A' if has[0] else 'B'}")
    return metrics


def _has(run: dict[str, Any], tier: str) -> bool | None:
    """Whether a run's backend has a tier, by its preset; null where that does not say."""
    preset = run["settings"].get("preset")
    if not preset or preset.get("engine") in ("openai", "anthropic"):
        return None
    below = [name for name, size in (preset.get("tiers") or {}).items() if name != "gpu" and size]
    if tier == "external":
        return True if below else preset.get("connector", "none") != "none"
    return tier == "gpu" or tier in below


def _uneven(counts: dict[str, int]) -> list[str]:
    left_out = {key: n for key, n in counts.items() if key != "pairs" and n}
    if not left_out:
        return []
    texts = {
        "only_a_ok": "answered by A alone", "only_b_ok": "answered by B alone", "neither_ok": "answered by neither",
        "missing_in_a": "not in A", "missing_in_b": "not in B",
    }  # fmt: skip
    return ["turns left out: " + ", ".join(f"{n:,} {texts[key]}" for key, n in left_out.items())]


def _invalid(run: dict[str, Any]) -> gates.Result:
    reason = f"{run['name']} is invalid: {'; '.join(run['reasons'] or ())}"
    return gates.Result("every run valid or partial", False, None, None, "value", None, reason)


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in ("settings", "self_check")} | {
        "started_at": run["started_at"].isoformat(timespec="seconds") + "Z"
    }


def _of_runs(con: duckdb.DuckDBPyConnection, a: str, b: str) -> dict[str, Cell]:
    """Metrics of whole runs: one figure each, so no interval."""
    figures = [_rates(con, run) for run in (a, b)]
    return {name: cell(name, *(each[name] for each in figures)) for name in figures[0]}


def _rates(con: duckdb.DuckDBPyConnection, run: str) -> dict[str, float | None]:
    rates, checks = queries.row(con, "throughput", run), queries.row(con, "checks", run)
    left_out = queries.left_out(checks)
    failed = checks["errors"] + checks["dropped"] - left_out
    ended = checks["turns"] - checks["cancelled"] - left_out
    return {
        "throughput": rates["requests_per_s"],
        "output_tokens_per_s": rates["output_tokens_per_s"],
        "prompt_tokens_per_s": rates["prompt_tokens_per_s"],
        "errors": failed,
        "error_share": failed / ended if ended else None,
    }
