"""The client against a scripted server: every fault is a recorded outcome, every stamp means what it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from replay.backends.http import HttpBackend, Limits
from replay.backends.preset import load
from replay.errors import ReplayError
from replay.load.clock import RunClock, run
from replay.load.content import Content

FAST = Limits(idle_s=0.15, total_s=0.4, retry_wait_s=0.01)


def test_a_good_reply_is_measured_from_first_to_last_token(wire: Any, mock: Any, send: Any) -> None:
    role = wire.event({"choices": [{"index": 0, "text": ""}]})
    steps = [wire.chunk(role), wire.chunk(wire.token()), wire.chunk(wire.token(" b"))]
    steps.append(wire.chunk(wire.usage()) + wire.chunk(wire.DONE) + wire.END)
    server = mock([wire.HEAD, *(part for step in steps for part in (0.03, step))])
    got = send(server)
    assert got.status == "ok", got.error
    assert (got.prompt_tokens, got.output_tokens, got.gpu, got.computed, got.tier_source) == (64, 2, 32, 32, "usage")
    stamps = [got.sent, got.first_byte, got.first_token, got.last_token, got.closed]
    assert stamps == sorted(stamps)
    assert got.first_token - got.first_byte > 0.05  # the head and the empty delta are no token
    assert got.last_token - got.first_token > 0.02
    assert got.closed - got.last_token > 0.02  # usage and [DONE] are no token


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"content": "", "reasoning": "x"},
        {"content": None, "reasoning_content": "x"},
        {"content": None, "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_content_reasoning_and_tool_calls_are_tokens(wire: Any, mock: Any, send: Any, delta: dict[str, Any]) -> None:
    empty = {"role": "assistant", "content": "", "tool_calls": None, "reasoning": None}
    first = wire.event({"choices": [{"delta": empty}], "usage": None})
    reply = [wire.HEAD, wire.chunk(first), 0.03, wire.chunk(wire.event({"choices": [{"delta": delta}]}))]
    got = send(mock([*reply, wire.chunk(wire.usage()), wire.END]), endpoint="chat")
    assert got.status == "ok", got.error
    assert got.first_token - got.first_byte > 0.02


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": None, "usage": None},
        {"choices": [None]},
        {"choices": [{"delta": None, "text": None, "token_ids": None}]},
        {"choices": [{"delta": "not an object"}]},
        {"choices": {"not": "a list"}},
        {"choices": [], "usage": None, "error": None, "kv_transfer_params": None, "sglext": None, "metrics": None},
    ],
)
def test_null_or_a_wrong_type_is_as_good_as_absent(wire: Any, mock: Any, send: Any, odd: dict[str, Any]) -> None:
    got = send(mock([wire.stream(wire.event(odd), wire.token(), wire.event(odd), wire.usage(), wire.event(odd))]))
    assert (got.status, got.prompt_tokens) == ("ok", 64), got.error


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n", b"data: [DONE]"])
def test_a_stream_may_end_without_done_or_without_its_last_empty_line(
    wire: Any, mock: Any, send: Any, end: bytes
) -> None:
    assert send(mock([wire.stream(wire.token(), wire.usage(), *([end] if end else []))])).status == "ok"


def test_a_stream_that_says_done_need_not_be_ended_by_http(wire: Any, mock: Any, send: Any) -> None:
    server = mock([wire.HEAD, wire.chunk(wire.token()), wire.chunk(wire.usage()), wire.chunk(wire.DONE), 5.0])
    assert send(server).status == "ok"


def test_usage_in_every_chunk_never_moves_the_stamps(wire: Any, mock: Any, send: Any) -> None:
    early = wire.event({"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": 0}})
    script = [wire.HEAD, wire.chunk(early), 0.03, wire.chunk(wire.token()), 0.03, wire.chunk(wire.usage()), wire.END]
    got = send(mock(script))
    assert got.first_token - got.first_byte > 0.02
    assert got.closed - got.last_token > 0.02
    assert got.output_tokens == 2  # the last usage counts


def test_unknown_cached_tokens_are_null_not_zero(wire: Any, mock: Any, send: Any) -> None:
    for details in (None, {"cached_tokens": None}, {}):
        counts = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": details}
        got = send(mock([wire.stream(wire.token(), wire.event({"choices": [], "usage": counts}))]))
        assert (got.status, got.gpu, got.computed, got.tier_source, got.lost) == ("ok", None, None, None, None)


FAULTS = {
    "error event": (["error"], "error within the reply: KV cache full"),
    "named error event": (["event"], "error within the reply: overloaded"),
    "garbage event": (["garbage"], "not what the interface promises"),
    "cut event": (["cut"], "cut short"),
    "reset in the middle": (["token", "RESET"], "in the middle of the reply"),
    "closed in the middle": (["token", "CLOSE"], "closed the connection in the middle"),
    "stall": (["token", 2.0], "silent for 0.15 s"),
    "no output": (["usage", "END"], "no output"),
    "empty body": (["END"], "no output"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_within_the_stream_is_an_error_with_what_was_measured(
    wire: Any, mock: Any, send: Any, name: str
) -> None:
    steps, message = FAULTS[name]
    make = {
        "error": wire.chunk(wire.token()) + wire.chunk(wire.event({"error": {"message": "KV cache full"}})) + wire.END,
        "event": wire.chunk(b'event: error\ndata: {"type":"error","error":{"message":"overloaded"}}\n\n') + wire.END,
        "garbage": wire.chunk(wire.token()) + wire.chunk(b"data: <html>\n\n") + wire.END,
        "cut": wire.chunk(wire.token()) + wire.chunk(b'data: {"choices":[{"te') + wire.END,
        "token": wire.chunk(wire.token()),
        "usage": wire.chunk(wire.usage(output=0)),
        "END": wire.END,
        "RESET": wire.RESET,
        "CLOSE": wire.CLOSE,
    }
    got = send(mock([wire.HEAD, 0.02, *(make.get(step, step) for step in steps)]), limits=FAST)
    assert got.status == "error"
    assert message in got.error
    assert "\n" not in got.error
    assert got.sent is not None
    assert got.first_byte is not None
    assert (got.first_token is not None) == (name not in ("named error event", "no output", "empty body"))
    assert got.attempts == 1  # something was received


@pytest.mark.parametrize(
    ("status_and_body", "message"),
    [
        (("429 Too Many Requests", {"error": {"message": "slow\n down"}}), "HTTP 429: slow down"),
        (("500 Internal Server Error", b"<html>boom</html>"), "HTTP 500: <html>boom</html>"),
        (("422 Unprocessable Entity", {"detail": [{"msg": "bad field", "input": "x"}]}), "HTTP 422: bad field"),
        (("400 Bad Request", {"object": "error", "message": "too long"}), "HTTP 400: too long"),
        (("307 Temporary Redirect", b""), "HTTP 307"),
        (("200 OK", {"error": "no"}), "error within the reply: no"),
        (("200 OK", b"{"), "not what the interface promises"),
    ],
)
def test_a_refusal_says_what_the_server_said(
    wire: Any, mock: Any, send: Any, status_and_body: Any, message: str
) -> None:
    got = send(mock([wire.document(*status_and_body)]))
    assert got.status == "error"
    assert message in got.error
    assert got.attempts == 1
    assert got.first_token is None


def test_not_http_is_an_error(wire: Any, mock: Any, send: Any) -> None:
    assert "not HTTP" in send(mock([b"SSH-2.0-OpenSSH\r\n"])).error


def test_a_reset_before_the_first_byte_is_sent_again_and_counted(wire: Any, mock: Any, send: Any) -> None:
    server = mock([wire.RESET], [wire.CLOSE], [wire.stream(wire.token(), wire.usage())])
    got = send(server)
    assert (got.status, got.attempts, len(server.requests)) == ("ok", 3, 3)
    assert server.requests[0] == server.requests[2]


def test_attempts_end(wire: Any, mock: Any, send: Any) -> None:
    server = mock([wire.RESET])
    got = send(server)
    assert (got.status, got.attempts, len(server.requests)) == ("error", 3, 3)
    assert "before the reply began" in got.error


def test_a_silent_server_is_not_asked_again_at_once_for_ever(wire: Any, mock: Any, send: Any) -> None:
    got = send(mock([5.0]), limits=Limits(idle_s=0.05, retries=0))
    assert (got.status, got.first_byte) == ("error", None)
    assert "silent for 0.05 s" in got.error


def test_a_slow_stream_is_fine_and_an_endless_one_ends(wire: Any, mock: Any, send: Any) -> None:
    slow = [step for _ in range(4) for step in (wire.chunk(wire.token()), 0.08)]
    assert send(mock([wire.HEAD, *slow, wire.chunk(wire.usage()), wire.END]), limits=FAST).status == "ok"
    endless = [step for _ in range(50) for step in (wire.chunk(wire.token()), 0.05)]
    got = send(mock([wire.HEAD, *endless]), limits=FAST)
    assert "no end of the reply within 0.4 s" in got.error
    assert got.last_token - got.first_token > 0.2


def test_a_dead_server_is_named_when_the_run_starts() -> None:
    async def enter() -> None:
        backend = HttpBackend("http://127.0.0.1:9", load("vllm"), Content(1), RunClock())
        async with backend:
            pass

    with pytest.raises(ReplayError, match=r"http://127\.0\.0\.1:9: cannot connect .*is the server running"):
        run(enter(), virtual=False)


def test_as_many_requests_are_in_flight_as_are_sent(wire: Any, mock: Any) -> None:
    server = mock([0.3, wire.stream(wire.token(), wire.usage())])

    async def use(backend: HttpBackend) -> list[Any]:
        requests = [wire.make_request(number=i, session=f"s{i}") for i in range(150)]
        outcomes = await asyncio.gather(*map(backend.send, requests))
        assert backend.self_check()["peak_connections"] == 150
        return outcomes

    outcomes = run(wire.with_backend(server, use), virtual=False)
    assert {outcome.status for outcome in outcomes} == {"ok"}
    assert server.peak == 150


def test_a_limit_of_connections_holds(wire: Any, mock: Any) -> None:
    server = mock([0.01, wire.stream(wire.token(), wire.usage())])

    async def use(backend: HttpBackend) -> None:
        await asyncio.gather(*(backend.send(wire.make_request(number=i)) for i in range(12)))

    run(wire.with_backend(server, use, limits=Limits(connections=3)), virtual=False)
    assert server.peak == 3


def test_a_connection_is_used_again_while_it_is_fresh(wire: Any, mock: Any) -> None:
    server = mock([wire.stream(wire.token(), wire.usage())])

    async def use(backend: HttpBackend) -> None:
        for number in range(5):
            await backend.send(wire.make_request(number=number))
        await asyncio.sleep(0.1)
        await backend.send(wire.make_request(number=6))

    run(wire.with_backend(server, use, limits=Limits(keep_alive_s=0.05)), virtual=False)
    assert server.connections == 2


def test_a_prompt_of_200k_tokens_arrives_whole(wire: Any, mock: Any, send: Any) -> None:
    server = mock([wire.stream(wire.token(), wire.usage(prompt=200_000))])
    got = send(server, wire.make_request(prompt=200_000))
    assert got.status == "ok", got.error
    body = json.loads(server.requests[0][2])
    assert body["prompt"] == Content(7).tokens("segment 0", 0, 200_000).tolist()


def test_an_event_of_a_megabyte_is_read(wire: Any, mock: Any, send: Any) -> None:
    big = wire.token(prompt_token_ids=list(range(200_000)))
    assert send(mock([wire.stream(big, wire.usage())])).status == "ok"


def test_a_cancelled_request_closes_its_connection(wire: Any, mock: Any) -> None:
    server = mock([5.0])

    async def use(backend: HttpBackend) -> None:
        task = asyncio.create_task(backend.send(wire.make_request()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert backend._pool._idle == [] or all(c._exchange is None for c in backend._pool._idle)

    run(wire.with_backend(server, use), virtual=False)


@pytest.mark.parametrize(
    ("timings", "wait"),
    [({"queue_time_ms": 50.0, "time_to_first_token_ms": 6.0}, 0.056), ({"queue_time_ms": None}, None), (None, None)],
)
def test_without_streaming_the_first_token_is_the_engines_own_timing(
    wire: Any, mock: Any, send: Any, timings: Any, wait: float | None
) -> None:
    counts = {"prompt_tokens": 64, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}}
    stats = {"cached_token_stats": {"num_vllm_cached_tokens": 16}}
    whole = {"choices": [{"text": " a b"}], "usage": counts, "metrics": timings, "kv_transfer_params": stats}
    preset = load("lmcache-cpu", ["connector=lmcache-mp"])
    server = mock([wire.document("200 OK", whole)])
    got = send(server, stream=False, preset=preset)
    assert (got.status, got.gpu, got.cpu, got.computed) == ("ok", 16, 16, 32), got.error
    assert got.first_token == (None if wait is None else pytest.approx(got.sent + wait))
    assert json.loads(server.requests[0][2])["stream"] is False
