"""vLLM's and SGLang's KV cache events over ZMQ: which blocks were stored and evicted, and when.

Wire (vLLM's ``distributed/kv_events.py``, 0.30 to 0.33; SGLang 0.5.23 has the same): multipart of topic,
sequence number and msgpack; a batch is ``[time, events, rank]``, an event a map with ``type`` (older
releases: an array that starts with it). Needs the package ``pyzmq``.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from replay.errors import ReplayError
from replay.load.events import CacheEvent

_TIERS = {"gpu": "gpu", "cpu": "cpu", "cpu_pinned": "cpu", "storage": "disk", "disk": "disk", "external": "external"}
_KINDS = {"BlockStored": "store", "BlockRemoved": "evict", "AllBlocksCleared": "reset"}
_ARRAY_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def decode(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch as maps with ``type``; events of unknown types are left out.

    Raises:
        msgspec.DecodeError: not msgpack.
    """
    batch = msgspec.msgpack.decode(payload, strict=False)
    events = batch[1] if isinstance(batch, list) and len(batch) > 1 else []
    found = []
    for event in events:
        if isinstance(event, list) and event and event[0] in _ARRAY_FIELDS:
            names = _ARRAY_FIELDS[event[0]]
            found.append({"type": event[0], **dict(zip(names, event[1:], strict=False))})
        elif isinstance(event, dict) and event.get("type") in _KINDS:
            found.append(event)
    return found


def to_row(event: dict[str, Any], at: float) -> CacheEvent:
    """An event of `decode` as a row."""
    medium = event.get("medium") or "GPU"
    hashes = event.get("block_hashes")
    tokens = event.get("token_ids")
    return CacheEvent(
        at,
        _KINDS[event["type"]],
        _TIERS.get(str(medium).lower(), str(medium).lower()),
        session=event.get("session_id"),
        blocks=len(hashes) if hashes is not None else None,
        tokens=len(tokens) if tokens else None,
    )


class Residency:
    """Which blocks of token ids were on the GPU, at any time of the run."""

    def __init__(self) -> None:
        self._children: dict[tuple[Any, bytes], Any] = {}
        self._changes: dict[Any, tuple[array[float], list[bool]]] = {}

    def apply(self, event: dict[str, Any], at: float) -> None:
        """Takes an event of `decode`; events of other tiers than the GPU are ignored."""
        if str(event.get("medium") or "GPU").lower() != "gpu":
            return
        kind = event["type"]
        if kind == "BlockStored":
            self._store(event, at)
        elif kind == "BlockRemoved":
            for block in event.get("block_hashes") or ():
                self._change(block, at, False)
        else:
            for block in list(self._changes):
                self._change(block, at, False)

    def _store(self, event: dict[str, Any], at: float) -> None:
        size = event.get("block_size") or 0
        ids = np.asarray(event.get("token_ids") or (), np.int32)
        parent = event.get("parent_block_hash")
        for number, block in enumerate(event.get("block_hashes") or ()):
            part = ids[number * size : (number + 1) * size]
            if size and len(part) == size:
                self._children[parent, part.tobytes()] = block
            self._change(block, at, True)
            parent = block

    def _change(self, block: Any, at: float, resident: bool) -> None:
        times, states = self._changes.setdefault(block, (array("d"), []))
        times.append(at)
        states.append(resident)

    def evicted(self, ids: npt.NDArray[np.int32], block_tokens: int, at: float) -> int:
        """Tokens of a prefix that a cache without eviction would have held at `at`, and this one did not.

        From the first block that had been evicted to the last that had ever been stored: what follows an
        evicted block cannot be reached, even if it is still there.

        Args:
            ids: the prefix.
            block_tokens: tokens of a block.
            at: seconds from the run's start.
        """
        parent: Any = None
        first = stored = None
        for number in range(len(ids) // block_tokens):
            part = ids[number * block_tokens : (number + 1) * block_tokens]
            block = self._children.get((parent, part.tobytes()))
            if block is None:
                break
            times, states = self._changes[block]
            last = bisect_right(times, at) - 1
            if last < 0:
                break
            if not states[last] and first is None:
                first = number
            stored = number
            parent = block
        return 0 if first is None or stored is None else (stored + 1 - first) * block_tokens


class KvEvents:
    """Follows a server's events during a run."""

    def __init__(self, endpoint: str, now: Callable[[], float], *, topic: str = ""):
        """Args:
            endpoint: ZMQ address that the server binds, such as ``tcp://127.0.0.1:5557``.
            now: the run's clock.
            topic: prefix of the topics to take.

        Raises:
            ReplayError: ``pyzmq`` is missing.
        """
        self.rows: list[CacheEvent] = []
        self.residency = Residency()
        self.gaps = 0
        """Batches that were lost on the way."""
        self.endpoint = endpoint
        self._topic = topic
        self._now = now
        self._next: int | None = None
        try:
            import zmq.asyncio
        except ImportError:
            raise ReplayError("KV events need the package pyzmq; install it: pip install pyzmq") from None
        self._zmq: Any = zmq

    async def start(self) -> None:
        """Subscribes."""
        self._context = self._zmq.asyncio.Context()
        self._socket = self._context.socket(self._zmq.SUB)
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        self._socket.subscribe(self._topic.encode())
        self._socket.connect(self.endpoint)
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Ends the subscription."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close()
        self._context.term()

    async def _follow(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            self.take(parts, self._now())

    def take(self, parts: list[bytes], at: float) -> None:
        """Takes one message of the socket."""
        if len(parts) == 3:
            number = int.from_bytes(parts[1], "big")
            if self._next is not None and number > self._next:
                self.gaps += number - self._next
            self._next = number + 1
        try:
            events = decode(parts[-1])
        except msgspec.DecodeError:
            self.gaps += 1
            return
        for event in events:
            self.rows.append(to_row(event, at))
            self.residency.apply(event, at)
