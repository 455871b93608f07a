"""Tokens by tier from what each engine says; the literal fields are of real or documented replies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.http.attribution import counters, lookups, loss, read_usage, tiers
from replay.backends.http.attribution.served import Served
from replay.backends.http.metrics import Sample
from replay.backends.preset import LowerTier, Preset, Tiers
from replay.load.clock import run
from replay.trace import ROOT, PrefixTree

CPU = LowerTier(gib=1)
VLLM = Preset(name="v")
OFFLOAD = Preset(name="o", connector="offload", tiers=Tiers(cpu=CPU))
MEMORY = Preset(name="m", connector="lmcache-mp", tiers=Tiers(cpu=CPU))
DISK = Preset(name="d", connector="lmcache-mp", tiers=Tiers(cpu=CPU, disk=CPU))
ONLY_DISK = Preset(name="s", connector="lmcache", tiers=Tiers(cpu=LowerTier(gib=1, staging=True), disk=CPU))
SGLANG = Preset(name="g", engine="sglang", connector="hicache", tiers=Tiers(cpu=CPU, disk=CPU))
OPENAI = Preset(name="a", engine="openai")


def openai(prompt: int, cached: int | None, output: int = 5) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached, "multimodal_tokens": None}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details,
    }


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (openai(640, 608), (640, 5, 608)),
        (openai(640, None), (640, 5, None)),
        ({}, (None, None, None)),
        # DeepSeek
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "prompt_cache_hit_tokens": 64,
                "prompt_cache_miss_tokens": 36,
            },
            (100, 5, 64),
        ),
        # Moonshot
        ({"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 30}, (100, 5, 30)),
        # Anthropic: input_tokens is only what follows the last cache breakpoint
        (
            {
                "input_tokens": 7,
                "cache_creation_input_tokens": 93,
                "cache_read_input_tokens": 900,
                "output_tokens": 5,
                "cache_creation": {"ephemeral_5m_input_tokens": 93, "ephemeral_1h_input_tokens": 0},
            },
            (1000, 5, 900),
        ),
        ({"input_tokens": 7, "output_tokens": 5}, (7, 5, None)),
        ({"prompt_tokens": "7", "completion_tokens": True}, (None, None, None)),
    ],
)
def test_usage_of_every_interface_is_read(usage: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert tuple(read_usage(usage)) == expected


STATS = {
    "cached_token_stats": {
        "num_vllm_cached_tokens": 608,
        "num_lmcache_cached_tokens": 640,
        "num_lmcache_extra_cached_tokens": 32,
    }
}
CASES = [
    ("vLLM alone", VLLM, openai(640, 608), {}, Served(gpu=608, computed=32, source="usage")),
    ("vLLM without details", VLLM, openai(640, None), {}, Served()),
    ("a connector hides the split", OFFLOAD, openai(640, 608), {}, Served(computed=32, source="usage")),
    ("nothing cached is known to be 0", OFFLOAD, openai(640, 0), {}, Served(gpu=0, computed=640, source="usage")),
    # A full repeat on vLLM 0.32 with LMCache's server: external full hit, minus the token that must run.
    (
        "LMCache server, memory only",
        MEMORY,
        openai(640, 639),
        {"kv_transfer_params": STATS},
        Served(gpu=608, cpu=31, computed=1, source="connector"),
    ),
    (
        "LMCache server, memory and disk, no lookup record",
        DISK,
        openai(640, 639),
        {"kv_transfer_params": STATS},
        Served(gpu=608, external=31, computed=1, source="connector"),
    ),
    (
        "LMCache server, memory and disk, with lookup record",
        DISK,
        openai(2000, 1536),
        {
            "kv_transfer_params": {"cached_token_stats": {"num_vllm_cached_tokens": 256}},
            "lookup": {"hit_tokens": 1536, "l1_hit_tokens": 1024, "l2_hit_tokens": 512},
        },
        Served(gpu=256, cpu=768, disk=512, computed=464, source="events"),
    ),
    (
        "the GPU had more than memory: all that was loaded came from disk",
        DISK,
        openai(2000, 1536),
        {
            "kv_transfer_params": {"cached_token_stats": {"num_vllm_cached_tokens": 1280}},
            "lookup": {"hit_tokens": 1536, "l1_hit_tokens": 1024, "l2_hit_tokens": 512},
        },
        Served(gpu=1280, cpu=0, disk=256, computed=464, source="events"),
    ),
    (
        "LMCache had less than vLLM: all from the GPU",
        DISK,
        openai(2000, 1536),
        {"lookup": {"hit_tokens": 1024, "l1_hit_tokens": 1024, "l2_hit_tokens": 0}},
        Served(gpu=1536, cpu=0, disk=0, computed=464, source="events"),
    ),
    (
        "streams before vLLM 0.33 with only a lookup: the GPU's part is unknown",
        DISK,
        openai(2000, 1536),
        {"lookup": {"hit_tokens": 1536, "l1_hit_tokens": 1536, "l2_hit_tokens": 0}},
        Served(computed=464, source="usage"),
    ),
    (
        "LMCache in the engine, one tier, from its log",
        ONLY_DISK,
        openai(2000, 1536),
        {"lookup": {"engine_tokens": 512, "hit_tokens": 1536, "load_tokens": 1024}},
        Served(gpu=512, disk=1024, computed=464, source="events"),
    ),
    (
        "LMCache in the engine, no hit",
        ONLY_DISK,
        openai(2000, 512),
        {"kv_transfer_params": {"num_lmcache_cached_tokens": 0}},
        Served(gpu=512, disk=0, computed=1488, source="connector"),
    ),
    (
        "SGLang",
        SGLANG,
        openai(1000, 900),
        {"sglext": {"cached_tokens_details": {"device": 400, "host": 300, "storage": 200, "storage_backend": "file"}}},
        Served(gpu=400, cpu=300, disk=200, computed=100, source="usage"),
    ),
    (
        "SGLang with Mooncake and no disk in the preset",
        Preset(name="g", engine="sglang", connector="hicache", tiers=Tiers(cpu=CPU)),
        openai(1000, 900),
        {
            "sglext": {
                "cached_tokens_details": {"device": 400, "host": 300, "storage": 200, "storage_backend": "mooncake"}
            }
        },
        Served(gpu=400, cpu=300, remote=200, computed=100, source="usage"),
    ),
    (
        "SGLang without storage",
        SGLANG,
        openai(1000, 700),
        {"sglext": {"cached_tokens_details": {"device": 400, "host": 300}}},
        Served(gpu=400, cpu=300, computed=300, source="usage"),
    ),
    ("SGLang without details", SGLANG, openai(1000, 700), {}, Served(computed=300, source="usage")),
    ("a hosted service", OPENAI, openai(1000, 700), {}, Served(external=700, computed=300, source="usage")),
    ("a hosted service that says nothing", OPENAI, openai(1000, None), {}, Served()),
]


@pytest.mark.parametrize(("name", "preset", "usage", "extra_and_expected"), [(*c[:3], c[3:]) for c in CASES])
def test_tokens_by_tier(
    name: str, preset: Preset, usage: dict[str, Any], extra_and_expected: tuple[dict[str, Any], Served]
) -> None:
    extra, expected = extra_and_expected
    assert tiers(preset, read_usage(usage), extra) == expected, name


COUNTS = st.one_of(st.none(), st.integers(0, 3000))


@given(
    preset=st.sampled_from([VLLM, OFFLOAD, MEMORY, DISK, ONLY_DISK, SGLANG, OPENAI]),
    prompt=st.integers(1, 2000),
    cached=COUNTS,
    parts=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS),
)
def test_known_tiers_add_up_to_the_prompt_and_none_is_negative(
    preset: Preset, prompt: int, cached: int | None, parts: tuple[int | None, ...]
) -> None:
    own, l1, hit, engine = parts
    extra = {
        "kv_transfer_params": {"cached_token_stats": {"num_vllm_cached_tokens": own}},
        "lookup": {"l1_hit_tokens": l1, "hit_tokens": hit, "engine_tokens": engine},
    }
    usage = openai(prompt, cached if cached is None else min(cached, prompt))
    served = tiers(preset, read_usage(usage), extra)
    known = [tokens for tokens in served[:6] if tokens is not None]
    assert all(tokens >= 0 for tokens in known)
    assert sum(known) <= prompt
    if served.computed is not None and len(known) > 1 and sum(known) != served.computed:
        assert sum(known) == prompt


def test_an_engines_id_gives_back_ours() -> None:
    assert lookups.request_id("cmpl-run1-s/0-0-9b54dfbf") == "run1-s/0"
    assert lookups.request_id("chatcmpl-run1-s/12-9b54dfbf") == "run1-s/12"
    assert lookups.request_id("something else") == "something else"


EVENT = (
    '{"event": "mp.lookup_prefetch.end", "time": 1.0, "session_id": "cmpl-r-s/0-0-9b54dfbf", '
    '"requested_tokens": 1536, "hit_tokens": 1536, "l1_hit_tokens": 1024, "l2_hit_tokens": 512}\n'
)
LOG = (
    "(EngineCore_DP0 pid=7) [2026-11-29 10:00:00] LMCache INFO: Reqid: cmpl-r-s/0-0-9b54dfbf, Total tokens 2000, "
    "Inference Engine computed tokens: 512, LMCache hit tokens: 1536, need to load: 1024 (vllm_v1_adapter.py:1476)\n"
)


def test_records_are_found_while_the_file_grows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = lookups.Lookups(path)
    assert run(follower.find("r-s/0"), virtual=False) is None  # no file yet
    path.write_text('{"event": "l1.keys.evicted", "time": 5.0, "chunks": 3}\nnot json\n' + EVENT[:40])
    assert run(follower.find("r-s/0"), virtual=False) is None
    with path.open("a") as file:
        file.write(EVENT[40:] + EVENT.replace("1024", "0"))
    found = run(follower.find("r-s/0"), virtual=False)
    assert found is not None
    assert found["l1_hit_tokens"] == 1024
    assert follower.chunk_events == [(5.0, "evict", 0, 3)]
    assert follower.missing == 2


def test_a_connectors_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG.replace("Total tokens 2000", "Total tokens 1"))
    follower = lookups.Lookups(path, log=True)  # what stands there is about earlier runs
    with path.open("a") as log:
        log.write("INFO: other\n" + LOG)
    found = run(follower.find("r-s/0"), virtual=False)
    assert found == {"total_tokens": 2000, "engine_tokens": 512, "hit_tokens": 1536, "load_tokens": 1024}


def test_notes_of_engine_and_cache_about_a_request_are_one_record(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = lookups.Lookups(path)
    about = {"event": "mp.lookup_prefetch.end", "session_id": "cmpl-r-s/0-0-9b54dfbf"}
    with path.open("a") as file:
        file.write(json.dumps({**about, "engine_tokens": 512}) + "\n")
        file.write(json.dumps({**about, "hit_tokens": 1536, "l1_hit_tokens": 1024}) + "\n")
    found = run(follower.find("r-s/0"), virtual=False)
    assert found is not None
    assert (found["engine_tokens"], found["hit_tokens"], found["l1_hit_tokens"]) == (512, 1536, 1024)


def test_waiting_for_records_that_never_come_ends(tmp_path: Path) -> None:
    follower = lookups.Lookups(tmp_path / "never")
    follower._in_vain = follower._GIVE_UP
    assert run(follower.find("x"), virtual=True) is None


BLOCK = Preset(name="b", block_tokens=16)


@pytest.mark.parametrize(
    ("served", "ideal", "prefilled", "gone", "expected"),
    [
        (96, 96, 96, None, {}),
        (96, 100, 100, None, {"granularity": 4}),
        (80, 96, 96, None, {"unknown": 16}),
        (0, 100, 100, None, {"granularity": 4, "unknown": 96}),
        (0, 100, 100, 64, {"granularity": 4, "evicted": 64, "unknown": 32}),
        (64, 100, 70, None, {"diverged": 30, "granularity": 6}),
        (99, 100, 100, 64, {"granularity": 1}),
        (100, 90, 90, None, {}),
    ],
)
def test_loss_is_split_and_adds_up(
    served: int, ideal: int, prefilled: int, gone: int | None, expected: dict[str, int]
) -> None:
    tokens = Served(gpu=served, computed=100 - served, source="usage")
    lost = loss.split(BLOCK, tokens, prompt=100, ideal=ideal, prefilled=prefilled, evicted=lambda: gone)
    assert lost is not None
    assert {cause: count for cause, count in lost.items() if count} == expected
    assert sum(lost.values()) == max(0, ideal - served)


@pytest.mark.parametrize(
    ("served", "warm", "expected"),
    [
        (0, 0, {"cold": 96, "granularity": 4}),
        (0, 40, {"cold": 68, "granularity": 4, "unknown": 28}),
        (32, 40, {"cold": 64, "granularity": 4}),
        (96, 0, {"granularity": 4}),
    ],
)
def test_what_a_restart_took_is_cold(served: int, warm: int, expected: dict[str, int]) -> None:
    tokens = Served(gpu=served, computed=120 - served, source="usage")
    lost = loss.split(BLOCK, tokens, prompt=120, ideal=100, prefilled=100, warm=warm)
    assert lost is not None
    assert {cause: count for cause, count in lost.items() if count} == expected


def test_the_last_prompt_token_is_never_served() -> None:
    tokens = Served(gpu=80, computed=16, source="usage")
    lost = loss.split(BLOCK, tokens, prompt=96, ideal=96, prefilled=96)
    assert lost is not None
    assert lost["granularity"] == 16


def test_without_a_cache_nothing_was_stored_and_without_counts_nothing_is_known() -> None:
    off = Preset(name="off", prefix_caching=False)
    lost = loss.split(off, Served(gpu=0, computed=100), prompt=100, ideal=90, prefilled=90)
    assert lost is not None
    assert lost["never_stored"] == 90
    assert loss.split(VLLM, Served(), prompt=100, ideal=90, prefilled=90) is None


def test_a_recorded_output_is_prefilled_only_once_a_prompt_has_held_it() -> None:
    tree, known = PrefixTree(), loss.Prefilled()
    first = tree.extend(ROOT, "a", 100)
    second = tree.extend(tree.extend(first, ("output", "s/0"), 20), "b", 30)
    known.add(tree, first)
    assert known.longest(tree, second) == 100
    known.add(tree, second)
    assert known.longest(tree, second) == 150
    fork = tree.extend(tree.cut(second, 110), "c", 5)
    assert known.longest(tree, fork) == 110


def scrapes(**sources: tuple[float, float]) -> list[Sample]:
    name = "vllm:prompt_tokens_cached_by_source_total"
    rows = [(at, source, value[at]) for at in (0, 1) for source, value in sources.items()]
    return [Sample(float(at), name, f'{{engine="0",source="{source}"}}', float(value)) for at, source, value in rows]


TIERED = Preset(name="t", connector="offload", tiers=Tiers(cpu=CPU, disk=CPU))


@pytest.mark.parametrize(
    ("preset", "cached", "samples", "expected"),
    [
        (TIERED, 90, scrapes(device=(5, 55), host=(0, 30), disk=(7, 17)), Served(50, 30, 10, computed=10)),
        (OFFLOAD, 90, scrapes(device=(5, 55), host=(0, 0), external_unspecified=(1, 41)), Served(50, 40, computed=10)),
        (TIERED, 90, scrapes(device=(5, 55), external_unspecified=(1, 41)), Served(50, external=40, computed=10)),
        (OFFLOAD, 90, scrapes(device=(5, 55), host=(0, 30)), None),  # something else ran too
        (OFFLOAD, 90, [], None),
        (
            OFFLOAD,
            90,
            [
                Sample(float(at), name, None, value)
                for at, values in enumerate(((5.0, 1.0), (55.0, 41.0)))
                for name, value in zip(
                    ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"), values, strict=True
                )
            ],
            Served(50, 40, computed=10),  # vLLM 0.31 and older
        ),
        (
            OFFLOAD,
            90,
            [
                Sample(float(at), name, labels, float(value))
                for at, grown in enumerate((0, 1))
                for name, labels, value in (
                    ("vllm:prefix_cache_hits_total", None, 150 * grown),  # looked at three times
                    ("vllm:prompt_tokens_by_source_total", '{source="local_cache_hit"}', 5 + 50 * grown),
                    ("vllm:prompt_tokens_by_source_total", '{source="external_kv_transfer"}', 40 * grown),
                    ("vllm:prompt_tokens_by_source_total", '{source="local_compute"}', 10 * grown),
                )
            ],
            Served(50, 40, computed=10),  # vLLM 0.26
        ),
    ],
)
def test_counters_around_a_request_that_ran_alone_tell_its_tiers(
    preset: Preset, cached: int, samples: list[Sample], expected: Served | None
) -> None:
    found = counters.tiers(preset, read_usage(openai(100, cached)), samples)
    assert found == (expected._replace(source="counters") if expected else None)
