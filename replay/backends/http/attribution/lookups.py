"""Per-request records that LMCache writes beside the replies: its server's events, or its connector's log."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec

# vLLM's internal id of a completion: "cmpl-<request id>-<prompt number>-<8 hex digits>"; of a chat the same
# with "chatcmpl-" and no number (engines.md of the measurements: seen with vLLM 0.32).
_ENGINE_ID = re.compile(r"^(?:cmpl|chatcmpl)-(.+?)(?:-\d+)?(?:-[0-9a-f]{8})?$")
# lmcache/integration/vllm/vllm_v1_adapter.py, get_num_new_matched_tokens (0.5.5, 0.5.6).
_LOG_LINE = re.compile(
    r"Reqid: (\S+), Total tokens (\d+), Inference Engine computed tokens: (\d+), "
    r"LMCache hit tokens: (\d+), need to load: (-?\d+)"
)


def request_id(engine_id: str) -> str:
    """The id that the client gave, from the one that the engine made of it."""
    found = _ENGINE_ID.match(engine_id)
    return found.group(1) if found else engine_id


def parse_event(line: str) -> tuple[str, dict[str, Any]] | None:
    """Request id and hit tokens of a line of `replay.backends.lmcache_recorder`; null for other events."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(event, dict) or event.get("event") != "mp.lookup_prefetch.end" or not event.get("session_id"):
        return None
    return request_id(str(event["session_id"])), event


def parse_log(line: str) -> tuple[str, dict[str, Any]] | None:
    """Request id and tokens of a line that LMCache's connector logs for each request; null for other lines."""
    found = _LOG_LINE.search(line)
    if found is None:
        return None
    total, engine, hit, load = map(int, found.groups()[1:])
    fields = {"total_tokens": total, "engine_tokens": engine, "hit_tokens": hit, "load_tokens": max(0, load)}
    return request_id(found.group(1)), fields


# What the recorder writes about chunks, as kind and number of the tier (L1 or L2).
_CHUNK_EVENTS = {
    "l1.keys.evicted": ("evict", 0),
    "l2.keys.evicted": ("evict", 1),
    "l2.keys.stored": ("store", 1),
    "l1.allocation.failed": ("drop", 0),
}


def chunk_event(line: str) -> tuple[float, str, int, int | None] | None:
    """Unix time, kind, tier number and chunks of a recorder's line about chunks; null for other lines."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not isinstance(event, dict) or event.get("event") not in _CHUNK_EVENTS:
        return None
    return (float(event["time"]), *_CHUNK_EVENTS[event["event"]], event.get("chunks"))


class Lookups:
    """Follows a growing file and finds the record of a request.

    A request that was preempted is looked up again: its first record counts, as its first prefill is what
    its first token waited for.
    """

    _WAIT_S = 0.25
    _STEP_S = 0.005
    _GIVE_UP = 20

    def __init__(self, path: Path, *, log: bool = False):
        """Args:
        path: file that is being written; it may not exist yet.
        log: it is an engine's log, not the recorder's file.
        """
        self.path = path
        self.missing = 0
        """Requests for which no record came in time."""
        self.chunk_events: list[tuple[float, str, int, int | None]] = []
        """What happened to chunks, as `chunk_event` gives it."""
        self._parse = parse_log if log else parse_event
        self._found: dict[str, dict[str, Any]] = {}
        # What stands there is about earlier requests, which may have had the same ids.
        self._position = path.stat().st_size if path.exists() else 0
        self._partial = b""
        self._in_vain = 0

    async def find(self, request: str) -> dict[str, Any] | None:
        """The record of a request that has ended; waits a moment for it, as events are written behind."""
        waited = 0.0
        while True:
            self._read()
            record = self._found.get(request)
            # vLLM's own share is noted by another process than LMCache's hits; both are wanted.
            if record is not None and "hit_tokens" in record:
                self._in_vain = 0
                return self._found.pop(request)
            # Where records never come (the recorder is not loaded), waiting would only delay the run.
            if waited >= self._WAIT_S or self._in_vain >= self._GIVE_UP:
                self._in_vain += 1
                self.missing += record is None
                return self._found.pop(request, None)
            await asyncio.sleep(self._STEP_S)
            waited += self._STEP_S

    def _read(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        self._position += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            record = self._parse(text)
            if record is not None:
                request, fields = record
                self._found[request] = {**fields, **self._found.get(request, {})}
                continue
            event = chunk_event(text)
            if event is not None:
                self.chunk_events.append(event)

    def close(self) -> None:
        """Reads what came last and forgets the records that nobody asked for."""
        self._read()
        self._found.clear()
