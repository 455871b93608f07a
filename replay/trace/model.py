"""What was asked: `Trace`, `Turn` and the segments that their prompts are made of.

A turn is one model call. It does not repeat its prompt: it says how many tokens of its parent's
context (the parent's prompt, then the parent's output) still start this prompt (`keep`), and which
segments follow (`append`). A turn therefore costs time and memory in proportion to what it adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

FORMAT = "replay-trace"
VERSION = 1

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]


class Ref(NamedTuple):
    """Names a turn: written ``"session/turn"`` in files."""

    session: str
    turn: int

    def __str__(self) -> str:
        return f"{self.session}/{self.turn}"

    @classmethod
    def parse(cls, text: str) -> Ref:
        """Reads ``"session/turn"``; the session's id may itself contain slashes.

        Raises:
            ValueError: there is no ``/N`` at the end.
        """
        session, slash, turn = text.rpartition("/")
        if not slash or not session or not turn.isdigit():
            raise ValueError(f"{text!r} is not of the form 'session/turn'")
        return cls(session, int(turn))


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line of a trace file."""

    format: str
    """Always ``replay-trace``."""
    version: int
    """Version of the format, now 1."""
    name: Name
    """Short name of the trace, shown in reports."""
    origin: str = ""
    """Where the traffic comes from, in a sentence."""
    licence: str = ""
    """Licence of the data."""
    synthetic: bool = False
    """True if no real traffic was recorded: the turns were drawn from distributions."""
    seed: int = 0
    """Token content is a pure function of (seed, segment id, position)."""
    tokenizer: str | None = None
    """Tokenizer that counted the tokens, where text was counted; null where the source gave counts."""
    block_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Tokens per block of the source, where prefixes are known only to that granularity."""
    notes: list[str] = []
    """What the importer estimated, dropped or could not know."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One model call. Token counts are whole tokens, times are seconds."""

    session: Name
    """The conversation or (sub-)agent that this turn belongs to."""
    turn: Count
    """Number within the session; turns of a session come in rising order."""
    at: Seconds | None = None
    """Seconds from the start of the trace; given on a session's first turn, optional later."""
    parent: str | None = None
    """``"session/turn"`` whose context is continued. Default: the previous turn of the session."""
    after: list[str] | None = None
    """Turns that must have finished before this one is sent. Default: the parent."""
    pause: Seconds = 0.0
    """Seconds from the end of everything in `after` to this request (tool call, human, think time)."""
    keep: Count | None = None
    """Tokens of the parent's context that still start this prompt. Default: all of it."""
    append: list[tuple[Name, Tokens]] = []
    """``[segment id, tokens]`` pairs added after the kept tokens. Equal ids are equal tokens everywhere."""
    output: Count = 0
    """Tokens generated."""
    cause: str = ""
    """What led to the call: ``start``, ``tool``, ``human``, ``subagent``, ``compaction``, ..."""
    cached: Count | None = None
    """Prompt tokens that the recorded server said it read from its cache; null where it did not say."""
    messages: list[dict[str, Any]] | None = None
    """The chat messages that this turn adds, only where the user asked to keep text."""
    tools: list[dict[str, Any]] | None = None
    """Tool definitions, only where the user asked to keep text."""

    @property
    def ref(self) -> Ref:
        """This turn's name."""
        return Ref(self.session, self.turn)

    @property
    def appended(self) -> int:
        """Tokens added after the kept ones."""
        return sum(tokens for _, tokens in self.append)


class Trace:
    """A header and its turns, resolved and checked: every reference exists and nothing is circular.

    `turns` is in file order and may be replayed any number of times; nothing changes a trace.
    Build one with `replay.trace.read`, an importer or `Trace(header, turns)`.

    Raises:
        ReplayError: the turns do not form a valid trace (see `replay.trace.resolve`).
    """

    def __init__(self, header: Header, turns: Iterable[Turn], *, source: str = "", lines: list[int] | None = None):
        from replay.trace.resolve import resolve

        self.header = header
        self.turns: list[Turn] = list(turns)
        self.source = source
        """Path that the trace was read from, or empty."""
        links = resolve(self.turns, source=source or header.name, lines=lines)
        self.parents: list[int] = links.parents
        """Index into `turns` of each turn's parent, -1 for none."""
        self.after: list[tuple[int, ...]] = links.after
        """Indices of the turns that each turn waits for."""
        self.keep: list[int] = links.keep
        """Tokens of the parent's context kept, with the default filled in."""
        self.prompt: list[int] = links.prompt
        """Prompt tokens of each turn (kept + appended)."""
        self.family: list[int] = links.family
        """Number of the tree of sessions that each turn belongs to (a root session and its sub-agents)."""

    def __len__(self) -> int:
        return len(self.turns)

    def __repr__(self) -> str:
        return f"Trace({self.header.name!r}, sessions={len(self.sessions)}, turns={len(self.turns)})"

    @cached_property
    def sessions(self) -> dict[str, list[int]]:
        """Indices of the turns of each session, in order."""
        sessions: dict[str, list[int]] = {}
        for index, turn in enumerate(self.turns):
            sessions.setdefault(turn.session, []).append(index)
        return sessions

    @cached_property
    def families(self) -> list[list[int]]:
        """Indices of the turns of each family: sessions that wait for, or continue, each other."""
        families: list[list[int]] = [[] for _ in range(max(self.family, default=-1) + 1)]
        for index, family in enumerate(self.family):
            families[family].append(index)
        return families

    @cached_property
    def shared_segments(self) -> frozenset[str]:
        """Segments that occur in more than one family: what independent sessions have in common."""
        seen: dict[str, int] = {}
        shared = set()
        for turn, family in zip(self.turns, self.family, strict=True):
            for segment, _ in turn.append:
                if seen.setdefault(segment, family) != family:
                    shared.add(segment)
        return frozenset(shared)

    @property
    def prompt_tokens(self) -> int:
        """Sum of all prompts."""
        return sum(self.prompt)

    @property
    def output_tokens(self) -> int:
        """Sum of all outputs."""
        return sum(turn.output for turn in self.turns)

    @property
    def causes(self) -> Counter[str]:
        """How many turns each cause led to."""
        return Counter(turn.cause for turn in self.turns)
