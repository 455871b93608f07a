from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replay.engine.lru import serial_hits

PROMPTS = st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=12, unique=True), min_size=1, max_size=40)


def run(prompts: list[list[int]], capacity: int) -> list[int]:
    ids = np.array([block for prompt in prompts for block in prompt], np.int32)
    return serial_hits(ids, np.cumsum([len(prompt) for prompt in prompts]), capacity).tolist()


def naive(prompts: list[list[int]], capacity: int) -> list[int]:
    order: list[int] = []
    hits = []
    for prompt in prompts:
        hit = 0
        while hit < len(prompt) and prompt[hit] in order:
            hit += 1
        hits.append(hit)
        order = [block for block in order if block not in prompt] + prompt[::-1]
        order = order[max(0, len(order) - capacity) :]
    return hits


@given(PROMPTS, st.integers(1, 30))
def test_agrees_with_a_list_of_blocks(prompts: list[list[int]], capacity: int) -> None:
    assert run(prompts, capacity) == naive(prompts, capacity)


@given(PROMPTS)
def test_a_larger_cache_never_hits_less(prompts: list[list[int]]) -> None:
    totals = [run(prompts, capacity) for capacity in range(1, 30)]
    for smaller, larger in pairwise(totals):
        assert all(few <= many for few, many in zip(smaller, larger, strict=True))


def test_no_requests_give_no_hits() -> None:
    assert run([], 4) == []
