"""Prompt content: a pure function of seed, segment and position, joined at the cost of what is appended."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.load.content import Content, is_output, token_ids
from replay.trace import ROOT, PrefixTree, Tip

PIECES = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40)), min_size=1, max_size=8)


def decode(prompt: bytes) -> list[int]:
    ids: list[int] = json.loads(b"[" + prompt[:-1] + b"]")
    return ids


def splitmix64(base: int, position: int) -> int:
    """The published algorithm (Steele, Lea, Flood 2014) on Python's integers."""
    mask = 2**64 - 1
    x = (base + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def grow(tree: PrefixTree, tip: Tip, pieces: list[tuple[str, int]]) -> Tip:
    for segment, tokens in pieces:
        tip = tree.extend(tip, segment, tokens)
    return tip


@given(
    prompts=st.lists(st.tuples(PIECES, st.integers(0, 60)), min_size=1, max_size=6), cache=st.sampled_from([0, 1 << 20])
)
def test_every_prompt_is_its_pieces_whatever_came_before(
    prompts: list[tuple[list[tuple[str, int]], int]], cache: int
) -> None:
    tree, content, tip = PrefixTree(), Content(3, cache_bytes=cache), ROOT
    for pieces, keep in prompts:
        tip = grow(tree, tree.cut(tip, min(keep, tip.depth)), pieces)
        expected = [content.tokens(segment, offset, count) for segment, offset, count in tree.pieces(tip)]
        assert decode(content.prompt(tree, tip)) == np.concatenate(expected).tolist()


@given(offset=st.integers(0, 500), count=st.integers(0, 500))
def test_a_slice_of_a_segment_is_a_slice_of_its_tokens(offset: int, count: int) -> None:
    whole = Content(1).tokens("s", 0, 1_000)
    assert Content(1).tokens("s", offset, count).tolist() == whole[offset : offset + count].tolist()


def test_tokens_are_the_same_on_every_machine_and_version() -> None:
    base = int.from_bytes(hashlib.blake2b(b"1:'s'", digest_size=8).digest(), "little")
    expected = [1_000 + (splitmix64(base, position) >> 32) * 29_000 // 2**32 for position in range(50)]
    assert Content(1).tokens("s", 0, 50).tolist() == expected
    assert Content(1).tokens(("s", 2), 0, 2).tolist() != Content(1).tokens("s", 0, 2).tolist()


def test_seed_segment_and_salt_each_give_other_tokens() -> None:
    salted = Content(1)
    salted.salt = "x"
    drawn = [Content(1).tokens("s", 0, 64), Content(2).tokens("s", 0, 64), Content(1).tokens("t", 0, 64)]
    drawn.append(salted.tokens("s", 0, 64))
    assert len({tuple(tokens.tolist()) for tokens in drawn}) == 4


def test_tokens_spread_over_the_whole_vocabulary_and_stay_in_it() -> None:
    tokens = Content(1, token_ids(range(5, 105))).tokens("s", 0, 10_000)
    assert set(tokens.tolist()) == set(range(5, 105))


def test_ids_of_any_width_are_legal_json() -> None:
    tree = PrefixTree()
    content = Content(1, token_ids(range(8, 1_200)))
    prompt = decode(content.prompt(tree, tree.extend(ROOT, "s", 2_000)))
    assert len(prompt) == 2_000
    assert min(prompt) < 100
    assert max(prompt) > 1_000


def test_what_the_engine_generated_replaces_the_recorded_output() -> None:
    tree, content, key = PrefixTree(), Content(1), ("output", "s/0")
    tip = tree.extend(tree.extend(tree.extend(ROOT, "s", 3), key, 4), "t", 2)
    before = decode(content.prompt(tree, tip))
    content = Content(1)
    assert content.set_output(key, [7, 8, 9])
    after = decode(content.prompt(tree, tip))
    assert after == [*before[:3], 7, 8, 9, before[6], *before[7:]]
    assert content.live_outputs == 1


def test_every_id_of_todays_vocabularies_can_stand_in_a_later_prompt() -> None:
    """Qwen3 has 151,936 entries, Gemma 262,144."""
    tree, content = PrefixTree(), Content(1)
    tip = tree.extend(tree.extend(ROOT, "s", 3), "o", 3)
    assert content.set_output("o", [151_935, 262_143, 0])
    assert decode(content.prompt(tree, tip))[3:] == [151_935, 262_143, 0]


@pytest.mark.parametrize("ids", [[], [-1], [1_000_000], [10**30], ["a"], [[1]], [None]])
def test_outputs_that_cannot_be_spelt_leave_the_recorded_one(ids: list[Any]) -> None:
    content = Content(1)
    assert not content.set_output("s", ids)
    assert content.tokens("s", 0, 3).tolist() == Content(1).tokens("s", 0, 3).tolist()


def test_messages_alternate_and_hold_the_pieces_in_order() -> None:
    tree, content = PrefixTree(), Content(1)
    tip = grow(tree, ROOT, [("system", 5), ("user", 6)])
    tip = tree.extend(tree.extend(tip, ("output", "s/0"), 3), "tool", 2)
    messages = content.messages(tree, tip)
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert [sum(map(len, message.parts)) // content.alphabet.width for message in messages] == [11, 3, 2]
    assert is_output(("output", "s/0"))
    assert not is_output("output")


def test_memory_stays_within_the_limit() -> None:
    content = Content(1, cache_bytes=10_000)
    for number in range(100):
        content.piece(f"s{number}", 0, 300)
    assert content._segments.size <= 10_000


@pytest.mark.parametrize("vocabulary", [range(0), range(-5, 5)])
def test_an_impossible_vocabulary_is_refused(vocabulary: range) -> None:
    with pytest.raises(ReplayError, match="vocabulary"):
        token_ids(vocabulary)
