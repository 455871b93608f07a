"""A small run with every tier and cause of loss, made up but consistent; golden files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replay.results import Store

GOLDEN = Path(__file__).parent / "golden"
KV_BYTES = 147_456
RUN: dict[str, Any] = {
    "id": "20260131-094210-k3v9tq",
    "backend": "lmcache-disk",
    "target": "sim",
    "simulated": True,
    "model": "qwen3-8b",
    "gpu": "h100",
    "trace": "made_up",
    "synthetic": True,
    "sessions": 8,
    "families": 8,
    "turns": 112,
    "seed": 1,
    "speed": 1.0,
    "scale_tokens": 1.0,
    "skip_idle": False,
    "outputs": "recorded",
    "duplication": 1.0,
    "started_at": "2026-01-31T09:42:10Z",
    "settings": {
        "kv_bytes_per_token": KV_BYTES,
        "capacity_tokens": {"gpu": 388_560, "cpu": 145_635, "disk": 3_640_888},
    },
    "self_check": {"cache_before": "empty"},
}
PAUSES = (0.4, 5.0, 0.8, 30.0, 2.0, 120.0, 900.0, 5000.0)


def some_rows(sessions: int = 8, turns: int = 14, **fixed: Any) -> list[dict[str, Any]]:
    """Rows of `requests` in the order of their ends; `fixed` values replace those of every row."""
    rows = []
    for number in range(sessions):
        now, context = number * 2.0, 20_000 + 512 * number
        for turn in range(turns):
            pause = PAUSES[(turn + number) % len(PAUSES)] if turn else 0.0
            row = one_row(f"session-{number}", turn, due=now + pause, pause=pause, reusable=context if turn else 0)
            rows.append({**row, **fixed})
            now, context = row["closed"], row["prompt_tokens"] + row["output_tokens"]
    return sorted(rows, key=lambda row: (row["closed"], row["session"]))


def one_row(
    session: str = "s", turn: int = 0, *, due: float = 0.0, pause: float = 0.0, reusable: int = 0
) -> dict[str, Any]:
    """One answered request whose tokens and losses add up: the longer the pause, the slower the tier."""
    gone = reusable if pause > 1000 else 0
    rounding = min(reusable - gone, reusable % 256)
    served = reusable - gone - rounding
    gpu = served if pause <= 60 else served // 2 if pause <= 300 else 0
    cpu = served - gpu if pause <= 300 else 0
    disk = served - gpu - cpu
    prompt = reusable + 1_000 + 10 * turn
    computed = prompt - served
    load = cpu * KV_BYTES / 40e9 + disk * KV_BYTES / 4e9
    first = due + 0.02 + computed / 15_000 + load
    output = 20 + turn
    last = first + 0.012 * (output - 1)
    return {
        "session": session, "turn": turn, "position": turn, "cause": "tool" if turn else "start", "pause": pause,
        "due": due, "sent": due, "first_byte": first, "first_token": first, "last_token": last, "closed": last,
        "status": "ok", "planned_tokens": prompt, "prompt_tokens": prompt, "output_tokens": output,
        "ideal_tokens": reusable, "gpu_tokens": gpu, "cpu_tokens": cpu, "disk_tokens": disk,
        "computed_tokens": computed, "lost_evicted": gone, "lost_granularity": rounding, "lost_never_stored": 0,
        "lost_cold": 0, "lost_diverged": 0, "lost_unknown": 0,
        "served_from": "disk" if disk else "cpu" if cpu else "gpu" if gpu else "none", "tier_source": "simulated",
        "recompute_s": (gone + rounding) / 15_000, "load_s": load, "preemptions": 0, "attempts": 1, "worker": 0,
    }  # fmt: skip


Write = Callable[..., Path]
Rows = Callable[..., list[dict[str, Any]]]
Row = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def make_rows() -> Rows:
    """See `some_rows`."""
    return some_rows


@pytest.fixture(scope="session")
def make_row() -> Row:
    """See `one_row`."""
    return one_row


@pytest.fixture(scope="session")
def kv_bytes() -> int:
    """Bytes of a token in the cache, as in the settings of the run."""
    return KV_BYTES


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a finished run of the given rows and returns the path of its results file; runs append."""
    return partial(write_run, tmp_path / "results.duckdb")


@pytest.fixture(scope="session")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results file with the run `RUN` of `some_rows`, to read only."""
    return write_run(tmp_path_factory.mktemp("standard") / "results.duckdb")


def write_run(
    path: Path,
    rows: list[dict[str, Any]] | None = None,
    *,
    status: str = "complete",
    scrapes: Sequence[tuple[float, str, str | None, float]] = (),
    **run: Any,
) -> Path:
    """Appends a finished run to a results file; `run` replaces values of `RUN`."""
    rows = some_rows() if rows is None else rows
    with Store.create_or_open(path) as store:
        run_id = store.begin_run({**RUN, **run})
        for row in rows:
            store.add(row, run_id=run_id)
        for at, *sample in scrapes:
            store.add_scrapes(run_id, at, [tuple(sample)])
        ended = max((row["closed"] for row in rows if row.get("closed")), default=0.0)
        store.finish_run(run_id, status=status, duration_s=ended)
    return path


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with a file of ``golden/``; ``UPDATE_GOLDEN=1`` writes the file instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8")

    return check
