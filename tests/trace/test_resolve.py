"""What makes a list of turns a trace, and what each mistake is told as."""

from __future__ import annotations

import math

import pytest

from replay.errors import ReplayError
from replay.trace import Header, Trace, Turn
from replay.trace.model import FORMAT, VERSION

HEADER = Header(format=FORMAT, version=VERSION, name="t")


def turn(name: str, append: int = 10, **fields) -> Turn:
    session, number = name.rsplit("/", 1)
    return Turn(session=session, turn=int(number), append=[(name, append)] if append else [], **fields)


def trace(*turns: Turn, **fields) -> Trace:
    return Trace(HEADER, turns, **fields)


def test_defaults_continue_the_previous_turn_with_its_whole_context():
    t = trace(turn("s/0", 100, at=0, output=5), turn("r/0", at=1), turn("s/1", 7), turn("s/4", 7))
    assert t.parents == [-1, -1, 0, 2]
    assert t.after == [(), (), (0,), (2,)]
    assert t.keep == [0, 0, 105, 112]
    assert t.prompt == [100, 10, 112, 119]


def test_a_parent_may_stand_later_in_the_file():
    t = trace(turn("agent/0", parent="s/0", keep=4), turn("s/0", 100, at=0))
    assert t.parents == [1, -1]
    assert t.prompt == [14, 100]


def test_families_join_sessions_that_wait_for_or_continue_each_other():
    t = trace(
        turn("a/0", at=0),
        turn("b/0", at=0),
        turn("a-agent/0", after=["a/0"]),
        turn("c/0", parent="b/0", keep=3, after=[], at=2),
        turn("a/1", after=["a/0", "a-agent/0"]),
        turn("d/0", at=9),
    )
    assert t.family == [0, 1, 0, 1, 0, 2]
    assert t.families == [[0, 2, 4], [1, 3], [5]]


def test_shared_segments_are_those_of_more_than_one_family():
    tools, own = ("tools", 9), ("own", 9)
    t = trace(
        Turn(session="a", turn=0, at=0, append=[tools, own]),
        Turn(session="a-agent", turn=0, after=["a/0"], append=[own]),
        Turn(session="b", turn=0, at=0, append=[tools]),
    )
    assert t.shared_segments == {"tools"}


@pytest.mark.parametrize(
    ("turns", "line", "problem"),
    [
        ([turn("s/0", at=0), turn("s/0")], 3, "occurs twice"),
        ([turn("s/1", at=0), turn("s/0")], 3, "comes after turn 1 of the same session"),
        ([turn("s/0", at=0), turn("s/1", parent="x/0")], 3, "parent 'x/0' does not exist"),
        ([turn("s/0", at=0), turn("s/1", parent="")], 3, "not of the form 'session/turn'"),
        ([turn("s/0", at=0), turn("s/1", after=["s/7"])], 3, "after 's/7' does not exist"),
        ([turn("s/0", at=0), turn("s/1", after=["s"])], 3, "not of the form 'session/turn'"),
        ([turn("s/0", at=0, output=3), turn("s/1", keep=14)], 3, "keep is 14 tokens but its parent s/0 has 13"),
        ([turn("s/0", at=0, keep=1)], 2, "keep is 1 tokens but it has no parent"),
        ([turn("s/0", at=0), turn("s/1", 0, keep=0)], 3, "prompt is empty"),
        ([turn("s/0")], 2, "needs a start time"),
        ([turn("s/0", at=0), turn("s/1", after=[])], 3, "needs a start time"),
        ([turn("s/0", at=-1.0)], 2, "at is -1.0"),
        ([turn("s/0", at=math.nan)], 2, "at is nan"),
        ([turn("s/0", at=0, pause=math.inf)], 2, "pause is inf"),
        ([turn("s/0", at=0, output=-1)], 2, "output is -1"),
        ([turn("s/0", at=0), turn("s/1", keep=-1)], 3, "keep is -1"),
        ([turn("s/0", -3, at=0)], 2, "append of segment 's/0' has -3 tokens"),
    ],
)
def test_a_mistake_is_one_line_that_names_line_and_turn(turns, line, problem):
    with pytest.raises(ReplayError) as error:
        trace(*turns, source="file.jsonl")
    message = str(error.value)
    assert message.startswith(f"file.jsonl:{line}: turn ")
    assert problem in message
    assert "\n" not in message


def test_a_cycle_is_told_by_a_turn_that_is_in_it():
    with pytest.raises(ReplayError, match=r"turn (a|b)/0: waits for itself"):
        trace(
            turn("downstream/0", after=["a/0"]),
            turn("a/0", after=["b/0"]),
            turn("b/0", after=["a/0"]),
        )


def test_a_turn_that_waits_for_itself_is_a_cycle():
    with pytest.raises(ReplayError, match="turn s/0: waits for itself"):
        trace(turn("s/0", after=["s/0"]))


def test_line_numbers_of_the_file_are_used_where_given():
    with pytest.raises(ReplayError, match=r"^f:41: turn s/0"):
        trace(turn("s/0"), source="f", lines=[41])


def test_no_turns_are_not_a_trace():
    with pytest.raises(ReplayError, match="no turns"):
        trace()
