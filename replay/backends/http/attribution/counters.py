"""Tiers of a request from the engine's counters, where it ran alone and nothing else says which tier served.

vLLM's ``prompt_tokens_cached_by_source_total`` (0.32 and later; its ``v1/metrics/loggers.py``) counts cached
prompt tokens by where they were, at admission. Read before and after a request that had the engine to
itself, the differences are that request's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from replay.backends.http.attribution.served import Served, Usage
from replay.backends.http.metrics import Sample, difference
from replay.backends.preset import Preset
from replay.load.outcome import Outcome

_BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
# What older versions have: counter and labels of the GPU's tokens, and of all from beyond it. The hits come last: they
# count a request again each time that the scheduler looks at it, so of one that had to wait they are too many.
_PROMPT = "vllm:prompt_tokens_by_source"
_OLDER = (
    ((_PROMPT, 'source="local_cache_hit"'), (_PROMPT, 'source="external_kv_transfer"')),
    (("vllm:prefix_cache_hits", ""), ("vllm:external_prefix_cache_hits", "")),
)


def wanted(preset: Preset) -> bool:
    """Whether replies alone leave the tiers of this preset open: vLLM with a connector that reports nothing itself."""
    return preset.engine == "vllm" and preset.connector in ("offload", "mooncake")


class Watch:
    """Reads the counters before and after the requests that have the engine to themselves."""

    def __init__(self, read: Callable[[], Awaitable[list[Sample]]]):
        """`read` scrapes the server's metrics."""
        self._read = read
        self._active = 0
        self._begun = 0

    @asynccontextmanager
    async def request(self) -> AsyncIterator[Callable[[], Awaitable[list[Sample]]]]:
        """Surrounds a request. What it gives, called after the reply, reads the counters and returns both
        scrapes, or nothing if another request ran meanwhile."""
        self._active += 1
        self._begun += 1
        number = self._begun
        try:
            before = await self._read() if self._active == 1 else []

            async def both() -> list[Sample]:
                if not before or self._begun != number:
                    return []
                after = await self._read()
                return [*before, *after] if after and self._begun == number else []

            yield both
        finally:
            self._active -= 1


async def fill(preset: Preset, outcome: Outcome, both: Callable[[], Awaitable[list[Sample]]]) -> None:
    """Puts the tiers into an outcome whose reply left them open, if its request ran alone.

    Args:
        preset: the backend.
        outcome: changed in place.
        both: what `Watch.request` gave.
    """
    if outcome.status != "ok" or outcome.gpu is not None:
        return
    prompt, computed = outcome.prompt_tokens, outcome.computed
    if prompt is None or computed is None:
        return
    served = tiers(preset, Usage(prompt, outcome.output_tokens, prompt - computed), await both())
    if served is not None:
        served.put(outcome)


def tiers(preset: Preset, counts: Usage, samples: Sequence[Sample]) -> Served | None:
    """Tokens by tier of a request that ran alone.

    Args:
        preset: says which tier a source that the engine does not name must be.
        counts: the request's usage.
        samples: two scrapes, one before and one after it.

    Returns:
        None if the counters are not there, or do not add up to what the usage says: something else ran too.
    """
    if counts.prompt is None or counts.cached is None:
        return None
    found = {tier: _grown(source, samples) for tier, source in (("gpu", "device"), ("cpu", "host"), ("disk", "disk"))}
    unnamed = [_grown(source, samples) for source in ("external_unspecified", "p2p")]
    if found["gpu"] is None:
        local, beyond_it = next((pair for pair in _OLDER if difference(samples, *pair[0]) is not None), _OLDER[-1])
        found, unnamed = {"gpu": _count(difference(samples, *local))}, [_count(difference(samples, *beyond_it))]
    if found["gpu"] is None:
        return None
    known = {tier: tokens for tier, tokens in found.items() if tokens is not None}
    beyond = sum(tokens for tokens in unnamed if tokens is not None)
    if sum(known.values()) + beyond != counts.cached:
        return None
    lower = [name for name, tier in preset.lower() if not tier.staging]
    served = {tier: tokens for tier, tokens in known.items() if tier == "gpu" or tier in lower or tokens}
    if beyond:
        only = lower[0] if len(lower) == 1 else "external"
        served[only] = served.get(only, 0) + beyond
    return Served(**served, computed=max(0, counts.prompt - counts.cached), source="counters")


def _grown(source: str, samples: Sequence[Sample]) -> int | None:
    return _count(difference(samples, _BY_SOURCE, f'source="{source}"'))


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)
