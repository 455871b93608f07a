"""Mooncake traces: blocks, conversations, recorded sessions, times, and the published figures."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.cli import main
from replay.errors import ReplayError
from replay.plan.stream import trace_curve
from replay.trace import Trace, read, write
from replay.trace.importers import Imported, detect, load, mooncake
from replay.trace.importers.sources import head, read_bytes
from replay.trace.order import contexts, nominal

SIZE = 512


def row(ids: list[int] | None, at: float | None = 0, *, last: int = 100, **fields: Any) -> dict[str, Any]:
    """A request of full blocks, but the last one, which has `last` tokens and an id."""
    length = SIZE * (len(ids) - 1) + last if ids else last
    given_fields = {"timestamp": at, "input_length": length, "output_length": 7, "hash_ids": ids, **fields}
    return {name: value for name, value in given_fields.items() if value is not None}


def written(folder: Path, rows: list[dict[str, Any]], name: str = "x.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(json.dumps(each) for each in rows) + "\n")
    return path


def one(folder: Path, rows: list[dict[str, Any]]) -> Trace:
    imported = load([written(folder, rows)])
    return Trace(imported.header, imported.turns)


def ideal(trace: Trace) -> list[int]:
    return contexts(trace, nominal(trace).order).ideal


def unbounded(rows: list[dict[str, Any]]) -> list[int]:
    """Hit tokens of each row from the ids alone, which here name whole prefixes."""
    seen: set[int] = set()
    hits = []
    for each in rows:
        ids = each["hash_ids"]
        known = next((depth for depth, block in enumerate(ids) if block not in seen), len(ids))
        hits.append(min(SIZE * known, each["input_length"]))
        seen.update(ids)
    return hits


def bounded(rows: list[dict[str, Any]], blocks: int) -> int:
    """Hit tokens of an LRU cache of so many blocks, a prompt's tail touched before its head."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for each in rows:
        ids = each["hash_ids"]
        known = next((depth for depth, block in enumerate(ids) if block not in cache), len(ids))
        hits += min(SIZE * known, each["input_length"])
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


# Blocks.


def test_a_partial_block_is_reused_only_where_its_id_is_equal(tmp_path: Path) -> None:
    rows = [row([0, 1, 2]), row([0, 1, 2], 1), row([0, 1, 3], 2), row([0, 1, 3, 4], 3, last=5)]
    rows[3]["hash_ids"] = [0, 1, 5, 4]
    trace = one(tmp_path, rows)
    assert trace.prompt == [1124, 1124, 1124, 1541]
    assert ideal(trace) == [0, 1124, 1024, 1024]
    assert trace_curve(trace, SIZE, partial=True).ceiling == 1124 + 1024 + 1024


def test_without_ids_for_partial_blocks_their_tokens_are_each_requests_own(tmp_path: Path) -> None:
    rows = [row([0, 1], at, last=SIZE) | {"input_length": 1100} for at in (0, 1)]
    trace = one(tmp_path, rows)
    assert trace.prompt == [1100, 1100]
    assert ideal(trace) == [0, 1024]
    assert not any("partial" in note for note in trace.header.notes)


def test_an_id_cut_to_another_length_is_equal_as_far_as_both_go(tmp_path: Path) -> None:
    trace = one(tmp_path, [row([46, 47], last=143), row([46, 47], 1, last=160), row([46, 47, 48], 2)])
    assert ideal(trace) == [0, 655, 672]
    assert "block ids of different lengths: equal as far as both go: 1" in trace.header.notes


def test_an_id_behind_another_block_is_equal_content_but_no_common_prefix(tmp_path: Path) -> None:
    trace = one(tmp_path, [row([1, 2, 3]), row([4, 2, 5], 1)])
    assert ideal(trace) == [0, 0]
    assert trace.turns[0].append[1] == trace.turns[1].append[1] == ("2", SIZE)
    assert "block ids that stand behind different blocks: equal content, no common prefix: 1" in trace.header.notes


prompt_lists = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.booleans(), st.integers(0, 1)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100)
@given(prompt_lists)
def test_reuse_is_what_the_ids_say(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[tuple[list[int], bool, int]]
) -> None:
    """Ids are made as the format makes them: one for each distinct prefix, a partial block's own."""
    names: dict[Any, int] = {}
    rows, now = [], 0
    for content, partial, wait in prompts:
        now += wait
        keys: list[Any] = [tuple(content[:depth]) for depth in range(1, len(content) + 1)]
        if partial:
            keys[-1] = (*keys[-1], "partial")
        ids = [names.setdefault(key, len(names)) for key in keys]
        rows.append(row(ids, now, last=100 if partial else SIZE))
    trace = one(tmp_path_factory.mktemp("t"), rows)
    assert ideal(trace) == unbounded(rows)
    curve = trace_curve(trace, SIZE, partial=True)
    assert [curve.hit_tokens(SIZE * n) for n in range(8)] == [bounded(rows, n) for n in range(8)]


