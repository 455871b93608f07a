"""A matrix of runs in one results file: backends by concurrency by settings; what is done already is not done again."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

import replay
from replay import runs
from replay.backends import preset as presets
from replay.backends.connect import DEFAULT_GPU, DEFAULT_MODEL, Where
from replay.backends.preset import Preset
from replay.engine import profiles
from replay.errors import ReplayError
from replay.load.driver import Progress
from replay.load.schedule import Settings
from replay.pool import Point, cores, simulate_all
from replay.results import queries
from replay.results.store import Store
from replay.trace import Trace

Watch = Callable[[float, int, str], None]
"""Gets the points done (the one going on as a fraction), the points in all, and the name of the latest."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a point."""

    point: Point
    run: str | None
    """Id of its run; null if it failed."""
    reused: bool = False
    """The run was in the results file already."""
    error: str | None = None


def points(
    backends: Sequence[str],
    changes: Sequence[str],
    concurrency: Sequence[int | None],
    where: Callable[[Preset], Where],
    **options: Any,
) -> list[Point]:
    """The points of a matrix, backend by backend.

    Args:
        backends: presets.
        changes: ``FIELD=V1,V2`` or, for one backend alone, ``BACKEND:FIELD=V1,V2``.
        concurrency: sessions live at once; null: sessions at their recorded times.
        where: a preset's place.
        options: further fields of `Settings`; `outputs` may be null for the place's default.

    Raises:
        ReplayError: unknown preset or field, a value that does not fit, a backend named twice or not at all.
    """
    axes = [_axis(text, backends) for text in changes]
    if len(set(backends)) < len(backends):
        raise ReplayError("--backend: a backend is named twice; vary its fields with --set FIELD=V1,V2")
    outputs = options.pop("outputs", None)
    found = []
    for backend in backends:
        mine = [values for only, values in axes if only in (None, backend)]
        for overrides in itertools.product(*mine):
            place = where(presets.load(backend, overrides))
            settings = Settings(outputs=outputs or place.default_outputs, **options)
            for number in concurrency or (None,):
                found.append(Point(place, replace(settings, concurrency=number), overrides))
    return found


def key(point: Point, trace_sha256: str) -> str:
    """Names what a point measures: equal for two points only if a run of one can stand for the other.

    Args:
        point: the point.
        trace_sha256: of the trace.
    """
    where = point.where
    model, gpu = where.model, where.gpu
    machine: list[Any] = [model, gpu]
    if where.simulated:
        machine = [profiles.model(model or DEFAULT_MODEL), profiles.gpu(gpu or DEFAULT_GPU)]
    parts = [
        replay.__version__, trace_sha256, where.preset, where.target, machine, where.isolation, where.dummy_weights,
        where.max_model_len, point.settings.as_dict(),
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]


def sweep(
    trace: Trace,
    todo: Sequence[Point],
    store: Store,
    *,
    jobs: int | None = None,
    ray: str | None = None,
    watch: Watch | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Done]:
    """Runs the points that the results file does not hold yet, and yields what became of each.

    A point's run is stored as soon as it has ended, so an interruption loses only those that were going on. Simulated
    points run in parallel, others one after the other.

    Args:
        trace: what to ask.
        todo: the points.
        store: gets the runs; runs of an earlier sweep in it are used again where they are complete.
        jobs: processes for simulated points; null: one a core.
        ray: address of a Ray cluster for the simulated points, or ``local``.
        watch: called as points go on and end.
        say: gets a line now and then while an engine starts.

    Raises:
        KeyboardInterrupt: a run was interrupted; it is stored as partial.
        ReplayError: the results file cannot be written, or workers cannot be had.
    """
    digest = runs.sha256(trace.source) if trace.source else _content_sha256(trace)
    keys = [key(point, digest) for point in todo]
    known = _complete(store)
    ended = 0

    def tell(ended: float, point: Point) -> None:
        if watch is not None:
            watch(ended, len(todo), point.name)

    def end(done: Done) -> Done:
        nonlocal ended
        ended += 1
        tell(ended, done.point)
        return done

    def follow(point: Point, progress: Progress) -> None:
        tell(ended + progress.done / max(1, progress.total), point)

    waiting = []
    for index, point in enumerate(todo):
        if keys[index] in known:
            yield end(Done(point, known[keys[index]], reused=True))
        else:
            waiting.append(index)
    simulated = [index for index in waiting if todo[index].where.simulated]
    tasks = [(todo[index], _notes(todo[index], keys[index])) for index in simulated]
    for number, outcome in simulate_all(trace, tasks, jobs=jobs or cores(), ray=ray):
        point = todo[simulated[number]]
        if isinstance(outcome, str):
            yield end(Done(point, None, error=outcome))
        else:
            yield end(_kept(point, outcome.store(store, trace_sha256=digest if trace.source else None), store))
    for index in waiting:
        if not todo[index].where.simulated:
            yield end(_measure(trace, todo[index], store, _notes(todo[index], keys[index]), follow, say))


def _measure(
    trace: Trace,
    point: Point,
    store: Store,
    notes: dict[str, Any],
    follow: Callable[[Point, Progress], None],
    say: Callable[[str], None],
) -> Done:
    """Runs a point that is not simulated; its rows are stored as they come."""
    try:
        run = runs.execute(
            trace, point.where, point.settings, store,
            name=point.name, notes=notes, watch=lambda progress: follow(point, progress), say=say,
        )  # fmt: skip
    except ReplayError as error:
        return Done(point, None, error=str(error))
    return _kept(point, run, store)


def _kept(point: Point, run: str, store: Store) -> Done:
    """A stored run; if it was interrupted, so is the sweep."""
    with store.reader() as con:
        stored = queries.run(con, run)
    if incomplete := (stored["self_check"] or {}).get("incomplete"):
        return Done(point, None, error=f"{incomplete}; its run {run} is partial")
    if stored["status"] == "partial":
        raise KeyboardInterrupt
    return Done(point, run)


def _notes(point: Point, name: str) -> dict[str, Any]:
    """What a run's settings say of its sweep."""
    return {"sweep": {"key": name, "set": list(point.overrides)}}


def _complete(store: Store) -> dict[str, str]:
    """Complete runs of earlier sweeps, latest ones, by key."""
    with store.reader() as con:
        found = con.execute(
            "SELECT settings ->> '$.sweep.key', id FROM runs "
            "WHERE status = 'complete' AND settings ->> '$.sweep.key' IS NOT NULL ORDER BY started_at"
        ).fetchall()
    return dict(found)


def _content_sha256(trace: Trace) -> str:
    return hashlib.sha256(msgspec.json.encode([trace.header, trace.turns])).hexdigest()


def _axis(text: str, backends: Sequence[str]) -> tuple[str | None, list[str]]:
    """``[BACKEND:]FIELD=V1,V2`` as the backend (null: all) and ``FIELD=V1``, ``FIELD=V2``."""
    name, equals, values = text.partition("=")
    only, colon, field = name.rpartition(":")
    if not equals or not field or not all(value.strip() for value in _split(values)):
        raise ReplayError(f"--set {text}: write it as FIELD=V1,V2, or as BACKEND:FIELD=V1,V2 for one backend alone")
    if colon and only not in backends:
        raise ReplayError(f"--set {text}: {only!r} is none of this sweep's backends: {', '.join(backends)}")
    return (only if colon else None), [f"{field}={value.strip()}" for value in _split(values)]


def _split(values: str) -> list[str]:
    """At the commas outside brackets, so that a value may be a YAML list."""
    parts, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
