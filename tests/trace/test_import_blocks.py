"""Block-hash traces: prefixes, forks, sub-agents, times and causes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.trace import ROOT, PrefixTree, Trace, read, write
from replay.trace.importers import Imported, load

GOLDEN = Path(__file__).parent.parent / "golden" / "importers"
SIZE = 64


def request(t: float, ids: list[int], extra: int = 10, **fields: Any) -> dict[str, Any]:
    """A request of `len(ids)` full blocks and `extra` tokens; it takes two seconds."""
    given_fields = {
        "t": t,
        "type": "n",
        "model": "m",
        "in": SIZE * len(ids) + extra,
        "out": 7,
        "hash_ids": ids,
        "input_types": ["tool_result"],
        "stop": "",
        "api_time": 2.0,
        "think_time": None,
    }
    return {**given_fields, **fields}


def agent(t: float, requests: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    base = {"t": t, "type": "subagent", "agent_id": "agent_001", "status": "completed", "duration_ms": None}
    return {**base, "requests": requests, **fields}


def document(requests: list[dict[str, Any]], name: str = "trace_x") -> bytes:
    head = {"id": name, "models": ["m"], "block_size": SIZE, "hash_id_scope": "local"}
    return json.dumps({**head, "requests": requests}).encode()


def imported(folder: Path, *documents: bytes) -> Imported:
    paths = []
    for number, content in enumerate(documents):
        paths.append(folder / f"{number}.json")
        paths[-1].write_bytes(content)
    return load(paths)


def one(folder: Path, requests: list[dict[str, Any]]) -> Trace:
    result = imported(folder, document(requests))
    return Trace(result.header, result.turns)


def ideal(trace: Trace) -> list[int]:
    """Tokens that each turn shares with an earlier one, turns sent in the order of the trace."""
    tree, tips, reuse = PrefixTree(), [], []
    for index, turn in enumerate(trace.turns):
        parent = trace.parents[index]
        tip = tree.cut(tips[parent], trace.keep[index]) if parent >= 0 else ROOT
        for segment, tokens in turn.append:
            tip = tree.extend(tip, segment, tokens)
        reuse.append(tree.longest_sent(tip))
        tree.mark_sent(tip)
        tips.append(tip)
    return reuse


def naive_prefixes(prompts: list[list[int]]) -> list[int]:
    best = []
    for number, ids in enumerate(prompts):
        shared = [next((k for k, (a, b) in enumerate(zip(ids, old, strict=False)) if a != b), min(len(ids), len(old)))
                  for old in prompts[:number]]  # fmt: skip
        best.append(SIZE * max(shared, default=0))
    return best


def test_a_prompt_continues_the_earlier_request_with_the_longest_common_prefix(tmp_path: Path) -> None:
    trace = one(
        tmp_path,
        [
            request(0, [1, 2, 3]),
            request(10, [1, 2, 3, 4, 5]),
            request(20, [1, 2, 9]),  # falls back behind the previous prompt
            request(30, [1, 2, 3, 4, 8]),  # a fork: longest prefix with turn 1, not with turn 2
        ],
    )
    assert trace.keep == [0, 192, 128, 256]
    assert trace.parents == [-1, 0, 1, 1]
    assert trace.prompt == [202, 330, 202, 330]
    assert ideal(trace) == trace.keep


def test_keep_never_reaches_beyond_the_parents_prompt_when_partial_blocks_have_ids(tmp_path: Path) -> None:
    requests = [request(0, [1, 2], extra=-28), request(10, [1, 2], extra=-28), request(20, [1, 2, 3])]
    trace = one(tmp_path, requests)
    assert trace.prompt == [100, 100, 202]
    assert trace.keep == [0, 100, 100]
    assert trace.header.notes == ["requests whose number of ids is not that of their full blocks: 2"]


def test_ids_that_recur_behind_another_prefix_are_equal_tokens_in_both_places(tmp_path: Path) -> None:
    trace = one(tmp_path, [request(0, [1, 2, 3]), request(10, [4, 2, 5])])
    segments = [dict(turn.append) for turn in trace.turns]
    common = set(segments[0]) & set(segments[1])
    assert len(common) == 1 and segments[0][common.pop()] == SIZE
    assert trace.prompt == [202, 202]
    assert ideal(trace) == [0, 0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=8))
def test_prefixes_agree_with_a_comparison_of_all_pairs(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    requests = [request(10.0 * k, ids, extra=k % 3) for k, ids in enumerate(prompts)]
    trace = one(tmp_path_factory.mktemp("t"), requests)
    expected = naive_prefixes(prompts)
    assert trace.keep == expected
    assert ideal(trace) == expected
    assert trace.prompt == [SIZE * len(ids) + k % 3 for k, ids in enumerate(prompts)]


def test_pauses_come_from_think_time_then_from_the_clock_else_they_are_counted(tmp_path: Path) -> None:
    trace = one(
        tmp_path,
        [
            request(0, [1]),
            request(9, [1, 2], think_time=4.0),
            request(20, [1, 2, 3], api_time=None),
            request(33, [1, 2, 3, 4]),
        ],
    )
    assert [turn.pause for turn in trace.turns] == [0.0, 4.0, 9.0, 0.0]
    assert trace.header.notes == ["pauses unknown (no think_time, no api_time before), set to 0: 1"]


def test_a_call_that_starts_while_another_runs_does_not_wait_for_it(tmp_path: Path) -> None:
    trace = one(
        tmp_path,
        [
            request(0, [1]),
            request(5, [1, 2], api_time=10.0),  # until 15
            request(8, [7], think_time=0.0),  # until 10, at the same time
            request(20, [1, 2, 3]),
        ],
    )
    assert trace.after == [(), (0,), (0,), (1, 2)]
    assert [turn.pause for turn in trace.turns] == [0.0, 3.0, 6.0, 5.0]
    assert trace.turns[2].cause == "tool"  # small beside its neighbour, but no compaction


def test_a_first_pair_of_overlapping_calls_starts_by_the_clock(tmp_path: Path) -> None:
    trace = one(tmp_path, [request(0, [1, 2], api_time=30.0), request(4, [1, 3])])
    assert trace.after == [(), ()]
    assert [turn.at for turn in trace.turns] == [0.0, 4.0]
    assert trace.keep == [0, 64]


def test_a_subagent_recorded_by_its_end_starts_when_it_was_launched(tmp_path: Path) -> None:
    inner = [request(0, [50]), request(3, [50, 51])]
    main = [request(0, [1]), agent(12.5, inner, duration_ms=10_000), request(14, [1, 2], think_time=12.0)]
    trace = one(tmp_path, main)
    turns = {str(turn.ref): turn for turn in trace.turns}
    first = turns["trace_x/agent_001/0"]
    assert (first.after, first.at, first.pause, first.cause) == (["trace_x/0"], 2.5, 0.5, "subagent")
    assert turns["trace_x/agent_001/1"].pause == 1.0
    joined = turns["trace_x/1"]
    assert joined.after == ["trace_x/0", "trace_x/agent_001/1"]
    assert joined.pause == 6.5  # from the end of the agent's last call at 7.5
    assert len(trace.families) == 1


@pytest.mark.parametrize(("begin", "kind"), [(0.0, "relative"), (5.0, "absolute")])
def test_inner_times_of_subagents_may_be_relative_or_absolute(tmp_path: Path, begin: float, kind: str) -> None:
    inner = [request(begin, [50]), request(begin + 4, [50, 51])]
    trace = one(tmp_path, [request(0, [1]), agent(5.0, inner, duration_ms=6_000), request(12, [1, 2])])
    assert [(str(turn.ref), turn.at) for turn in trace.turns] == [
        ("trace_x/0", 0.0),
        ("trace_x/agent_001/0", 5.0),
        ("trace_x/agent_001/1", 9.0),
        ("trace_x/1", 12.0),
    ], kind


def test_nobody_waits_for_an_agent_in_the_background(tmp_path: Path) -> None:
    inner = [request(0, [50], api_time=60.0)]
    trace = one(tmp_path, [request(0, [1]), agent(3, inner, status="async_launched"), request(6, [1, 2])])
    assert [str(turn.ref) for turn in trace.turns] == ["trace_x/0", "trace_x/agent_001/0", "trace_x/1"]
    assert trace.after == [(), (0,), (0,)]
    assert trace.turns[1].pause == 1.0


def test_causes_follow_from_the_input_and_from_a_shrinking_context(tmp_path: Path) -> None:
    trace = one(
        tmp_path,
        [
            request(0, [1, 2, 3, 4, 5], input_types=["text"]),
            request(10, [1, 2, 3, 4, 5, 6]),
            request(20, [1, 2, 3, 4, 5, 6, 7], input_types=["text"]),
            request(30, [1, 8], input_types=["text"]),
            request(40, [9], model="other"),
        ],
    )
    assert [turn.cause for turn in trace.turns] == ["start", "tool", "human", "compaction", "tool"]


def test_zero_outputs_are_kept_and_empty_prompts_dropped(tmp_path: Path) -> None:
    trace = one(tmp_path, [request(0, [1], out=0), request(5, [], extra=0), request(9, [1, 2])])
    assert [turn.output for turn in trace.turns] == [0, 7]
    assert trace.header.notes == ["requests without a prompt, dropped: 1"]


def test_requests_out_of_order_are_sorted_by_their_start(tmp_path: Path) -> None:
    trace = one(tmp_path, [request(10, [1, 2]), request(0, [1])])
    assert [(turn.at, prompt) for turn, prompt in zip(trace.turns, trace.prompt, strict=True)] == [(0, 74), (10, 138)]


def test_exact_copies_are_imported_once_and_named(tmp_path: Path) -> None:
    requests = [request(0, [1]), request(9, [1, 2])]
    result = imported(tmp_path, document(requests, "a"), document(requests, "b"), document(requests[:1], "a"))
    assert result.notes[0] == "b is an exact copy of a and was imported once"
    assert [str(turn.ref) for turn in result.turns] == ["a/0", "a/1", "a~2/0"]
    Trace(result.header, result.turns)


def test_ids_of_different_files_are_different_tokens(tmp_path: Path) -> None:
    result = imported(tmp_path, document([request(0, [1, 2])], "a"), document([request(0, [1, 3])], "b"))
    assert not Trace(result.header, result.turns).shared_segments


def test_the_import_of_a_small_trace_is_as_recorded_in_the_golden_file(tmp_path: Path) -> None:
    inner = [request(0, [1, 20], input_types=["text"]), request(5, [1, 20, 21], out=0)]
    requests = [
        request(0, [1, 2, 3], input_types=["text"]),
        request(8, [1, 2, 3, 4], think_time=6.0),
        agent(21.0, inner, duration_ms=11_000),
        request(25, [1, 2, 3, 4, 5], think_time=15.0),
        request(90, [1, 2, 3, 4, 5, 6], api_time=None, input_types=["text"]),
        request(95, [1, 9], extra=0),
        request(130, [1, 2, 3, 4, 7]),
    ]
    result = imported(tmp_path, document(requests))
    out = tmp_path / "out.jsonl"
    write(out, result.header, result.turns)
    golden = GOLDEN / "blocks.jsonl"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_bytes(out.read_bytes())
    assert out.read_text() == golden.read_text()
    assert read(out).turns == result.turns


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (document([request(0, [1])])[:-9], "not a block-hash trace: Input data was truncated"),
        (document([request(0, [1, 2, 3], extra=-100)]), "the request at t=0 has 3 block ids for 92 tokens"),
        (document([request(0, ["x"])]), "Expected `int`, got `str` - at `$.requests[0].hash_ids[0]`"),  # type: ignore[list-item]
        (document([request(0, [1], out=-1)]), "Expected `int` >= 0"),
        (document([]), "no request with a prompt in it"),
        (document([request(0, [1])]).replace(b'"block_size": 64', b'"block_size": 0'), "block_size is 0"),
    ],
)
def test_broken_files_are_refused_in_one_line_that_names_them(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(ReplayError) as error:
        imported(tmp_path, content)
    assert problem in str(error.value)
    assert "0.json" in str(error.value)
    assert "\n" not in str(error.value)
