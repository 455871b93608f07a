"""What people see: fits 80 columns, plain when piped, foreign text stays text."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from replay.cli import main
from replay.results import render, units
from replay.results.html.run import page
from replay.results.report import report

Write = Callable[..., Path]
Rows = Callable[..., list[dict[str, Any]]]
HOSTILE = "[bold red]x[/] <script>alert(1)</script> | `a` \x1b[31m\r\n'; DROP TABLE runs; --"


def test_the_table_is_as_before(standard: Path, golden: Callable[[str, str], None]) -> None:
    golden("report.txt", render.text(report(standard)))


def test_markdown_is_as_before(standard: Path, golden: Callable[[str, str], None]) -> None:
    golden("report.md", render.markdown(report(standard)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_and_no_figure_is_cut(write: Write, make_rows: Rows, width: int) -> None:
    rows = [{**row, "session": f"{row['session']}-{'long' * 30}"} for row in make_rows()]
    shown = render.text(report(write(rows)), width=width)
    assert max(map(len, shown.splitlines())) <= width
    if width >= 80:
        assert shown.count("…") == 5  # the sessions' names


def test_a_simulated_run_says_so_first(write: Write) -> None:
    path = write(id="a")
    assert render.text(report(path, "a")).lstrip().startswith("SIMULATED")
    assert "SIMULATED" in render.markdown(report(path, "a"))
    path = write(id="b", simulated=False, target="launch")
    assert "SIMULATED" not in render.text(report(path, "b"))


def test_reasons_stand_below_the_verdict(write: Write, make_rows: Rows) -> None:
    shown = render.text(report(write(make_rows()[:50], status="partial", name="mine")))
    assert "(mine)" in shown
    assert "partial\n         - the run was stopped before its end\n         - too few requests for p99: 50" in shown


def test_foreign_text_is_shown_as_text(write: Write, make_rows: Rows) -> None:
    rows = [{**row, "session": HOSTILE + row["session"]} for row in make_rows()]
    path = write(rows, name=HOSTILE, trace=HOSTILE, model=HOSTILE)
    shown = report(path)
    text = render.text(shown, width=200)
    assert "[bold red]x[/] <script>alert(1)</script> | `a` ?[31m??" in text
    assert "\x1b" not in text
    markdown = render.markdown(shown)
    assert "<script>" not in markdown
    assert r"\[bold red\]x\[/\] &lt;script&gt;alert(1)&lt;/script&gt; \| \`a\`" in markdown
    cells = list(csv.reader(io.StringIO(render.csv(path), newline="")))
    assert {row[1] for row in cells[1:]} == {row["session"] for row in rows}


def test_csv_holds_every_row_and_leaves_unknown_empty(standard: Path, make_rows: Rows) -> None:
    rows = list(csv.DictReader(io.StringIO(render.csv(standard))))
    expected = sorted(make_rows(), key=lambda row: (row["session"], row["position"]))
    assert [(row["session"], int(row["turn"])) for row in rows] == [(row["session"], row["turn"]) for row in expected]
    assert {row["remote_tokens"] for row in rows} == {""}
    assert [float(row["first_token"]) for row in rows] == [row["first_token"] for row in expected]


def test_colour_only_on_a_terminal(standard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = report(standard)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for terminal, coloured in ((True, True), (False, False)):
        buffer = io.StringIO()
        render.show(shown, Console(file=buffer, force_terminal=terminal, width=80, highlight=False))
        assert ("\x1b[" in buffer.getvalue()) is coloured
    monkeypatch.setenv("NO_COLOR", "1")
    buffer = io.StringIO()
    render.show(shown, Console(file=buffer, force_terminal=True, width=80, highlight=False))
    assert "\x1b[3" not in buffer.getvalue()


def test_bars_are_drawn_in_ascii_where_need_be(standard: Path) -> None:
    buffer = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    render.show(report(standard), Console(file=buffer, width=80, highlight=False))
    buffer.flush()
    assert b"####" in buffer.buffer.getvalue()  # type: ignore[attr-defined]


def test_unknown_is_shown_as_a_dash(write: Write, make_rows: Rows) -> None:
    lines = render.text(report(write(make_rows(lost_evicted=None, recompute_s=None, disk_tokens=None)))).splitlines()
    disk = next(line for line in lines if line.startswith("disk"))
    assert disk.split() == ["disk", "-", "-", "3.64", "M"]
    rounding = next(line for line in lines if line.startswith("granularity"))
    assert rounding.split()[-1] == "-", "its price in prefill"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (9_999, "9,999"), (10_000, "10.0 k"), (999_499, "999 k"), (999_500, "1.00 M"),
     (48_306_839, "48.3 M"), (2.5e9, "2.50 G"), (3e12, "3.0 T")],
)  # fmt: skip
def test_tokens_are_written_to_three_digits(value: float | None, text: str) -> None:
    assert units.tokens(value) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(None, 5, "-"), (1, 0, "-"), (0, 5, "0 %"), (1, 10**6, "< 0.1 %"), (1, 3, "33.3 %"),
     (99_999, 100_000, "> 99.9 %"), (5, 5, "100 %")],
)  # fmt: skip
def test_shares_do_not_round_to_nothing_or_all(part: float | None, whole: float, text: str) -> None:
    assert units.share(part, whole) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 s"), (0.00001, "< 0.0001 s"), (0.0123, "0.0123 s"), (2.824, "2.82 s"),
     (437.8, "7.30 min"), (38_072, "10.6 h")],
)  # fmt: skip
def test_durations_carry_their_unit(value: float | None, text: str) -> None:
    assert units.duration(value) == text


def test_what_a_backend_does_not_say_is_said_to_be_unknown(make_rows: Rows, write: Write) -> None:
    silent = ("gpu_tokens", "cpu_tokens", "disk_tokens", "served_from", "recompute_s")
    causes = ("lost_evicted", "lost_granularity", "lost_never_stored", "lost_cold", "lost_diverged", "lost_unknown")
    path = write(make_rows(**dict.fromkeys((*silent, *causes))), simulated=False, gpu=None)
    shown = render.text(report(path))
    assert re.search(r"^tier unknown +\d", shown, re.MULTILINE)
    assert "of the ideal; the backend does not say why\n" in shown
    assert "Which pauses cost reuse, whatever the cause\n" in shown
    assert "on an unknown GPU" in shown
    assert "Which pauses cost evictions" not in shown


def test_a_stopped_run_says_how_many_requests_were_planned(make_rows: Rows, write: Write) -> None:
    rows = make_rows()[:16]
    shown = render.text(report(write(rows, status="partial")))
    assert "outcome  16 of 112 requests answered, 96 never sent\n" in shown


def test_sessions_and_their_families_are_both_named(write: Write) -> None:
    assert " 8 sessions in 3 families, 112 turns" in render.text(report(write(id="a", families=3)))
    assert " 8 sessions, 112 turns" in render.text(report(write()))


def pasted(shown: str) -> list[list[str]]:
    """The commands at the end of a report, as a shell would split them."""
    commands = re.search(r"^More.*?:\n(?:\n```sh\n)?(.*?)(?:```|\Z)", shown, re.MULTILINE | re.DOTALL)
    assert commands
    return [shlex.split(command.replace("\\\n", "")) for command in re.split(r"\n(?=\s*replay )", commands[1])]


@pytest.mark.parametrize("fmt", ["table", "md"])
@pytest.mark.parametrize(
    "name", ["results.duckdb", "my runs/of a rather long name that no terminal has room for.duckdb"]
)
def test_the_commands_at_the_end_show_this_run_when_pasted(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fmt: str, name: str
) -> None:
    write(id="first")
    db = tmp_path / name
    db.parent.mkdir(exist_ok=True)
    write().rename(db)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["report", "first", "--db", name, "--format", fmt], catch_exceptions=False)
    report_command, sql_command = pasted(done.stdout)
    assert report_command[:3] == ["replay", "report", "first"] and sql_command[:2] == ["replay", "sql"]
    outputs = []
    for command in (report_command, [*sql_command, "--format", "json"]):
        again = CliRunner().invoke(main, command[1:], catch_exceptions=False)
        assert again.exit_code == 0, again.output
        outputs.append(json.loads(again.stdout))
    assert outputs[0]["run"]["id"] == "first"
    assert {row["run_id"] for row in outputs[1]} == {"first"} and len(outputs[1]) == 5


def test_the_file_that_commands_read_anyway_is_not_named(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write().rename(tmp_path / "replay.duckdb")
    monkeypatch.chdir(tmp_path)
    assert "--db" not in CliRunner().invoke(main, ["report"]).stdout
    monkeypatch.setenv("REPLAY_DB", "other.duckdb")
    assert "--db replay.duckdb" in CliRunner().invoke(main, ["report", "--db", "replay.duckdb"]).stdout
    (tmp_path / "replay.duckdb").rename(tmp_path / "other.duckdb")
    assert "--db" not in CliRunner().invoke(main, ["report"]).stdout


def test_a_hostile_run_id_stays_one_word(write: Write) -> None:
    foreign = 'a\'b $(touch gone) `x` "q"'
    report_command, sql_command = pasted(render.text(report(write(id=foreign)), db="r.duckdb"))
    assert report_command[2] == foreign
    assert sql_command[2].split("run_id = ")[1] == "'" + foreign.replace("'", "''") + "' LIMIT 5"


@pytest.mark.parametrize(
    ("settings", "target", "said"),
    [
        ({"preset": {"instances": 2}}, "sim", "target sim, 2 instances\n"),
        ({"preset": {"instances": 2, "tensor_parallel": 4}}, "launch", "target launch, 2 instances of 4 GPUs each\n"),
        ({"preset": {"tensor_parallel": 4}}, "sim", "target sim, on 4 GPUs\n"),
        ({"preset": {}, "instances": 1}, "launch", "target launch\n"),
        ({"preset": {"instances": 3}, "instances": 2}, "http://a,http://b", "http://a,http://b, 2 instances\n"),
        ({"preset": {"instances": 2}}, "http://a", "target http://a\n"),
        ({}, "sim", "target sim\n"),
    ],
)
def test_several_instances_are_said(write: Write, settings: dict[str, Any], target: str, said: str) -> None:
    path = write(settings=settings, target=target)
    assert said in render.text(report(path))
    assert dict(page(path).facts)["backend"].endswith(said.strip())


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ({"restarted_at_s": 60.02}, "seed 1, engine restarted at 60.0 s\n"),
        ({"restarted_at_s": None}, "seed 1, a restart at 60.0 s was never reached\n"),
    ],
)
def test_a_restart_is_said(write: Write, check: dict[str, Any], said: str) -> None:
    path = write(settings={"replay": {"restart_at": 60.0}}, self_check=check)
    assert said.strip() in " ".join(render.text(report(path)).split())
    assert said.strip() in dict(page(path).facts)["trace"]
    assert said in render.markdown(report(path))
    assert "restart" not in render.text(report(write(id="b"), "b"))
