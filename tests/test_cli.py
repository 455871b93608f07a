"""The command line as a user meets it: the main job, bad input, interruption, determinism."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner, Result

from replay.cli import main
from replay.runs import _interrupts

ROOT = Path(__file__).resolve().parent.parent
HEADER = '{"format":"replay-trace","version":1,"name":"t"}'
FIRST = '{"session":"a","turn":0,"at":0,"append":[["x",4096]],"output":4}'


def replay(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "r.duckdb"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three sessions that share tools, each of two turns."""
    lines = [HEADER]
    for n, name in enumerate("abc"):
        lines.append(f'{{"session":"{name}","turn":0,"at":{n},"append":[["tools",2048],["{name}0",1000]],"output":20}}')
        lines.append(f'{{"session":"{name}","turn":1,"pause":2,"append":[["{name}1",300]],"output":20}}')
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def columns(path: Path, sql: str) -> list[tuple]:
    with duckdb.connect(str(path), read_only=True) as con:
        return con.execute(sql).fetchall()


def test_the_main_job_prints_tiers_loss_and_first_token_times(db: Path):
    result = replay("run", ROOT / "traces/evict_and_return.jsonl", "--backend", "lmcache-disk", "--model", "qwen3-8b",
                    "--gpu", "h100", "--set", "tiers.gpu.tokens=388560", "--target", "sim", "--db", db)  # fmt: skip
    assert result.exit_code == 0
    for expected in ("SIMULATED", "Where 640 k prompt tokens came from", "disk", "Time to first token", "Lost reuse"):
        assert expected in result.stdout, expected


@pytest.mark.parametrize(
    ("backend", "tier", "lost"),
    [("vllm", None, 16384), ("lmcache-cpu", "cpu", 0), ("lmcache-disk", "disk", 0), ("vllm-offload-cpu", "cpu", 0)],
)
def test_an_evicted_document_returns_from_the_tier_that_kept_it(db: Path, backend: str, tier: str | None, lost: int):
    machine = ("--model", "qwen3-8b", "--gpu", "h100", "--set", "tiers.gpu.tokens=388560", "--target", "sim")
    result = replay("run", ROOT / "traces/evict_and_return.jsonl", "--backend", backend, *machine, "--db", db, "--json")
    assert result.exit_code == 0
    (last,) = columns(db, "SELECT * EXCLUDE (run_id) FROM requests ORDER BY sent DESC LIMIT 1")
    names = [row[0] for row in columns(db, "SELECT column_name FROM (DESCRIBE requests)")][1:]
    row = dict(zip(names, last, strict=True))
    assert row["served_from"] == (tier or "none")
    assert row["lost_evicted"] == lost
    if tier:
        assert row[f"{tier}_tokens"] == 16384
    ttft = (row["first_token"] - row["sent"]) * 1000
    published = {"vllm": 530, "lmcache-cpu": 71, "lmcache-disk": 450, "vllm-offload-cpu": 125}
    assert ttft == pytest.approx(published[backend], rel=0.1), "H100 tables published for these backends; offload: H200"


def test_json_has_the_stable_keys_and_tokens_that_sum(small: Path, db: Path):
    result = replay("run", small, "--backend", "lmcache-cpu", "--target", "sim", "--db", db, "--json")
    report = json.loads(result.stdout)
    assert {"run", "tokens", "loss", "ttft_s", "e2e_s", "itl_s", "throughput", "tiers", "self_check"} <= set(report)
    tokens = report["tokens"]
    assert tokens["prompt"] == sum(
        tokens[tier] or 0 for tier in ("gpu", "cpu", "disk", "remote", "external", "computed")
    )
    assert report["run"]["simulated"] is True


def test_evictions_over_time_are_stored_with_the_run(db: Path):
    machine = ("--model", "qwen3-8b", "--gpu", "h100", "--set", "tiers.gpu.tokens=388560", "--target", "sim")
    result = replay("run", ROOT / "traces/evict_and_return.jsonl", "--backend", "lmcache-disk", *machine, "--db", db)
    assert result.exit_code == 0
    sums = columns(db, "SELECT tier, kind, sum(tokens) FROM cache_events GROUP BY ALL ORDER BY ALL")
    totals = {(tier, kind): tokens for tier, kind, tokens in sums}
    assert totals["gpu", "evict"] > 16_384, "the document that came back had been evicted"
    assert totals["disk", "store"] > totals["gpu", "evict"]
    assert ("disk", "evict") not in totals
    assert len(columns(db, 'SELECT DISTINCT "at" FROM cache_events')) > 3


