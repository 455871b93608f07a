"""Raw Claude Code logs: calls spread over lines, copies, forks, sub-agents, compaction, expiry, privacy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.trace import Trace, Turn, read, write
from replay.trace.importers import Imported, detect, load

GOLDEN = Path(__file__).parent.parent / "golden" / "importers"
MAIN = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"


class Log:
    """Writes the lines of a session as Claude Code does; each follows the one before unless `above` says so."""

    def __init__(self, session: str = MAIN, **common: Any):
        self.common = {"sessionId": session, "version": "2.1.40", "cwd": "/Users/secret/project", **common}
        self.lines: list[dict[str, Any] | str] = []
        self.last: str | None = None
        self.prefix = f"{session[:4]}{common.get('agentId', '')}"

    def line(self, at: float, type: str, *, above: str | None = "", uuid: str = "", **fields: Any) -> str:
        uuid = uuid or f"{self.prefix}-{len(self.lines)}"
        self.lines.append(
            {
                **self.common,
                "type": type,
                "uuid": uuid,
                "parentUuid": self.last if above == "" else above,
                "timestamp": datetime.fromtimestamp(1_770_000_000 + at, timezone.utc).isoformat(),
                **fields,
            }
        )
        self.last = uuid
        return uuid

    def human(self, at: float, text: str = "please do the secret thing", **fields: Any) -> str:
        return self.line(at, "user", message={"role": "user", "content": text}, **fields)

    def result(self, at: float, tool: str, **fields: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": tool, "content": "secret output"}
        return self.line(at, "user", message={"role": "user", "content": [block]}, **fields)

    def reply(self, at: float, id: str, cached: int, new: int, *blocks: Any, out: int = 1, **fields: Any) -> str:
        """A line of call `id`; `blocks` are texts or tool call ids (``tool:...``), default one text."""
        stop = fields.pop("stop", None)
        hour = fields.pop("hour", False)
        usage = {
            "input_tokens": 3,
            "cache_creation_input_tokens": new - 3,
            "cache_read_input_tokens": cached,
            "output_tokens": out,
            "cache_creation": {"ephemeral_1h_input_tokens": new - 3 if hour else 0},
        }
        message = {
            "id": id,
            "role": "assistant",
            "model": fields.pop("model", "claude-x"),
            "content": [_block(block) for block in blocks or ("twelve chars",)],
            "stop_reason": stop,
            "usage": usage,
        }
        return self.line(at, "assistant", message=message, requestId=f"req_{id}", **fields)

    def raw(self, text: str) -> None:
        self.lines.append(text)

    def text(self, lines: Iterable[dict[str, Any] | str] | None = None) -> str:
        found = self.lines if lines is None else lines
        return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in found)


def _block(block: Any) -> Any:
    if isinstance(block, str) and block.startswith("tool:"):
        return {"type": "tool_use", "id": block, "name": "Bash", "input": {}}
    return {"type": "text", "text": block} if isinstance(block, str) else block


def imported(folder: Path, files: dict[str, str], **options: Any) -> Imported:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = load([folder], **options)
    Trace(result.header, result.turns)
    return result


def by_ref(result: Imported) -> dict[str, Turn]:
    return {str(turn.ref).replace(MAIN, "main").replace(OTHER, "other"): turn for turn in result.turns}


def test_lines_of_one_call_are_counted_once_and_its_last_usage_wins(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000, "let me look", out=2)
    log.reply(5, "m1", 15_000, 1_000, "tool:a", out=2)
    log.result(5.5, "tool:a")  # the tool answers while the reply goes on
    log.reply(6, "m1", 15_000, 1_000, "tool:b", out=90, stop="tool_use")
    log.result(8, "tool:b")
    log.reply(11, "m2", 16_000, 500, out=40, stop="end_turn")
    turns = imported(tmp_path, {"a.jsonl": log.text()}).turns
    assert [turn.output for turn in turns] == [90, 40]
    assert [(turn.cached, turn.appended) for turn in turns] == [(15_000, 16_000), (16_000, 500)]
    assert (turns[1].keep, turns[1].pause, turns[1].at) == (16_000, 2.0, 8.0)
    assert [turn.cause for turn in turns] == ["start", "tool"]


def test_placeholder_outputs_are_estimated_from_the_text_and_counted(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000, "x" * 41, out=2)
    result = imported(tmp_path, {"a.jsonl": log.text()})
    assert result.turns[0].output == 11
    assert "outputs estimated from the text (the log has only a placeholder): 1" in result.notes


def test_first_calls_share_the_system_prompt_of_their_version_and_model(tmp_path: Path) -> None:
    files = {}
    for number, (version, cached) in enumerate([("2.0", 15_000), ("2.0", 14_000), ("2.1", 15_000), ("2.0", 90_000)]):
        log = Log(f"{number}" + MAIN[1:], version=version)
        log.human(number * 10.0)
        log.reply(number * 10.0 + 4, f"m{number}", cached, 1_000)
        files[f"{number}.jsonl"] = log.text()
    turns = imported(tmp_path, files).turns
    segments = [turn.append[0][0] for turn in turns]
    assert segments[0] == segments[1] and segments[0].startswith("system-")
    assert segments[2].startswith("system-") and segments[2] != segments[0]
    assert turns[3].append == [(f"3{MAIN[1:]}/0", 91_000)]  # resumed: a private conversation


def test_growing_copies_of_a_session_count_once(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000, "tool:a")
    log.result(5, "tool:a")
    log.reply(9, "m2", 16_000, 500)
    alone = imported(tmp_path / "one", {"a.jsonl": log.text()})
    copies = {f"copy{n}.jsonl": log.text(log.lines[:n]) for n in (2, 3, 4)}
    assert imported(tmp_path / "all", copies).turns == alone.turns


def test_a_forked_file_repeats_the_stem_and_continues_its_fork_point(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000)
    log.human(10)
    log.reply(14, "m2", 16_000, 500)
    fork = Log(OTHER)
    fork.lines = [{**line, "sessionId": OTHER} for line in log.lines[:2] if isinstance(line, dict)]
    fork.human(30, above=fork.lines[-1]["uuid"])  # type: ignore[index]
    fork.reply(34, "m3", 16_000, 700)
    result = imported(tmp_path, {"a.jsonl": log.text(), "b.jsonl": fork.text()})
    turns = by_ref(result)
    assert sorted(turns) == ["main/0", "main/1", "other/0"]
    branch = turns["other/0"]
    assert (branch.parent, branch.keep, branch.appended, branch.pause) == (f"{MAIN}/0", 16_000, 700, 26.0)
    assert branch.cause == "human"


def test_a_rewind_continues_the_earlier_reply_but_waits_for_the_abandoned_one(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    first = log.reply(4, "m1", 15_000, 1_000)
    log.human(10)
    log.reply(14, "m2", 16_000, 500)
    log.human(30, above=first)
    log.reply(34, "m3", 16_000, 700)
    turn = by_ref(imported(tmp_path, {"a.jsonl": log.text()}))["main/2"]
    assert (turn.parent, turn.after, turn.keep, turn.pause) == (f"{MAIN}/0", [f"{MAIN}/1"], 16_000, 16.0)


def test_a_compaction_starts_a_fresh_context(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 100_000)
    last = log.human(9, "before")
    log.line(20, "system", subtype="compact_boundary", above=None, logicalParentUuid=last)
    log.human(20, "summary", isCompactSummary=True)
    log.reply(25, "m2", 15_000, 20_000)
    result = imported(tmp_path, {"a.jsonl": log.text()}, keep_text=True)
    turn = result.turns[1]
    assert (turn.cause, turn.keep, turn.appended, turn.pause) == ("compaction", 15_000, 20_000, 16.0)
    assert turn.messages == [{"role": "user", "content": "summary"}]


@pytest.mark.parametrize(
    ("gap", "hour", "prompt", "keep"),
    [
        (310.0, False, 60_500, 60_000),  # expired: the content is still the same
        (290.0, False, 60_500, 9_000),  # a real break
        (310.0, True, 60_500, 9_000),  # written to live an hour, so a real break too
        (3_700.0, True, 60_500, 60_000),
        (310.0, False, 55_000, 9_000),  # the prompt shrank: something was taken out
    ],
)
def test_a_miss_after_the_caches_lifetime_is_an_expiry_and_keeps_the_prompt(
    tmp_path: Path, gap: float, hour: bool, prompt: int, keep: int
) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 0, 60_000, hour=hour)
    log.human(4 + gap)
    log.reply(8 + gap, "m2", 9_000, prompt - 9_000)
    turn = imported(tmp_path, {"a.jsonl": log.text()}).turns[1]
    assert (turn.keep, turn.cached, turn.appended) == (keep, 9_000, prompt - keep)


def test_keep_never_exceeds_the_logged_context(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 0, 20_000, out=50, stop="end_turn")
    log.human(10)
    log.reply(14, "m2", 25_000, 500)
    turn = imported(tmp_path, {"a.jsonl": log.text()}).turns[1]
    assert (turn.keep, turn.appended, turn.cached) == (20_050, 5_450, 25_000)


def subagent_logs(background: bool = False) -> tuple[Log, Log]:
    """A session that runs one sub-agent, and the sub-agent's own log."""
    main, side = Log(), Log(MAIN, agentId="a1b2c3d", isSidechain=True)
    main.human(0)
    task = {"type": "tool_use", "id": "tool:t", "name": "Task", "input": {"prompt": "look around"}}
    main.reply(4, "m1", 15_000, 1_000, task)
    side.human(5, "look around")
    side.reply(8, "s1", 10_000, 2_000, "tool:x")
    side.result(9, "tool:x")
    side.reply(12, "s2", 12_000, 300)
    status = "async_launched" if background else "completed"
    main.result(13, "tool:t", toolUseResult={"agentId": "a1b2c3d", "status": status})
    main.reply(16, "m2", 16_000, 400)
    return main, side


