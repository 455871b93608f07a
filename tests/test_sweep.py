"""Sweeps: the points of a matrix, the same rows however they are run, and going on after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replay import runs
from replay.backends.connect import DEFAULT_GPU, DEFAULT_MODEL, Where
from replay.backends.preset import Preset
from replay.backends.sim import SimBackend
from replay.cli import main
from replay.errors import ReplayError
from replay.pool import Point
from replay.results import Store
from replay.results.matrix import matrix, slo, text
from replay.sweep import Done, key, points, sweep
from replay.trace import Header, Trace, Turn, read, write
from replay.trace.synth import generate

BACKENDS = ("vllm", "lmcache-cpu")


def simulated(preset: Preset) -> Where:
    return Where(preset=preset)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A few short sessions, from a file."""
    path = tmp_path_factory.mktemp("trace") / "chat.jsonl"
    write(path, *generate("doc-qa", 5, 3))
    return read(path)


def run_all(trace: Trace, todo: list[Point], path: Path, **options: Any) -> list[Done]:
    with Store.create_or_open(path) as store:
        done = list(sweep(trace, todo, store, **options))
    return sorted(done, key=lambda each: todo.index(each.point))


def rows(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Rows of `requests` by name of run, without the run's id."""
    with Store.create_or_open(path) as store, store.reader() as con:
        names = con.execute("SELECT id, name FROM runs WHERE status = 'complete'").fetchall()
        return {
            name: con.execute(
                "SELECT * EXCLUDE (run_id) FROM requests WHERE run_id = ? ORDER BY session, turn", [run]
            ).fetchall()
            for run, name in names
        }


def test_points_are_every_combination() -> None:
    found = points(BACKENDS, ["block_tokens=16,32"], [1, 4, None], simulated)
    assert len(found) == len({point.name for point in found}) == 2 * 2 * 3
    assert found[0].name == "vllm/c1/block_tokens=16"
    assert found[2].name == "vllm/block_tokens=16" and found[2].settings.concurrency is None
    assert {point.where.preset.block_tokens for point in found} == {16, 32}


def test_a_setting_may_be_one_backends_alone() -> None:
    found = points(BACKENDS, ["lmcache-cpu:tiers.cpu.gib=10,20", "max_seqs=8"], [None], simulated)
    assert [point.name for point in found] == [
        "vllm/max_seqs=8",
        "lmcache-cpu/tiers.cpu.gib=10/max_seqs=8",
        "lmcache-cpu/tiers.cpu.gib=20/max_seqs=8",
    ]


def test_a_value_may_be_a_list() -> None:
    (first, second) = points(["vllm"], ["launch.args=[--a,--b],[]"], [None], simulated)
    assert first.where.preset.launch.args == ["--a", "--b"] and second.where.preset.launch.args == []


@pytest.mark.parametrize(
    ("backends", "changes", "said"),
    [
        (("vllm", "vllm"), [], "named twice"),
        (("vllm", "nosuch"), [], "unknown backend 'nosuch'"),
        (("vllm",), ["tiers.gpu.gib"], "FIELD=V1,V2"),
        (("vllm",), ["tiers.gpu.gib=1,"], "FIELD=V1,V2"),
        (("vllm",), ["sglang:tiers.gpu.gib=1"], "none of this sweep's backends"),
        (("vllm",), ["tiers.gpu.gib=-1"], "tiers.gpu.gib=-1"),
        (("vllm",), ["tiers.cpu.gib=10"], "need a connector"),
    ],
)
def test_a_matrix_that_cannot_be_is_refused_before_anything_runs(
    backends: tuple[str, ...], changes: list[str], said: str
) -> None:
    with pytest.raises(ReplayError) as caught:
        points(backends, changes, [None], simulated)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_key_changes_with_whatever_changes_the_result() -> None:
    base = points(["vllm"], [], [4], simulated)[0]
    others = [
        points(["vllm"], [], [5], simulated)[0],
        points(["vllm"], ["block_tokens=32"], [4], simulated)[0],
        points(["lmcache-cpu"], [], [4], simulated)[0],
        points(["vllm"], [], [4], simulated, seed=1)[0],
        points(["vllm"], [], [4], simulated, speed=2.0)[0],
        points(["vllm"], [], [4], lambda preset: Where(preset=preset, gpu="l40s"))[0],
        points(["vllm"], [], [4], lambda preset: Where(preset=preset, model="qwen3-8b"))[0],
        points(["vllm"], [], [4], lambda preset: Where(preset=preset, target="http://127.0.0.1:1"))[0],
    ]
    keys = [key(point, "t") for point in (base, *others)] + [key(base, "u")]
    assert len(set(keys)) == len(keys)
    assert key(points(["vllm"], [], [4], simulated)[0], "t") == keys[0]
    named = points(["vllm"], [], [4], lambda preset: Where(preset=preset, gpu="h200"))[0]
    assert key(named, "t") == keys[0]  # the default, by its name


def test_points_in_parallel_give_the_rows_that_they_give_alone(trace: Trace, tmp_path: Path) -> None:
    todo = points(BACKENDS, [], [1, 3], simulated)
    alone, parallel = tmp_path / "alone.duckdb", tmp_path / "parallel.duckdb"
    assert all(done.run for done in run_all(trace, todo, alone, jobs=1))
    run_all(trace, todo, parallel, jobs=2)
    assert rows(alone) == rows(parallel)
    assert set(rows(alone)) == {point.name for point in todo}
    with Store.create_or_open(tmp_path / "run.duckdb") as store:
        runs.execute(trace, todo[1].where, todo[1].settings, store, name=todo[1].name)
    assert rows(tmp_path / "run.duckdb")[todo[1].name] == rows(alone)[todo[1].name]


def test_ray_gives_the_same_rows(trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    todo = points(BACKENDS, [], [2], simulated)
    run_all(trace, todo, tmp_path / "alone.duckdb", jobs=1)
    run_all(trace, todo, tmp_path / "ray.duckdb", ray="local")
    assert rows(tmp_path / "ray.duckdb") == rows(tmp_path / "alone.duckdb")


def test_a_cluster_that_is_not_there_is_said_at_once(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"--ray .*(nothing answers there|needs Ray)"):
        run_all(trace, points(["vllm"], [], [2], simulated), tmp_path / "r.duckdb", ray="127.0.0.1:1")


def test_stored_runs_are_whole(trace: Trace, tmp_path: Path) -> None:
    todo = points(["vllm"], [], [2], simulated)
    path = tmp_path / "r.duckdb"
    (done,) = run_all(trace, todo, path, jobs=1)
    with Store.create_or_open(path) as store, store.reader() as con:
        found = con.execute(
            "SELECT id, status, verdict, simulated, trace_sha256, concurrency, turns FROM runs"
        ).fetchall()
    assert found == [(done.run, "complete", "valid", True, runs.sha256(trace.source), 2, len(trace))]


def test_points_that_are_there_are_not_run_again(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    first = run_all(trace, points(BACKENDS, [], [2], simulated), path, jobs=1)
    again = run_all(trace, points(BACKENDS, [], [2, 3], simulated), path, jobs=1)
    assert not any(done.reused for done in first)
    assert [done.reused for done in again] == [True, False, True, False]
    assert {done.run for done in first} == {done.run for done in again if done.reused}


def test_a_partial_point_is_run_again(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    todo = points(BACKENDS, [], [2], simulated)
    first = run_all(trace, todo, path, jobs=1)
    with Store.create_or_open(path) as store, store.reader() as con:
        con.execute("UPDATE runs SET status = 'partial' WHERE id = ?", [first[1].run])
    again = run_all(trace, todo, path, jobs=1)
    assert [done.reused for done in again] == [True, False]
    assert again[1].run != first[1].run


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A trace that takes seconds to simulate."""
    path = tmp_path / "long.jsonl"
    write(path, *generate("claude-code", 12, 1))
    return path


def started(path: Path, long: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "replay", "sweep", str(long), "--target", "sim", "--db", str(path), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_runs(path: Path, process: subprocess.Popen[str]) -> None:
    """Waits until a run is stored: DuckDB's log beside the file holds more than one run of 400 rows."""
    log = path.with_name(path.name + ".wal")
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        if log.exists() and log.stat().st_size > 200_000:
            return
        time.sleep(0.02)
    raise AssertionError("no run was stored")


def children(process: int) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == process:
            yield int(status.parent.name)


MATRIX = ("--backend", "vllm", "--backend", "lmcache-cpu", "--concurrency", "2,3,4,5")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see the workers")
def test_a_killed_sweep_goes_on_where_it_was_and_leaves_no_worker(long: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    process = started(path, long, *MATRIX, "--jobs", "2")
    wait_for_runs(path, process)
    workers = list(children(process.pid))
    process.kill()
    process.communicate()
    kept = rows(path)
    assert 0 < len(kept) < 8 and workers
    again = started(path, long, *MATRIX, "--jobs", "2", "--json")
    shown, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert f"{len(kept)} of 8 points in" in said
    assert len(json.loads(shown)["points"]) == 8
    after = rows(path)
    assert len(after) == 8 and all(after[name] == kept[name] for name in kept)
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_ctrl_c_stops_a_sweep_at_once_and_says_how_to_go_on(long: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    process = started(path, long, *MATRIX, "--jobs", "2")
    wait_for_runs(path, process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "run it again to go on" in said and "Traceback" not in said
    assert 0 < len(rows(path)) < 8


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_a_worker_starts_waits_until_it_has_started(
    when: str, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process half started could be neither used nor killed."""
    start, begun = SpawnProcess.start, []

    def interrupted(self: SpawnProcess) -> None:
        begun.append(self)
        if when == "before":
            os.kill(os.getpid(), signal.SIGINT)
        start(self)
        if when == "after":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_all(trace, points(BACKENDS, [], [1, 2], simulated), tmp_path / "r.duckdb", jobs=2)
    assert [worker.is_alive() for worker in begun] == [False]
    assert signal.getsignal(signal.SIGINT) is handler and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see the workers")
def test_a_worker_that_dies_is_reported_and_what_is_done_is_kept(long: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    process = started(path, long, *MATRIX, "--jobs", "2")
    wait_for_runs(path, process)
    for worker in children(process.pid):
        if b"spawn_main" in Path(f"/proc/{worker}/cmdline").read_bytes():
            os.kill(worker, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "a worker process died" in said and "Traceback" not in said
    assert 0 < len(rows(path)) < 8


class _RealTime:
    """Stands in for `connect`: the engine model on the real clock, as if it were a server."""

    def __init__(self) -> None:
        self.live = self.most = 0

    @contextlib.asynccontextmanager
    async def __call__(self, where: Where, clock: Any, **options: Any) -> AsyncIterator[SimBackend]:
        self.live += 1
        self.most = max(self.most, self.live)
        async with SimBackend(where.preset, DEFAULT_MODEL, DEFAULT_GPU, clock) as backend:
            yield backend
        self.live -= 1


def server(preset: Preset) -> Where:
    return Where(preset=preset, target="http://127.0.0.1:1")


@pytest.fixture
def tiny(tmp_path: Path) -> Trace:
    turns = [Turn(session=f"s{n}", turn=0, at=0.0, append=[(f"x{n}", 512)], output=3) for n in range(4)]
    return Trace(Header(format="replay-trace", version=1, name="tiny"), turns)


def test_points_that_are_not_simulated_run_one_after_the_other(
    tiny: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = _RealTime()
    monkeypatch.setattr(runs, "connect", connect)
    path = tmp_path / "r.duckdb"
    todo = points(BACKENDS, [], [1, 2], server)
    seen: list[tuple[float, int, str]] = []
    done = run_all(tiny, todo, path, jobs=4, watch=lambda *progress: seen.append(progress))
    assert connect.most == 1 and len({each.run for each in done}) == 4
    assert set(rows(path)) == {point.name for point in todo}
    assert [progress for progress, _, _ in seen] == sorted(progress for progress, _, _ in seen)
    assert seen[0] == (0.25, 4, "vllm/c1") and seen[-1] == (4, 4, "lmcache-cpu/c2")
    assert all(each.reused for each in run_all(tiny, todo, path))


def test_an_interrupted_point_is_kept_as_partial_and_ends_the_sweep(
    tiny: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "connect", _RealTime())
    path = tmp_path / "r.duckdb"
    todo = points(BACKENDS, [], [1], server)

    def interrupt(done: float, total: int, name: str) -> None:
        if done == 0.5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_all(tiny, todo, path, watch=interrupt)
    with Store.create_or_open(path) as store, store.reader() as con:
        found = con.execute(
            "SELECT name, status, (SELECT count(*) FROM requests WHERE status = 'ok') FROM runs"
        ).fetchall()
    ((name, status, answered),) = found
    assert (name, status) == ("vllm/c1", "partial") and answered >= 2
    assert [each.reused for each in run_all(tiny, todo, path)] == [False, False]


def test_a_point_that_cannot_run_does_not_stop_the_others(trace: Trace, tmp_path: Path) -> None:
    command = [
        "sweep", trace.source, "--target", "sim", "--backend", "vllm", "--jobs", "1",
        "--model", "llama-3.1-70b", "--gpu", "h100", "--set", "tensor_parallel=1,4",
        "--db", str(tmp_path / "r.duckdb"), "--json",
    ]  # fmt: skip
    result = CliRunner().invoke(main, command)
    found = json.loads(result.stdout)
    assert result.exit_code == 2
    assert [point["name"] for point in found["points"]] == ["vllm/tensor_parallel=4"]
    assert [each["name"] for each in found["failed"]] == ["vllm/tensor_parallel=1"]


def made_up(path: Path, name: str, *, ttft: float, requests_per_s: float) -> str:
    """Stores a run of 20 requests with a given pace."""
    with Store.create_or_open(path) as store:
        run = store.begin_run({"name": name, "backend": "vllm", "target": "sim", "simulated": True})
        for turn in range(20):
            times = {"due": 0.0, "sent": 0.0, "first_token": ttft, "last_token": ttft + 1, "closed": ttft + 1}
            tokens = {"prompt_tokens": 100, "output_tokens": 9, "ideal_tokens": 0, "computed_tokens": 100}
            store.add({"session": "s", "turn": turn, "status": "ok", **times, **tokens}, run_id=run)
        store.finish_run(run, duration_s=20 / requests_per_s)
    return run


def test_the_operating_point_is_the_fastest_that_keeps_the_slo(tmp_path: Path) -> None:
    path = tmp_path / "r.duckdb"
    slow = made_up(path, "c1", ttft=0.2, requests_per_s=1.0)
    good = made_up(path, "c4", ttft=0.8, requests_per_s=3.0)
    late = made_up(path, "c4, later tokens", ttft=0.9, requests_per_s=3.0)
    full = made_up(path, "c16", ttft=4.0, requests_per_s=7.0)
    ids = [full, slow, late, good]
    assert matrix(path, ids).best == full
    limited = matrix(path, ids, [slo("ttft_p95=2s")])
    assert [(point["run"], point["meets_slo"]) for point in limited.points] == [
        (full, False), (slow, True), (late, True), (good, True),
    ]  # fmt: skip
    assert limited.best == good
    assert matrix(path, ids, [slo("ttft_p95=2s"), slo("throughput>=5")]).best is None
    shown = text(limited)
    assert max(map(len, shown.splitlines())) <= 80
    for said in ("SIMULATED", "keeps *", "misses", "Operating point: c4 (3.00 requests/s)"):
        assert said in shown


def test_an_invalid_run_or_an_unknown_figure_keeps_no_slo(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "r.duckdb"
    (done,) = run_all(trace, points(["vllm"], [], [1], simulated), path, jobs=1)
    ids = [str(done.run)]
    assert matrix(path, ids, [slo("ttft_p50=1000s")]).best == done.run
    assert matrix(path, ids, [slo("ttft_p99=1000s")]).best is None, "too few requests for a p99"
    with Store.create_or_open(path) as store, store.reader() as con:
        con.execute("UPDATE runs SET verdict = 'invalid'")
    assert matrix(path, ids, [slo("ttft_p50=1000s")]).best is None
    assert matrix(path, ids).best is None


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("ttft_p95", "METRIC=VALUE"),
        ("ttft_p95=-2s", "METRIC=VALUE"),
        ("tfft_p95=2s", "nearest: ttft_p95"),
        ("cpu_tokens=2M", "unknown SLO metric"),
        ("ttft_p95=2", "--slo 'ttft_p95=2': '2' is no limit on ttft_p95; write e.g. ttft_p95=2s or 300ms"),
        ("hit_share>=0.9", "write e.g. hit_share=50%"),
    ],
)
def test_an_slo_that_cannot_be_read_is_explained(written: str, said: str) -> None:
    with pytest.raises(ReplayError) as caught:
        slo(written)
    assert said in str(caught.value) and "--gate" not in str(caught.value)


def test_an_slo_points_to_the_good_side() -> None:
    assert slo("ttft_p95=2s").op == "<="
    assert slo("throughput=10").op == ">="
    assert slo("hit_share=90%").holds(0.95) and not slo("hit_share=90%").holds(0.85)


def test_workers_share_a_sweeps_runs_and_are_refused_where_nothing_is_sent(tiny: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, tiny.header, tiny.turns)
    said = CliRunner().invoke(main, ["sweep", str(path), "--backend", "vllm", "--target", "sim", "--workers", "2"])
    assert said.exit_code == 2 and said.output.count("\n") == 1
    assert "--workers: the engine model has one virtual clock" in said.output


def test_a_sweep_says_what_it_simulates_only_if_it_can(tiny: Trace, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, tiny.header, tiny.turns)
    common = ["sweep", str(path), "--backend", "vllm", "--target", "sim"]
    for wrong in (["--gpu", "h20"], ["--model", "qwen3-8"], ["--db", str(tmp_path / "no" / "r.duckdb")]):
        said = CliRunner().invoke(main, [*common, *wrong])
        assert said.exit_code == 2 and said.output.count("\n") == 1, said.output