# Conversations.


def test_a_request_that_starts_with_a_whole_earlier_prompt_continues_it(tmp_path: Path) -> None:
    rows = [
        row([0, 1, 2]),
        row([0, 5, 6], 1000),  # shares block 0, as all do: another conversation
        row([0, 1, 7, 8], 2000),  # continues the first row
        row([0, 1, 7, 9, 10], 3000),  # and this one it
        row([0, 1, 11, 12], 4000),  # a fork of the first row
    ]
    trace = one(tmp_path, rows)
    assert [str(turn.ref) for turn in trace.turns] == ["row-1/0", "row-2/0", "row-1/1", "row-1/2", "row-5/0"]
    assert trace.parents == [-1, -1, 0, 2, 0]
    assert trace.keep == [0, 0, 1024, 1536, 1024]
    assert len(trace.families) == 2
    assert "0" in trace.shared_segments and "1" not in trace.shared_segments
    assert [turn.cause for turn in trace.turns] == ["start", "start", "", "", ""]
    assert ideal(trace) == unbounded(rows)


def test_a_shared_beginning_is_no_conversation(tmp_path: Path) -> None:
    many = [row([0, 1, 10 + n, 40 + n], n) for n in range(1, mooncake.BRANCHES + 2)]
    trace = one(tmp_path, [row([0, 1, 2]), *many])
    assert set(trace.parents) == {-1}
    assert ideal(trace)[1:] == [1024] * len(many)
    assert one(tmp_path, [row([0, 1, 2]), *many[:-1]]).parents == [-1, *[0] * mooncake.BRANCHES]


def test_requests_arrive_at_their_times_and_wait_for_nobody(tmp_path: Path) -> None:
    rows = [row([0, 1, 2], 5000), row([0, 1, 3, 4], 5000), row([9, 8], 8500)]
    trace = one(tmp_path, rows)
    assert [turn.at for turn in trace.turns] == [0.0, 0.0, 3.5]
    assert trace.after == [(), (), ()]
    assert trace.parents == [-1, 0, -1]


def test_rows_out_of_order_are_sorted_by_time_and_others_start_at_zero(tmp_path: Path) -> None:
    trace = one(tmp_path, [row([0, 1, 3, 4], 2000), row([0, 1, 2], 1000), row([7, 8], None)])
    assert [(str(turn.ref), turn.at) for turn in trace.turns] == [
        ("row-2/0", 0.0), ("row-3/0", 0.0), ("row-2/1", 1.0)
    ]  # fmt: skip
    assert "requests without a timestamp, started at 0 seconds: 1" in trace.header.notes


