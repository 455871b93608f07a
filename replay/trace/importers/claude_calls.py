"""Groups the lines of Claude Code logs into calls, sessions and sub-agents, each call once.

One call is written as several lines (one a content block), and the same lines recur: in growing copies
of a file, in files of resumed or forked sessions, and for sub-agents both inside ``progress`` lines and
in a file of their own. Lines are known by `uuid` and calls by `message.id`, over all files together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from replay.trace.importers.claude_lines import Line, Message, Usage, read_lines
from replay.trace.importers.sources import Notes

CHARS_PER_TOKEN = 4
"""For outputs whose final count the log lacks. Thinking that was not logged is missing from the estimate."""

_INLINE = "?"


class Key(NamedTuple):
    """A session of the log, or one of its sub-agents."""

    session: str
    agent: str = ""


@dataclass(slots=True, eq=False)
class Node:
    """A line as a link in the chain of `parentUuid`."""

    above: str | None
    time: float | None
    said: str = ""
    """``human`` or ``tool`` where a user or a tool wrote it."""
    boundary: bool = False
    """Whether the context was compacted here."""
    call: Call | None = None
    prompt: bytes = b""
    """Digest of the text of a line that starts a conversation."""
    message: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class Call:
    """One model call, as far as the log tells. Times are seconds since 1970."""

    id: str
    key: Key
    number: int
    """Order of first appearance over all files."""
    line: str
    """uuid of its first line."""
    heard: Node | None
    """The last user line before it in the same file and session."""
    model: str
    version: str
    first: float | None = None
    end: float | None = None
    usage: Usage = field(default_factory=Usage)
    final: bool = False
    """Whether the logged output count is the final one, not what it was when the line was written."""
    chars: int = 0
    tools: list[str] = field(default_factory=list)
    """Ids of the tool calls in its reply."""
    content: list[Any] = field(default_factory=list)
    rank: int = -1
    """Order in time over all calls; nothing links to a higher rank."""
    _blocks: set[bytes] = field(default_factory=set)

    @property
    def output(self) -> int:
        """Output tokens: the final count, or an estimate from the text."""
        logged = self.usage.output_tokens or 0
        return logged if self.final else max(logged, -(-self.chars // CHARS_PER_TOKEN))

    def add(self, message: Message, time: float | None, keep_text: bool) -> None:
        """Takes in one of its lines, which may be a copy of one before."""
        if message.usage is not None and _size(message.usage) >= _size(self.usage):
            self.usage = message.usage
        self.final |= message.stop_reason is not None
        if time is not None:
            self.first = time if self.first is None else min(self.first, time)
            self.end = time if self.end is None else max(self.end, time)
        for block in message.blocks():
            digest = _digest(msgspec.json.encode(block))
            if digest in self._blocks:
                continue
            self._blocks.add(digest)
            self.chars += _chars(block)
            if block.get("type") == "tool_use" and isinstance(block.get("id"), str):
                self.tools.append(block["id"])
            if keep_text:
                self.content.append(block)


class Result(NamedTuple):
    """That a tool call ended."""

    node: Node
    in_background: bool


class Log:
    """All lines of all files, linked."""

    def __init__(self, keep_text: bool, notes: Notes):
        self.keep_text = keep_text
        self.notes = notes
        self.nodes: dict[str, Node] = {}
        self.calls: dict[str, Call] = {}
        self.results: dict[str, Result] = {}
        """By id of the tool call."""
        self.callers: dict[str, Call] = {}
        """The call that made each tool call."""
        self.launched: dict[Key, str] = {}
        """The tool call that launched each sub-agent."""
        self._prompts: dict[tuple[str, bytes], list[str]] = {}
        self._heard: dict[Key, Node] = {}
        self._files = 0

    def read(self, path: Path) -> None:
        """Adds a file.

        Raises:
            ReplayError: it cannot be read.
        """
        before = len(self.calls)
        self._files += 1
        self._heard = {}
        for number, line in enumerate(read_lines(path, self.notes)):
            inner = line.agent_line() if line.kind == "progress" else None
            self._take(line, f"{self._files}:{number}")
            if inner is not None:
                if inner.agent_id and inner.parent_tool_use_id:
                    agent = Key(self._session(inner), inner.agent_id)
                    self.launched.setdefault(agent, inner.parent_tool_use_id)
                self._take(inner, f"{self._files}:{number}:agent")
        if len(self.calls) == before:
            self.notes.count("files without a model call of their own")

    def _session(self, line: Line) -> str:
        return line.session_id or f"file {self._files}"

    def _take(self, line: Line, place: str) -> None:
        key = Key(self._session(line), line.agent_id or (_INLINE if line.is_sidechain else ""))
        uuid = line.uuid or place
        node = self.nodes.get(uuid)
        if node is None:
            node = self.nodes[uuid] = Node(line.parent_uuid or line.logical_parent_uuid, line.time)
            node.boundary = line.subtype == "compact_boundary"
        else:
            node.above = node.above or line.parent_uuid
            self.notes.count("lines that occur more than once (copies, resumed sessions), counted once")
        if line.message is None:
            return
        if line.kind == "user":
            self._take_user(line, line.message, key, node)
        elif line.kind == "assistant":
            self._take_reply(line, line.message, key, uuid, node)

    def _take_user(self, line: Line, message: Message, key: Key, node: Node) -> None:
        blocks = message.blocks()
        ended = [block.get("tool_use_id") for block in blocks if block.get("type") == "tool_result"]
        node.said = "tool" if ended else "human"
        agent = line.agent_result()
        for tool in (tool for tool in ended if isinstance(tool, str)):
            self.results.setdefault(tool, Result(node, agent.in_background))
            if agent.agent_id:
                self.launched.setdefault(Key(key.session, agent.agent_id), tool)
        if not ended and key.agent and line.parent_uuid is None:
            node.prompt = _digest("".join(str(block.get("text")) for block in blocks).encode())
        if self.keep_text and node.message is None:
            node.message = {"role": "user", "content": message.content}
        self._heard[key] = node

    def _take_reply(self, line: Line, message: Message, key: Key, uuid: str, node: Node) -> None:
        if message.model == "<synthetic>":
            self.notes.count("replies that no model gave (API errors and the like), skipped")
            return
        if message.usage is None or message.usage.prompt == 0:
            self.notes.count("reply lines without token usage, skipped")
            return
        name = message.id or line.request_id or uuid
        call = self.calls.get(name)
        if call is None:
            heard = self._heard.pop(key, None)
            call = Call(name, key, len(self.calls), uuid, heard, message.model or "", line.version or "")
            self.calls[name] = call
        elif call.key.agent and not key.agent:
            call.key = key  # a sub-agent's file may repeat the main conversation's replies
        node.call = call
        call.add(message, line.time, self.keep_text)
        for tool in call.tools:
            self.callers.setdefault(tool, call)
        for block in message.blocks():
            given = block.get("input")
            prompt = given.get("prompt") if isinstance(given, dict) else None
            if isinstance(prompt, str) and isinstance(block.get("id"), str):
                tools = self._prompts.setdefault((key.session, _digest(prompt.encode())), [])
                if block["id"] not in tools:
                    tools.append(block["id"])

    def ordered(self) -> list[Call]:
        """All calls in order of time; one without a time follows the one before. Names inline sub-agents."""
        latest: dict[Key, float] = {}
        times: dict[str, float] = {}
        for call in self.calls.values():
            if call.key.agent == _INLINE:
                call.key = self._inline(call)
            times[call.id] = latest[call.key] = call.first if call.first is not None else latest.get(call.key, 0.0)
        calls = sorted(self.calls.values(), key=lambda call: (times[call.id], call.number))
        for rank, call in enumerate(calls):
            call.rank = rank
        return calls

    def _inline(self, call: Call) -> Key:
        """An inline sub-agent is known by its first line; the tool call with that prompt launched it."""
        uuid, root = call.line, self.nodes[call.line]
        seen = {uuid}
        while root.above in self.nodes and root.above not in seen:
            uuid = root.above
            root = self.nodes[uuid]
            seen.add(uuid)
        key = Key(call.key.session, uuid)
        if key not in self.launched:
            same = self._prompts.get((key.session, root.prompt), [])
            if same:
                self.launched[key] = same.pop(0)
        return key

    def trail(self, call: Call) -> tuple[Call | None, list[Node], bool]:
        """From a call up to the one whose reply it continues.

        Returns:
            That call or null, the lines between (latest first), and whether the context was compacted on
            the way; lines before the compaction are left out.
        """
        nodes: list[Node] = []
        compacted = False
        seen = {call.line}
        uuid = self.nodes[call.line].above
        while uuid is not None and uuid in self.nodes and uuid not in seen:
            seen.add(uuid)
            node = self.nodes[uuid]
            if node.call is not None and node.call is not call:
                return node.call, nodes, compacted
            compacted |= node.boundary
            if not compacted:
                nodes.append(node)
            uuid = node.above
        return None, nodes, compacted


def _size(usage: Usage) -> tuple[int, int]:
    return usage.output_tokens or 0, usage.prompt


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _chars(block: dict[str, Any]) -> int:
    count = sum(len(block[name]) for name in ("text", "thinking", "name") if isinstance(block.get(name), str))
    return count + (len(msgspec.json.encode(block["input"])) if "input" in block else 0)
