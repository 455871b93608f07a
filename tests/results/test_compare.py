"""Comparisons: pairs, refusals, differences against numpy, explanations, and what is printed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from replay.cli import main
from replay.errors import ReplayError
from replay.results.compare import compare
from replay.results.compare_render import text
from replay.results.layout import Section
from replay.results.render import plain, section_table

Row = dict[str, Any]
Rows = Callable[..., list[Row]]
Write = Callable[..., Path]
Both = Callable[..., Path]


@pytest.fixture
def both(write: Write, make_rows: Rows) -> Both:
    """Writes run `a` of made-up rows and run `b` of the same after `change`; further fields go to run `b`."""

    def write_both(change: Callable[[list[Row]], list[Row]] | None = None, sessions: int = 12, **run: Any) -> Path:
        write(make_rows(sessions), id="a", name="a")
        rows = make_rows(sessions)
        return write(change(rows) if change else rows, **{"id": "b", "name": "b", **run})

    return write_both


def faster(factor: float) -> Callable[[list[Row]], list[Row]]:
    """Scales the time from sent to first and last token."""

    def change(rows: list[Row]) -> list[Row]:
        for row in rows:
            for key in ("first_byte", "first_token", "last_token", "closed"):
                row[key] = row["sent"] + factor * (row[key] - row["sent"])
        return rows

    return change


def test_a_copy_of_a_run_shows_no_difference(both: Both) -> None:
    found = compare(both(), ["a", "b"])
    (against,) = found.runs
    assert against.pairs["pairs"] == 12 * 14
    for name, cell in against.metrics.items():
        assert cell.verdict in ("no difference shown", "unknown"), name
        assert cell.difference in (0, None) and cell.low in (0, None) and cell.high in (0, None), name
    assert {group.verdict for group in against.groups} == {"no difference shown"}
    assert all(group.better == group.worse == 0 for group in against.groups)
    assert against.turns == [] and against.moved == [] and against.warnings == []
    assert set(against.why.values()) == {0}
    assert found.passed is None


def test_a_run_against_itself_is_allowed_and_said(both: Both) -> None:
    (against,) = compare(both(), ["a", "a"]).runs
    assert against.metrics["ttft_p50"].difference == 0
    assert against.warnings == ["this compares a run with itself"]


def test_differences_are_those_of_the_paired_turns(both: Both, make_rows: Rows) -> None:
    (against,) = compare(both(faster(0.5)), ["a", "b"]).runs
    a = np.array([row["first_token"] - row["sent"] for row in make_rows(12)])
    for stat, figure in (("mean", np.mean), ("p50", np.median), ("p90", lambda x: np.quantile(x, 0.9))):
        cell = against.metrics[f"ttft_{stat}"]
        assert (cell.a, cell.b) == (pytest.approx(figure(a)), pytest.approx(figure(a) / 2))
        assert cell.change == pytest.approx(-0.5)
        assert (cell.change_low, cell.change_high) == (pytest.approx(-0.5), pytest.approx(-0.5))
        assert cell.low is not None and cell.high is not None and cell.low <= cell.difference <= cell.high < 0
        assert cell.verdict == "better" and cell.n == len(a)
    assert against.metrics["prompt_tokens"].verdict == "no difference shown"
    assert against.resampled == "session" and against.units == 12


def test_the_other_way_round_is_worse(both: Both, write: Write, make_rows: Rows) -> None:
    both(faster(0.5))
    path = write(make_rows(12), id="c", name="c")
    first, second = compare(path, ["b", "a", "c"]).runs
    assert first.metrics["ttft_p50"].verdict == second.metrics["ttft_p50"].verdict == "worse"
    assert first.metrics == second.metrics


def test_the_order_of_rows_does_not_matter(both: Both) -> None:
    path = both(lambda rows: faster(0.7)(rows)[::-1])
    assert compare(path, ["a", "b"]).runs[0].metrics["ttft_p50"].change == pytest.approx(-0.3)


def test_turns_that_one_run_did_not_answer_are_no_pairs_and_are_counted(both: Both) -> None:
    def spoil(rows: list[Row]) -> list[Row]:
        slow = max(rows, key=lambda row: row["first_token"] - row["sent"])
        slow.update(status="error", error="out of memory", first_token=None, last_token=None)
        return [row for row in rows if not (row["session"] == "session-3" and row["turn"] == 13)]

    (against,) = compare(both(spoil), ["a", "b"]).runs
    assert against.pairs == {
        "pairs": 12 * 14 - 2, "only_a_ok": 1, "only_b_ok": 0, "neither_ok": 0, "missing_in_b": 1, "missing_in_a": 0,
    }  # fmt: skip
    assert against.metrics["ttft_p50"].n == 12 * 14 - 2 and against.metrics["ttft_p50"].difference == 0
    assert against.metrics["errors"].b == 1
    assert any("1 answered by A alone, 1 not in B" in warning for warning in against.warnings)


def test_runs_without_a_common_answer_are_refused(both: Both) -> None:
    def rename(rows: list[Row]) -> list[Row]:
        return [{**row, "session": f"other {row['session']}"} for row in rows]

    with pytest.raises(ReplayError, match="answered no turn in common"):
        compare(both(rename), ["a", "b"])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("trace_sha256", "1" * 64, "trace_sha256 unknown"),
        ("model", "qwen3-32b", "model qwen3-8b and qwen3-32b"),
        ("gpu", "l40s", "gpu h100 and l40s"),
        ("families", 99, "families 8 and 99"),
        ("seed", 7, "seed 1 and 7"),
        ("speed", 2.0, "speed 1.0 and 2.0"),
        ("scale_tokens", 0.5, "scale_tokens 1.0 and 0.5"),
        ("concurrency", 4, "concurrency recorded start times and 4"),
        ("skip_idle", True, "skip_idle False and True"),
        ("outputs", "live", "outputs recorded and live"),
        ("trace", "another", "trace made_up and another"),
        ("settings", {"replay": {"absolute": True}}, "absolute False and True"),
        ("settings", {"replay": {"absolute": False, "restart_at": 60.0}}, "restart_at never and 60.0"),
    ],
)
def test_runs_that_were_asked_differently_are_refused_unless_forced(
    write: Write, make_rows: Rows, field: str, value: Any, said: str
) -> None:
    first: dict[str, Any] = {"settings": {"replay": {"absolute": False}}} if field == "settings" else {}
    first |= {"trace_sha256": "0" * 64} if field == "trace_sha256" else {}
    said = "trace_sha256 000000000000 and 111111111111" if field == "trace_sha256" else said
    write(make_rows(), id="a", name="a", **first)
    path = write(make_rows(), id="b", name="b", **{**first, field: value})
    with pytest.raises(ReplayError) as caught:
        compare(path, ["a", "b"])
    assert said in str(caught.value) and "--force" in str(caught.value) and "\n" not in str(caught.value)
    (against,) = compare(path, ["a", "b"], force=True).runs
    assert any(said in warning for warning in against.warnings)


def test_doubtful_runs_are_warned_of(both: Both) -> None:
    path = both(simulated=False, status="partial", gpu=None)
    found = compare(path, ["a", "b"])
    warnings = "\n".join(found.runs[0].warnings)
    for said in ("a (a) is simulated and the other was measured", "b (b) is partial", "to be the same: gpu"):
        assert said in warnings
    assert "A is SIMULATED" in text(found)
    assert all(warning in text(found, width=400) for warning in found.runs[0].warnings)


def test_an_unknown_tier_is_not_zero(both: Both) -> None:
    path = both(lambda rows: [{**row, "disk_tokens": None, "computed_tokens": None} for row in rows])
    metrics = compare(path, ["a", "b"]).runs[0].metrics
    for name in ("disk_tokens", "computed_tokens", "disk_share"):
        cell = metrics[name]
        assert cell.b is None and cell.difference is None and cell.low is None and cell.verdict == "unknown", name
    assert metrics["disk_tokens"].a


def test_too_few_pairs_give_no_interval_and_no_high_percentile(both: Both) -> None:
    (against,) = compare(both(lambda rows: faster(0.5)(rows)[:8]), ["a", "b"], force=True).runs
    assert against.metrics["ttft_p50"].difference is not None
    assert against.metrics["ttft_p50"].low is None and against.metrics["ttft_p50"].verdict == "no interval"
    assert against.metrics["ttft_p90"].b is None


def test_moved_tokens_and_seconds_explain_the_difference(both: Both, make_rows: Rows) -> None:
    def to_disk(rows: list[Row]) -> list[Row]:
        for row in faster(1.25)(rows):
            row.update(disk_tokens=row["disk_tokens"] + row["cpu_tokens"], cpu_tokens=0, load_s=2 * row["load_s"])
            row["served_from"] = "disk" if row["disk_tokens"] else row["served_from"]
        return rows

    (against,) = compare(both(to_disk), ["a", "b"]).runs
    rows = make_rows(12)
    assert against.moved == [{"from": "cpu", "to": "disk", "tokens": sum(row["cpu_tokens"] for row in rows)}]
    why = against.why
    assert why["load_s"] == pytest.approx(sum(row["load_s"] for row in rows))
    assert why["ttft_s"] == pytest.approx(0.25 * sum(row["first_token"] - row["sent"] for row in rows))
    assert why["ttft_s"] == pytest.approx(why["recompute_s"] + why["load_s"] + why["rest_s"])
    assert {group.group for group in against.groups if group.by == "served_from"} >= {"gpu > gpu", "cpu > disk"}


def test_groups_count_the_turns_that_got_better_and_worse(both: Both, make_rows: Rows) -> None:
    def change(rows: list[Row]) -> list[Row]:
        quick = faster(0.5)([row for row in rows if row["pause"] > 300])
        slow = faster(2.0)([row for row in rows if row["position"] and row["pause"] < 1])
        return [*quick, *slow, *(row for row in rows if row not in quick and row not in slow)]

    (against,) = compare(both(change), ["a", "b"]).runs
    pauses = {group.group: group for group in against.groups if group.by == "pause"}
    rows = [row for row in make_rows(12) if row["position"]]
    assert sum(group.n for group in pauses.values()) == len(rows)
    for name, low, high, sign in (("< 1 s", 0, 1, 1), ("1-10 s", 1, 10, 0), ("5-60 min", 300, 3600, -1)):
        n = sum(low <= row["pause"] < high for row in rows)
        group = pauses[name]
        assert (group.n, group.better, group.worse) == (n, n * (sign < 0), n * (sign > 0))
        assert group.verdict == {1: "worse", 0: "no difference shown", -1: "better"}[sign]
    assert {turn["difference"] < 0 for turn in against.turns} == {True, False}
    assert len(against.turns) == 10


def test_a_gate_that_should_fail_exits_1_and_one_that_holds_exits_0(both: Both) -> None:
    path = str(both(faster(0.5)))
    command = ["compare", "a", "b", "--db", path]
    for gate, code in (("ttft_p50 <= -40%", 0), ("ttft_p50 <= -60%", 1), ("ttft_p95 <= 1ms", 1), ("errors <= 0", 0)):
        result = CliRunner().invoke(main, [*command, "--gate", gate, "--gate", "loss <= +0%"])
        assert result.exit_code == code, (gate, result.output)
        assert ("FAILED" in result.output) == bool(code)
    shown = CliRunner().invoke(main, [*command, "--gate", "ttft_p50 <= -60%", "--json"])
    found = json.loads(shown.stdout)
    assert shown.exit_code == 1 and found["passed"] is False
    (gate,) = found["runs"][0]["gates"]
    assert gate["gate"] == "ttft_p50 <= -60%" and gate["passed"] is False and gate["value"] == pytest.approx(-0.5)


def test_mistakes_exit_2_with_one_line(both: Both) -> None:
    path = str(both(seed=9))
    for arguments, said in (
        (["a", "b"], "seed 1 and 9"),
        (["a"], "at least two runs"),
        (["a", "nosuch"], "unknown run 'nosuch'"),
        (["a", "b", "--force", "--gate", "fast"], "METRIC OP VALUE"),
    ):
        result = CliRunner().invoke(main, ["compare", *arguments, "--db", path])
        assert result.exit_code == 2 and said in result.output and len(result.output.splitlines()) == 1


def test_an_invalid_run_passes_no_gate_unless_forced(both: Both) -> None:
    def fail_some(rows: list[Row]) -> list[Row]:
        return [{**row, "status": "error"} if row["turn"] > 6 else row for row in rows]

    path = both(fail_some)
    found = compare(path, ["a", "b"], limits=["ttft_p50 <= +0%"])
    assert found.passed is False and "b is invalid" in found.runs[0].gates[-1].reason
    assert "b is invalid" in text(found, width=300)
    assert compare(path, ["a", "b"], limits=["ttft_p50 <= +0%"], force=True).passed is True


def test_what_is_printed_fits_80_columns_and_says_simulated(both: Both, write: Write, make_rows: Rows) -> None:
    path = both(faster(0.5))
    for run, factor in (("long", 1.0), ("long2", 3.0)):
        rows = [{**row, "session": f"\x1b[31m<b>{row['session']}</b>" + "x" * 90} for row in make_rows()]
        write(faster(factor)(rows), id=run, name=run + "n" * 70)
    shown = text(compare(path, ["a", "b"], limits=["ttft_p50 <= -60%"]))
    assert max(map(len, shown.splitlines())) <= 80
    for said in ("SIMULATED", "95 % interval", "-50.0 %", "better", "FAIL", "12 sessions"):
        assert said in shown
    shown = text(compare(path, ["long", "long2"]))
    assert max(map(len, shown.splitlines())) <= 80 and "\x1b" not in shown and "?[31m<b>" in shown


def test_json_has_the_promised_keys(both: Both) -> None:
    found = json.loads(compare(both(faster(0.5)), ["a", "b"]).json())
    assert found.keys() == {"baseline", "runs", "passed"}
    (against,) = found["runs"]
    assert against.keys() == {
        "run", "warnings", "pairs", "resampled", "units", "metrics", "groups", "turns", "moved", "why", "gates",
    }  # fmt: skip
    assert {"a", "b", "difference", "change", "low", "high", "n", "verdict"} <= against["metrics"]["ttft_p50"].keys()


def test_simulated_runs_of_a_bundled_trace_compare(tmp_path: Path) -> None:
    path = str(tmp_path / "r.duckdb")
    trace = str(Path(__file__).parents[2] / "traces" / "claude_code.jsonl")
    for name, backend in (("vllm", "vllm"), ("lmcache-cpu", "lmcache-cpu"), ("again", "vllm")):
        command = ["run", trace, "--target", "sim", "--sessions", "12", "--backend", backend, "--name", name]
        size = ["--set", "tiers.gpu.tokens=400000"]  # little enough that sessions evict each other
        ended = CliRunner().invoke(main, [*command, *size, "--db", path])
        assert ended.exit_code == 0, ended.output
    result = CliRunner().invoke(main, ["compare", "vllm", "lmcache-cpu", "--db", path, "--gate", "ttft_p50 <= -90%"])
    assert result.exit_code == 1
    assert "SIMULATED" in result.output and "95 % interval" in result.output
    changed, same = compare(path, ["vllm", "lmcache-cpu", "again"]).runs
    assert changed.metrics["computed_tokens"].verdict == "better"
    assert changed.metrics["computed_tokens"].high < 0 < changed.metrics["cpu_tokens"].b
    assert {row["to"] for row in changed.moved if row["from"] == "computed"} >= {"cpu"}
    assert all(cell.verdict in ("no difference shown", "unknown") for cell in same.metrics.values())


def test_no_cell_of_a_wide_table_is_clipped_but_the_first() -> None:
    rows = [
        ("  never stored", "24.3 k", "22.8 k", "+0.044 pp", "-26.3 k .. +17.1 k", "no difference shown"),
        ("gpu", "2.57 M", "2.59 M", "+28.8 k", "-81 .. +60.8 k", "no difference shown"),
    ]
    group = ("external > external", "1,234", "1,000", "234", "0.0958", "0.0750", "-1,234 %", "no difference shown")
    for section in (Section("t", ("",) * 6, rows, left=(0, 5)), Section("t", ("",) * 8, [group], left=(0, 7))):
        shown = plain(section_table(section))
        assert max(map(len, shown.splitlines())) <= 80
        for row in section.rows:
            assert all(cell.strip() in shown for cell in row[1:]), shown
            assert row[0].strip()[:15] in shown


def test_a_tier_that_one_preset_lacks_is_told_from_one_of_which_nothing_is_known(write: Write, make_rows: Rows) -> None:
    causes = {"lost_evicted": None, "disk_tokens": None}
    lower = {"cpu": {"gib": 8.0}}
    path = write(make_rows(cpu_tokens=None, **causes), id="a", name="a", settings={"preset": {"name": "a"}})
    cpu = {"preset": {"name": "b", "tiers": lower, "connector": "lmcache"}}
    write(make_rows(disk_tokens=None), id="b", name="b", settings=cpu)
    write(make_rows(cpu_tokens=None, **causes), id="c", name="c", settings=cpu)
    write(make_rows(cpu_tokens=None, **causes), id="d", name="d", settings={"preset": {"engine": "openai"}})
    for first, second, said in (("a", "b", "only in B"), ("b", "a", "only in A"), ("c", "b", "unknown"),
                                ("d", "b", "unknown"), ("a", "c", "unknown")):  # fmt: skip
        found = compare(path, [first, second])
        metrics = found.runs[0].metrics
        assert metrics["cpu_tokens"].verdict == metrics["cpu_share"].verdict == said, (first, second)
        assert metrics["lost_evicted"].verdict == metrics["external_tokens"].verdict == "unknown"
    assert re.search(r"^cpu +- .* only in B$", text(compare(path, ["a", "b"])), re.MULTILINE)
    cell = compare(path, ["a", "b"]).runs[0].metrics["cpu_tokens"]
    assert (cell.a, cell.difference) == (None, None) and cell.b


def test_the_shipped_runs_say_which_tiers_are_in_only_one() -> None:
    shipped = Path(__file__).parents[2] / "reports" / "h200-qwen3-8b.duckdb"
    shown = text(compare(shipped, ["vllm agents", "lmcache-cpu agents"]))
    assert re.search(r"^cpu +- +485 k +- +- +only in B$", shown, re.MULTILINE)


def test_an_error_says_which_run_was_taken_where_a_name_is_ambiguous(both: Both, write: Write, make_rows: Rows) -> None:
    path = both()
    other = {"trace": "other", "trace_sha256": "f" * 64, "started_at": "2026-03-01T00:00:00Z"}
    write(make_rows(12), id="late", name="b", **other)
    with pytest.raises(ReplayError) as caught:
        compare(path, ["a", "b"])
    said = str(caught.value)
    assert "trace made_up and other" in said
    assert "'b' is the name of 2 runs; the latest was taken, late (trace other), not b (trace made_up)" in said
    assert "An id in place of the name picks another" in said and "--name" in said and "'a' is" not in said


def test_by_its_id_the_earlier_run_of_a_name_compares(both: Both, write: Write, make_rows: Rows) -> None:
    path = write(make_rows(12), id="early", name="same")
    write(make_rows(12), id="late", name="same", trace="other", started_at="2026-03-01T00:00:00Z")
    both()
    assert compare(path, ["a", "early"]).runs[0].run["id"] == "early"
    with pytest.raises(ReplayError) as caught:
        compare(path, ["a", "late"])
    assert "was taken" not in str(caught.value)


def test_the_command_that_an_unknown_run_is_answered_with_lists_the_runs_of_that_file(both: Both) -> None:
    path = both()
    path = path.rename(path.with_name("results of mine.duckdb"))
    said = CliRunner().invoke(main, ["report", "nosuch", "--db", str(path)]).output
    (command,) = re.findall(r"`replay (.*)`", said)
    listed = CliRunner().invoke(main, shlex.split(command)).output
    assert re.findall(r"^(a|b) ", listed, re.MULTILINE) == ["b", "a"]
