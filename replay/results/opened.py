"""The results file from Python: `open_results`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import polars as pl

from replay.errors import ReplayError
from replay.results.database import describe
from replay.results.snapshot import open_live


class Results:
    """A results file, read-only. Use as a context manager, or `close` it: others cannot write meanwhile.

    Views and tables with all columns: ``docs/results.md``.
    """

    def __init__(self, con: duckdb.DuckDBPyConnection):
        self.con = con
        """The DuckDB connection."""

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; relations made from it end with it, frames stay."""
        self.con.close()

    def sql(self, query: str, **params: Any) -> duckdb.DuckDBPyRelation:
        """A query as a DuckDB relation, evaluated when it is read; ``$name`` takes a parameter.

        Raises:
            ReplayError: DuckDB refuses the query.
        """
        try:
            return self.con.sql(query, params=params or None)
        except duckdb.Error as error:
            raise ReplayError(f"SQL: {describe(error)}") from error

    def frame(self, query: str, **params: Any) -> pl.DataFrame:
        """The result of a query as a polars frame.

        Raises:
            ReplayError: DuckDB refuses the query.
        """
        try:
            return pl.DataFrame(self.sql(query, **params))
        except duckdb.Error as error:
            raise ReplayError(f"SQL: {describe(error)}") from error

    @property
    def runs(self) -> duckdb.DuckDBPyRelation:
        """The view `v_runs`: a row a run, newest first."""
        return self.con.view("v_runs")

    @property
    def requests(self) -> duckdb.DuckDBPyRelation:
        """The view `v_requests`: a row a turn, with `ttft`, `e2e`, `itl`, `served_tokens`, `loss_total`."""
        return self.con.view("v_requests")

    @property
    def tiers(self) -> duckdb.DuckDBPyRelation:
        """The view `v_tiers`: a row for each turn and each tier that the backend names, with its prompt tokens."""
        return self.con.view("v_tiers")

    @property
    def losses(self) -> duckdb.DuckDBPyRelation:
        """The view `v_losses`: a row for each turn and each cause of loss, with tokens and prefill seconds."""
        return self.con.view("v_losses")

    @property
    def ttft(self) -> duckdb.DuckDBPyRelation:
        """The view `v_ttft`: a row for each run and `served_from`, with `n`, `mean` and percentiles in seconds."""
        return self.con.view("v_ttft")

    @property
    def sessions(self) -> duckdb.DuckDBPyRelation:
        """The view `v_sessions`: a row a session of a run, with its sums."""
        return self.con.view("v_sessions")

    @property
    def scrapes(self) -> duckdb.DuckDBPyRelation:
        """The table `scrapes`."""
        return self.con.table("scrapes")

    @property
    def cache_events(self) -> duckdb.DuckDBPyRelation:
        """The table `cache_events`."""
        return self.con.table("cache_events")


def open_results(path: str | Path) -> Results:
    """Opens a results file to read it from Python. While another process writes it, this is what it has stored so far.

    ::

        with open_results("results.duckdb") as results:
            results.requests.filter("served_from = 'disk'").aggregate("median(ttft)").show()
            frame = results.frame("SELECT session, sum(lost_evicted) FROM requests WHERE run_id = $run "
                                  "GROUP BY session", run="20260131-094210-k3v9tq")

    Raises:
        ReplayError: no such file, or it is no results file.
    """
    return Results(open_live(path)[0])
