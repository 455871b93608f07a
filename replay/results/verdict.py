"""Whether a run may be trusted: `valid`, `partial` or `invalid`, and why.

`invalid`: its figures describe something else than the question. `partial`: it ended early, or some
figures are doubtful; the reasons say which. Warnings never change the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import duckdb

from replay.results import queries, units

Verdict = Literal["valid", "partial", "invalid"]

MAX_SHARE = 0.01
"""Share of requests that may fail, be cut short or not add up before the run is invalid."""
DRIFT_S = (0.1, 1.0)
"""p99 of the seconds from due to sent above which a run is partial, invalid."""
LAG_S = (0.05, 0.5)
"""p99 of the seconds by which the client's event loop woke late above which a run is partial, invalid."""


def judge(con: duckdb.DuckDBPyConnection, run_id: str) -> tuple[Verdict, list[str]]:
    """The verdict on a stored run, from its rows and its self-check."""
    run = queries.run(con, run_id)
    counters = queries.rows(con, "counters", run_id)
    return verdict(queries.row(con, "checks", run_id), run["self_check"], counters, status=run["status"])


def disagreements(counters: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]] | None:
    """The rows of ``reports/counters.sql`` whose two sums differ; null where nothing can be compared.

    A token for each request is let pass: the last token of a prompt always runs, and of a prompt that was cached
    to its end vLLM's counters count it as cached or as computed, depending on who had cached it.
    """
    both = [row for row in counters if None not in (row["engine"], row["requests"])]
    return [row for row in both if abs(row["engine"] - row["requests"]) > row["n"]] if both else None


def verdict(
    checks: Mapping[str, Any],
    self_check: Mapping[str, Any],
    counters: Sequence[Mapping[str, Any]] = (),
    *,
    status: str = "complete",
) -> tuple[Verdict, list[str]]:
    """The verdict and its reasons, gravest first, warnings last.

    Args:
        checks: the row of ``reports/checks.sql``.
        self_check: what the client noticed; keys as in ``reports/README.md``, all optional.
        counters: the rows of ``reports/counters.sql``.
        status: of the run; only ``complete`` can be valid.
    """
    invalid, partial, warnings = _Reasons(), _Reasons(), _Reasons()
    _completeness(checks, status, self_check.get("incomplete"), invalid, partial)
    _requests(checks, self_check, invalid, partial)
    _counters(counters, invalid, partial)
    _client(checks, self_check, invalid, partial)
    _warnings(checks, self_check, warnings)
    reasons = [*invalid, *partial, *warnings]
    return ("invalid" if invalid else "partial" if partial else "valid"), reasons


class _Reasons(list[str]):
    def add_if(self, condition: bool, reason: str) -> None:
        if condition:
            self.append(reason)


def _completeness(
    checks: Mapping[str, Any], status: str, incomplete: str | None, invalid: _Reasons, partial: _Reasons
) -> None:
    partial.add_if(status == "partial", incomplete or "the run was stopped before its end")
    partial.add_if(status == "running", "the run has not ended")
    invalid.add_if(not checks["ok"] and status == "complete", "no request succeeded")
    partial.add_if(bool(checks["cancelled"]), f"{units.count(checks['cancelled'], 'request')} cancelled")
    invalid.add_if(bool(checks["repeated"]), f"{units.count(checks['repeated'], 'turn')} recorded more than once")


def _requests(checks: Mapping[str, Any], self_check: Mapping[str, Any], invalid: _Reasons, partial: _Reasons) -> None:
    left_out = queries.left_out(checks)
    ended = checks["turns"] - checks["cancelled"] - left_out
    dropped = checks["dropped"] - left_out
    failed = checks["errors"] + dropped
    said = f" (mostly: {checks['common_error'][:120]})" if checks["common_error"] else ""
    errors = f"{checks['errors']:,} of {units.count(ended, 'request')} failed"
    (invalid if failed > MAX_SHARE * ended else partial).add_if(
        failed > 0, f"{errors}, {dropped:,} dropped after them{said}"
    )
    partial.add_if(
        left_out > 0,
        f"{units.count(checks['too_long'], 'prompt')} too long, {units.count(checks['after_too_long'], 'turn')} "
        "after them: left out, as --too-long drop says",
    )
    for n, what in (
        (max(checks["truncated"], self_check.get("truncated") or 0), "had a prompt shorter than the trace's"),
        (checks["unbalanced"], "do not add up: tiers to the prompt, or causes to the loss"),
        (checks["warm"], "reused more than this run had sent: the cache was not empty"),
    ):
        grave = n > MAX_SHARE * checks["ok"]
        (invalid if grave else partial).add_if(n > 0, f"{units.count(n, 'request')} {what}")
    moved = self_check.get("counters_moved") is True
    invalid.add_if(moved, "the server's counters moved before the run: someone else uses it")


def _counters(counters: Sequence[Mapping[str, Any]], invalid: _Reasons, partial: _Reasons) -> None:
    apart = disagreements(counters)
    if not apart:
        return
    prompt = max(row["requests"] or 0 for row in counters)
    most = max(abs(row["engine"] - row["requests"]) for row in apart)
    said = ", ".join(f"{row['kind']} {row['engine']:,} against {row['requests']:,}" for row in apart)
    grave = most > MAX_SHARE * prompt
    (invalid if grave else partial).append(f"the engine's counters differ from the requests' tokens: {said}")


def _client(checks: Mapping[str, Any], self_check: Mapping[str, Any], invalid: _Reasons, partial: _Reasons) -> None:
    for value, (some, much), text in (
        (checks["drift_p99"], DRIFT_S, "requests left late: p99 {:.2f} s after they were due"),
        (self_check.get("loop_lag_p99_s"), LAG_S, "the client was saturated: it woke {:.2f} s late (p99)"),
    ):
        if value is not None and value > some:
            (invalid if value > much else partial).append(text.format(value))


def _warnings(checks: Mapping[str, Any], self_check: Mapping[str, Any], warnings: _Reasons) -> None:
    quantum = self_check.get("timestamp_quantum_s")
    if quantum:
        warnings.append(f"times in the trace are multiples of {quantum:g} s: shorter pauses are unknown")
    ok = checks["ok"]
    warnings.add_if(
        bool(ok and checks["unattributed"]),
        f"the backend does not say what served {checks['unattributed']} of {units.count(ok, 'request')}",
    )
    missing = [name for name, least in (("p90", 10), ("p95", 20), ("p99", 100)) if checks["timed"] < least]
    warnings.add_if(bool(ok and missing), f"too few requests for {', '.join(missing)}: {checks['timed']:,}")
    warnings.extend(str(text) for text in self_check.get("warnings") or ())