def progress(main: Log, side: Log) -> Log:
    """The main log with the sub-agent's lines inside `progress` lines."""
    mixed = Log()
    mixed.lines = list(main.lines[:2])
    for number, line in enumerate(side.lines):
        assert isinstance(line, dict)
        inner = {name: line[name] for name in ("type", "message", "uuid", "timestamp")}
        data = {"type": "agent_progress", "agentId": "a1b2c3d", "message": inner}
        mixed.line(5 + number, "progress", above=None, uuid=f"p{number}", data=data, parentToolUseID="tool:t")
    mixed.lines += main.lines[2:]
    return mixed


def inline(main: Log, side: Log) -> Log:
    """The main log with the sub-agent's lines among its own, without the agent's name."""
    mixed = Log()
    hidden = [{k: v for k, v in line.items() if k != "agentId"} for line in side.lines if isinstance(line, dict)]
    mixed.lines = [*main.lines[:2], *hidden, *main.lines[2:]]
    return mixed


@pytest.mark.parametrize("form", ["separate", "progress", "both", "inline"])
def test_subagents_are_found_in_each_of_their_forms_and_joined(tmp_path: Path, form: str) -> None:
    main, side = subagent_logs()
    files = {
        "separate": {f"{MAIN}.jsonl": main.text(), f"{MAIN}/subagents/agent-a1b2c3d.jsonl": side.text()},
        "progress": {f"{MAIN}.jsonl": progress(main, side).text()},
        "both": {f"{MAIN}.jsonl": progress(main, side).text(), f"{MAIN}/subagents/agent-a1b2c3d.jsonl": side.text()},
        "inline": {f"{MAIN}.jsonl": inline(main, side).text()},
    }[form]
    turns = by_ref(imported(tmp_path, files))
    name = "agent-2" if form == "inline" else "a1b2c3d"
    assert list(turns) == ["main/0", f"main/{name}/0", f"main/{name}/1", "main/1"]
    first, second = turns[f"main/{name}/0"], turns[f"main/{name}/1"]
    assert (first.after, first.pause, first.cause, first.parent) == ([f"{MAIN}/0"], 1.0, "subagent", None)
    assert (second.keep, second.pause, second.cause) == (12_000, 1.0, "tool")
    joined = turns["main/1"]
    assert joined.after == [f"{MAIN}/0", f"{MAIN}/{name}/1"]
    assert joined.pause == 1.0
    assert joined.keep == 16_000


