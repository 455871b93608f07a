"""Lines of a Claude Code log (``~/.claude/projects/**.jsonl``), typed, bad ones counted.

The format is internal to Claude Code and undocumented; only the fields named here are read, all of them
optional. Versions differ: see the importer's tests for the oddities that were met.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from replay.trace.importers.sources import Notes, read_bytes
from replay.trace.model import Count

Form = TypeVar("Form", bound=msgspec.Struct)


class Usage(msgspec.Struct, gc=False):
    """Token counts of one call; the prompt is the sum of the three input fields."""

    input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_creation: dict[str, Count | None] | None = None

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return (self.input_tokens or 0) + (self.cache_creation_input_tokens or 0) + self.cached

    @property
    def cached(self) -> int:
        """Prompt tokens that the provider read from its cache."""
        return self.cache_read_input_tokens or 0

    @property
    def long_lived(self) -> bool:
        """Whether the cache was written with a lifetime of an hour instead of five minutes."""
        return bool((self.cache_creation or {}).get("ephemeral_1h_input_tokens"))


class Message(msgspec.Struct, gc=False):
    """What was said, by the user, a tool or the model."""

    id: str | None = None
    role: str | None = None
    model: str | None = None
    stop_reason: str | None = None
    usage: Usage | None = None
    content: str | list[Any] | None = None

    def blocks(self) -> list[dict[str, Any]]:
        """The content as blocks; plain text is one block."""
        if isinstance(self.content, str):
            return [{"type": "text", "text": self.content}] if self.content else []
        return [block for block in self.content or [] if isinstance(block, dict)]


class Line(msgspec.Struct, rename="camel"):
    """One line of the log, or the line inside a ``progress`` line."""

    type: str | None = None
    subtype: str | None = None
    uuid: str | None = None
    parent_uuid: str | None = None
    logical_parent_uuid: str | None = None
    session_id: str | None = None
    agent_id: str | None = None
    is_sidechain: bool | None = None
    is_meta: bool | None = None
    request_id: str | None = None
    timestamp: str | None = None
    version: str | None = None
    message: Message | None = None
    data: Raw = Raw(b"null")
    tool_use_result: Raw = Raw(b"null")
    parent_tool_use_id: str | None = msgspec.field(name="parentToolUseID", default=None)

    @property
    def kind(self) -> str | None:
        """``user``, ``assistant``, ``system``, ...; the message's role where the line has no type."""
        return self.type or (self.message.role if self.message else None)

    @property
    def time(self) -> float | None:
        """Seconds since 1970, or null."""
        try:
            stamp = datetime.fromisoformat((self.timestamp or "").replace("Z", "+00:00"))
        except ValueError:
            return None
        return (stamp if stamp.tzinfo else stamp.replace(tzinfo=timezone.utc)).timestamp()

    def agent_line(self) -> Line | None:
        """The sub-agent's line that a ``progress`` line carries, or null."""
        progress = _decode(self.data, _Progress)
        if progress is None or progress.type != "agent_progress" or progress.message is None:
            return None
        line = progress.message
        line.session_id, line.agent_id, line.is_sidechain = self.session_id, progress.agent_id, True
        line.version, line.parent_tool_use_id = self.version, self.parent_tool_use_id
        return line

    def agent_result(self) -> AgentResult:
        """What a tool that ran a sub-agent reported, empty for other tools."""
        return _decode(self.tool_use_result, AgentResult) or AgentResult()


class AgentResult(msgspec.Struct, rename="camel", gc=False):
    """Which sub-agent a tool result belongs to, and whether the tool waited for it."""

    agent_id: str | None = None
    status: str | None = None

    @property
    def in_background(self) -> bool:
        """Whether the agent goes on after this result."""
        return self.status == "async_launched"


class _Progress(msgspec.Struct, rename="camel"):
    type: str | None = None
    agent_id: str | None = None
    message: Line | None = None


def _decode(raw: Raw, kind: type[Form]) -> Form | None:
    """`raw` as `kind`, null where it has another form (several tools share these fields)."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError:
        return None


def read_lines(path: Path, notes: Notes) -> Iterator[Line]:
    """The usable lines of a log; the last one may be cut off, and any may be broken.

    Raises:
        ReplayError: the file cannot be read or decompressed.
    """
    decode = msgspec.json.Decoder(Line).decode
    for text in read_bytes(path).splitlines():
        if not text or text.isspace():
            continue
        try:
            yield decode(text)
        except (msgspec.ValidationError, UnicodeDecodeError):
            notes.count("lines of unknown form, skipped")
        except msgspec.DecodeError:
            notes.count("lines that are not JSON, skipped")


def matches(head: bytes) -> bool:
    """Whether a file that begins so is a Claude Code log."""
    lines = head.splitlines()
    if len(lines) == 1 and not head.endswith(b"\n"):  # perhaps a line so long that it is cut off
        return all(key in head for key in (b'"sessionId"', b'"uuid"', b'"message"', b'"content"'))
    return any(map(_is_log_line, lines))


def _is_log_line(text: bytes) -> bool:
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if not (line.session_id or line.uuid):
        return False
    if line.message is None:
        return line.type == "progress" and bytes(line.data) != b"null"
    said = line.message.content is not None or line.message.usage is not None
    return said and (line.type or line.message.role) in ("user", "assistant")
