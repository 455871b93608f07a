"""Runs inside vLLM as its connector to LMCache in the same process, and writes what both had of each prompt.

Loaded by ``kv_connector_module_path``, it is LMCache's own connector with notes in the form of
`replay.backends.lmcache_recorder`: the tokens that vLLM had itself, and LMCache's hits by backend. It imports nothing
of `replay`, so it runs in the engine's environment; $REPLAY_LMCACHE_EVENTS names the file. No tokens, keys or prompts
are written. Hooks: vLLM 0.26 to 0.33, `KVConnectorBase_V1` (v1/base.py); lmcache 0.5.3 to 0.5.6,
`LMCacheEngine.lookup` and its `lookup_pins` (v1/cache_engine.py).
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

from lmcache.v1.cache_engine import LMCacheEngine
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

_MEMORY = "LocalCPUBackend"


def note(request: str, **counts: int) -> None:
    """Appends a line; a line is one write, so that scheduler and worker may share the file."""
    line = json.dumps({"event": "mp.lookup_prefetch.end", "time": time.time(), "session_id": request, **counts})
    handle = os.open(os.environ["REPLAY_LMCACHE_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode() + b"\n")
    finally:
        os.close(handle)


def noting_lookup(lookup: Callable[..., int]) -> Callable[..., int]:
    """`LMCacheEngine.lookup`, with a note of the hits that each backend holds for the request."""

    @functools.wraps(lookup)
    def noted(engine: Any, *args: Any, **kwargs: Any) -> int:
        hits = lookup(engine, *args, **kwargs)
        request = kwargs.get("lookup_id")
        if request is not None and kwargs.get("pin"):
            pinned = engine.lookup_pins.get(request, {}) if hits else {}
            memory = len(pinned.get(_MEMORY, ())) * engine.config.chunk_size
            note(request, hit_tokens=hits, l1_hit_tokens=min(memory, hits), l2_hit_tokens=max(0, hits - memory))
        return hits

    return noted


class Noting:
    """Notes what vLLM had itself when a request was scheduled."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None):
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._own: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Asked until the request can be scheduled: the last answer is the one that counts."""
        self._own[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is scheduled, with so many tokens to load; after an asynchronous load, once more with none."""
        own = self._own.pop(request.request_id, None)
        if own is not None:
            note(request.request_id, engine_tokens=own, load_tokens=num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]


class InProcess(Noting, LMCacheConnectorV1):  # type: ignore[misc]
    """LMCache in vLLM's process."""


LMCacheEngine.lookup = noting_lookup(LMCacheEngine.lookup)
