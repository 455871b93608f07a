"""Server-sent events from bytes, as they come.

The framing of the HTML standard, section 9.2.6: LF, CRLF and CR end lines, an empty line ends an
event, a colon starts a comment, several ``data`` lines are one value. Bytes may be cut anywhere:
nothing is decoded before an event is complete, so characters are never cut.
"""

from __future__ import annotations

Event = tuple[bytes, bytes]
"""The type that an event names (often empty) and its data. A plain tuple: there are many of them."""


class EventReader:
    """Cuts a stream of bytes into events. There is no limit to the size of an event."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._tail = b""
        self._after_cr = False
        self._started = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        if not self._parts and data.startswith(b"data: ") and data.endswith(b"\n\n") and not self._after_cr:
            # What servers send: whole events of one line each, which account for every line ending.
            lines = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(lines) and b"\r" not in data:
                self._started = True
                return [(b"", line) for line in lines]
        if self._after_cr and data:
            self._after_cr = False
            if data.startswith(b"\n"):
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # An empty line may lie across two reads, so the last byte of the one before is looked at too.
        if b"\n\n" not in (self._tail + data if self._tail else data):
            if data:
                self._parts.append(data)
                self._tail = b"\n" if data.endswith(b"\n") else b""
            return []
        self._parts.append(data)
        *blocks, rest = b"".join(self._parts).split(b"\n\n")
        self._parts = [rest] if rest else []
        self._tail = b"\n" if rest.endswith(b"\n") else b""
        events = []
        for block in blocks:
            event = self._event(block)
            if event is not None:
                events.append(event)
        return events

    def close(self) -> Event | None:
        """What the stream ended in, where its last event lacks the empty line; the caller judges if it is whole."""
        block = b"".join(self._parts)
        self._parts = []
        return self._event(block.rstrip(b"\n"))

    def _event(self, block: bytes) -> Event | None:
        if not self._started:
            if not block:
                return None
            self._started = True
            block = block.removeprefix(b"\xef\xbb\xbf")
        if block.startswith(b"data: ") and b"\n" not in block:
            return b"", block[6:]
        kind = b""
        data: list[bytes] = []
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                data.append(value)
            elif name == b"event":
                kind = value
        return (kind, b"\n".join(data)) if data or kind else None
