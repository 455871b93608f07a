"""Prometheus scrapes as rows, counters as differences, and the engine's cache events."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.http import HttpBackend
from replay.backends.http.kv_events import KvEvents, Residency, decode, to_row
from replay.backends.http.metrics import Sample, difference, gpu_tokens, parse
from replay.backends.preset import LowerTier, Preset, Tiers
from replay.load.clock import run
from replay.load.events import CacheEvent

TEXT = """# HELP vllm:prefix_cache_hits Prefix cache hits
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="a\\"b}c"} 608.0
vllm:prompt_tokens_cached_by_source_total{source="disk"} 1e3
vllm:kv_cache_usage_perc 0.25 1700000000000
le{le="+Inf"} +Inf
nan NaN
this is not a metric
"""


def test_prometheus_text_becomes_rows() -> None:
    assert parse(TEXT, 2.0) == [
        Sample(2.0, "vllm:prefix_cache_hits_total", '{engine="0",model_name="a\\"b}c"}', 608.0),
        Sample(2.0, "vllm:prompt_tokens_cached_by_source_total", '{source="disk"}', 1000.0),
        Sample(2.0, "vllm:kv_cache_usage_perc", None, 0.25),
        Sample(2.0, "le", '{le="+Inf"}', float("inf")),
    ]


@given(st.text(max_size=200))
def test_any_text_can_be_scraped(text: str) -> None:
    parse(text, 0.0)


def test_counters_are_differences_and_absent_is_null() -> None:
    samples = [
        Sample(0.0, "hits_total", '{t="gpu"}', 100.0),
        Sample(1.0, "hits_total", '{t="gpu"}', 150.0),
        Sample(1.0, "hits_total", '{t="disk"}', 7.0),  # first seen later: it began at 0
        Sample(2.0, "hits_total", '{t="gpu"}', 30.0),  # the server was restarted
    ]
    assert difference(samples, "hits") == 50 + 30 + 7
    assert difference(samples, "hits", 't="disk"') == 7
    assert difference(samples, "hits", 't="cpu"') is None
    assert difference(samples, "no_such_counter") is None
    assert difference([], "hits") is None


def test_a_run_is_scraped_at_start_and_end(wire: Any, mock: Any) -> None:
    server = mock([wire.stream(wire.token(), wire.usage())])
    server.metrics = lambda count: b"requests_total 1\n"

    async def use(backend: HttpBackend) -> HttpBackend:
        server.metrics = lambda count: b"requests_total 3\nlate_total 2\n"
        return backend

    backend = run(wire.with_backend(server, use, scrape_s=60.0), virtual=False)
    assert difference(backend.scrapes(), "requests") == 2
    assert difference(backend.scrapes(), "late") == 2


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ('vllm:cache_config_info{block_size="128",kv_cache_size_tokens="20382",num_gpu_blocks="159"} 1.0', 20382),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0', 1600),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0', None),
        ("sglang:max_total_num_tokens 4096.0", 4096),
        ("other 1", None),
    ],
)
def test_the_size_of_the_gpu_tier_is_read_from_the_metrics(text: str, tokens: int | None) -> None:
    assert gpu_tokens(parse(text, 0.0)) == tokens


def test_a_server_without_metrics_gives_no_rows(wire: Any, mock: Any) -> None:
    async def use(backend: HttpBackend) -> HttpBackend:
        return backend

    assert run(wire.with_backend(mock([]), use, scrape_s=0.01), virtual=False).scrapes() == []


@pytest.mark.parametrize(("at_once", "expected"), [(1, (8, 24, "counters")), (2, (None, None, "usage"))])
def test_a_connector_that_reports_nothing_is_told_apart_by_counters_while_requests_run_alone(
    wire: Any, mock: Any, at_once: int, expected: tuple[Any, ...]
) -> None:
    server = mock([0.05, wire.stream(wire.token(), wire.usage(cached=32))])
    # Each request counts 8 tokens of the device and 24 of the host.
    name = b"vllm:prompt_tokens_cached_by_source_total"
    lines = [(b"device", 8), (b"host", 24)]
    server.metrics = lambda count: b"".join(b'%s{source="%s"} %d\n' % (name, s, n * count) for s, n in lines)

    async def use(backend: HttpBackend) -> list[Any]:
        requests = [wire.make_request(number=i, session=f"s{i}") for i in range(at_once)]
        return await asyncio.gather(*map(backend.send, requests))

    preset = Preset(name="offload", connector="offload", tiers=Tiers(cpu=LowerTier(gib=1)))
    outcomes = run(wire.with_backend(server, use, preset=preset), virtual=False)
    assert {(o.gpu, o.cpu, o.tier_source) for o in outcomes} == {expected}
    assert {o.computed for o in outcomes} == {32}


STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
    "block_size": 4,
    "lora_id": None,
    "medium": "GPU",
    "session_id": "s",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}


def test_map_and_array_events_are_read() -> None:
    batch = [12.0, [STORED, ["BlockRemoved", [11], "CPU"], {"type": "Later"}, {"type": "AllBlocksCleared"}], 0]
    events = decode(msgspec.msgpack.encode(batch))
    assert [to_row(event, 3.0) for event in events] == [
        CacheEvent(3.0, "store", "gpu", session="s", blocks=2, tokens=8),
        CacheEvent(3.0, "evict", "cpu", blocks=1),
        CacheEvent(3.0, "reset", "gpu"),
    ]


def test_eviction_is_a_fact_at_the_time_of_a_request() -> None:
    known = Residency()
    ids = np.arange(1, 13, dtype=np.int32)
    known.apply(STORED, 1.0)
    assert known.evicted(ids, 4, 1.5) == 0
    known.apply(REMOVED, 2.0)
    assert known.evicted(ids, 4, 2.5) == 8  # the first block went; the second cannot be reached without it
    assert known.evicted(ids, 4, 1.5) == 0
    assert known.evicted(ids[:7], 4, 2.5) == 4
    assert known.evicted(ids[::-1].copy(), 4, 2.5) == 0
    known.apply(STORED | {"block_hashes": [11], "token_ids": [1, 2, 3, 4]}, 3.0)
    assert known.evicted(ids, 4, 3.5) == 0
    known.apply({"type": "AllBlocksCleared"}, 4.0)
    assert known.evicted(ids, 4, 4.5) == 8
    known.apply(STORED | {"medium": "CPU"}, 5.0)
    assert known.evicted(ids, 4, 5.5) == 8


def test_events_arrive_over_zmq_and_gaps_are_counted(tmp_path: Any) -> None:
    endpoint = f"ipc://{tmp_path}/events"

    async def follow() -> KvEvents:
        context = zmq.Context()
        publisher = context.socket(zmq.PUB)
        publisher.linger = 0
        publisher.bind(endpoint)
        events = KvEvents(endpoint, lambda: 7.0, topic="kv")
        await events.start()
        await asyncio.sleep(0.2)
        for number in (0, 1, 4):
            batch = msgspec.msgpack.encode([0.0, [STORED], 0])
            publisher.send_multipart([b"kv", number.to_bytes(8, "big"), batch])
        publisher.send_multipart([b"kv", (5).to_bytes(8, "big"), b"\xc1"])
        for _ in range(100):
            if events.gaps >= 3:
                break
            await asyncio.sleep(0.01)
        await events.stop()
        publisher.close()
        context.term()
        return events

    events = run(follow(), virtual=False)
    assert [row.kind for row in events.rows] == ["store"] * 3
    assert events.gaps == 3  # two batches lost, one unreadable