def test_the_same_seed_trace_and_backend_give_the_same_rows(small: Path, tmp_path: Path):
    dumps = []
    for name in ("one", "two"):
        db = tmp_path / f"{name}.duckdb"
        assert replay("run", small, "--backend", "lmcache-disk", "--target", "sim", "--db", db).exit_code == 0
        out = replay("sql", "SELECT * EXCLUDE (run_id) FROM requests", "--db", db, "--format", "csv")
        dumps.append(out.stdout)
    assert dumps[0] == dumps[1]
    assert dumps[0].count("\n") == 7


def test_a_bundled_trace_is_found_outside_the_checkout(tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = replay("inspect", "traces/doc_qa.jsonl", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["turns"] == 6
    assert "comes with replay" in result.stderr


BAD_TRACES = {
    "truncated JSON": ([HEADER, FIRST, '{"session":"a","tu'], ":3:"),
    "another format": (['{"timestamp":1,"hash_ids":[1]}'], "replay import"),
    "mixed-up lines": ([HEADER, FIRST, HEADER], ":3:"),
    "no such parent": ([HEADER, FIRST, '{"session":"b","turn":0,"parent":"z/9","append":[["y",1]]}'], ":3:"),
    "cycle in after": (
        [HEADER, *(f'{{"session":"{a}","turn":0,"after":["{b}/0"],"append":[["x",9]]}}' for a, b in ("ab", "ba"))],
        "cycle",
    ),
    "keep beyond the parent": ([HEADER, FIRST, '{"session":"a","turn":1,"keep":5000,"append":[["y",1]]}'], "keep"),
    "negative time": ([HEADER, '{"session":"a","turn":0,"at":-1,"append":[["x",9]]}'], ":2:"),
    "not a number": ([HEADER, '{"session":"a","turn":0,"at":NaN,"append":[["x",9]]}'], ":2:"),
    "zero-token prompt": ([HEADER, '{"session":"a","turn":0,"at":0,"append":[]}'], "empty"),
    "no turns": ([HEADER], "no turns"),
    "empty file": ([], "empty"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TRACES)
def test_a_bad_trace_is_one_line_exit_code_2_and_no_run(case: str, tmp_path: Path, db: Path):
    lines, expected = BAD_TRACES[case]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    assert (
        replay("run", ROOT / "traces/doc_qa.jsonl", "--backend", "vllm", "--target", "sim", "--db", db).exit_code == 0
    )
    result = replay("run", path, "--backend", "vllm", "--target", "sim", "--db", db)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("replay: ")
    assert expected in result.stderr
    assert str(path) in result.stderr
    assert columns(db, "SELECT count(*) FROM runs") == [(1,)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--backend", "lmcache-dsk"), "lmcache-disk"),
        (("--backend", "vllm", "--model", "qwen3-8"), "qwen3-8b"),
        (("--backend", "vllm", "--gpu", "h20"), "h200"),
        (("--backend", "vllm", "--target", "moon"), "must be sim, launch or a URL"),
        (("--backend", "vllm", "--target", "launch"), "needs --model"),
        (("--backend", "vllm", "--set", "tiers.gpu.tokns=5"), "tokns"),
        (("--backend", "vllm", "--set", "tiers"), "FIELD=VALUE"),
        (("--backend", "vllm", "--speed", "0"), "--speed"),
        (("--backend", "vllm", "--sessions", "0"), "--sessions"),
        (("--backend", "vllm", "--model", "llama-3.1-70b", "--gpu", "l40s"), "l40s"),
    ],
)
def test_bad_options_are_one_line_with_the_fix(args: tuple[str, ...], expected: str, small: Path, db: Path):
    target = () if "--target" in args else ("--target", "sim")
    result = replay("run", small, "--db", db, *args, *target)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()  # and not, before it, that something is being simulated
    assert expected in line
    assert not db.exists() or columns(db, "SELECT count(*) FROM runs") == [(0,)]


def test_a_run_that_answers_nothing_is_stored_as_invalid_and_exits_1(
    small: Path, db: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("replay.backends.sim.SimBackend._problem", lambda *_: "out of order")
    result = replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["run"]["verdict"] == "invalid"


@pytest.mark.parametrize("limit", [("--model", "qwen3-8b"), ("--set", "tiers.gpu.tokens=30000")])
def test_turns_left_out_as_too_long_are_the_users_choice_and_no_failure(
    limit: tuple[str, str], small: Path, tmp_path: Path, db: Path
):
    more = (
        '{"session":"a","turn":2,"append":[["big",60000]]}\n'
        '{"session":"a","turn":3,"parent":"a/2","keep":9,"append":[["z",9]]}\n'
    )
    path = tmp_path / "long.jsonl"
    path.write_text(small.read_text() + more)
    command = ("run", path, "--backend", "vllm", "--target", "sim", "--gpu", "h200", *limit, "--db", db)
    refused = replay(*command)
    assert refused.exit_code == 2 and "1 of 8 turns do not fit" in refused.stderr and "a/2" in refused.stderr
    assert refused.stderr.count("\n") == 1 and columns(db, "SELECT count(*) FROM runs") == [(0,)]
    shown = replay(*command, "--too-long", "drop")
    assert shown.exit_code == 0
    assert "6 of 8 requests answered, 1 too long, 1 left out after them" in shown.stdout
    result = json.loads(replay("report", "--db", db, "--format", "json").stdout)
    assert result["run"]["verdict"] == "partial"
    assert result["run"]["reasons"][0] == ("1 prompt too long, 1 turn after them: left out, as --too-long drop says")
    assert [row["failed"] for row in result["sessions"]] == [0, 0, 0]


def test_a_gpu_tier_that_no_prompt_fits_is_refused_before_the_run(small: Path, db: Path):
    for choice in ("refuse", "drop"):
        machine = ("--target", "sim", "--set", "tiers.gpu.tokens=1000", "--too-long", choice)
        result = replay("run", small, "--backend", "vllm", *machine, "--db", db)
        assert result.exit_code == 2
        assert "6 of 6 turns do not fit the GPU tier's 977 tokens" in result.stderr and result.stderr.count("\n") == 1
        assert columns(db, "SELECT count(*) FROM runs") == [(0,)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("report", "nope"), "unknown run 'nope'; `replay sql"),
        (("backends", "nope"), "unknown backend 'nope'; 'replay backends' lists them"),
        (("serve", "--backend", "vllm", "--fault", "nope"), "unknown fault 'nope'; known: error, garbage, no-usage,"),
    ],
)
def test_a_name_is_called_nearest_only_if_it_is_near(args: tuple[str, ...], expected: str, small: Path, db: Path):
    assert replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db).exit_code == 0
    result = replay(*args, *(("--db", db) if args[0] == "report" else ()))
    assert result.exit_code == 2 and expected in result.stderr and "nearest:" not in result.stderr


