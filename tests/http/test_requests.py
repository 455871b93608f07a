"""What is put on the wire: lengths, isolation, ids, real messages, and a key that goes nowhere else."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from replay.backends.http import HttpBackend
from replay.backends.preset import Preset, load
from replay.errors import ReplayError
from replay.load.clock import RunClock, run
from replay.load.content import Content
from replay.load.outcome import Request
from replay.trace import ROOT, PrefixTree, Turn

KEY = "sk-top-secret-42"


def body(mock: Any, number: int = 0) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(mock.requests[number][2])
    return sent


def ok(wire: Any) -> list[bytes]:
    return [wire.stream(wire.token(), wire.usage())]


def test_vllm_gets_ids_exact_lengths_a_salt_and_our_request_id(wire: Any, mock: Any, send: Any) -> None:
    server = mock(ok(wire))
    send(server, salt="run1")
    sent = body(server)
    assert server.requests[0][0] == "POST /v1/completions HTTP/1.1"
    assert sent.pop("prompt") == Content(7).tokens("segment 0", 0, 64).tolist()
    assert sent == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "run1",
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
        "max_tokens": 2,
        "min_tokens": 2,
        "request_id": "run1-s/0",
    }
    assert server.requests[0][1]["x-session-id"] == "s"


def test_each_run_has_its_own_salt(wire: Any, mock: Any, send: Any) -> None:
    servers = [mock(ok(wire)), mock(ok(wire))]
    for server in servers:
        send(server)
    assert body(servers[0])["cache_salt"] != body(servers[1])["cache_salt"]


def test_sglang_is_asked_for_tiers(wire: Any, mock: Any, send: Any) -> None:
    server = mock(ok(wire))
    send(server, preset=Preset(name="sglang", engine="sglang"))
    assert body(server)["return_cached_tokens_details"] is True
    assert body(server)["rid"].endswith("-s/0")


def test_an_lmcache_server_is_asked_for_tiers(wire: Any, mock: Any, send: Any) -> None:
    server = mock(ok(wire))
    send(server, preset=Preset(name="l", connector="lmcache-mp"))
    assert body(server)["kv_transfer_params"] == {"cached_token_stats": True}


def test_a_hosted_service_gets_chat_with_standard_fields_and_salted_text(wire: Any, mock: Any, send: Any) -> None:
    servers = [mock([wire.stream(wire.event({"choices": [{"delta": {"content": "x"}}]}), wire.usage())]) for _ in "ab"]
    for server in servers:
        send(server, preset=Preset(name="openai", engine="openai"))
    sent = body(servers[0])
    assert set(sent) == {"model", "stream", "stream_options", "max_tokens", "messages"}
    assert sent["messages"][0]["content"] != body(servers[1])["messages"][0]["content"]


def test_anthropic_gets_messages_and_is_asked_to_cache_them(wire: Any, mock: Any, send: Any) -> None:
    events = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 50}}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    named = [b"event: %s\n%s" % (e["type"].encode(), wire.event(e)) for e in events]
    server = mock([wire.stream(*named)])
    got = send(server, preset=Preset(name="anthropic", engine="anthropic"))
    assert (got.status, got.prompt_tokens, got.external, got.output_tokens) == ("ok", 60, 50, 2), got.error
    assert server.requests[0][0] == "POST /v1/messages HTTP/1.1"
    assert server.requests[0][1]["anthropic-version"] == "2023-06-01"
    assert body(server)["messages"][-1]["content"][0]["cache_control"] == {"type": "ephemeral"}


@pytest.mark.parametrize(("token", "warnings"), [(150_000, 0), (1_000_000, 1)])
def test_live_outputs_are_asked_for_and_stand_in_the_next_prompt(
    wire: Any, mock: Any, token: int, warnings: int
) -> None:
    reply = wire.stream(wire.token("", token_ids=[11]), wire.token("", token_ids=[token]), wire.usage())
    server = mock([reply])
    tree = PrefixTree()
    tip = tree.extend(ROOT, "a", 5)
    context = tree.extend(tip, ("output", "s/0"), 2)
    after = tree.extend(context, "b", 3)
    first = Request(Turn(session="s", turn=0, output=2), "s", "s/0", tree, tip, context, 2, ideal=0)
    second = Request(Turn(session="s", turn=1, output=2), "s", "s/1", tree, after, after, 2, ideal=0, parent_id="s/0")

    async def use(backend: HttpBackend) -> tuple[list[Any], dict[str, Any]]:
        return [await backend.send(request) for request in (first, second)], backend.self_check()

    outcomes, check = run(wire.with_backend(server, use, outputs="live"), virtual=False)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert outcomes[0].first_token is not None  # ids are tokens, though their text is empty
    assert body(server)["return_token_ids"] is True
    assert (body(server, 1)["prompt"][5:7] == [11, token]) is (warnings == 0)
    said = [text for text in check["warnings"] if "generated outputs are missing from later prompts" in text]
    assert len(said) == warnings


def turn(number: int, **fields: Any) -> Turn:
    return Turn(session="s", turn=number, append=[(f"m{number}", 10)], output=4, **fields)


def play_messages(wire: Any, server: Any, turns: list[Turn], keeps: list[int], **options: Any) -> list[dict[str, Any]]:
    """Sends turns that each continue the one before; returns the bodies."""
    tree, requests, context = PrefixTree(), [], ROOT
    for asked, keep in zip(turns, keeps, strict=True):
        tip = tree.extend(tree.cut(context, keep), asked.append[0][0], 10)
        name = f"s/{asked.turn}"
        context = tree.extend(tip, ("output", name), 4)
        parent = f"s/{asked.turn - 1}" if requests else None
        requests.append(Request(asked, "s", name, tree, tip, context, 4, ideal=0, parent_id=parent))

    async def use(backend: HttpBackend) -> None:
        for request in requests:
            await backend.send(request)

    run(wire.with_backend(server, use, **options), virtual=False)
    return [body(server, i) for i in range(len(requests))]


def test_recorded_messages_and_tools_are_sent_as_they_are(wire: Any, mock: Any) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = [
        turn(0, messages=[{"role": "user", "content": 'ü "quoted"'}], tools=tools),
        turn(1, messages=[call, {"role": "tool", "tool_call_id": "c1", "content": "42"}]),
    ]
    server = mock([wire.stream(wire.event({"choices": [{"delta": {"content": "x"}}]}), wire.usage())])
    bodies = play_messages(wire, server, asked, [0, 14])
    assert server.requests[0][0] == "POST /v1/chat/completions HTTP/1.1"
    assert bodies[0]["messages"] == asked[0].messages
    assert bodies[1]["messages"] == [*asked[0].messages, *asked[1].messages]
    assert bodies[1]["tools"] == tools


def test_an_answer_that_the_trace_lacks_is_the_servers_own(wire: Any, mock: Any) -> None:
    asked = [turn(i, messages=[{"role": "user", "content": f"q{i}"}]) for i in range(2)]
    said = [wire.event({"choices": [{"delta": {"content": text}}]}) for text in ("Hel", "lo")]
    bodies = play_messages(wire, mock([wire.stream(*said, wire.usage())]), asked, [0, 14])
    assert [m["content"] for m in bodies[1]["messages"]] == ["q0", "Hello", "q1"]


@pytest.mark.parametrize(("keep", "left"), [(0, ["q2"]), (10, ["q0", "q2"]), (14, ["q0", "a", "q2"])])
def test_a_turn_keeps_the_messages_that_lie_in_the_context_that_it_keeps(
    wire: Any, mock: Any, keep: int, left: list[str]
) -> None:
    asked = [turn(i, messages=[{"role": "user", "content": f"q{i}"}]) for i in range(3)]
    server = mock([wire.stream(wire.event({"choices": [{"delta": {"content": "a"}}]}), wire.usage())])
    bodies = play_messages(wire, server, asked, [0, 14, keep])
    assert [m["content"] for m in bodies[2]["messages"]] == left


def test_messages_with_tool_blocks_go_to_anthropics_interface(wire: Any, mock: Any) -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "42"}]}
    asked = [turn(0, messages=[{"role": "system", "content": "be brief"}, result])]
    server = mock([wire.stream(wire.event({"type": "message_stop"}))])
    bodies = play_messages(wire, server, asked, [0])
    assert server.requests[0][0] == "POST /v1/messages HTTP/1.1"
    assert bodies[0]["messages"] == [result]
    assert bodies[0]["system"] == [{"type": "text", "text": "be brief"}]


def test_the_api_key_is_in_one_header_and_nowhere_else(
    wire: Any, mock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REPLAY_TEST_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server = mock([wire.document("401 Unauthorized", {"error": {"message": f"bad key {KEY}"}})])
    seen: list[str] = []

    async def use(backend: HttpBackend) -> None:
        outcome = await backend.send(wire.make_request())
        seen.extend([repr(backend), str(backend.describe()), str(backend.self_check()), repr(outcome)])
        assert outcome.error == "HTTP 401: bad key [key]"

    run(wire.with_backend(server, use, api_key_env="REPLAY_TEST_KEY"), virtual=False)
    first, headers, sent = server.requests[0]
    assert headers.pop("authorization") == f"Bearer {KEY}"
    everywhere = [first, str(headers), sent.decode(), caplog.text, *seen]
    everywhere.append(Path("/proc/self/cmdline").read_bytes().decode() if Path("/proc/self/cmdline").exists() else "")
    assert not [text for text in everywhere if KEY in text]


def test_an_error_that_repeats_the_prompt_is_withheld(wire: Any, mock: Any, send: Any) -> None:
    ids = Content(7).piece("segment 0", 0, 20)
    got = send(
        mock([wire.document("400 Bad Request", {"error": {"message": b"bad prompt: ".decode() + bytes(ids).decode()}})])
    )
    assert got.error == "HTTP 400: (message withheld: it repeats the request)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "give an address such as"),
        ({"url": "http://u:p@localhost:1"}, "leave the key out"),
        ({"url": "http://localhost:99999"}, "port is not a number"),
        ({"api_key_env": "REPLAY_NO_SUCH_KEY"}, "REPLAY_NO_SUCH_KEY is empty"),
        ({"headers": {"X-A": "b\r\nX-Evil: 1"}}, "printable"),
    ],
)
def test_unusable_settings_are_refused(options: dict[str, Any], message: str) -> None:
    async def enter() -> None:
        url = options.pop("url", "http://127.0.0.1:9")
        async with HttpBackend(url, load("vllm"), Content(1), RunClock(), **options):
            pass

    with pytest.raises(ReplayError, match=message):
        run(enter(), virtual=False)


def test_an_unknown_model_is_refused_with_those_that_exist(wire: Any, mock: Any, send: Any) -> None:
    with pytest.raises(ReplayError, match="has no model 'other'; it has m"):
        send(mock(ok(wire)), model="other")


def test_a_key_that_is_refused_says_what_to_set(wire: Any, mock: Any, send: Any) -> None:
    server = mock(ok(wire))
    server.models = wire.document("401 Unauthorized", {})
    with pytest.raises(ReplayError, match="--api-key-env"):
        send(server)


def test_a_server_that_cannot_reset_says_what_to_do(wire: Any, mock: Any, send: Any) -> None:
    with pytest.raises(ReplayError, match="VLLM_SERVER_DEV_MODE=1"):
        send(mock(ok(wire)), isolation="reset")
