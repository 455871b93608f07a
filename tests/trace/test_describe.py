"""What a description says of small traces that one can count by hand."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from replay.resources import data_path
from replay.trace import Header, Trace, Turn, read
from replay.trace.describe import Description, describe, render
from replay.trace.model import FORMAT, VERSION
from replay.trace.synth import generate


def trace(*turns: Turn, **header) -> Trace:
    return Trace(Header(format=FORMAT, version=VERSION, name="t", **header), turns)


def text(description: Description) -> str:
    out = io.StringIO()
    Console(file=out, width=80, force_terminal=False).print(render(description))
    return out.getvalue()


SMALL = trace(
    Turn(session="a", turn=0, at=0, append=[("tools", 640), ("a0", 640)], output=64, cause="start"),
    Turn(session="a", turn=1, pause=30, append=[("a1", 256)], output=64, cause="tool"),
    Turn(session="b", turn=0, at=100, append=[("tools", 640), ("b0", 320)], output=64, cause="start"),
    Turn(session="a", turn=2, pause=500, keep=640, append=[("a2", 128)], output=0, cause="human"),
)


def test_totals_and_ideal_reuse():
    found = describe(SMALL)
    assert (found.sessions, found.families, found.turns) == (2, 2, 4)
    assert found.prompt_tokens == 1280 + 1600 + 960 + 768
    assert found.output_tokens == 192
    assert found.ideal_tokens == 0 + 1344 + 640 + 640
    assert found.ideal_share == pytest.approx(2624 / 4608)
    assert found.shared_share == pytest.approx(640 / 4608)
    assert found.duration_s == 530
    assert found.causes == {"start": 2, "tool": 1, "human": 1}


def test_unique_tokens_are_counted_once_with_their_prefix():
    found = describe(SMALL, kv_bytes_per_token=2**20)
    assert found.unique_tokens == 640 + 640 + 64 + 256 + 64 + 320 + 64 + 128
    assert found.unique_gib == found.unique_tokens / 1024
    assert describe(SMALL).unique_gib is None


def test_windows_serve_what_was_used_within_them():
    minute, five, hour = describe(SMALL).windows
    # a/1 finds all of a/0; b/0 finds the tools 70 s after a/1 used them; a/2 430 s after b/0 did.
    assert minute.hit_share == pytest.approx(1344 / 4608)
    assert five.hit_share == pytest.approx((1344 + 640) / 4608)
    assert hour.hit_share == pytest.approx((1344 + 640 + 640) / 4608)


def test_windows_hold_what_was_used_within_them():
    minute, five, hour = describe(SMALL, kv_bytes_per_token=2**20).windows
    assert minute.tokens == 1344 + 320
    assert five.tokens == 1344 + 320 + 320 + 64
    assert hour.tokens == describe(SMALL).unique_tokens
    assert minute.gib == minute.tokens / 1024


def test_an_hour_serves_at_most_the_ideal_and_windows_rise():
    found = describe(Trace(*generate("claude-code", 6, 1)))
    shares = [window.hit_share for window in found.windows]
    held = [window.tokens for window in found.windows]
    assert shares == sorted(shares)
    assert shares[-1] <= found.ideal_share
    assert held == sorted(held)
    assert held[-1] <= found.unique_tokens


def test_percentiles_of_pauses_are_by_cause_and_leave_out_first_turns():
    found = describe(SMALL).percentiles
    assert found["pause"].n == 2
    assert found["pause_tool"].p50 == 30
    assert found["pause_human"].max == 500
    assert "pause_start" not in found
    assert found["turns_per_session"].max == 3
    assert found["append"].max == 1280
    assert found["session_inter_arrival"].p50 == 100
    assert found["inter_arrival"].n == 3


def test_broken_prefixes_are_counted_and_the_worst_named():
    found = describe(SMALL).breaks
    assert found.turns == 1
    assert found.causes == {"human": 1}
    (worst,) = found.worst
    assert (worst.turn, worst.context_tokens, worst.lost_tokens) == ("a/2", 1664, 1024)


def test_a_sub_agent_that_takes_only_the_tools_is_not_a_broken_prefix():
    found = describe(
        trace(
            Turn(session="s", turn=0, at=0, append=[("tools", 10), ("own", 90)]),
            Turn(session="s/agent", turn=0, parent="s/0", keep=10, append=[("task", 5)]),
        )
    )
    assert found.breaks.turns == 0
    assert found.families == 1


def test_recorded_cache_reads_are_set_against_the_ideal_of_the_same_turns():
    turns = [
        Turn(session="s", turn=0, at=0, append=[("a", 100)]),
        Turn(session="s", turn=1, append=[("b", 100)], cached=50),
    ]
    found = describe(trace(*turns)).recorded
    assert found is not None
    assert (found.turns, found.cached_share, found.ideal_share) == (1, 0.25, 0.5)
    assert describe(SMALL).recorded is None


@pytest.mark.parametrize(
    ("turns", "header", "warning"),
    [
        (
            [Turn(session=f"s{n}", turn=0, at=n // 5, append=[("a", 1)]) for n in range(20)],
            {},
            "16 of 20 recorded times",
        ),
        (
            [Turn(session="s", turn=n, at=0 if n == 0 else None, pause=n, append=[("a", 1)]) for n in range(12)],
            {},
            "multiples of 1 s",
        ),
        ([Turn(session="s", turn=0, at=0, append=[("a", 1)])], {}, "1 turns have no output"),
        ([Turn(session="s", turn=0, at=0, append=[("a", 1)], cached=2)], {}, "more cached tokens than"),
        ([Turn(session="s", turn=0, at=0, append=[("a", 1)])], {"block_tokens": 64}, "blocks of 64 tokens"),
    ],
)
def test_what_makes_the_figures_uncertain_is_said(turns, header, warning):
    found = describe(trace(*turns, **header))
    assert any(warning in each for each in found.warnings)
    assert warning in " ".join(text(found).split())


def test_a_clean_trace_has_no_warnings_and_its_notes_are_passed_on():
    found = describe(Trace(*generate("claude-code", 4, 0)))
    assert found.warnings == []
    assert len(found.notes) == 4


def test_the_json_has_the_documented_keys():
    found = msgspec.json.decode(msgspec.json.encode(describe(SMALL)))
    documented = {"sessions", "turns", "prompt_tokens", "output_tokens", "ideal_share", "percentiles"}
    assert documented <= set(found)
    assert set(found["percentiles"]["prompt"]) == {"n", "p10", "p50", "p90", "p99", "max"}


@pytest.mark.parametrize("name", ["claude_code", "doc_qa", "evict_and_return"])
def test_tables_fit_80_columns(name):
    found = describe(read(data_path("traces", f"{name}.jsonl")), kv_bytes_per_token=163_840)
    assert max(map(len, text(found).splitlines())) <= 80
    assert "…" not in text(found)


def test_names_from_a_file_are_not_taken_for_markup():
    found = describe(trace(Turn(session="s", turn=0, at=0, append=[("a", 9)], cause="[red]x"), notes=["[bold]n"]))
    assert "[red]x" in text(found)
    assert "[bold]n" in text(found)
