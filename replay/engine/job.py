"""One request inside the engine model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from replay.engine.lru import Int32s
from replay.engine.tier import Hit, Prefetch

NO_CHUNKS: Int32s = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Job:
    """A request from its arrival to its last token. Times are seconds on the engine's clock."""

    blocks: Int32s
    """Ids of the full GPU blocks of prompt and output."""
    prompt: int
    """Prompt tokens."""
    output: int
    """Tokens to generate, at least 1."""
    ideal: int = 0
    """Prompt tokens that an unbounded cache could serve."""
    chunks: Int32s = field(default_factory=NO_CHUNKS.copy)
    """Ids of the full chunks of lower tiers: of the prompt, and of the output where it is stored too."""

    arrived: float = 0.0
    """When the scheduler had it."""
    slot: int = -1
    """Its row of the block table, or -1."""
    generated: int = 0
    """Tokens generated when it last started or resumed prefill."""
    stored: int = 0
    """Chunks that the lower tiers have been given."""
    known: int = 0
    """Tokens whose KV it found in the GPU tier or loaded when it was admitted last."""
    met: int = 0
    """The same, and what the CPU tier has and was not worth loading."""
    hit: Hit = field(default_factory=Hit)
    asked: bool = False
    """Whether storage has been asked for what it holds of a waiting request."""
    prefetch: Prefetch | None = None
    busy_until: float = 0.0
    """When the last transfer of its KV from or to lower tiers ends."""
    loaded: float | None = None
    """When the scheduler hears that an asynchronous load has ended; null: not yet."""
    first_token: float | None = None
    on_first_token: Callable[[float], None] | None = None
    """Called with the time of the first token when it is there."""
    last_token: float | None = None
    served: dict[str, int] | None = None
    """Prompt tokens by the tier that served them at its first admission: the tiers' names, and ``computed``."""
    lost: dict[str, int] = field(default_factory=dict)
    """Ideal tokens that were not served, by cause."""
    load_s: float = 0.0
    """Seconds between asking lower tiers for KV and having it."""
    preemptions: int = 0
    goal: int = field(init=False)
    """Tokens whose KV it holds when it ends: all but the last generated one."""

    @property
    def total(self) -> int:
        """Tokens whose KV it needs before the next one can be generated."""
        return self.prompt + self.generated

    def __post_init__(self) -> None:
        self.goal = self.prompt + self.output - 1