def test_nobody_waits_for_a_subagent_in_the_background(tmp_path: Path) -> None:
    main, side = subagent_logs(background=True)
    turns = by_ref(imported(tmp_path, {"a.jsonl": main.text(), "agent-a1b2c3d.jsonl": side.text()}))
    assert turns["main/a1b2c3d/0"].after == [f"{MAIN}/0"]
    assert turns["main/1"].after is None


def test_a_subagents_file_alone_starts_by_the_clock(tmp_path: Path) -> None:
    turns = by_ref(imported(tmp_path, {"agent-a1b2c3d.jsonl": subagent_logs()[1].text()}))
    assert turns["main/a1b2c3d/0"].at == 0.0 and turns["main/a1b2c3d/0"].after is None


def test_the_summary_call_of_a_compaction_stands_between_the_contexts(tmp_path: Path) -> None:
    main, side = Log(), Log(MAIN, agentId="acompact-0a1b2c", isSidechain=True)
    main.human(0)
    last = main.reply(4, "m1", 15_000, 100_000)
    side.human(10, "summarise", above=last)
    side.reply(40, "s1", 15_000, 101_000)
    main.line(41, "system", subtype="compact_boundary", above=None, logicalParentUuid=last)
    main.human(41, "summary")
    main.reply(45, "m2", 15_000, 20_000)
    turns = by_ref(imported(tmp_path, {"a.jsonl": main.text(), "agent-acompact-0a1b2c.jsonl": side.text()}))
    summary = turns["main/acompact-0a1b2c/0"]
    assert (summary.parent, summary.pause, summary.cause) == (f"{MAIN}/0", 6.0, "compaction")
    assert turns["main/1"].after == [f"{MAIN}/0", f"{MAIN}/acompact-0a1b2c/0"]
    assert turns["main/1"].pause == 1.0


