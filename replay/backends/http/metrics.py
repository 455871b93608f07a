"""A server's Prometheus metrics as rows, and the difference of counters over a run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from replay.backends.http.exchange import WireError
from replay.backends.http.server import Server

# Name, optional labels (label values may hold escaped quotes and braces), value; a timestamp may follow.
_LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?\s+(\S+)')

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


RESTARTED = "replay:restarted"
"""Name of the sample that stands between those of a server before and after a restart."""


class Sample(NamedTuple):
    """One value: a row of the table `scrapes`."""

    at: float
    """Seconds from the run's start."""
    name: str
    labels: str | None
    """As scraped, such as ``{engine="0"}``."""
    value: float


def parse(text: str, at: float) -> list[Sample]:
    """The samples of Prometheus' text format (version 0.0.4); lines that are not of it, and NaN, are left out."""
    samples = []
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.match(line)
        if found is None:
            continue
        name, labels, number = found.groups()
        with contextlib.suppress(ValueError):
            value = float(number)
            if not math.isnan(value):
                samples.append(Sample(at, name, labels or None, value))
    return samples


def difference(samples: Iterable[Sample], name: str, labels: str = "") -> float | None:
    """By how much a counter grew from the first scrape to the last, summed over its label sets; null if absent.

    A counter that fell was reset by a restart: it is then counted from 0, as Prometheus' ``increase`` does.

    Args:
        samples: of a run, in order of time.
        name: with or without the ``_total`` that exporters add.
        labels: part that the labels must hold, such as ``source="disk"``.
    """
    names = {name, f"{name}_total"}
    series: dict[str, tuple[float, float]] = {}
    first_at: float | None = None
    for sample in samples:
        first_at = sample.at if first_at is None else first_at
        if sample.name not in names or labels not in (sample.labels or ""):
            continue
        key = sample.name + (sample.labels or "")
        # A series that appears later started at 0: exporters create labelled counters at first use.
        last, grown = series.get(key, (sample.value if sample.at == first_at else 0.0, 0.0))
        series[key] = (sample.value, grown + (sample.value - last if sample.value >= last else sample.value))
    return sum(grown for _, grown in series.values()) if series else None


def gpu_tokens(samples: Iterable[Sample]) -> int | None:
    """Tokens of the engine's GPU tier, from vLLM's ``cache_config_info`` or SGLang's ``max_total_num_tokens``."""
    for sample in samples:
        if sample.name == "sglang:max_total_num_tokens" and 0 < sample.value < math.inf:
            return int(sample.value)
        if sample.name != "vllm:cache_config_info":
            continue
        labels = dict(_LABEL.findall(sample.labels or ""))
        if labels.get("kv_cache_size_tokens", "").isdigit():
            return int(labels["kv_cache_size_tokens"])
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if blocks.isdigit() and size.isdigit():
            return int(blocks) * int(size)
    return None


class Scraper:
    """Reads ``/metrics`` at the start, every `every_s` seconds and at the end of a run."""

    def __init__(self, server: Server, now: Callable[[], float], every_s: float):
        self.samples: list[Sample] = []
        self.failures = 0
        """Scrapes that the server did not answer."""
        self._server = server
        self._now = now
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Scrapes once, and goes on if the server has metrics."""
        await self.scrape()
        if self.samples:
            self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Scrapes a last time."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            await self.scrape()

    async def restart(self) -> None:
        """Goes on after a restart of the server, which is noted as a sample `RESTARTED`."""
        if self.samples:
            self.samples.append(Sample(self._now(), RESTARTED, None, 1.0))
            await self.start()

    async def scrape(self) -> None:
        """Adds the samples of now."""
        self.samples += await self.read()

    async def read(self) -> list[Sample]:
        """The samples of now; none if the server does not answer."""
        at = self._now()
        try:
            status, body = await self._server.ask("GET", "/metrics")
        except WireError:
            self.failures += 1
            return []
        return parse(body.decode(errors="replace"), at) if status == 200 else []

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.scrape()
