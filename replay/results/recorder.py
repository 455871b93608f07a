"""A run in memory: what a process without the results file measures, for the one that has it to store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

from replay.results.store import Sample, Store, new_run_id


class Recorder:
    """Takes one run as a `Store` does; `store` writes it to a results file. Can be pickled."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}
        """The run's description."""
        self.ending: dict[str, Any] = {}
        """The fields given when it ended; empty before."""
        self._rows: list[Mapping[str, Any]] = []
        self._scrapes: list[tuple[float, list[Sample]]] = []
        self._events: list[Mapping[str, Any]] = []

    def begin_run(self, run: Mapping[str, Any]) -> str:
        """Notes a run's description; returns its id."""
        started = datetime.now(timezone.utc).replace(tzinfo=None)
        self.run = {"id": new_run_id(), "started_at": started, **run}
        return str(self.run["id"])

    def add(self, row: Mapping[str, Any], *, run_id: str | None = None) -> None:
        """Notes a row of `requests`."""
        self._rows.append(row)

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The rows noted so far."""
        return self._rows

    def add_scrapes(self, run_id: str, at: float, samples: Iterable[Sample]) -> None:
        """Notes one scrape of a metrics endpoint."""
        self._scrapes.append((at, list(samples)))

    def add_cache_events(self, run_id: str, events: Iterable[Mapping[str, Any]]) -> None:
        """Notes rows of `cache_events`."""
        self._events += events

    def finish_run(self, run_id: str, **fields: Any) -> None:
        """Notes how the run ended."""
        self.ending = {"status": "complete", **fields}

    def store(self, store: Store, **changed: Any) -> str:
        """Writes the run to a results file, finished and judged; returns its id.

        Args:
            store: the results file.
            changed: columns of `runs` to replace.

        Raises:
            ReplayError: the results file cannot be written.
        """
        run_id = store.begin_run({**self.run, **changed})
        for row in self._rows:
            store.add(row, run_id=run_id)
        for at, samples in self._scrapes:
            store.add_scrapes(run_id, at, samples)
        store.add_cache_events(run_id, self._events)
        store.finish_run(run_id, **self.ending)
        return run_id