def test_a_missing_trace_is_named(db: Path):
    result = replay("run", "nowhere/x.jsonl", "--backend", "vllm", "--target", "sim", "--db", db)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nowhere/x.jsonl" in result.stderr


def test_an_unusable_results_file_is_refused_and_left_alone(small: Path, tmp_path: Path):
    text = tmp_path / "notes.duckdb"
    text.write_text("these are my notes")
    for db in (text, tmp_path / "no" / "such" / "folder.duckdb", tmp_path):
        result = replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db)
        assert result.exit_code == 2, db
        (line,) = result.stderr.splitlines()
        assert line.startswith("replay: ")
    assert text.read_text() == "these are my notes"


def test_a_locked_results_file_is_refused(small: Path, db: Path):
    assert replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db).exit_code == 0
    code = f"import duckdb,sys; c=duckdb.connect({str(db)!r}); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        result = replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db)
        holder.communicate(b"")
    assert result.exit_code == 2
    assert str(db) in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_kept_as_partial_and_shown(number: signal.Signals, tmp_path: Path):
    db = tmp_path / "r.duckdb"
    args = [sys.executable, "-m", "replay", "run", str(ROOT / "traces/claude_code.jsonl"), "--backend", "lmcache-disk"]
    with subprocess.Popen([*args, "--target", "sim", "--sessions", "640", "--db", str(db)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "80"}) as process:  # fmt: skip
        log = tmp_path / "r.duckdb.wal"
        deadline = time.monotonic() + 120
        while (not log.exists() or log.stat().st_size < 100_000) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert b"partial" in out
    assert columns(db, "SELECT status, verdict FROM runs") == [("partial", "partial")]
    (rows,) = columns(db, "SELECT count(*) FROM requests WHERE status = 'ok'")[0]
    assert rows > 0
    shown = replay("report", "--db", db)
    assert shown.exit_code == 0
    assert "partial" in shown.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_stops_the_run_and_a_second_does_what_it_did_before(number: signal.Signals):
    seen: list[str] = []

    class Driven:
        def stop(self) -> None:
            seen.append("stopped")

    async def main() -> None:
        with _interrupts(Driven()):  # type: ignore[arg-type]
            for _ in range(2):
                signal.raise_signal(number)
                await asyncio.sleep(0.01)
        assert signal.getsignal(number) is ours

    def ours(*_: object) -> None:
        seen.append("ours")

    before = signal.signal(number, ours)  # as the launcher does, to end its engines
    try:
        asyncio.run(main())
    finally:
        signal.signal(number, before)
    assert seen == ["stopped", "ours"]


