"""Synthetic traces: the draws, and the structure of sessions."""

from __future__ import annotations

import re
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.trace import Trace
from replay.trace.synth import PROFILES, generate
from replay.trace.synth.agents import FULL, SYSTEM, TOOLS, WINDOW
from replay.trace.synth.draw import SplitLognormal, exponential, stratified

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module", params=SEEDS)
def agents(request) -> Trace:
    return Trace(*generate("claude-code", 48, request.param))


@given(st.floats(0.001, 0.999), st.floats(1, 1000), st.floats(0.1, 3), st.floats(0.1, 3))
def test_a_cut_distribution_stays_within_its_bounds_and_rises(quantile, p50, low, high):
    cut = SplitLognormal(p50, low, high, least=p50 / 3, most=p50 * 4)
    assert p50 / 3 * 0.999 <= cut.at(quantile) <= p50 * 4 * 1.001
    assert cut.at(quantile) <= cut.at(min(0.9999, quantile + 0.05))


def test_a_split_lognormal_has_the_percentiles_that_it_was_made_from():
    found = SplitLognormal(252, low=0.96, high=1.43)
    assert found.at(0.25) == pytest.approx(132, rel=0.01)
    assert found.at(0.50) == pytest.approx(252)
    assert found.at(0.90) == pytest.approx(1571, rel=0.01)


@given(st.integers(1, 100), st.integers())
def test_strata_hold_one_number_each(count, seed):
    assert sorted(int(value * count) for value in stratified(Random(seed), count)) == list(range(count))


def test_gaps_of_a_poisson_process_have_the_mean_asked_for():
    rng = Random(5)
    assert sum(exponential(rng, 60) for _ in range(20_000)) / 20_000 == pytest.approx(60, rel=0.05)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(profile):
    first, again = generate(profile, 3, 7), generate(profile, 3, 7)
    assert first == again
    assert first[0].seed == 7
    assert first[0].synthetic
    assert generate(profile, 3, 8) != first


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(ReplayError, match="unknown profile 'claude'; nearest: claude-code"):
        generate("claude", 1, 0)


@pytest.mark.parametrize("profile", PROFILES)
def test_fewer_than_one_session_is_refused(profile):
    with pytest.raises(ReplayError, match="at least 1"):
        generate(profile, 0, 0)


def test_contexts_stay_within_the_window(agents):
    assert max(p + turn.output for p, turn in zip(agents.prompt, agents.turns, strict=True)) < WINDOW
    assert max(agents.prompt) <= FULL


def test_all_root_sessions_start_with_the_same_tools_and_system_prompt(agents):
    starts = [turn for turn in agents.turns if turn.at is not None]
    assert len(starts) == 48
    assert all(turn.append[:2] == [("tools", TOOLS), ("system", SYSTEM)] for turn in starts)
    assert agents.shared_segments == {"tools", "system"}
    assert {turn.cause for turn in starts} == {"start", "resume"}


def test_a_session_keeps_its_whole_context_unless_it_compacts_or_breaks(agents):
    kept = lost = 0
    for index, parent in enumerate(agents.parents):
        if parent >= 0:
            whole = agents.keep[index] == agents.prompt[parent] + agents.turns[parent].output
            kept += whole
            lost += not whole
    assert 0.005 < lost / (kept + lost) < 0.04


def test_a_compaction_keeps_a_third_of_a_much_smaller_prompt(agents):
    compactions = [index for index, turn in enumerate(agents.turns) if turn.cause == "compaction"]
    assert compactions
    for index in compactions:
        assert agents.keep[index] == agents.prompt[index] // 3
        assert agents.prompt[index] < 0.6 * agents.prompt[agents.parents[index]]


def test_a_parent_waits_for_the_sub_agents_that_it_started(agents):
    index_of = {str(turn.ref): index for index, turn in enumerate(agents.turns)}
    joined = {last for turn in agents.turns for last in turn.after or () if "/agent-" in last}
    agent_sessions = [name for name in agents.sessions if "/agent-" in name]
    assert agent_sessions
    for name in agent_sessions:
        first, last = agents.sessions[name][0], agents.sessions[name][-1]
        (spawner,) = agents.after[first]
        assert agents.turns[spawner].session == name.split("/")[0]
        assert agents.turns[first].append[0][0] == "tools"
        assert agents.parents[first] == -1
        assert str(agents.turns[last].ref) in joined
    for turn in agents.turns:
        for ref in turn.after or ():
            if "/agent-" in ref and "/agent-" not in turn.session:
                assert index_of[ref] < index_of[str(turn.ref)]


def test_steps_are_mostly_tool_fed_and_humans_are_slower_than_tools(agents):
    tool = [turn.pause for turn in agents.turns if turn.cause == "tool"]
    human = [turn.pause for turn in agents.turns if turn.cause == "human"]
    assert len(human) / (len(human) + len(tool)) == pytest.approx(0.144, abs=0.05)
    assert median(tool) == pytest.approx(0.3, rel=0.2)
    assert median(human) == pytest.approx(84, rel=0.5)


def test_sessions_start_at_the_rate_asked_for():
    _, turns = generate("claude-code", 400, 0, gap=30)
    starts = [turn.at for turn in turns if turn.at is not None]
    assert starts == sorted(starts)
    assert starts[-1] / 399 == pytest.approx(30, rel=0.15)


def test_documents_are_asked_one_at_a_time():
    for profile in ("doc-qa", "evict-and-return"):
        trace = Trace(*generate(profile, 4, 0))
        assert trace.after == [(), *((index,) for index in range(len(trace) - 1))]
        assert len(trace.families) == 1


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_what_a_trace_says_of_itself_counts_one_as_one(profile: str):
    header, _ = generate(profile, 1, 0)
    said = " ".join([header.origin or "", *header.notes])
    assert not re.search(r"\b1 (sessions|others|documents|turns)\b", said)
    assert re.search(r"\b1 (session|other|document)\b", said)
