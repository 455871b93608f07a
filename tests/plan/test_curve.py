"""The one-pass hit curve against a brute-force LRU, and against published figures of real traces."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.plan import hit_curve
from replay.trace.tree import ROOT, BlockIds, Ids, PrefixTree

Prompts = Sequence[tuple[Ids, int]]


def brute_force(prompts: Prompts, capacity: int, block_tokens: int) -> tuple[int, int]:
    """Hit blocks and tokens of an LRU of `capacity` blocks: look up the longest resident prefix, then touch
    all blocks of the prompt from the last to the first."""
    cache: OrderedDict[int, None] = OrderedDict()
    blocks = tokens = 0
    for ids, prompt_tokens in prompts:
        hit = 0
        for block in ids.tolist():
            if block not in cache:
                break
            hit += 1
        blocks += hit
        tokens += min(hit * block_tokens, prompt_tokens)
        for block in reversed(ids.tolist()):
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return blocks, tokens


def dense(ids: Iterable[Sequence[Any]]) -> list[Ids]:
    numbers: dict[Any, int] = {}
    return [np.array([numbers.setdefault(block, len(numbers)) for block in row], np.int32) for row in ids]


def mooncake(corpus: Path) -> list[tuple[Ids, int]]:
    with gzip.open(corpus / "mooncake" / "conversation_trace.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [(np.array(row["hash_ids"], np.int32), row["input_length"]) for row in rows]


def claude_code(corpus: Path, files: int) -> list[tuple[Ids, int]]:
    """Requests by recorded time, trace k starting at 30 k seconds; ids count within their trace."""
    found: list[tuple[float, int, int, list[int], int]] = []

    def walk(entries: list[dict[str, Any]], start: float, number: int) -> None:
        for entry in entries:
            if entry.get("type") == "subagent":
                walk(entry["requests"], start + entry["t"], number)
            else:
                found.append((start + entry["t"], number, len(found), entry["hash_ids"], entry["in"]))

    paths = sorted((corpus / "claude-code-blocks" / "traces").glob("trace_*.json.xz"))[:files]
    for number, path in enumerate(paths):
        walk(json.loads(lzma.decompress(path.read_bytes()))["requests"], 30.0 * number, number)
    found.sort(key=lambda row: row[:3])
    ids = dense([(number, block) for block in blocks] for _, number, _, blocks, _ in found)
    return [(row, request[4]) for row, request in zip(ids, found, strict=True)]


pieces = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=5)


@given(st.lists(pieces, max_size=12), st.integers(1, 4))
def test_the_curve_equals_a_simulated_lru_at_every_capacity(
    prompts: list[list[tuple[str, int]]], block_tokens: int
) -> None:
    tree = PrefixTree()
    ids = BlockIds(tree, block_tokens)
    stream = []
    for pieces_of_prompt in prompts:
        tip = ROOT
        for segment, tokens in pieces_of_prompt:
            tip = tree.extend(tip, segment, tokens)
        stream.append((ids(tip), tip.depth))
    curve = hit_curve(stream, block_tokens)
    for capacity in range(len(curve.blocks) + 2):
        blocks, tokens = brute_force(stream, capacity, block_tokens) if capacity else (0, 0)
        assert curve.hit_blocks(capacity * block_tokens) == blocks
        assert curve.hit_tokens(capacity * block_tokens) == tokens


@pytest.mark.parametrize("name", ["mooncake", "claude-code-1", "claude-code-3"])
def test_real_traces_equal_a_simulated_lru_at_twelve_capacities(corpus: Path, name: str) -> None:
    if name == "mooncake":
        stream, size = mooncake(corpus)[:1500], 512
    else:
        stream, size = claude_code(corpus, int(name[-1])), 64
    curve = hit_curve(stream, size)
    longest, distinct = max(len(ids) for ids, _ in stream), len(curve.blocks) - 1
    capacities = [1, 7, longest // 10, longest // 2, longest - 1, longest, longest + 1]
    capacities += [distinct // 8, distinct // 4, distinct // 2, distinct - 1, distinct + 9]
    for capacity in capacities:
        assert (curve.hit_blocks(capacity * size), curve.hit_tokens(capacity * size)) == brute_force(
            stream, capacity, size
        )


def test_twenty_claude_code_traces_have_their_published_hits(corpus: Path) -> None:
    curve = hit_curve(claude_code(corpus, 20), 64)
    found = [curve.hit_blocks(millions * 1e6) for millions in (1, 5, 20, 1e6)]
    assert found == [2_886_346, 2_903_146, 2_903_525, 2_903_525]
    assert curve.blocks[[5_000, 15_625, 78_125]].tolist() == [2_567_449, 2_886_346, 2_903_146]


def test_mooncakes_conversations_have_their_published_hits(corpus: Path) -> None:
    curve = hit_curve(mooncake(corpus), 512)
    capacities = [2_048, 9_765, 39_062, 97_656, 10**9]
    assert [curve.hit_blocks(512 * n) for n in capacities] == [15_857, 59_742, 101_337, 104_870, 105_710]
    shares = [round(100 * curve.hit_share(512 * n), 2) for n in capacities]
    assert shares == [5.60, 21.11, 35.82, 37.07, 37.36]
    assert curve.ceiling == 54_098_411


def test_a_partial_last_block_counts_with_the_tokens_that_it_has() -> None:
    ids = np.array([0, 1], np.int32)
    curve = hit_curve([(ids, 15), (ids, 15)], 10)
    assert curve.tokens.tolist() == [0, 10, 15]
    assert curve.prompt_tokens == 30


def test_the_working_set_is_the_smallest_capacity_with_all_hits() -> None:
    prompt, other = np.arange(3, dtype=np.int32), np.arange(3, 8, dtype=np.int32)
    curve = hit_curve([(prompt, 30), (other, 50), (prompt, 30)], 10)
    assert curve.working_set == 80
    assert curve.hit_tokens(79) == 20 and curve.hit_tokens(80) == curve.ceiling == 30


def test_nothing_asked_is_an_empty_curve() -> None:
    curve = hit_curve([], 16)
    assert (curve.ceiling, curve.working_set, curve.hit_share(1e9)) == (0, 0, 0.0)


def test_ids_that_do_not_name_prefixes_are_refused() -> None:
    with pytest.raises(ValueError, match="two different prefixes"):
        hit_curve([(np.array([0, 1], np.int32), 32), (np.array([1], np.int32), 16)], 16)
    with pytest.raises(ValueError, match="2 blocks of 16 tokens for a prompt of 16"):
        hit_curve([(np.array([0, 1], np.int32), 16)], 16)
