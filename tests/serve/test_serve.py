"""`replay serve`: an OpenAI-compatible server whose cache behaves like the engine's."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.http import HttpBackend, Limits
from replay.backends.preset import load
from replay.errors import ReplayError
from replay.load.clock import RunClock
from replay.load.content import Content
from replay.load.outcome import Request
from replay.serve import parse_fault
from replay.serve.prompts import Prompts
from replay.trace import ROOT, PrefixTree, Turn

IDS = list(range(1000, 1640))


def completion(prompt: Any, tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {"model": "qwen3-8b", "prompt": prompt, "max_tokens": tokens, **more}


def cached(reply: tuple[int, Any]) -> int:
    count: int = reply[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_repeated_prompt_is_cached_but_for_its_last_block(serving: Any, ask: Any) -> None:
    async def use(url: str, _: Any) -> None:
        first = await ask(url, "/v1/completions", completion(IDS))
        assert first[0] == 200
        assert cached(first) == 0
        again = await ask(url, "/v1/completions", completion(IDS))
        assert cached(again) == 624  # 640 tokens, blocks of 16, the last block runs again
        assert again[1]["usage"]["prompt_tokens_details"]["tiers"] == {
            "gpu": 624,
            "cpu": None,
            "disk": None,
            "remote": None,
        }
        assert again[1]["replay"]["simulated"] is True
        longer = await ask(url, "/v1/completions", completion([*IDS, 7, 8, 9]))
        assert cached(longer) == 640
        other = await ask(url, "/v1/completions", completion([*IDS[:100], *IDS]))
        assert cached(other) == 96
        salted = await ask(url, "/v1/completions", completion(IDS, cache_salt="x"))
        assert cached(salted) == 0

    serving(use)


def test_what_it_generated_is_cached_and_anything_else_is_not(serving: Any, ask: Any) -> None:
    async def use(url: str, _: Any) -> None:
        reply = await ask(url, "/v1/completions", completion(IDS, 40, return_token_ids=True))
        said = reply[1]["choices"][0]["token_ids"]
        assert len(said) == 40
        assert cached(await ask(url, "/v1/completions", completion([*IDS, *said, 5]))) == 672
        assert cached(await ask(url, "/v1/completions", completion([*IDS, *range(40), 5]))) == 640

    serving(use)


def test_chat_and_text_share_prefixes(serving: Any, ask: Any) -> None:
    async def use(url: str, _: Any) -> None:
        system = {"role": "system", "content": "you are brief " * 40}
        for number in range(2):
            body = {"messages": [system, {"role": "user", "content": f"question {number}"}], "max_tokens": 2}
            reply = await ask(url, "/v1/chat/completions", body)
            assert reply[1]["choices"][0]["message"]["role"] == "assistant"
            assert (cached(reply) >= 112) == (number == 1)
        reply = await ask(url, "/v1/completions", completion("a text of six words here"))
        assert reply[1]["usage"]["prompt_tokens"] == 6

    serving(use)


def test_the_stream_is_what_openais_is(serving: Any) -> None:
    async def use(url: str, _: Any) -> bytes:
        body = completion(IDS, 3, stream=True, stream_options={"include_usage": True})
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as reply:
            assert reply.content_type == "text/event-stream"
            return await reply.read()

    events = serving(use).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert len(events) == 3 + 1 + 2
    assert '"finish_reason":"length"' in events[2]
    assert '"choices":[]' in events[3]
    assert '"completion_tokens":3' in events[3]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", completion([]), 400),
        ("/v1/completions", completion(None), 400),
        ("/v1/completions", completion([1, "a"]), 400),
        ("/v1/completions", completion([-1]), 400),
        ("/v1/completions", completion([[1], [2]]), 400),
        ("/v1/completions", completion(IDS, 10**7), 400),
        ("/v1/completions", completion(IDS, -1), 400),
        ("/v1/completions", completion(IDS, model="other"), 404),
        ("/v1/completions", [1], 400),
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/v1/chat/completions", {"messages": ["x"]}, 400),
    ],
)
def test_bad_requests_are_refused_as_vllm_refuses_them(
    serving: Any, ask: Any, path: str, body: Any, status: int
) -> None:
    async def use(url: str, _: Any) -> None:
        got, reply = await ask(url, path, body)
        assert got == status
        assert reply["error"]["message"]

    serving(use)


def test_health_models_metrics_and_reset(serving: Any, ask: Any) -> None:
    async def use(url: str, _: Any) -> None:
        for _i in range(2):
            await ask(url, "/v1/completions", completion(IDS))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/health") as reply:
                assert reply.status == 200
            async with session.get(f"{url}/v1/models") as reply:
                assert (await reply.json())["data"][0]["id"] == "qwen3-8b"
            async with session.get(f"{url}/metrics") as reply:
                text = await reply.text()
        assert 'vllm:prefix_cache_hits_total{engine="0",model_name="qwen3-8b"} 624' in text
        assert 'vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="qwen3-8b",source="device"} 624' in text
        assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="qwen3-8b"} 2' in text
        assert await ask(url, "/reset_prefix_cache") == (200, {"success": True})
        assert cached(await ask(url, "/v1/completions", completion(IDS))) == 0

    serving(use)


def test_a_reset_is_refused_while_requests_run(serving: Any, ask: Any) -> None:
    async def use(url: str, server: Any) -> None:
        server.metrics.running = 1
        assert await ask(url, "/reset_prefix_cache") == (200, {"success": False})

    serving(use)


def request(prompt: int, output: int = 3) -> Request:
    tree = PrefixTree()
    tip = tree.extend(ROOT, "a", prompt)
    context = tree.extend(tip, ("output", "s/0"), output)
    return Request(Turn(session="s", turn=0, output=output), "s", "s/0", tree, tip, context, output, ideal=0)


FAULTS = [
    ("refuse@1", "error", "before the reply began"),
    ("status=429@1", "error", "HTTP 429: injected fault"),
    ("status@1", "error", "HTTP 500"),
    ("reset@1", "error", "in the middle of the reply"),
    ("truncate@1", "error", "in the middle of the reply"),
    ("garbage@1", "error", "not what the interface promises"),
    ("error@1", "error", "error within the reply: injected fault"),
    ("stall=2@1", "error", "silent for 0.5 s"),
    ("slow=2@1", "error", "silent for 0.5 s"),
    ("no-usage@1", "ok", None),
    ("slow=0.2@1", "ok", None),
    ("reset@2", "ok", None),
]


@pytest.mark.parametrize(("fault", "status", "message"), FAULTS)
def test_every_injected_fault_is_what_our_client_records(
    serving: Any, fault: str, status: str, message: str | None
) -> None:
    async def use(url: str, _: Any) -> Any:
        limits = Limits(idle_s=0.5 if status == "error" else 30.0, retries=0)
        async with HttpBackend(url, load("vllm"), Content(1), RunClock(), scrape_s=None, limits=limits) as client:
            return await client.send(request(640))

    got = serving(use, fault)
    assert got.status == status, got.error
    assert (message or "") in (got.error or "")
    if fault == "no-usage@1":
        assert (got.prompt_tokens, got.gpu, got.computed) == (None, None, None)
    if fault.startswith("slow=0.2"):
        assert got.first_byte - got.sent > 0.2


def test_our_client_knows_that_it_is_the_engine_model(serving: Any) -> None:
    async def use(url: str, _: Any) -> Any:
        async with HttpBackend(url, load("vllm"), Content(1), RunClock(), scrape_s=None) as client:
            return client.describe()

    about = serving(use)
    assert about["simulated"] is True
    assert about["gpu"] == "h200"
    assert about["max_context"] == 40_960
    assert about["tiers"]["gpu"]["tokens"] > 100_000


@pytest.mark.parametrize("text", ["", "boom", "stall=x", "stall=1.2.3", "reset=3", "status=200", "stall@0", "a@b@c"])
def test_an_unknown_fault_is_refused(text: str) -> None:
    with pytest.raises(ReplayError, match="fault"):
        parse_fault(text)


def test_a_fault_reads_back_as_it_was_written() -> None:
    for text in ("stall=2.5@10", "reset@1", "status=429@3"):
        assert str(parse_fault(text)) == text


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=12)


@given(PROMPTS)
def test_the_tree_shares_exactly_the_common_prefixes(prompts: list[list[int]]) -> None:
    known = Prompts()
    for number, prompt in enumerate(prompts):
        tip = known.context(np.array(prompt, np.int32))
        assert tip.depth == len(prompt)
        shared = max((common(prompt, earlier) for earlier in prompts[:number]), default=0)
        assert known.tree.longest_sent(tip) == shared
        known.tree.mark_sent(tip)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_many_clients_at_once_are_all_answered(serving: Any, ask: Any) -> None:
    async def use(url: str, server: Any) -> None:
        bodies = [completion([*IDS, number], 2, stream=False) for number in range(100)]
        replies = await asyncio.gather(*(ask(url, "/v1/completions", body) for body in bodies))
        assert {status for status, _ in replies} == {200}
        assert server.metrics.running == 0

    serving(use)
