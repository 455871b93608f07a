"""Steps that are taken together: see `replay.engine.scheduler`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stretch:
    """Steps under way: their common start, how many, and the time of ``n`` steps as a polynomial."""

    start: float
    end: float
    steps: int = 1
    base: float = 0.0
    """Seconds of the first step."""
    slope: float = 0.0
    """Seconds that each step adds to the one before."""

    def after(self, steps: int) -> float:
        """When so many steps have ended."""
        return self.start + steps * self.base + self.slope * (steps * (steps - 1) / 2)
