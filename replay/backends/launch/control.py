"""What the launcher asks of the servers it started: are they ready, how large is the GPU tier, empty it."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from replay.errors import ReplayError

POLL_S = 0.25
REQUEST = aiohttp.ClientTimeout(total=30)
_FIRST_REQUEST = aiohttp.ClientTimeout(total=300)


async def warm_up(urls: list[str], engine: str, model: str) -> None:
    """A short request to each instance: the first one pays for lazy set-up, which is nobody's TTFT.

    Raises:
        ReplayError: an instance does not answer it.
    """
    body = {"model": model, "prompt": list(range(3, 35)), "max_tokens": 2, "temperature": 0}
    async with aiohttp.ClientSession(timeout=_FIRST_REQUEST) as http:
        for url in urls:
            async with http.post(f"{url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    text = " ".join((await reply.text()).split())[:300]
                    raise ReplayError(f"the engine answered its first request with {reply.status}: {text}")
            if engine == "vllm":
                await post_until(http, f"{url}/reset_prefix_cache", {})


async def gpu_tokens(urls: list[str]) -> int | None:
    """Tokens of the GPU tiers of all instances together; null if one does not say."""
    total = 0
    async with aiohttp.ClientSession(timeout=REQUEST) as http:
        for url in urls:
            async with http.get(f"{url}/metrics") as reply:
                tokens = _capacity(await reply.text())
            if tokens is None:
                return None
            total += tokens
    return total


def _capacity(metrics: str) -> int | None:
    """Tokens of the GPU tier, from an engine's /metrics page; vLLM counts in a block that it keeps for padding."""
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    if info:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', info[1]))
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        return int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else None
    total = re.search(r"^sglang:max_total_num_tokens(?:\{[^}]*\})? ([\d.e+]+)", metrics, re.MULTILINE)
    return int(float(total[1])) if total else None


async def ready(http: aiohttp.ClientSession, where: str) -> bool:
    """Whether a URL answers 200, or ``tcp://host:port`` accepts."""
    target = urlsplit(where)
    try:
        if target.scheme == "tcp":
            _, writer = await asyncio.open_connection(target.hostname, target.port)
            writer.close()
            return True
        async with http.get(where) as reply:
            return reply.status == 200
    except (OSError, aiohttp.ClientError, asyncio.TimeoutError):
        return False


async def post_until(http: aiohttp.ClientSession, url: str, body: dict[str, Any], tries: int = 40) -> bool:
    """Posts until it succeeds: engines refuse a reset while blocks are still held by a request or a save."""
    for _ in range(tries):
        async with http.post(url, json=body) as reply:
            if reply.status == 404:
                return False
            answer = await reply.text()
            if reply.status == 200 and not re.search(r'"success": ?false', answer):
                return True
        await asyncio.sleep(POLL_S)
    return False
