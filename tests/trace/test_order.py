"""The nominal schedule and ideal reuse, against plain definitions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from replay.trace import Header, Trace, Turn
from replay.trace.model import FORMAT, VERSION
from replay.trace.order import contexts, nominal

HEADER = Header(format=FORMAT, version=VERSION, name="t")


@st.composite
def traces(draw) -> Trace:
    """Small traces of a few sessions that fork, join, shrink and share segments; lines in mixed order."""
    turns: list[Turn] = []
    context: list[int] = []
    count: dict[str, int] = {}
    for _ in range(draw(st.integers(1, 12))):
        session = draw(st.sampled_from("ab"))
        number = count.get(session, 0)
        own = [i for i, turn in enumerate(turns) if turn.session == session]
        parent = own[-1] if own else draw(st.sampled_from([None, *range(len(turns))]))
        after = (
            draw(st.none() | st.lists(st.sampled_from(range(len(turns))), max_size=2, unique=True)) if turns else None
        )
        append = draw(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 5)), min_size=1, max_size=2))
        output = draw(st.integers(0, 3))
        keep = draw(st.integers(0, context[parent])) if parent is not None else 0
        turns.append(
            Turn(
                session=session,
                turn=number,
                at=draw(st.integers(0, 9)),
                parent=None if parent is None or own else str(turns[parent].ref),
                after=None if after is None else [str(turns[i].ref) for i in after],
                pause=draw(st.integers(0, 4)),
                keep=keep,
                append=append,
                output=output,
            )
        )
        context.append(keep + sum(tokens for _, tokens in append) + output)
        count[session] = number + 1
    return Trace(HEADER, sorted(turns, key=lambda turn: turn.session))


def spelt(trace: Trace) -> tuple[list[list], list[list]]:
    """Prompts and contexts as lists of tokens."""
    prompts: dict[int, list] = {}

    def prompt(index: int) -> list:
        if index not in prompts:
            parent = trace.parents[index]
            kept = context(parent)[: trace.keep[index]] if parent >= 0 else []
            added = [(seg, k) for seg, tokens in trace.turns[index].append for k in range(tokens)]
            prompts[index] = kept + added
        return prompts[index]

    def context(index: int) -> list:
        return prompt(index) + [("out", index, k) for k in range(trace.turns[index].output)]

    every = range(len(trace))
    return [prompt(index) for index in every], [context(index) for index in every]


def common(a: list, b: list) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(deadline=None)
@given(traces())
def test_every_turn_is_sent_once_in_order_of_time_and_after_what_it_needs(trace):
    order, sent = nominal(trace)
    place = {index: position for position, index in enumerate(order)}
    assert sorted(order) == list(range(len(trace)))
    assert [sent[index] for index in order] == sorted(sent)
    for index, turn in enumerate(trace.turns):
        needs = [*trace.after[index], *([trace.parents[index]] if trace.parents[index] >= 0 else [])]
        assert all(place[need] < place[index] for need in needs)
        due = max((sent[need] for need in trace.after[index]), default=None)
        earliest = turn.at if due is None else due + turn.pause
        assert sent[index] == max([earliest, *(sent[need] for need in needs)])


@settings(deadline=None)
@given(traces())
def test_ideal_reuse_is_the_longest_prefix_of_anything_sent_before(trace):
    order = nominal(trace).order
    found = contexts(trace, order)
    prompts, whole = spelt(trace)
    for position, index in enumerate(order):
        before = [common(prompts[index], whole[other]) for other in order[:position]]
        assert found.ideal[index] == max(before, default=0)
        assert found.prompt[index].depth == trace.prompt[index] == len(prompts[index])
        assert found.context[index].depth == len(whole[index])


def test_pauses_count_from_the_last_of_what_a_turn_waits_for():
    trace = Trace(
        HEADER,
        [
            Turn(session="s", turn=0, at=10, append=[("a", 1)]),
            Turn(session="agent", turn=0, after=["s/0"], pause=5, append=[("b", 1)]),
            Turn(session="s", turn=1, after=["s/0", "agent/0"], pause=2, append=[("c", 1)]),
            Turn(session="t", turn=0, at=16, append=[("d", 1)]),
        ],
    )
    assert nominal(trace).sent == [10, 15, 17, 16]
    assert nominal(trace).order == [0, 1, 3, 2]
