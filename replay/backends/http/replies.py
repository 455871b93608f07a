"""What a reply says: first and last token, usage, and the fields that name cache tiers.

One class an interface: `OpenAIReply` for ``/v1/completions`` and ``/v1/chat/completions``,
`AnthropicReply` for ``/v1/messages``. Both take a stream of events or one JSON document. ``null`` is
the same as absent everywhere: servers send it where an object or a list belongs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from replay.backends.http.attribution.served import Usage, read_usage
from replay.backends.http.sse import Event, EventReader


class _Delta(msgspec.Struct):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: Any = None
    token_ids: Any = None


class _Chunk(msgspec.Struct):
    id: Any = None
    choices: list[_Choice | None] | None = None
    usage: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    kv_transfer_params: Any = None
    sglext: Any = None
    metrics: Any = None
    replay: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_ANY = msgspec.json.Decoder()
_EXTRAS = ("kv_transfer_params", "sglext", "metrics", "replay")


class Reply:
    """What is common to both interfaces; a `wire.Sink`. Times are the clock's, in seconds."""

    def __init__(self, *, keep_text: bool = False):
        self.first_token: float | None = None
        """Arrival of the first non-empty content, reasoning or tool-call delta."""
        self.last_token: float | None = None
        self.usage: dict[str, Any] = {}
        """The last usage that was not null."""
        self.extra: dict[str, Any] = {}
        """Fields beyond usage that tell tiers or times: `kv_transfer_params`, `sglext`, `metrics`,
        and `replay` of the engine model over HTTP."""
        self.output_ids: list[int] = []
        self.error: Any = None
        """What an error event held."""
        self.finished = False
        """The stream said that it is complete."""
        self.ended = False
        """The generation said that it is complete (a finish or stop reason)."""
        self.malformed = 0
        """Events that were not what the interface promises."""
        self.whole = bytearray()
        """The body, where it is not a stream of events."""
        self.streaming = True
        self.text: list[str] | None = [] if keep_text else None
        """What was said, where the trace lacks the recorded answer that later prompts repeat."""
        self._events = EventReader()

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Decides from the head whether the body is a stream of events."""
        self.streaming = status == 200 and "json" not in headers.get("content-type", "")

    def feed(self, at: float, data: bytes) -> None:
        """Takes decoded bytes of the body that arrived at `at`."""
        if not self.streaming:
            self.whole += data
            return
        self._take(at, self._events.feed(data))

    def close(self, at: float | None) -> None:
        """Takes what the body ended in; call it once, when nothing more can come."""
        if not self.streaming:
            self.take_document(at)
            return
        rest = self._events.close()
        if rest is not None:
            self._take(at, [rest])

    @property
    def counts(self) -> Usage:
        """Token counts of the usage; ask once nothing more can come."""
        return read_usage(self.usage)

    @property
    def has_output(self) -> bool:
        """Anything was generated."""
        return self.first_token is not None or bool(self.output_ids)

    def take_document(self, at: float | None) -> None:
        """Takes `whole` as one JSON document."""
        raise NotImplementedError

    def _take(self, at: float | None, events: list[Event]) -> None:
        raise NotImplementedError

    def _token(self, at: float | None) -> None:
        if self.first_token is None:
            self.first_token = at
        self.last_token = at


class OpenAIReply(Reply):
    """A reply of ``/v1/completions`` or ``/v1/chat/completions``."""

    def _take(self, at: float | None, events: list[Event]) -> None:
        for kind, data in events:
            if data.startswith(b"[DONE]"):
                self.finished = True
                continue
            chunk = _decode(data)
            if chunk is None:
                self.malformed += 1
                if kind == b"error":
                    self.error = data.decode(errors="replace")
                continue
            choices = chunk.choices
            if kind or not choices or chunk.usage is not None or _has_facts(chunk):
                self._facts(chunk, kind == b"error")
            for choice in choices or ():
                if choice is not None:
                    self._choice(at, choice, choice.delta)

    def take_document(self, at: float | None) -> None:
        chunk = _decode(bytes(self.whole))
        if chunk is None:
            self.malformed += 1
            return
        self._facts(chunk, False)
        for choice in chunk.choices or ():
            if choice is not None:
                self._choice(None, choice, choice.message)
        self.finished = True

    def _facts(self, chunk: _Chunk, is_error: bool) -> None:
        if chunk.error or is_error or chunk.object == "error":
            self.error = chunk.error or chunk.message or "unspecified"
        if isinstance(chunk.usage, dict):
            self.usage = chunk.usage
        for name in _EXTRAS:
            value = getattr(chunk, name)
            if isinstance(value, dict):
                self.extra.setdefault(name, {}).update(value)

    def _choice(self, at: float | None, choice: _Choice, delta: _Delta | None) -> None:
        if choice.finish_reason:
            self.ended = True
        ids = choice.token_ids
        if isinstance(ids, list) and ids:
            self.output_ids += ids
        elif not choice.text and (delta is None or not _says(delta)):
            return
        self._token(at)
        if self.text is not None and delta is not None and isinstance(delta.content, str):
            self.text.append(delta.content)


def _has_facts(chunk: _Chunk) -> bool:
    return not (chunk.kv_transfer_params is chunk.sglext is chunk.metrics is chunk.error is None)


def _says(delta: _Delta) -> bool:
    if delta.content or delta.reasoning or delta.reasoning_content:
        return True
    calls = delta.tool_calls
    return isinstance(calls, list) and any(isinstance(call, dict) and any(call.values()) for call in calls)


def _decode(data: bytes) -> _Chunk | None:
    try:
        return _CHUNK.decode(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    try:
        return _repair(_ANY.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _repair(raw: Any) -> _Chunk | None:
    """A chunk in which some field has a type that the interface does not know: that field counts as absent."""
    if not isinstance(raw, dict):
        return None
    choices = raw.get("choices")
    kept = []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            fields = {k: v for k, v in choice.items() if k not in ("delta", "message") or isinstance(v, dict)}
            kept.append(msgspec.convert(fields, _Choice))
    return msgspec.convert({**raw, "choices": kept}, _Chunk)


class AnthropicReply(Reply):
    """A reply of ``/v1/messages``."""

    def _take(self, at: float | None, events: list[Event]) -> None:
        for event in events:
            self._event(at, event)

    def _event(self, at: float | None, event: Event) -> None:
        try:
            data = _ANY.decode(event[1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            data = None
        if not isinstance(data, dict):
            self.malformed += 1
            if event[0] == b"error":
                self.error = event[1].decode(errors="replace")
            return
        kind = data.get("type")
        if kind == "error" or data.get("error"):
            self.error = data.get("error") or "unspecified"
        elif kind == "message_start":
            self._document(data.get("message"), at=None)
        elif kind == "content_block_start":
            self._block(at, data.get("content_block"))
        elif kind == "content_block_delta":
            self._block(at, data.get("delta"))
        elif kind == "message_delta":
            self._usage(data.get("usage"))
            self.ended = self.ended or bool((data.get("delta") or {}).get("stop_reason"))
        elif kind == "message_stop":
            self.finished = True

    def take_document(self, at: float | None) -> None:
        try:
            data = _ANY.decode(bytes(self.whole))
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.malformed += 1
            return
        if isinstance(data, dict) and (data.get("type") == "error" or data.get("error")):
            self.error = data.get("error") or "unspecified"
        else:
            self._document(data, at=None)
            self.finished = True

    def _document(self, message: Any, at: float | None) -> None:
        if not isinstance(message, dict):
            return
        self._usage(message.get("usage"))
        if isinstance(message.get("kv_transfer_params"), dict):
            self.extra["kv_transfer_params"] = message["kv_transfer_params"]
        self.ended = self.ended or bool(message.get("stop_reason"))
        for block in message.get("content") or ():
            self._block(at, block)

    def _usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.usage.update({name: value for name, value in usage.items() if value is not None})

    def _block(self, at: float | None, block: Any) -> None:
        if not isinstance(block, dict):
            return
        called = block.get("type") == "tool_use" and block.get("name")
        if called or block.get("text") or block.get("thinking") or block.get("partial_json"):
            self._token(at)
        if self.text is not None and isinstance(block.get("text"), str):
            self.text.append(block["text"])
