"""The results file of real runs that the repository ships: it opens, it adds up, and the documents quote it."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from replay.cli import main
from replay.results import Results, open_results, queries
from replay.results.report import CACHED, report
from replay.results.verdict import judge
from replay.runs import sha256

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "reports" / "h200-qwen3-8b.duckdb"
TRACES = ("agents48", "doc_qa", "evict_and_return")


@pytest.fixture(scope="module")
def results() -> Iterator[Results]:
    with open_results(FILE) as opened:
        yield opened


def runs(results: Results) -> list[dict[str, Any]]:
    found = results.con.execute("SELECT id, name, verdict, reasons, settings, simulated FROM runs ORDER BY id")
    names = [column[0] for column in found.description or ()]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


def test_it_opens_without_being_written_to() -> None:
    """In a checkout that cannot be written, an older schema could not be brought up to date."""
    before = hashlib.sha256(FILE.read_bytes()).hexdigest()
    for args in (
        ["report", "lmcache-disk agents", "--db", FILE],
        ["compare", "vllm agents", "lmcache-cpu agents", "--db", FILE],
        ["sql", "SELECT name, verdict FROM v_runs", "--db", FILE],
    ):
        done = CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == before
    assert FILE.stat().st_size < 2e6


def test_every_prompt_token_is_accounted_for_and_the_engine_counted_the_same(results: Results) -> None:
    for run in runs(results):
        assert not run["simulated"]
        tokens = queries.row(results.con, "tokens", run["id"])
        assert tokens["unknown"] == 0
        assert sum(tokens[part] or 0 for part in (*CACHED, "computed")) == tokens["prompt"]
        counted = {row["kind"]: row["engine"] for row in queries.rows(results.con, "counters", run["id"])}
        assert (counted["prompt"], counted["computed"]) == (tokens["prompt"], tokens["computed"])
        if not tokens["unnamed"]:
            assert counted["gpu"] == tokens["gpu"]
            assert counted["lower"] == sum(tokens[tier] or 0 for tier in ("cpu", "disk", "remote", "external"))


def test_each_request_sums_to_its_prompt(results: Results) -> None:
    tiers = " + ".join(f"coalesce({part}_tokens, 0)" for part in (*CACHED, "computed"))
    wrong = results.con.execute(f"SELECT count(*), count(*) FILTER ({tiers} <> prompt_tokens) FROM v_requests")
    assert wrong.fetchone() == (8422, 0)


def test_verdicts_are_todays(results: Results) -> None:
    for run in runs(results):
        assert (run["verdict"], run["reasons"]) == judge(results.con, run["id"])
        assert run["verdict"] == "valid"


def test_no_path_of_the_machine_is_in_it(results: Results) -> None:
    text = results.con.execute("SELECT string_agg(settings::VARCHAR || self_check::VARCHAR) FROM runs").fetchone()
    assert text is not None
    for folder in ("/tmp", "/opt", "/home", "/root", "/work", "/usr"):
        assert folder not in text[0]


def test_the_traces_are_those_that_are_bundled(results: Results) -> None:
    asked = {sha for (sha,) in results.con.execute("SELECT DISTINCT trace_sha256 FROM runs").fetchall()}
    assert {sha256(ROOT / "traces" / f"{name}.jsonl") for name in TRACES} <= asked


def test_the_headline_of_the_documents_is_what_the_file_says() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    backends = ("vllm-no-cache", "vllm", "vllm-offload-cpu", "lmcache-cpu", "lmcache-disk")
    for name, run in itertools.product(backends, ("agents", "agents-c32")):
        shown = report(FILE, f"{name} {run}")
        share = sum(shown.tokens[part] or 0 for part in CACHED) / (shown.tokens["prompt"] or 1)
        waits = [f"{1e3 * (shown.ttft_s['all'][stat] or 0):,.0f} ms" for stat in ("p50", "p90", "p99")]
        line = f"| `{name}` | {share:.1%} | ".replace("%", " %") + " | ".join(waits) + " |"
        assert line in text and (run != "agents" or line in readme)


@pytest.mark.parametrize(
    ("run", "condition", "low", "high"),
    [
        ("% doc_qa", "name NOT LIKE '%disk%' AND prompt_tokens = 16416 AND computed_tokens = 16416", 490, 625),
        ("% doc_qa", "prompt_tokens = 16416 AND computed_tokens < 100", 20, 45),
        ("lmcache-cpu evict_and_return-8", "cpu_tokens > 0", 60, 100),
        ("lmcache-cpu back", "cpu_tokens = 16384", 70, 100),
        ("vllm-offload-cpu evict_and_return-8", "cpu_tokens > 0", 85, 140),
    ],
)
def test_times_are_near_those_that_were_measured_by_hand(
    results: Results, run: str, condition: str, low: float, high: float
) -> None:
    """Hand-made: 16k-token misses 501 to 628 ms, hits 30 to 46, back from the CPU 90 (LMCache) and 125 (offload)."""
    sql = f"SELECT ttft * 1e3 FROM v_requests JOIN runs ON id = run_id WHERE name LIKE $run AND {condition}"
    times = [time for (time,) in results.con.execute(sql, {"run": run}).fetchall()]
    assert times and all(low < time < high for time in times)


def test_a_table_of_the_document_is_what_the_file_says(results: Results) -> None:
    """How much a run varies: served and TTFT percentiles of each repetition."""
    text = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    rows = re.findall(
        r"\| `(\S+ agents\S*(?: earlier)?)` \| \w+ \| ([\d.]+) % \| ([\d,]+) ms \| ([\d,]+) ms \| ([\d,]+) ms", text
    )
    assert len(rows) == 13
    for name, share, *times in rows:
        sql = "SELECT sum(prompt_tokens - computed_tokens) / sum(prompt_tokens), quantile_cont(ttft, [0.5, 0.9, 0.99])"
        sql += " FROM v_requests JOIN runs ON id = run_id WHERE name = $name"
        found = results.con.execute(sql, {"name": name}).fetchone()
        assert found is not None
        assert [f"{100 * found[0]:.1f}", *(f"{1e3 * time:,.0f}" for time in found[1])] == [share, *times], name


def test_the_file_is_for_the_oldest_duckdb_that_is_supported() -> None:
    with duckdb.connect() as con:
        con.execute(f"ATTACH '{FILE}' AS shipped (READ_ONLY)")
        tags = con.execute("SELECT tags FROM duckdb_databases() WHERE database_name = 'shipped'").fetchone()
    assert tags is not None and tags[0]["storage_version"].startswith("v1.3")
