"""`Usage`, what every interface counts under its own names, and `Served`, the tokens by tier."""

from __future__ import annotations

from typing import Any, NamedTuple

from replay.load.outcome import Outcome


class Usage(NamedTuple):
    """Token counts of a reply; null where the server does not say."""

    prompt: int | None
    output: int | None
    cached: int | None
    """Prompt tokens that were read from any cache."""


class Served(NamedTuple):
    """Prompt tokens by the tier that served them; null where unknown or where there is no such tier."""

    gpu: int | None = None
    cpu: int | None = None
    disk: int | None = None
    remote: int | None = None
    external: int | None = None
    computed: int | None = None
    source: str | None = None
    """Who says so: ``usage``, ``connector``, ``events`` or ``counters``."""

    def put(self, outcome: Outcome) -> None:
        """Writes the counts into an outcome."""
        outcome.gpu, outcome.cpu, outcome.disk, outcome.remote = self[:4]
        outcome.external, outcome.computed, outcome.tier_source = self[4:]


def read_usage(usage: dict[str, Any]) -> Usage:
    """Reads OpenAI's, DeepSeek's, Moonshot's and Anthropic's usage.

    Anthropic's prompt is ``input_tokens + cache_read_input_tokens + cache_creation_input_tokens``
    (its documentation of prompt caching); all others count the whole prompt in one field.
    """
    if count(usage, "prompt_tokens") is None and count(usage, "input_tokens") is not None:
        read = count(usage, "cache_read_input_tokens")
        created = count(usage, "cache_creation_input_tokens") or 0
        prompt = (count(usage, "input_tokens") or 0) + (read or 0) + created
        return Usage(prompt, count(usage, "output_tokens"), read)
    details = usage.get("prompt_tokens_details")
    cached = count(details, "cached_tokens") if isinstance(details, dict) else None
    for name in ("prompt_cache_hit_tokens", "cached_tokens"):
        cached = count(usage, name) if cached is None else cached
    return Usage(count(usage, "prompt_tokens"), count(usage, "completion_tokens"), cached)


def count(fields: Any, name: str) -> int | None:
    """A token count of a JSON object; null where it is absent, null or no count."""
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def total_only(usage: Usage, *, source: str = "usage") -> Served:
    """Tokens where only the sum over all tiers is known: computed follows, the tiers do not."""
    if usage.prompt is None or usage.cached is None:
        return Served()
    computed = max(0, usage.prompt - usage.cached)
    return (
        Served(gpu=0, computed=computed, source=source)
        if not usage.cached
        else Served(computed=computed, source=source)
    )
