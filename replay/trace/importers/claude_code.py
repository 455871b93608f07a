"""Raw logs of Claude Code, ``~/.claude/projects/**.jsonl``.

The log has no prompts, only what was said and how many tokens each call read (`usage`). So lengths are
the provider's, and what a prompt shares with the one before it is what the provider's cache proved:
`keep` is `cache_read_input_tokens`, except where the gap to the previous call is longer than the cache
lives (5 minutes, or 1 hour where the log says so; https://docs.claude.com/en/docs/build-with-claude/prompt-caching).
There the miss says nothing about the content, and the previous prompt counts as kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay.errors import ReplayError
from replay.trace.importers.claude_calls import Call, Key, Log, Node
from replay.trace.importers.claude_lines import matches
from replay.trace.importers.sources import Notes
from replay.trace.model import FORMAT, VERSION, Header, Turn

__all__ = ["ABOUT", "NAME", "load", "matches"]

NAME = "claude-code"
ABOUT = "Claude Code's own logs, ~/.claude/projects/**/*.jsonl"

SYSTEM_LIMIT = 40_000
"""A first call that finds fewer cached tokens found the system prompt and tools, not a conversation."""
CACHE_LIFE_S = {False: 300.0, True: 3600.0}
"""Lifetime of the provider's cache, by whether the log says that it was written to live an hour."""
SHORTFALL = 0.9
"""Reading less than this share of the previous prompt is a miss; the rest is rounding to cache points."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_AGENT = re.compile(r"(a|acompact-|aside_question-|aprompt_suggestion-)?[0-9a-f]{5,40}")


def load(
    paths: list[Path], keep_text: bool, progress: Callable[[int, int], None]
) -> tuple[Header, list[Turn], list[str]]:
    """Reads logs of any number of sessions as one trace; time 0 is the first request in it.

    With `keep_text`, `Turn.messages` holds what the prompt has more than its parent's: the parent's
    reply, then what the user and the tools said; all of it after a compaction.

    Raises:
        ReplayError: no file holds a model call with token usage.
    """
    notes = Notes()
    log = Log(keep_text, notes)
    for done, path in enumerate(paths, 1):
        log.read(path)
        progress(done, len(paths))
    if not log.calls:
        where = paths[0] if len(paths) == 1 else f"{len(paths):,} files"
        raise ReplayError(f"{where}: no model call with token usage in it; name a log of a session that was answered")
    notes.say("the system prompt and tools are not in the log, only their length; cached = what the provider read")
    turns = _Builder(log, notes).turns()
    header = Header(
        format=FORMAT,
        version=VERSION,
        name=NAME,
        origin="Logs of Claude Code; lengths as the API counted them.",
    )
    return header, turns, notes.lines()


@dataclass(slots=True, eq=False)
class _Session:
    """A session or sub-agent while its turns are built."""

    name: str
    calls: list[Call] = field(default_factory=list)
    launcher: Call | None = None
    returns: bool = False
    """Whether the launching session waits for it."""
    returned: float | None = None
    """When its result was logged."""


class _Builder:
    """Turns calls into `Turn`s, in order of time."""

    def __init__(self, log: Log, notes: Notes):
        self.log = log
        self.notes = notes
        self.calls = log.ordered()
        self.sessions: dict[Key, _Session] = {}
        self.position: dict[str, int] = {}
        self.running: dict[Key, list[_Session]] = {}
        """Sub-agents that the session which launched them still waits for."""
        starts = [start for call in self.calls if (start := self._start(call)) is not None]
        self.zero = min(starts, default=0.0)

    def turns(self) -> list[Turn]:
        """One turn a call."""
        for call in self.calls:
            self._session(call).calls.append(call)
            self.position[call.id] = len(self._session(call).calls) - 1
        for key, session in self.sessions.items():
            if key.agent:
                self._launch(key, session)
        return [self._turn(call) for call in self.calls]

    def _session(self, call: Call) -> _Session:
        if call.key not in self.sessions:
            self.sessions[call.key] = _Session(self._name(call.key))
        return self.sessions[call.key]

    def _name(self, key: Key) -> str:
        """Ids that Claude Code made; anything else could be a name that a person chose, and gets a number."""
        number = len(self.sessions) + 1
        session = key.session if _UUID.fullmatch(key.session) else None
        if not key.agent:
            return session or f"session-{number}"
        main = self.sessions.get(Key(key.session))
        above = main.name if main else session or f"session-{number}"
        return f"{above}/{key.agent if _AGENT.fullmatch(key.agent) else f'agent-{number}'}"

    def _launch(self, key: Key, agent: _Session) -> None:
        """Finds the call that launched a sub-agent, and whether its session waited for the result."""
        first = agent.calls[0]
        tool = self.log.launched.get(key, "")
        launcher = self.log.callers.get(tool)
        result = self.log.results.get(tool)
        if launcher is not None and result is not None:
            agent.returns, agent.returned = not result.in_background, result.node.time
        if launcher is None:
            launcher = self.log.trail(first)[0]
            # The summary call of a compaction: the next call of the session is what it is for.
            agent.returns = key.agent.startswith("acompact")
        if launcher is None or launcher.rank >= first.rank:
            main = self.sessions.get(Key(key.session))
            earlier = [call for call in main.calls if call.rank < first.rank] if main else []
            launcher = earlier[-1] if earlier else None
            self.notes.count(
                "sub-agents that do not say which call launched them, placed by time", launcher is not None
            )
        agent.launcher = launcher
        if launcher is not None and agent.returns:
            self.running.setdefault(launcher.key, []).append(agent)

    def _start(self, call: Call) -> float | None:
        """When the request was sent: the last thing said before the reply."""
        said = [node.time for node in self.log.trail(call)[1] if node.said and node.time is not None]
        if not said and call.heard is not None and call.heard.time is not None:
            said = [call.heard.time]
        if not said:
            return call.first
        return max(said) if call.first is None else min(max(said), call.first)

    def _turn(self, call: Call) -> Turn:
        session, number = self._session(call), self.position[call.id]
        previous = session.calls[number - 1] if number else None
        parent, trail, compacted = self.log.trail(call)
        if parent is None or parent.rank > call.rank:
            parent = previous
        before = previous or session.launcher or parent
        after = [before, *self._returning(call, previous)] if before else []
        start = self._start(call)
        keep = self._keep(call, parent, compacted, start) if parent else None
        if not call.final:
            self.notes.count("outputs estimated from the text (the log has only a placeholder)")
        return Turn(
            session=session.name,
            turn=number,
            at=None if start is None and after else round((start or self.zero) - self.zero, 3),
            parent=self._ref(parent) if parent is not None and parent is not previous else None,
            after=[self._ref(other) for other in after] if after and after != [parent] else None,
            pause=self._pause(start, after),
            keep=keep,
            append=self._append(call, keep, f"{session.name}/{number}"),
            output=call.output,
            cause=self._cause(call, previous, parent, trail, compacted),
            cached=call.usage.cached,
            messages=self._messages(parent, trail, compacted) if self.log.keep_text else None,
        )

    def _ref(self, call: Call) -> str:
        return f"{self._session(call).name}/{self.position[call.id]}"

    def _returning(self, call: Call, previous: Call | None) -> list[Call]:
        """Last calls of the sub-agents whose results this call is the first to see."""
        if previous is None:
            return []
        back = [agent for agent in self.running.get(call.key, []) if self._is_back(agent, call)]
        if back:
            self.running[call.key] = [agent for agent in self.running[call.key] if agent not in back]
        return [agent.calls[-1] for agent in back]

    @staticmethod
    def _is_back(agent: _Session, call: Call) -> bool:
        if agent.calls[-1].rank > call.rank:
            return False
        return agent.returned is None or call.first is None or agent.returned <= call.first

    def _keep(self, call: Call, parent: Call, compacted: bool, start: float | None) -> int:
        cached, before = call.usage.cached, parent.usage.prompt
        if not compacted and call.usage.prompt >= before and cached < SHORTFALL * before:
            gap = start - parent.end if start is not None and parent.end is not None else 0.0
            if gap > CACHE_LIFE_S[parent.usage.long_lived]:
                self.notes.count("prompts that had expired at the provider after a long pause, counted as kept")
                return before
            self.notes.count("prompts that lost their cached prefix without a long pause or a compaction")
        context = before + parent.output
        if cached > context:
            self.notes.count("prompts cached further than the logged calls explain, that part counted as new")
        return min(cached, context)

    def _append(self, call: Call, keep: int | None, ref: str) -> list[tuple[str, int]]:
        cached = call.usage.cached
        if keep is None and 0 < cached < SYSTEM_LIMIT:
            pieces = [(self._system(call), cached), (ref, call.usage.prompt - cached)]
        else:
            pieces = [(ref, call.usage.prompt - (keep or 0))]
        return [(segment, tokens) for segment, tokens in pieces if tokens]

    @staticmethod
    def _system(call: Call) -> str:
        """Segment of system prompt and tools: one a version and model, for sub-agents also one a length."""
        parts = [call.version, call.model] + ([str(call.usage.cached)] if call.key.agent else [])
        return f"system-{hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()}"

    def _pause(self, start: float | None, after: list[Call]) -> float:
        ends = [call.end for call in after if call.end is not None]
        if not after:
            return 0.0
        if start is None or not ends:
            self.notes.count("pauses unknown (lines without a time), set to 0")
            return 0.0
        pause = start - max(ends)
        if pause < 0:
            self.notes.count("pauses negative (tools answered while the reply was still streaming), set to 0")
        return round(max(0.0, pause), 3)

    @staticmethod
    def _cause(call: Call, previous: Call | None, parent: Call | None, trail: list[Node], compacted: bool) -> str:
        if compacted or call.key.agent.startswith("acompact"):
            return "compaction"
        if previous is None and call.key.agent:
            return "subagent"
        if previous is None and parent is None:
            return "start"
        return next((node.said for node in trail if node.said), call.heard.said if call.heard else "")

    def _messages(self, parent: Call | None, trail: list[Node], compacted: bool) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if parent is not None and not compacted:
            messages.append({"role": "assistant", "content": parent.content})
            # Results of parallel tool calls stand on branches beside the trail.
            beside = [self.log.results[tool].node for tool in parent.tools if tool in self.log.results]
            trail = trail + [node for node in reversed(beside) if node not in trail]
        return messages + [node.message for node in reversed(trail) if node.message is not None]
