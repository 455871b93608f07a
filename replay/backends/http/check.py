"""What the client notices about itself and about the server's counting, stored with the run."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from replay.backends.http.exchange import Exchange
from replay.backends.preset import Preset
from replay.load.outcome import Outcome, Request


class SelfCheck:
    """Collects over a run; `summary` gives the figures."""

    def __init__(self, preset: Preset):
        self._preset = preset
        self._compose = array("d")
        self._upload = array("d")
        self._drift = array("q")
        self._short = 0
        self._silent = 0
        self._split = 0
        self._answers = 0
        self._not_live = 0

    def timed(self, exchange: Exchange) -> None:
        """Notes the client's own part of a request: making the body, and handing it to the kernel."""
        if exchange.compose_s is not None:
            self._compose.append(exchange.compose_s)
        if exchange.sent is not None and exchange.written is not None:
            self._upload.append(exchange.written - exchange.sent)

    def answered(self, request: Request, outcome: Outcome) -> None:
        """Notes how the server counted."""
        if outcome.status != "ok":
            return
        self._answers += 1
        if outcome.prompt_tokens is not None:
            self._drift.append(outcome.prompt_tokens - request.prompt)
        self._short += outcome.output_tokens is not None and outcome.output_tokens != max(1, request.output)
        self._silent += outcome.computed is None
        self._split += outcome.computed is not None and None in (outcome.gpu, outcome.computed)

    def output_refused(self) -> None:
        """Notes a generated output that could not stand in later prompts, where the recorded one stands instead."""
        self._not_live += 1

    def merge(self, other: SelfCheck) -> None:
        """Adds what another client of the same run noticed."""
        self._compose.extend(other._compose)
        self._upload.extend(other._upload)
        self._drift.extend(other._drift)
        self._short += other._short
        self._silent += other._silent
        self._split += other._split
        self._answers += other._answers
        self._not_live += other._not_live

    def times(self) -> dict[str, Any]:
        """The client's own part of its requests, in milliseconds."""
        return {"compose_ms": percentiles(self._compose), "upload_ms": percentiles(self._upload)}

    def summary(self) -> dict[str, Any]:
        """Milliseconds and token counts; null where nothing was measured."""
        drift = np.abs(np.array(self._drift))
        return {
            **self.times(),
            "prompt_drift": {
                "requests": int((drift > 0).sum()),
                "mean_tokens": float(np.mean(self._drift)) if len(drift) else None,
                "max_tokens": int(drift.max()) if len(drift) else None,
            },
            "output_length_differs": self._short,
            "without_cached_tokens": self._silent,
            "without_tiers": self._split,
            "warnings": self._warnings(),
        }

    def _warnings(self) -> list[str]:
        warnings = []
        if self._silent:
            hint = {
                "vllm": "; start vLLM with --enable-prompt-tokens-details",
                "sglang": "; start SGLang with --enable-cache-report",
            }.get(self._preset.engine, "")
            warnings.append(f"{self._silent} of {self._answers} replies do not say how much was cached{hint}")
        if self._split:
            hint = " (vLLM before 0.33 gives LMCache's counts only without streaming)" if self._lmcache else ""
            warnings.append(f"{self._split} of {self._answers} replies do not say which tier served{hint}")
        if self._short:
            warnings.append(f"{self._short} of {self._answers} outputs differ from the length that was asked for")
        if self._not_live:
            warnings.append(f"{self._not_live} of {self._answers} generated outputs are missing from later prompts")
        return warnings

    @property
    def _lmcache(self) -> bool:
        return self._preset.connector == "lmcache-mp"


def percentiles(seconds: array[float]) -> dict[str, float] | None:
    """Milliseconds; null where nothing was measured."""
    if not seconds:
        return None
    p50, p99, most = np.percentile(np.array(seconds), (50, 99, 100)) * 1e3
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(float(most), 3)}