def test_timestamps_in_ticks_are_said_to_be(tmp_path: Path) -> None:
    ticks = [row([n, 100 + n], 3000 * (n // 5)) for n in range(20)]
    notes = one(tmp_path, ticks).header.notes
    assert any(
        note.startswith("timestamps are quantised: 16 of 20 repeat another, stamps come every 3 s") for note in notes
    )
    exact = [row([n, 100 + n], 617 * n) for n in range(20)]
    assert not any("quantised" in note for note in one(tmp_path, exact).header.notes)


# Recorded sessions.


def test_later_rows_of_a_session_add_to_prompt_and_answer_before(tmp_path: Path) -> None:
    rows = [
        row([0, 1], 0, session_id="s", group_id=3),
        row([0, 2], 50, session_id="t", group_id=3),
        row([3, 4], None, session_id="s", delay=614.0),
        row(None, None, session_id="s", delay=10.0),
    ]
    trace = one(tmp_path, rows)
    assert [str(turn.ref) for turn in trace.turns] == ["s/0", "s/1", "s/2", "t/0"]
    assert trace.prompt == [612, 612 + 7 + 612, 612 + 7 + 612 + 7 + 100, 612]
    assert trace.after == [(), (0,), (1,), ()]
    assert [turn.pause for turn in trace.turns] == [0.0, 0.614, 0.01, 0.0]
    assert ideal(trace)[3] == SIZE  # block 0 of the other session
    assert "requests without hash_ids, taken as sharing nothing: 1" in trace.header.notes


def test_a_session_row_without_delay_pauses_from_arrival_to_arrival(tmp_path: Path) -> None:
    trace = one(tmp_path, [row([0, 1], 1000, session_id="s"), row([3, 4], 3500, session_id="s")])
    assert (trace.turns[1].at, trace.turns[1].pause, trace.after[1]) == (2.5, 2.5, (0,))
    assert any(note.startswith("pauses unknown (no delay)") for note in trace.header.notes)


def test_ids_of_several_files_are_kept_apart(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        written(tmp_path, [row([0, 1, 2])], name)
    imported = load([tmp_path])
    trace = Trace(imported.header, imported.turns)
    assert [turn.session for turn in trace.turns] == ["1:row-1", "2:row-1"]
    assert ideal(trace) == [0, 0]


# Errors.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "output_length": 3, "hash_ids": [1]}', r"missing required field `input_length`"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 3}', r">= 0"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 3}', r">= 0"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": ["a"]}', r"hash_ids"),
        ('{"timestamp": 1, "input_length"', "not a row of a Mooncake trace"),
        ("[]", "not a row of a Mooncake trace"),
        ('{"input_length": 655, "output_length": 1, "hash_ids": [0, 1, 2]}', r"3 block ids for 655 .* make 2;"),
        ('{"input_length": 655, "output_length": 1, "hash_ids": [0]}', r"1 block ids for 655 .* make 2;"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps(row([0, 1]))
    path.write_text(f"{good}\n\n{good}\n{line}\n")
    with pytest.raises(ReplayError, match=message) as caught:
        load([path])
    assert str(caught.value).startswith(f"{path}:4: ") and "\n" not in str(caught.value)


def test_requests_without_a_prompt_are_dropped_and_counted(tmp_path: Path) -> None:
    empty = {"timestamp": 0, "input_length": 0, "output_length": 3, "hash_ids": []}
    imported = load([written(tmp_path, [row([0, 1]), empty])])
    assert len(imported.turns) == 1 and "requests without a prompt, dropped: 1" in imported.notes
    with pytest.raises(ReplayError, match="no request with a prompt"):
        load([written(tmp_path, [empty])])


def test_import_and_plan_from_the_command_line(tmp_path: Path) -> None:
    source, trace = written(tmp_path, [row([0, 1, 2]), row([0, 1, 2], 1)]), str(tmp_path / "t.jsonl")
    imported = CliRunner().invoke(main, ["import", str(source), "-o", trace])
    assert imported.exit_code == 0 and "2 sessions" not in imported.output
    ceilings = []
    for flags in ([], ["--partial-blocks"]):
        planned = CliRunner().invoke(main, ["plan", trace, "--no-predict", "--json", *flags])
        assert planned.exit_code == 0, planned.output
        ceilings.append(json.loads(planned.stdout)["ceiling"]["hit_tokens"])
    assert ceilings == [1024, 1124]


# The published traces.


@pytest.fixture(scope="module")
def conversation(corpus: Path) -> Imported:
    return load([corpus / "mooncake" / "conversation_trace.jsonl.gz"])


@pytest.fixture(scope="module")
def source(corpus: Path) -> list[dict[str, Any]]:
    data = read_bytes(corpus / "mooncake" / "conversation_trace.jsonl.gz")
    return [json.loads(line) for line in data.splitlines()]


def test_the_conversation_trace_comes_over_row_by_row(conversation: Imported, source: list[dict[str, Any]]) -> None:
    trace = Trace(conversation.header, conversation.turns)
    assert len(trace) == 12_031 and trace.prompt_tokens == 144_793_823
    assert trace.prompt == [each["input_length"] for each in source]
    assert [turn.output for turn in trace.turns] == [each["output_length"] for each in source]
    assert [turn.at for turn in trace.turns] == [each["timestamp"] / 1000 for each in source]
    assert any("quantised: 10,851 of 12,031" in note for note in conversation.notes)
    assert ideal(trace) == unbounded(source)


def test_the_hit_curve_of_the_conversation_trace_has_the_published_points(
    conversation: Imported, source: list[dict[str, Any]]
) -> None:
    curve = trace_curve(Trace(conversation.header, conversation.turns), SIZE, partial=True)
    shares = {2_048: 5.60, 9_765: 21.11, 39_062: 35.82, 97_656: 37.07, 10**9: 37.36}
    assert {blocks: round(100 * curve.hit_share(SIZE * blocks), 2) for blocks in shares} == shares
    for blocks in (1, 9_765):
        assert curve.hit_tokens(SIZE * blocks) == bounded(source, blocks)


def test_conversations_of_the_conversation_trace_grow(conversation: Imported) -> None:
    trace = Trace(conversation.header, conversation.turns)
    links = [(i, parent) for i, parent in enumerate(trace.parents) if parent >= 0]
    roomy = sum(trace.prompt[i] >= trace.prompt[p] + trace.turns[p].output for i, p in links)
    assert len(links) == 3_964
    assert roomy > 0.85 * len(links)  # most have room for the answer that they would hold if they continue it
    assert max(len(family) for family in trace.families) < 50


def test_the_session_example_of_aiperf_shares_its_global_blocks(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "aiperf-formats" / "mooncake-sessions.excerpt.jsonl"
    assert detect(head(path)) == mooncake.NAME
    imported = load([path])
    write(tmp_path / "t.jsonl", imported.header, imported.turns)
    trace = read(tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in read_bytes(path).splitlines()]
    assert [turn.appended for turn in trace.turns] == [each["input_length"] for each in rows]
    assert len(trace.sessions) == 2
    assert ideal(trace)[-1] == 63 * SIZE
    assert trace.prompt[1] == 44_083 + 987 + 578
