"""Conversations whose text the trace holds: messages are sent as they are, each serialised once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from replay.backends.http.bodies import Endpoint, serialise
from replay.load.outcome import Request

_ANTHROPIC_BLOCKS = ("tool_use", "tool_result", "thinking")


class _Part(NamedTuple):
    """What one turn added: its messages, then the answer it got."""

    name: str
    """The request's id."""
    parent: _Part | None
    end: int
    """Prompt tokens up to the end of these messages."""
    messages: bytes
    system: tuple[Any, ...]
    tools: Any
    anthropic: bool
    ends_open: bool
    """The last message is not the assistant's: an answer is to follow."""


class History:
    """The messages behind each request."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._answers: dict[str, str] = {}

    def messages(self, request: Request, *, system_apart: bool) -> tuple[list[bytes], dict[str, Any]]:
        """The serialised messages of a request's whole prompt, and its ``tools`` and ``system`` fields.

        A turn that keeps only part of its parent's context keeps the messages that end within that part.

        Args:
            request: its turn holds the messages that it adds.
            system_apart: system messages go into a field of their own (Anthropic's interface).
        """
        added = request.turn.messages or []
        parent = self._parts.get(request.parent_id or "")
        kept = request.prompt - request.turn.appended
        while parent is not None and parent.end > kept:
            parent = parent.parent
        first_is_answer = bool(added) and added[0].get("role") == "assistant"
        if parent is not None and parent.ends_open and kept > parent.end and not first_is_answer:
            added = [{"role": "assistant", "content": self._answers.get(parent.name, "")}, *added]
        system: tuple[Any, ...] = parent.system if parent else ()
        if system_apart:
            system += tuple(m.get("content") for m in added if m.get("role") == "system")
            added = [m for m in added if m.get("role") != "system"]
        tools = request.turn.tools or (parent.tools if parent else None)
        ends_open = bool(added) and added[-1].get("role") != "assistant"
        part = _Part(request.id, parent, request.prompt, serialise(added), system, tools, system_apart, ends_open)
        self._parts[request.id] = part
        return _chain(part), _more(tools, system)

    def endpoint(self, request: Request) -> Endpoint:
        """The interface whose form a request's messages have: Anthropic's have tools' calls and results as blocks."""
        parent = self._parts.get(request.parent_id or "")
        blocks = [b for m in request.turn.messages or () for b in _blocks(m)]
        if (parent is not None and parent.anthropic) or any(b.get("type") in _ANTHROPIC_BLOCKS for b in blocks):
            return "messages"
        return "chat"

    def answered(self, request: Request, text: str) -> None:
        """Keeps what the server said, for a next turn whose messages lack it."""
        self._answers[request.id] = text


def _blocks(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _chain(part: _Part | None) -> list[bytes]:
    found = []
    while part is not None:
        if part.messages:
            found.append(part.messages)
        part = part.parent
    found.reverse()
    return found


def _more(tools: Any, system: tuple[Any, ...]) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if tools:
        more["tools"] = tools
    if system:
        blocks: list[Mapping[str, Any]] = []
        for content in system:
            blocks += content if isinstance(content, list) else [{"type": "text", "text": content}]
        more["system"] = blocks
    return more
