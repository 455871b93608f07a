"""The server's counters in Prometheus' text format, with vLLM's names (its ``v1/metrics/loggers.py``, 0.32)."""

from __future__ import annotations

from collections import Counter

from replay.load.outcome import Outcome

_SOURCES = {"gpu": "device", "cpu": "host", "disk": "disk", "remote": "external_unspecified"}
# The buckets of vLLM's time_to_first_token_seconds, shortened.
_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)


class Metrics:
    """Counts requests; `text` is the scrape."""

    def __init__(self, model: str):
        self.running = 0
        self._model = model
        self._counts: Counter[str] = Counter()
        self._by_source: Counter[str] = Counter()
        self._ttft: list[int] = [0] * (len(_BUCKETS) + 1)
        self._ttft_sum = 0.0

    def add(self, outcome: Outcome) -> None:
        """Counts a request that has ended well."""
        prompt, gpu = outcome.prompt_tokens or 0, outcome.gpu or 0
        cached = prompt - (outcome.computed or 0)
        self._counts["prompt_tokens"] += prompt
        self._counts["generation_tokens"] += outcome.output_tokens or 0
        self._counts["prefix_cache_queries"] += prompt
        self._counts["prefix_cache_hits"] += gpu
        self._counts["external_prefix_cache_queries"] += prompt - gpu
        self._counts["external_prefix_cache_hits"] += cached - gpu
        self._counts["prompt_tokens_cached"] += cached
        self._counts["num_preemptions"] += outcome.preemptions or 0
        self._counts["request_success"] += 1
        for tier, source in _SOURCES.items():
            self._by_source[source] += getattr(outcome, tier) or 0
        if outcome.first_token is not None and outcome.sent is not None:
            wait = outcome.first_token - outcome.sent
            self._ttft[sum(wait > bound for bound in _BUCKETS)] += 1
            self._ttft_sum += wait

    def text(self) -> str:
        """The scrape."""
        model = self._model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        labels = f'engine="0",model_name="{model}"'
        lines = [f"vllm:num_requests_running{{{labels}}} {self.running}"]
        for name in _COUNTERS:
            lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{labels}}} {self._counts[name]}"]
        name = "vllm:prompt_tokens_cached_by_source"
        lines.append(f"# TYPE {name} counter")
        for source in sorted(set(_SOURCES.values())):
            lines.append(f'{name}_total{{{labels},source="{source}"}} {self._by_source[source]}')
        return "\n".join([*lines, *self._histogram(labels)]) + "\n"

    def _histogram(self, labels: str) -> list[str]:
        name, total = "vllm:time_to_first_token_seconds", 0
        lines = [f"# TYPE {name} histogram"]
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._ttft, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {total}')
        return [*lines, f"{name}_sum{{{labels}}} {self._ttft_sum}", f"{name}_count{{{labels}}} {total}"]


_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prompt_tokens_cached",
    "num_preemptions",
    "request_success",
)
