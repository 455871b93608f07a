"""The bundled traces are what their README says they are."""

from __future__ import annotations

import numpy as np
import pytest

from replay.resources import data_path
from replay.trace import Trace, read, write
from replay.trace.order import contexts, nominal
from replay.trace.synth import generate

MADE_BY = {
    "claude_code.jsonl": ("claude-code", 64, 215),
    "doc_qa.jsonl": ("doc-qa", 1, 0),
    "evict_and_return.jsonl": ("evict-and-return", 36, 0),
}
TRACELAB = {
    "prefix": 126_180,
    "append": 857,
    "output": 252,
    "tool pause": 0.3,
    "human pause": 84,
    "tool-fed steps a session": 15,
    "turns a session": 16,
    "ideal reuse": 0.957,
}
"""Published medians of Claude Code steps (arXiv 2606.30560), and the share of prompt tokens reused."""


def bundled(name: str) -> Trace:
    return read(data_path("traces", name))


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    trace = bundled("claude_code.jsonl")
    ideal = np.array(contexts(trace, nominal(trace).order).ideal)
    prompt = np.array(trace.prompt)
    pause = {cause: [turn.pause for turn in trace.turns if turn.cause == cause] for cause in ("tool", "human")}
    roots = [turns for name, turns in trace.sessions.items() if "/agent-" not in name]
    tool_fed = [sum(trace.turns[index].cause == "tool" for index in turns) for turns in roots]
    return {
        "prefix": float(np.median(ideal)),
        "append": float(np.median(prompt - ideal)),
        "output": float(np.median([turn.output for turn in trace.turns])),
        "tool pause": float(np.median(pause["tool"])),
        "human pause": float(np.median(pause["human"])),
        "tool-fed steps a session": float(np.median(tool_fed)),
        "turns a session": float(np.median([len(turns) for turns in trace.sessions.values()])),
        "ideal reuse": float(ideal.sum() / prompt.sum()),
    }


@pytest.mark.parametrize("figure", TRACELAB)
def test_claude_code_is_within_a_tenth_of_the_published_figure(measured, figure):
    assert measured[figure] == pytest.approx(TRACELAB[figure], rel=0.1)


def test_claude_code_reuse_is_within_one_point_of_the_published_share(measured):
    assert measured["ideal reuse"] == pytest.approx(0.957, abs=0.01)


@pytest.mark.parametrize("name", MADE_BY)
def test_a_bundled_trace_is_made_by_the_command_in_its_readme(tmp_path, name):
    profile, sessions, seed = MADE_BY[name]
    write(tmp_path / name, *generate(profile, sessions, seed))
    assert (tmp_path / name).read_bytes() == data_path("traces", name).read_bytes()
    readme = data_path("traces", "README.md").read_text()
    seed_option = f" --seed {seed}" if seed else ""
    assert f"replay synth {profile} --sessions {sessions}{seed_option} -o traces/{name}" in readme


@pytest.mark.parametrize("name", MADE_BY)
def test_a_bundled_trace_says_that_it_is_synthetic(name):
    assert bundled(name).header.synthetic


def test_claude_code_fits_a_repository_and_a_model_of_262144_tokens():
    path = data_path("traces", "claude_code.jsonl")
    trace = read(path)
    assert path.stat().st_size < 1.5e6
    assert max(p + turn.output for p, turn in zip(trace.prompt, trace.turns, strict=True)) < 200_000


def test_every_bundled_trace_is_listed():
    assert {path.name for path in data_path("traces").glob("*.jsonl*")} >= set(MADE_BY)
    readme = data_path("traces", "README.md").read_text()
    for path in data_path("traces").glob("*.jsonl*"):
        assert f"`{path.name}`" in readme


def test_doc_qa_asks_each_length_twice_with_different_questions():
    trace = bundled("doc_qa.jsonl")
    ideal = contexts(trace, nominal(trace).order).ideal
    assert trace.prompt == [1056, 1056, 4128, 4128, 16416, 16416]
    assert ideal == [0, 1024, 0, 4096, 0, 16384]
    assert {turn.output for turn in trace.turns} == {1}


def test_evict_and_return_comes_back_after_36_other_documents():
    trace = bundled("evict_and_return.jsonl")
    ideal = contexts(trace, nominal(trace).order).ideal
    assert [turn.session for turn in trace.turns[:2]] == ["first", "first"]
    assert len({turn.session for turn in trace.turns[2:-1]} - {"first"}) == 36
    assert trace.turns[-1].session == "first"
    assert ideal == [0, 16384, *[0] * 36, 16384]
    assert set(trace.prompt) == {16416}
    assert {turn.output for turn in trace.turns} == {1}
