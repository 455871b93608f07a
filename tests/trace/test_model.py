"""References and totals of the trace model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.trace import Header, Ref, Trace, Turn
from replay.trace.model import FORMAT, VERSION


@given(st.text(min_size=1), st.integers(0, 10**6))
def test_a_reference_reads_back_as_written(session, turn):
    assert Ref.parse(str(Ref(session, turn))) == Ref(session, turn)


@pytest.mark.parametrize("text", ["", "s", "/3", "s/", "s/x", "s/-1", "s/1.0"])
def test_what_is_not_session_and_turn_is_refused(text):
    with pytest.raises(ValueError, match=r"not of the form|invalid literal"):
        Ref.parse(text)


def test_totals_follow_from_the_turns():
    turns = [
        Turn(session="a", turn=0, at=0, append=[("x", 100), ("y", 20)], output=7, cause="start"),
        Turn(session="a", turn=1, keep=100, append=[("z", 5)], output=3, cause="tool"),
        Turn(session="b", turn=0, at=4, append=[("x", 50)], cause="start"),
    ]
    trace = Trace(Header(format=FORMAT, version=VERSION, name="t"), iter(turns))
    assert [turn.appended for turn in trace.turns] == [120, 5, 50]
    assert trace.prompt == [120, 105, 50]
    assert (trace.prompt_tokens, trace.output_tokens, len(trace)) == (275, 10, 3)
    assert trace.sessions == {"a": [0, 1], "b": [2]}
    assert trace.causes == {"start": 2, "tool": 1}
    assert repr(trace) == "Trace('t', sessions=2, turns=3)"
