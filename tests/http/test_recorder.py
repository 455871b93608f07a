"""LMCache's side: the module that its server loads, on a stand-in for its event bus."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from replay.backends.http.attribution.lookups import chunk_event, parse_event
from replay.backends.lmcache_recorder import Recorder


class Kind(enum.Enum):
    """The event types of LMCache 0.5.6 that matter here, and one that does not."""

    LOOKUP = "mp.lookup_prefetch.end"
    EVICTED = "l1.keys.evicted"
    STORED = "l2.keys.stored"
    L2_EVICTED = "l2.keys.evicted"
    OTHER = "mp.store.end"


def test_it_records_lookups_and_counts_chunks_without_their_keys(tmp_path: Path) -> None:
    subscribed: dict[Any, Any] = {}
    bus = SimpleNamespace(subscribe=subscribed.__setitem__)
    path = tmp_path / "events.jsonl"
    recorder = Recorder(SimpleNamespace(event_bus=bus), path)
    recorder.subscribe(Kind)
    assert set(subscribed) == {Kind.LOOKUP, Kind.EVICTED, Kind.STORED, Kind.L2_EVICTED}

    def publish(kind: Kind, session_id: str = "", **metadata: Any) -> None:
        event = SimpleNamespace(event_type=kind, timestamp=12.5, session_id=session_id, metadata=metadata)
        subscribed[kind](event)

    hits = {"requested_tokens": 512, "hit_tokens": 256, "l1_hit_tokens": 256, "l2_hit_tokens": 0}
    publish(Kind.LOOKUP, "cmpl-r-s/0-0-9b54dfbf", **hits, early_exit_reason="", model_name="m", cache_salt="secret")
    publish(Kind.EVICTED, keys=[b"k1", b"k2"])
    publish(Kind.EVICTED, keys=[])
    publish(Kind.L2_EVICTED, key_count=4)
    recorder.close()
    publish(Kind.EVICTED, keys=[b"k3"])  # after the end: dropped, no error

    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert recorder.report_status() == {"replay_recorder": {"written": 3}}
    found = parse_event(lines[0])
    assert found is not None
    assert found[0] == "r-s/0"
    assert hits.items() <= found[1].items()
    assert [chunk_event(line) for line in lines[1:]] == [(12.5, "evict", 0, 2), (12.5, "evict", 1, 4)]
    assert "secret" not in path.read_text()
    assert "k1" not in path.read_text()
    assert json.loads(lines[1]) == {"event": "l1.keys.evicted", "time": 12.5, "chunks": 2}
