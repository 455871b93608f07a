"""Runs inside ``lmcache server`` and writes what its event bus says about each request and each eviction.

Load it with ``--server-module '{"module_path": "lmcache_recorder", "config": {"path": "events.jsonl"}}'``
and this file's folder in PYTHONPATH. It imports nothing of `replay`, so it runs in the server's own
environment. Interface and events: LMCache 0.5.5 and 0.5.6, ``v1/multiprocess/ext_server_module.py`` and
``v1/mp_observability/event.py``. No tokens, keys or prompts are written: ids and counts only.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

_REQUEST_FIELDS = ("requested_tokens", "hit_tokens", "l1_hit_tokens", "l2_hit_tokens", "early_exit_reason")
_KEY_EVENTS = ("l1.keys.evicted", "l2.keys.evicted", "l2.keys.stored", "l1.allocation.failed")


class Recorder:
    """A server module: it adds no request handlers, only subscriptions."""

    def __init__(self, context: Any, path: Path):
        self.context = context
        self._file = path.open("a", buffering=1)
        self._lock = threading.Lock()
        self.written = 0

    def subscribe(self, event_types: Any) -> None:
        """Subscribes to the events that this version of LMCache has."""
        known = {kind.value: kind for kind in event_types}
        bus = self.context.event_bus
        if "mp.lookup_prefetch.end" in known:
            bus.subscribe(known["mp.lookup_prefetch.end"], self.on_lookup)
        for name in _KEY_EVENTS:
            if name in known:
                bus.subscribe(known[name], self.on_keys)

    def on_lookup(self, event: Any) -> None:
        """A request's lookup has ended: its hits by tier."""
        fields = {name: event.metadata[name] for name in _REQUEST_FIELDS if event.metadata.get(name) is not None}
        self._write(event, {"session_id": event.session_id, **fields})

    def on_keys(self, event: Any) -> None:
        """Chunks were stored or evicted, or did not fit: how many."""
        keys = event.metadata.get("keys")
        count = event.metadata.get("key_count", len(keys) if keys is not None else None)
        if count != 0:
            self._write(event, {"chunks": count})

    def _write(self, event: Any, fields: dict[str, Any]) -> None:
        line = json.dumps({"event": event.event_type.value, "time": event.timestamp, **fields})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")
                self.written += 1

    def report_status(self) -> dict[str, Any]:
        """For the server's ``/status``."""
        return {"replay_recorder": {"written": self.written}}

    def close(self) -> None:
        """Ends the file; events that come later are dropped."""
        with self._lock:
            self._file.close()


def build_server_modules(build: Any) -> list[Recorder]:
    """LMCache's entry point: `build` has `server_context` and our `config`, whose `path` is the file to write."""
    from lmcache.v1.mp_observability.event import EventType

    recorder = Recorder(build.server_context, Path(build.config["path"]))
    recorder.subscribe(EventType)
    return [recorder]
