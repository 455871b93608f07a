"""The importers against the real traces, and against the tables of prefix and append computed from them."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.trace import ROOT, PrefixTree, Trace, Turn, read, write
from replay.trace.importers import Imported, load


def table(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as stream:
        return list(csv.DictReader(stream))


def lines_of(path: Path) -> Iterator[bytes]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    yield from data.splitlines()


@pytest.fixture(scope="module")
def blocks(corpus: Path) -> Imported:
    return load([corpus / "claude-code-blocks" / "traces"])


@pytest.fixture(scope="module")
def logs(corpus: Path) -> Imported:
    return load([corpus / "claude-code-jsonl" / "entire-cli", corpus / "claude-code-jsonl" / "spotter"])


def test_every_block_trace_request_has_the_published_prefix_and_append(blocks: Imported, corpus: Path) -> None:
    trace = Trace(blocks.header, blocks.turns)
    index = {str(turn.ref): i for i, turn in enumerate(trace.turns)}
    rows = table(corpus / "claude-code-blocks" / "requests.csv.gz")
    wrong = []
    for row in rows:
        session = row["trace"] if row["chain"] == "main" else f"{row['trace']}/{row['chain']}"
        i = index.pop(f"{session}/{row['i']}")
        found = (trace.keep[i], trace.turns[i].appended, trace.turns[i].output)
        if found != (int(row["prefix"]), int(row["append"]), int(row["out"])):
            wrong.append((row, found))
    assert not wrong
    assert not index, "turns that the table does not have"
    assert len(rows) == 31_644


def test_the_ideal_reuse_of_every_block_trace_request_is_its_prefix(blocks: Imported) -> None:
    trace = Trace(blocks.header, blocks.turns)
    tree, tips = PrefixTree(), []
    for i, turn in enumerate(trace.turns):
        parent = trace.parents[i]
        tip = tree.cut(tips[parent], trace.keep[i]) if parent >= 0 else ROOT
        for segment, tokens in turn.append:
            tip = tree.extend(tip, segment, tokens)
        assert tree.longest_sent(tip) == trace.keep[i], turn.ref
        tree.mark_sent(tip)
        tips.append(tip)


def test_exact_copies_of_block_traces_are_named_once(blocks: Imported) -> None:
    copies = [note for note in blocks.notes if "exact copy" in note]
    assert copies == [
        f"trace_{copy} is an exact copy of trace_0403 and was imported once" for copy in ("0427", "0432", "0449")
    ]


def test_uncompressed_block_traces_import_as_the_compressed_ones(blocks: Imported, corpus: Path) -> None:
    plain = load([corpus / "claude-code-blocks" / "plain" / "trace_0291.json"])
    assert plain.turns == [turn for turn in blocks.turns if turn.session.split("/")[0] == "trace_0291"]


def test_subagents_of_block_traces_run_between_their_launch_and_their_join(blocks: Imported) -> None:
    trace = Trace(blocks.header, blocks.turns)
    waiting = [turn for turn in trace.turns if turn.after and len(turn.after) > 1 and "/" not in turn.session]
    agents = {turn.session for turn in trace.turns if "/" in turn.session}
    joined = {ref.rpartition("/")[0] for turn in waiting for ref in turn.after or [] if "/agent" in ref}
    assert len(agents) == 38
    # Four run in the background and two end with their trace.
    assert agents - joined == {
        *(f"trace_0295/agent_00{k}" for k in (2, 3, 4, 5)),
        "trace_0004/agent_001",
        "trace_0004/agent_002",
    }
    first = {turn.session: turn for turn in trace.turns if "/" in turn.session and turn.turn == 0}
    assert max(turn.pause for name, turn in first.items() if not name.startswith("trace_0004")) < 2.0
    assert all(turn.at is not None for turn in first.values())


def csv_sessions(corpus: Path, trace: Trace) -> list[str]:
    """Sessions as the table numbers them: files by path, without those that hold no call of their own."""
    folder = corpus / "claude-code-jsonl"
    names = []
    for path in sorted((folder / "entire-cli").iterdir()) + sorted((folder / "spotter").rglob("*.jsonl*"), key=str):
        line = json.loads(next(line for line in lines_of(path) if b'"sessionId"' in line))
        session = line["sessionId"]
        agent = line.get("agentId")
        name = f"{session}/{agent}" if agent else session
        if name in trace.sessions:
            names.append(name)
    return names


def test_every_logged_call_has_the_published_prefix_append_and_trigger(logs: Imported, corpus: Path) -> None:
    trace = Trace(logs.header, logs.turns)
    rows = defaultdict(list)
    for row in table(corpus / "claude-code-jsonl" / "steps.csv.gz"):
        rows[int(row["session"])].append(row)
    names = csv_sessions(corpus, trace)
    assert len(names) == len(rows) == 84
    for number, name in enumerate(names):
        turns = [(trace.turns[i], trace.prompt[i]) for i in trace.sessions[name]]
        assert [(turn.cached, prompt - (turn.cached or 0)) for turn, prompt in turns] == [
            (int(row["prefix"]), int(row["append"])) for row in rows[number]
        ], name
        for (turn, _), row in zip(turns, rows[number], strict=True):
            expected = {"tool"} if row["kind"] == "tool" else {"human", "start", "subagent", "compaction"}
            assert turn.cause in expected, turn.ref
            if turn.after is None and turn.turn > 0:
                assert turn.pause == pytest.approx(max(0.0, float(row["pause_s"])), abs=0.0015), turn.ref


def test_calls_inside_progress_lines_are_sub_sessions_counted_once(logs: Imported, corpus: Path) -> None:
    trace = Trace(logs.header, logs.turns)
    tabled = set(csv_sessions(corpus, trace))
    extra = [turn for turn in trace.turns if turn.session not in tabled]
    assert len(extra) == 540
    assert {turn.session.split("/")[0] for turn in extra} <= tabled
    assert len(trace) == 5_254 + 540


def test_what_a_prompt_keeps_is_what_the_provider_read_unless_it_had_expired(logs: Imported) -> None:
    trace = Trace(logs.header, logs.turns)
    expired = 0
    for i, turn in enumerate(trace.turns):
        parent, cached = trace.parents[i], turn.cached or 0
        if parent < 0:
            continue
        context = trace.prompt[parent] + trace.turns[parent].output
        if trace.keep[i] != min(cached, context):
            expired += 1
            assert trace.keep[i] == trace.prompt[parent] > cached
            assert turn.at is not None and turn.at - (trace.turns[parent].at or 0.0) > 300
    assert f"prompts that had expired at the provider after a long pause, counted as kept: {expired}" in logs.notes
    assert expired == 80


def test_growing_copies_of_a_real_session_count_once(corpus: Path) -> None:
    folder = corpus / "claude-code-jsonl" / "checkpoint-copies"
    assert load([folder]).turns == load([folder / "copy4.jsonl.gz"]).turns


@pytest.mark.parametrize(
    ("folder", "calls"),
    [("claude-code-viewer", 199), ("claude-reliability", 54), ("tracelab-example", 10), ("ccusage", 5)],
)
def test_logs_of_other_versions_import(corpus: Path, folder: str, calls: int) -> None:
    result = load([corpus / "claude-code-jsonl" / folder])
    assert len(Trace(result.header, result.turns)) == calls


def test_inline_subagents_of_real_logs_are_joined(corpus: Path) -> None:
    result = load([corpus / "claude-code-jsonl" / "claude-code-viewer"])
    trace = Trace(result.header, result.turns)
    agents = {turn.session for turn in trace.turns if turn.cause == "subagent" and turn.turn == 0}
    joined = {ref.rpartition("/")[0] for turn in trace.turns for ref in turn.after or [] if "/agent-" in ref}
    # Two hand-made files beside the logs hold sub-agents that no call launched.
    assert len(agents) == 9 and len(agents & joined) == 7


def test_both_kinds_survive_writing_and_reading(blocks: Imported, logs: Imported, tmp_path: Path) -> None:
    for result in (blocks, logs):
        out = tmp_path / "out.jsonl.zst"
        write(out, result.header, result.turns)
        again = read(out)
        assert again.turns == result.turns
        assert again.header == result.header


PATTERNS = {
    "session": re.compile(
        r"([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|session-\d+)(/((a|acompact-)?[0-9a-f]{5,40}|agent-\d+))?"
    ),
    "cause": re.compile(r"start|tool|human|subagent|compaction"),
    "system": re.compile(r"system-[0-9a-f]{12}"),
}


def test_nothing_that_a_person_wrote_reaches_an_import_without_text(corpus: Path, tmp_path: Path) -> None:
    folder = corpus / "claude-code-jsonl"
    result = load([folder])
    for turn in result.turns:
        assert turn.messages is None and turn.tools is None
        assert PATTERNS["session"].fullmatch(turn.session), turn.session
        assert PATTERNS["cause"].fullmatch(turn.cause) or turn.cause == ""
        refs = [turn.parent or turn.session + "/0", *(turn.after or [])]
        assert all(PATTERNS["session"].fullmatch(ref.rpartition("/")[0]) for ref in refs)
        assert all(s == f"{turn.session}/{turn.turn}" or PATTERNS["system"].fullmatch(s) for s, _ in turn.append)
    out = tmp_path / "out.jsonl"
    write(out, result.header, result.turns)
    written = out.read_text()
    words, names = private(folder)
    assert len(words) > 10_000 and len(names) > 50
    assert not {name for name in names if name in written}
    # The header's notes are ours; of the turns, all words are names of fields, causes or parts of ids.
    turns = written.partition("\n")[2]
    ours = {*Turn.__struct_fields__, "compaction", "subagent", "session", "system", "acompact"}
    assert not set(re.findall(r"[A-Za-z]{6,}", turns)) & words - ours


def private(folder: Path) -> tuple[set[str], set[str]]:
    """Words of the logs (not those that could be part of a hexadecimal id); folders, branches and session titles."""
    words: set[str] = set()
    names: set[str] = set()
    for path in sorted(folder.rglob("*.jsonl*")):
        text = b"\n".join(lines_of(path)).decode(errors="replace")
        words.update(re.findall(r"[A-Za-z]{6,}", text))
        names.update(re.findall(r'"(?:cwd|gitBranch|slug)": ?"([^"\\]{8,})"', text))
    return {word for word in words if not re.fullmatch(r"[a-f]+", word)}, names