def test_help_starts_fast_because_heavy_imports_are_lazy():
    heavy = "numpy|duckdb|polars|numba|aiohttp|rich|yaml|msgspec"
    code = f"import sys, re; import replay.cli; print([m for m in sys.modules if re.fullmatch({heavy!r}, m)])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_command_has_help_with_an_example():
    for name, command in main.commands.items():
        text = replay(name, "--help").stdout
        assert f"replay {name}" in text.split("Example", 1)[-1], name
        assert command.help, name


@pytest.mark.parametrize("statement", ["", "  ", ";", "-- nothing but a comment"])
def test_an_empty_statement_is_one_line(statement: str, small: Path, db: Path):
    assert replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db).exit_code == 0
    result = replay("sql", statement, "--db", db)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "the statement is empty" in result.stderr


def test_sessions_are_counted_the_same_everywhere(tmp_path: Path, db: Path):
    path = tmp_path / "t.jsonl"
    sub = '{"session":"a/sub","turn":0,"after":["a/0"],"pause":1,"append":[["y",512]],"output":4}'
    other = FIRST.replace('"a"', '"b"')
    path.write_text("\n".join([HEADER, FIRST, sub, other]) + "\n")
    run = replay("run", path, "--backend", "vllm", "--target", "sim", "--db", db)
    assert "3 sessions in 2 families, 3 turns" in run.stdout
    assert "3 in 2 families" in replay("inspect", path).stdout
    assert columns(db, "SELECT sessions, families FROM v_runs") == [(3, 2)]


def test_report_formats_agree(small: Path, db: Path, tmp_path: Path):
    assert replay("run", small, "--backend", "vllm", "--target", "sim", "--db", db, "--name", "mine").exit_code == 0
    as_json = json.loads(replay("report", "mine", "--db", db, "--format", "json").stdout)
    assert as_json["run"]["name"] == "mine"
    csv = replay("report", "--db", db, "--format", "csv").stdout.splitlines()
    assert len(csv) == 1 + as_json["run"]["turns"]
    assert replay("report", "--db", db, "--format", "md", "-o", tmp_path / "r.md").exit_code == 0
    assert "SIMULATED" in (tmp_path / "r.md").read_text().upper()


def test_a_raw_claude_code_log_becomes_a_trace_that_runs(corpus: Path, tmp_path: Path, db: Path):
    log = sorted((corpus / "claude-code-jsonl" / "spotter").glob("*.jsonl.gz"))[0]
    assert replay("import", log, "-o", tmp_path / "mine.jsonl.gz").exit_code == 0
    result = replay(
        "run", tmp_path / "mine.jsonl.gz", "--backend", "lmcache-cpu", "--target", "sim", "--db", db, "--json"
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)["run"]["verdict"] in ("valid", "partial")
    sums = columns(db, "SELECT bool_and(prompt_tokens = gpu_tokens + cpu_tokens + computed_tokens) FROM requests")
    assert sums == [(True,)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--header X:y", "--header means nothing for --target sim"),
        ("--endpoint chat", "--endpoint means nothing for --target sim"),
        ("--max-model-len 5000", "--max-model-len means nothing for --target sim"),
        ("--isolation reset", "--isolation means nothing for --target sim"),
        (
            "--target http://127.0.0.1:9 --dummy-weights",
            "--dummy-weights means nothing for --target http://127.0.0.1:9",
        ),
        ("--target http://127.0.0.1:9 --restart-at 5", "--restart-at: http://127.0.0.1:9 is not ours to restart"),
    ],
)
def test_an_option_without_effect_is_refused(small: Path, db: Path, options: str, said: str):
    result = replay("run", small, "--backend", "vllm", "--target", "sim", *options.split(), "--db", db)
    assert result.exit_code == 2
    assert said in result.output
