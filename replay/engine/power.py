"""The power cap of a GPU: a prefill that goes on for long runs at a lower clock.

Seen on H200s (700 W) with vLLM 0.26 and Qwen3-8B: 8,192 new tokens take 218 to 222 ms after a pause, and 227 ms one
after the other, while ``nvidia-smi`` reports the SM clock to fall from 1,980 to 1,500 MHz for the reason "SW power
cap"; decoding alone, which waits for memory, keeps the full clock. Without the cap a model of lone requests is a
twentieth too fast in everything that follows a queue.
"""

from __future__ import annotations

from replay.engine.profiles import StepFit

HOT_S = 0.2
"""Seconds of computing after which the clock falls; the second of two long prefills was slow already."""
COOL_S = 0.05
"""Seconds without computing after which it is back: what lay between the lone requests that ran at full clock."""


class PowerCap:
    """How hot one GPU is. Steps that wait for memory (no prefill, or a small one) do not count."""

    def __init__(self, fit: StepFit):
        """A cool GPU."""
        self._fit = fit
        self._since = 0.0
        """Seconds of computing since it was cool."""
        self._until = -COOL_S
        """When it computed last."""

    def step(self, start: float, tokens: int, seconds: float) -> float:
        """Seconds that a step takes that would take `seconds` at full clock.

        Args:
            start: when the GPU begins; never before the last step's.
            tokens: new tokens of prefill in it.
            seconds: of it at full clock.
        """
        computing = self._fit.token_s * tokens
        if computing <= self._fit.weights_s:
            return seconds
        if start - self._until > COOL_S:
            self._since = 0.0
        if self._since >= HOT_S:
            seconds += (self._fit.power_cap - 1) * computing
        self._since += seconds
        self._until = start + seconds
        return seconds
