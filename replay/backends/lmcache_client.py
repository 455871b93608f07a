"""Runs inside vLLM as its connector to LMCache's server, and writes what vLLM itself had of each prompt.

The server's own lookups are noted by `replay.backends.lmcache_recorder`. Like `replay.backends.lmcache_tiers`, which
must lie beside it, it is LMCache's own connector but for the notes.
"""

from __future__ import annotations

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache_tiers import Noting  # type: ignore[import-not-found]


class ServerClient(Noting, LMCacheMPConnector):  # type: ignore[misc]
    """The client of LMCache's server."""
