"""The prefix tree against token lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.trace import ROOT, BlockIds, PrefixTree, Tip

Tokens = list[tuple[str, int]]
"""Each token as its segment and its position in it: equal exactly if the tokens are equal."""

pieces = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 7)), min_size=1, max_size=3)
growth = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), pieces), min_size=1, max_size=12)


def grow(steps: list[tuple[int, int, list[tuple[str, int]]]]) -> tuple[PrefixTree, list[Tip], list[Tokens]]:
    """Contexts that each keep a part of an earlier one and add pieces, as tips and as token lists."""
    tree, tips, lists = PrefixTree(), [ROOT], [[]]
    for wanted_base, wanted_keep, added in steps:
        base = wanted_base % len(tips)
        keep = min(wanted_keep, len(lists[base]))
        tip, tokens = tree.cut(tips[base], keep), lists[base][:keep]
        for segment, count in added:
            tip = tree.extend(tip, segment, count)
            tokens = tokens + [(segment, position) for position in range(count)]
        tips.append(tip)
        lists.append(tokens)
    return tree, tips, lists


def common(a: Tokens, b: Tokens) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@settings(deadline=None)
@given(growth)
def test_pieces_spell_the_tokens_that_were_appended(steps):
    tree, tips, lists = grow(steps)
    for tip, tokens in zip(tips, lists, strict=True):
        spelt = [(seg, at) for seg, offset, n in tree.pieces(tip) for at in range(offset, offset + n)]
        assert spelt == tokens
        assert tip.depth == len(tokens)


@settings(deadline=None)
@given(growth)
def test_equal_contexts_are_the_same_tip(steps):
    _, tips, lists = grow(steps)
    for i, tip in enumerate(tips):
        for j in range(i):
            assert (tip == tips[j]) == (lists[i] == lists[j])


@settings(deadline=None)
@given(growth)
def test_longest_sent_is_the_longest_prefix_shared_with_anything_sent_before(steps):
    tree, tips, lists = grow(steps)
    for i, tip in enumerate(tips):
        assert tree.longest_sent(tip) == max((common(lists[i], lists[j]) for j in range(i)), default=0)
        tree.mark_sent(tip)


@settings(deadline=None)
@given(growth, st.integers(1, 5))
def test_block_ids_are_equal_exactly_where_all_tokens_up_to_there_are(steps, size):
    tree, tips, lists = grow(steps)
    blocks = BlockIds(tree, size)
    known: dict[tuple[tuple[str, int], ...], int] = {}
    for tip, tokens in zip(tips, lists, strict=True):
        ids = blocks(tip)
        assert ids.dtype == np.int32
        assert len(ids) == len(tokens) // size
        for k, number in enumerate(ids):
            assert known.setdefault(tuple(tokens[: (k + 1) * size]), int(number)) == number
    assert len(set(known.values())) == len(known)
    assert all(0 <= number < blocks.count for number in known.values())


@settings(deadline=None)
@given(growth, st.integers(1, 5))
def test_ids_of_partial_blocks_are_equal_exactly_where_all_tokens_up_to_their_first_are(steps, size):
    tree, tips, lists = grow(steps)
    blocks = BlockIds(tree, size, partial=True)
    known: dict[tuple[tuple[str, int], ...], int] = {}
    for tip, tokens in zip(tips, lists, strict=True):
        ids = blocks(tip)
        assert len(ids) == -(-len(tokens) // size)
        for k, number in enumerate(ids):
            assert known.setdefault(tuple(tokens[: k * size + 1]), int(number)) == number
    assert len(set(known.values())) == len(known)
    assert all(0 <= number < blocks.count for number in known.values())


@settings(deadline=None)
@given(growth, growth, st.integers(1, 5))
def test_block_ids_do_not_change_when_the_tree_grows(first, more, size):
    tree, tips, _ = grow(first)
    blocks = BlockIds(tree, size)
    before = [blocks(tip).tolist() for tip in tips]
    for _, _, added in more:
        tip = tips[-1]
        for segment, count in added:
            tip = tree.extend(tip, segment, count)
        blocks(tip)
    assert [blocks(tip).tolist() for tip in tips] == before


def test_a_long_context_is_continued_at_the_cost_of_what_is_added():
    tree = PrefixTree()
    tip = tree.extend(ROOT, "book", 200_000)
    for turn in range(100):
        tip = tree.extend(tip, f"turn {turn}", 1_000)
    assert len(tree) == 101
    assert tree.longest_sent(tree.cut(tip, 150_000)) == 0
    tree.mark_sent(tree.cut(tip, 150_000))
    assert tree.longest_sent(tip) == 150_000


def test_cutting_more_than_there_is_fails():
    tree = PrefixTree()
    with pytest.raises(ValueError, match="keep 11 tokens of a context of 10"):
        tree.cut(tree.extend(ROOT, "a", 10), 11)


def test_a_block_has_at_least_one_token():
    with pytest.raises(ValueError, match="at least one token"):
        BlockIds(PrefixTree(), 0)