def test_lines_that_are_no_calls_are_skipped_and_counted(tmp_path: Path) -> None:
    log = Log()
    log.raw('{"type": "summary", "summary": "a secret", "leafUuid": "x"}')
    log.human(0)
    log.raw("not json")
    log.raw("42")
    log.raw('["a list"]')
    log.reply(2, "err", 0, 1_000, model="<synthetic>")
    log.line(3, "assistant", message={"id": "m0", "role": "assistant", "content": "no usage"})
    log.reply(4, "m1", 15_000, 1_000)
    log.raw('{"type": "assistant", "mess')
    result = imported(tmp_path, {"a.jsonl": log.text()})
    assert len(result.turns) == 1
    assert {
        "lines that are not JSON, skipped: 2",
        "lines of unknown form, skipped: 2",
        "replies that no model gave (API errors and the like), skipped: 1",
        "reply lines without token usage, skipped: 1",
    } <= set(result.notes)


def test_times_out_of_order_give_no_negative_pause(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(10, "m1", 15_000, 1_000, "tool:a")
    log.result(7, "tool:a")
    log.reply(12, "m2", 16_000, 100)
    result = imported(tmp_path, {"a.jsonl": log.text()})
    assert [turn.pause for turn in result.turns] == [0.0, 0.0]
    assert any(note.startswith("pauses negative") and note.endswith(": 1") for note in result.notes)


def test_missing_times_and_links_fall_back_to_the_order_of_lines(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000)
    log.reply(9, "m2", 16_000, 100)
    for line in log.lines:
        assert isinstance(line, dict)
        del line["timestamp"], line["uuid"], line["parentUuid"]
    result = imported(tmp_path, {"a.jsonl": log.text()})
    assert [(turn.keep, turn.at, turn.pause) for turn in result.turns] == [(None, 0.0, 0.0), (16_000, None, 0.0)]
    assert "pauses unknown (lines without a time), set to 0: 1" in result.notes


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    log = Log()
    log.human(0, uuid="u1", above="u2")
    log.human(1, uuid="u2", above="u1")
    log.reply(4, "m1", 15_000, 1_000)
    assert len(imported(tmp_path, {"a.jsonl": log.text()}).turns) == 1


def test_text_is_kept_only_on_request(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000, "looking", "tool:a", "tool:b")
    log.result(5, "tool:a")
    log.result(6, "tool:b", above=log.lines[1]["uuid"])  # type: ignore[index]
    log.human(8, "and this")
    log.reply(9, "m2", 16_000, 500)
    files = {"a.jsonl": log.text()}
    assert all(turn.messages is None for turn in imported(tmp_path, files).turns)
    turns = imported(tmp_path, files, keep_text=True).turns
    assert turns[0].messages == [{"role": "user", "content": "please do the secret thing"}]
    said = turns[1].messages
    assert said is not None
    assert [message["role"] for message in said] == ["assistant", "user", "user", "user"]
    assert [block["type"] for block in said[0]["content"]] == ["text", "tool_use", "tool_use"]
    assert [said[k]["content"][0]["tool_use_id"] for k in (1, 2)] == ["tool:a", "tool:b"]
    assert said[3]["content"] == "and this"


def test_names_that_a_person_chose_do_not_reach_the_trace(tmp_path: Path) -> None:
    main, side = subagent_logs()
    text = main.text().replace(MAIN, "secret-project").replace("a1b2c3d", "secret@team")
    agent = side.text().replace(MAIN, "secret-project").replace("a1b2c3d", "secret@team")
    result = imported(tmp_path, {"secret.jsonl": text, "agent-secret.jsonl": agent})
    assert sorted({turn.session for turn in result.turns}) == ["session-1", "session-1/agent-2"]
    out = tmp_path / "out.jsonl"
    write(out, result.header, result.turns)
    assert "secret" not in out.read_text()


def test_the_import_of_a_small_log_is_as_recorded_in_the_golden_file(tmp_path: Path) -> None:
    main, side = subagent_logs()
    main.human(400)
    main.reply(405, "m3", 0, 17_000, out=33, stop="end_turn")
    main.line(500, "system", subtype="compact_boundary", above=None, logicalParentUuid=main.last)
    main.human(500, "summary")
    main.reply(507, "m4", 15_000, 3_000)
    result = imported(tmp_path, {"a.jsonl": main.text(), "agent-a1b2c3d.jsonl": side.text()})
    out = tmp_path / "out.jsonl"
    write(out, result.header, result.turns)
    golden = GOLDEN / "claude_code.jsonl"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_bytes(out.read_bytes())
    assert out.read_text() == golden.read_text()
    assert read(out).turns == result.turns


def test_a_log_without_a_call_is_refused(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    path = tmp_path / "a.jsonl"
    path.write_text(log.text())
    with pytest.raises(ReplayError, match=r"a\.jsonl: no model call with token usage in it"):
        load([path])


def test_sources_of_unknown_format_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 3}\n')
    with pytest.raises(ReplayError, match=r"no known format found; known: claude-code-blocks .*; claude-code "):
        load([path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReplayError, match="empty: no logs in there"):
        load([tmp_path / "empty"])
    with pytest.raises(ReplayError, match="unknown format 'claude-cod'; nearest: claude-code"):
        load([path], format="claude-cod")
    with pytest.raises(ReplayError, match=r"missing\.jsonl: no such file"):
        load([tmp_path / "missing.jsonl"])
    path.write_text('{"format":"replay-trace","version":1,"name":"x"}\n')
    with pytest.raises(ReplayError, match="already in the native format"):
        load([path])


def test_files_of_other_formats_in_a_folder_are_skipped_and_counted(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000)
    files = {"a.jsonl": log.text(), "agent.meta.json": '{"toolUseId": "x"}', "notes.txt": "hello"}
    result = imported(tmp_path, files)
    assert "files of unknown format in the given folders, skipped: 1" in result.notes


def test_formats_are_told_from_the_content() -> None:
    log = Log()
    log.human(0)
    assert detect(log.text().encode()) == "claude-code"
    assert detect(b"\n\n{}\n") is None
    assert detect(b"\xff\xfe\x00") is None
    assert detect(b'{"id": "t", "block_size": 64, "requests": [') == "claude-code-blocks"


def test_files_of_both_formats_become_one_trace_and_progress_counts_all(tmp_path: Path) -> None:
    log = Log()
    log.human(0)
    log.reply(4, "m1", 15_000, 1_000)
    request = {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [1], "api_time": 1.0}
    blocks = json.dumps({"id": "t", "block_size": 64, "requests": [request]})
    seen: list[tuple[int, int]] = []
    files = {"a.jsonl": log.text(), "b.json": blocks}
    result = imported(tmp_path, files, progress=lambda done, total: seen.append((done, total)))
    assert {turn.session for turn in result.turns} == {MAIN, "t"}
    assert seen == [(1, 2), (2, 2)]
    assert result.header.name == "claude-code+t"
    assert result.header.block_tokens is None


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_lines_lost_repeated_or_out_of_order_still_give_a_valid_trace_with_each_call_once(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    main, side = subagent_logs()
    main.human(400)
    main.reply(405, "m3", 0, 17_000)
    main.line(500, "system", subtype="compact_boundary", above=None, logicalParentUuid=main.last)
    main.human(500)
    main.reply(507, "m4", 15_000, 3_000)
    lines = progress(main, side).lines + side.lines
    chosen = data.draw(st.lists(st.sampled_from(range(len(lines))), min_size=1, max_size=2 * len(lines)))
    split = data.draw(st.integers(0, len(chosen)))
    files = {
        f"{number}.jsonl": main.text([lines[k] for k in part])
        for number, part in enumerate((chosen[:split], chosen[split:]))
        if part
    }
    calls = set(re.findall(r'"id": "([ms]\d)"', "".join(files.values())))
    folder = tmp_path_factory.mktemp("log")
    if not calls:
        with pytest.raises(ReplayError):
            imported(folder, files, format="claude-code")
        return
    result = imported(folder, files, format="claude-code")
    assert len(result.turns) == len(calls)
    out = folder / "out.jsonl"
    write(out, result.header, result.turns)
    assert read(out).turns == result.turns


@pytest.mark.parametrize(
    "block",
    [
        None,
        7,
        {"type": 5},
        {"type": "tool_use", "id": 3, "input": None},
        {"type": "text", "text": ["x"]},
        {"type": "tool_result", "tool_use_id": ["x"]},
    ],
)
def test_content_of_an_unexpected_form_does_no_harm(tmp_path: Path, block: Any) -> None:
    log = Log()
    log.line(0, "user", message={"role": "user", "content": [block]})
    log.reply(4, "m1", 15_000, 1_000, "ok")
    line = log.lines[1]
    assert isinstance(line, dict)
    line["message"]["content"] = [block]
    assert len(imported(tmp_path, {"a.jsonl": log.text()}, keep_text=True).turns) == 1
