"""Whatever a server sends, reading it gives facts or faults, never an exception."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.http.attribution import tiers
from replay.backends.http.errors import describe_error, fault
from replay.backends.http.replies import AnthropicReply, OpenAIReply, Reply
from replay.backends.preset import Preset

NAMES = [
    "choices", "delta", "text", "content", "tool_calls", "reasoning", "finish_reason", "token_ids", "usage", "error",
    "message", "kv_transfer_params", "cached_token_stats", "sglext", "cached_tokens_details", "device", "replay",
    "prompt_tokens", "prompt_tokens_details", "cached_tokens", "input_tokens", "type", "content_block", "stop_reason",
    "lost", "tiers", "metrics", "queue_time_ms", "detail", "object",
]  # fmt: skip
TYPES = ["message_start", "content_block_start", "content_block_delta", "message_delta", "message_stop", "error"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "a", *TYPES])
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
EVENTS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6) | JSON
PRESETS = [Preset(name=e, engine=e) for e in ("vllm", "sglang", "openai")] + [Preset(name="l", connector="lmcache-mp")]


def judge(reply: Reply, preset: Preset) -> None:
    """All that the client asks of a reply."""
    reply.close(2.0)
    what = fault(reply, 200)
    if what is not None:
        assert "\n" not in describe_error(what, reply, secret="", sent=b"\r\n\r\n{}")
    served = tiers(preset, reply.counts, reply.extra)
    assert all(tokens is None or tokens >= 0 for tokens in served[:6])


@given(
    kind=st.sampled_from([OpenAIReply, AnthropicReply]),
    events=st.lists(EVENTS, max_size=4),
    preset=st.sampled_from(PRESETS),
    streaming=st.booleans(),
    keep_text=st.booleans(),
)
def test_any_json_is_read(
    kind: type[Reply], events: list[Any], preset: Preset, streaming: bool, keep_text: bool
) -> None:
    reply = kind(keep_text=keep_text)
    reply.begin(200, {"content-type": "text/event-stream" if streaming else "application/json"})
    for event in events:
        data = json.dumps(event).encode()
        reply.feed(1.0, b"data: " + data + b"\n\n" if streaming else data)
    judge(reply, preset)


@given(kind=st.sampled_from([OpenAIReply, AnthropicReply]), data=st.binary(max_size=200), streaming=st.booleans())
def test_any_bytes_are_read(kind: type[Reply], data: bytes, streaming: bool) -> None:
    reply = kind()
    reply.begin(200 if streaming else 500, {})
    reply.feed(1.0, b"data: " + data + b"\n\n" + data)
    judge(reply, PRESETS[0])


@pytest.mark.parametrize("text", ["a", "", None])
def test_text_is_kept_only_when_asked_for(text: str | None) -> None:
    for keep in (False, True):
        reply = OpenAIReply(keep_text=keep)
        reply.feed(1.0, b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n")
        assert reply.text == ([text] if keep and text else [] if keep else None)
