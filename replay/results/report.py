"""A run as plain data: `report` reads it, `render` and ``--format json`` show it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import msgspec

from replay.results import queries
from replay.results.snapshot import open_live
from replay.results.store import Store
from replay.results.verdict import disagreements, verdict

TIERS = ("gpu", "cpu", "disk", "remote", "external")
CACHED = (*TIERS, "unnamed")
"""Where cached tokens may have been; ``unnamed``: the backend says how many, not in which tier."""
SERVED_FROM = (*TIERS, "none", "unknown")
STATUSES = ("ok", "errors", "dropped", "cancelled")
LOSSES = ("evicted", "granularity", "never_stored", "cold", "diverged", "unknown")

Cell = dict[str, float | None]
"""Seconds of a group of requests: `n`, `mean`, `p50`, `p90`, `p95`, `p99`; null where n is too small."""
_EMPTY: Cell = {"n": 0, "mean": None, "p50": None, "p90": None, "p95": None, "p99": None}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the reports say about one run. Null is unknown; a null is never a zero.

    The field names are the keys of ``replay report --format json`` and stay as they are.
    """

    run: dict[str, Any]
    """The run's row without `settings` and `self_check`; `started_at` is ISO 8601 in UTC."""
    settings: dict[str, Any]
    """What was stored of the backend: preset, versions, profile, capacities."""
    requests: dict[str, int]
    """Turns by outcome: `total`, `ok`, `errors`, `dropped`, `cancelled`; `too_long` and `after_too_long` are those of
    `dropped` that ``--too-long drop`` left out."""
    tokens: dict[str, int | None]
    """`prompt`, `output`, `ideal`, and `prompt` split into tiers, `computed` and `unknown`."""
    loss: dict[str, int | float | None]
    """Tokens lost: `total` and by cause; `recompute_s` is the prefill time that they cost."""
    loss_s: dict[str, float | None]
    """That price by cause, in seconds, in proportion to each request's lost tokens."""
    ttft_s: dict[str, Cell]
    """Sent to first token: a cell for `all` and each `served_from` (`unknown`: the backend does not say)."""
    ttft_due_s: dict[str, Cell]
    """Due to first token."""
    e2e_s: dict[str, Cell]
    """Sent to last token."""
    itl_s: dict[str, Cell]
    """Mean time between output tokens of a request."""
    throughput: dict[str, float | None]
    """`seconds`, and per second: requests, output, prompt and computed tokens."""
    tiers: dict[str, dict[str, float | None] | None]
    """Per tier `loads`, `tokens`, `bytes`, `timed`, `seconds`, `gb_per_s`; null: tier absent or unseen."""
    pauses: list[dict[str, Any]]
    """Rows of ``reports/pauses.sql``."""
    sessions: list[dict[str, Any]]
    """Rows of ``reports/sessions.sql``, worst first."""
    counters: dict[str, dict[str, int | None]]
    """By kind of tokens, `engine` (its own counter over the run) and `requests` (their sum); empty without scrapes."""
    self_check: dict[str, Any]
    """`counters_agree` (null: nothing to compare), `schedule_drift_p99_s`, `peak_in_flight`, `dropped_turns`, and what
    the client noticed."""

    def json(self) -> str:
        """This report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def report(source: Store | str | Path, run: str | None = None) -> Report:
    """Reads the report of a run.

    Args:
        source: an open store or the path of a results file.
        run: id, name, or unique start of either; null for the latest run.

    Raises:
        ReplayError: no such file or run.
    """
    with connection(source) as (con, live):
        run_id = queries.find_run(con, run, source=str(source.path if isinstance(source, Store) else source))
        return _read(con, run_id, live=live)


@contextmanager
def connection(source: Store | str | Path) -> Iterator[tuple[duckdb.DuckDBPyConnection, bool]]:
    """A connection to read from, and whether runs may still be going on in it."""
    con, live = (source.reader(), True) if isinstance(source, Store) else open_live(source)
    try:
        yield con, live
    finally:
        con.close()


def _read(con: duckdb.DuckDBPyConnection, run_id: str, *, live: bool) -> Report:
    run = queries.run(con, run_id)
    settings, self_check = run.pop("settings"), run.pop("self_check")
    checks = queries.row(con, "checks", run_id)
    if run["status"] == "running" and not live:
        run["status"] = "partial"  # its process is gone: it would hold the file's lock
    if run["verdict"] is None:
        run["verdict"], run["reasons"] = verdict(checks, self_check, status=run["status"])
    run = _rounded(run | {"started_at": _iso(run["started_at"])})
    counters = queries.rows(con, "counters", run_id)
    apart = disagreements(counters)
    latency = _latency(con, run_id)
    loss = queries.row(con, "loss", run_id)
    tokens = queries.row(con, "tokens", run_id)
    del tokens["requests"]
    return Report(
        run=run,
        settings=settings,
        requests={
            "total": checks["turns"],
            **{k: checks[k] for k in (*STATUSES, "too_long", "after_too_long")},
        },
        tokens=tokens,
        loss={key: _round(loss[key]) for key in ("total", *LOSSES, "recompute_s")},
        loss_s={cause: _round(loss[f"{cause}_s"]) for cause in LOSSES},
        **latency,
        throughput={key: _round(value) for key, value in queries.row(con, "throughput", run_id).items()},
        tiers=_tiers(con, run_id),
        pauses=[_rounded(row) for row in queries.rows(con, "pauses", run_id)],
        sessions=[_rounded(row) for row in queries.rows(con, "sessions", run_id)],
        counters={row["kind"]: {key: row[key] for key in ("engine", "requests")} for row in counters},
        self_check={
            **self_check,
            "counters_agree": None if apart is None else not apart,
            "schedule_drift_p99_s": _round(checks["drift_p99"]),
            "peak_in_flight": checks["peak_in_flight"],
            "dropped_turns": checks["dropped"],
            "loop_lag_p99_s": self_check.get("loop_lag_p99_s"),
            "cache_before": self_check.get("cache_before"),
            "warnings": self_check.get("warnings") or [],
        },
    )


def _latency(con: duckdb.DuckDBPyConnection, run_id: str) -> dict[str, dict[str, Cell]]:
    cells: dict[str, dict[str, Cell]] = {
        metric: {group: dict(_EMPTY) for group in ("all", *SERVED_FROM)}
        for metric in ("ttft_s", "ttft_due_s", "e2e_s", "itl_s")
    }
    for row in queries.rows(con, "latency", run_id):
        cells[row["metric"]][row["served_from"]] = {key: _round(row[key]) for key in _EMPTY}
    return cells


def _tiers(con: duckdb.DuckDBPyConnection, run_id: str) -> dict[str, dict[str, float | None] | None]:
    found = {row.pop("tier"): _rounded(row) for row in queries.rows(con, "tiers", run_id)}
    return {tier: found.get(tier) for tier in TIERS}


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: _round(value) for key, value in row.items()}


def _round(value: Any) -> Any:
    """Nine decimals of a float: sums over threads differ in the last bits from one time to the next."""
    return round(value, 9) if isinstance(value, float) else value


def _iso(at: datetime) -> str:
    return at.isoformat(timespec="seconds") + "Z"
