"""The power cap: when it slows prefill, and that simulated requests feel it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.connect import Where
from replay.backends.preset import load
from replay.engine import profiles
from replay.engine.power import COOL_S, PowerCap
from replay.runs import simulate
from replay.trace import Header, Trace, Turn

FIT = profiles.gpu("h200").fits["qwen3-8b"]
FULL = 8192


def test_long_work_gets_slow_and_a_pause_makes_it_fast_again() -> None:
    power = PowerCap(FIT)
    slow = 0.21 + (FIT.power_cap - 1) * FIT.token_s * FULL
    assert power.step(0.0, FULL, 0.21) == 0.21
    assert power.step(0.21, FULL, 0.21) == pytest.approx(slow)
    assert power.step(1.0, FULL, 0.21) == 0.21


def test_steps_that_wait_for_memory_neither_heat_nor_slow_down() -> None:
    power = PowerCap(FIT)
    for n in range(100):
        assert power.step(n / 100, 64, 0.01) == 0.01
    assert power.step(1.0, FULL, 0.21) == 0.21


@given(
    steps=st.lists(st.tuples(st.floats(0, 4 * COOL_S), st.integers(1, FULL)), max_size=30),
    cap=st.floats(1, 1.5),
)
def test_a_cap_never_makes_a_step_faster_nor_slower_than_the_cap(steps: list[tuple[float, int]], cap: float) -> None:
    fit, now = msgspec.structs.replace(FIT, power_cap=cap), 0.0
    power = PowerCap(fit)
    for pause, tokens in steps:
        work = max(fit.weights_s, fit.token_s * tokens)
        taken = power.step(now + pause, tokens, work)
        assert work <= taken <= cap * work * (1 + 1e-9)
        now += pause + taken


def ttfts(turns: list[Turn]) -> dict[str, float]:
    trace = Trace(Header(format="replay-trace", version=1, name="power", synthetic=True), turns)
    rows = simulate(trace, Where(load("vllm"), model="qwen3-8b", gpu="h200"))
    return {row["session"]: row["first_token"] - row["sent"] for row in rows}


def test_prompts_without_pauses_take_longer_than_prompts_with() -> None:
    def prompts(pause: float) -> list[Turn]:
        after = [None, *([f"{n}/0"] for n in range(9))]
        return [
            Turn(
                session=str(n), turn=0, at=None if previous else 0.0, after=previous, pause=pause,
                append=[(f"{pause} {n}", FULL)], output=1,
            )
            for n, previous in enumerate(after)
        ]  # fmt: skip

    rested, pressed = ttfts(prompts(0.2)), ttfts(prompts(0.0))
    assert rested["9"] == pytest.approx(rested["0"])
    assert pressed["9"] - rested["9"] == pytest.approx((FIT.power_cap - 1) * FIT.token_s * FULL, rel=1e-6)


def test_who_waits_is_scheduled_while_those_before_run() -> None:
    """Four prompts of half a step's budget each: vLLM launches the second step while the first one runs."""
    turns = [Turn(session=str(n), turn=0, at=0.0, append=[(f"w{n}", FULL // 2)], output=1) for n in range(4)]
    found = sorted(ttfts(turns).values())
    assert found[0] == found[1] < found[2] == found[3]
    work = FIT.token_s * FULL + FIT.attention_s * FULL * FULL / 4
    assert found[2] - found[0] == pytest.approx(work, rel=0.02)
