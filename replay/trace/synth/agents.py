"""Coding-agent sessions drawn from published fits of Claude Code traffic.

Where a figure comes from stands beside it: TL is TraceLab (Zhu et al., arXiv 2606.30560, its Claude
tables), KV is the 692 distinct traces of callanjfox/kv-cache-tester, whose contexts end at 200,000
tokens. The two disagree in places; `traces/README.md` says which one was followed for what.
"""

from __future__ import annotations

from math import log
from random import Random

from replay.errors import ReplayError
from replay.trace.model import FORMAT, VERSION, Header, Turn
from replay.trace.synth.draw import SplitLognormal, exponential, lognormal, stratified

WINDOW = 200_000
"""Tokens of the model's context window (prompt and output)."""
TOOLS, SYSTEM = 12_300, 2_800
"""Tool definitions and system prompt, the same for all sessions (KV medians)."""
FRESH = lognormal(19_000, 0.25, least=TOOLS + SYSTEM + 100)
"""First prompt of a new session (KV: p10 13.3k, p50 19.0k, p90 24.3k)."""
RESUMED_SHORT, RESUMED_LONG = 0.3, 0.9
"""Share of resumed sessions in the shorter and the longer half (KV: 44 % of all). A trace of a few
hours meets most long sessions when they are under way."""
RESUMED = lognormal(140_000, 0.5, least=60_000, most=190_000)
"""First prompt of a resumed session (KV: p50 119k), cut to the window; p50 here 120k."""
TOOL_STEPS = lognormal(21, log(135 / 15) / 1.2816, least=1, most=300)
"""Tool-fed steps that a session would have (TL: p50 15, p90 135). More than TL's, since some end early
at the window; cut so that no session outweighs the rest."""
HUMAN_SHARE = 0.144
"""Human-fed among the later steps (KV: 14.2 % against 84.5 % tool-fed)."""
APPEND = (
    (32_000, SplitLognormal(1_235, low=1.2, high=2.51, least=16, most=60_000)),
    (64_000, SplitLognormal(903, low=1.2, high=1.34, least=16, most=60_000)),
    (128_000, SplitLognormal(753, low=1.2, high=1.20, least=16, most=60_000)),
    (WINDOW, SplitLognormal(675, low=1.2, high=1.18, least=16, most=60_000)),
)
"""New tokens of a step by the context (below so many tokens) that it adds to. TL's append by prefix
(p50 and p90: 1.3k and 30.7k, 951 and 5.3k, 793 and 3.7k, 710 and 3.2k) with its p50 scaled by 0.95;
width below the median from TL's pooled p25 of 384."""
TOOL_FED, HUMAN_FED = 1.02, 0.87
"""Factors on it (KV: tool-fed p50 718, human-fed 608)."""
OUTPUT = SplitLognormal(252, low=0.96, high=1.43, least=1, most=16_000)
"""Output tokens of a step (TL: p25 132, p50 252, p90 1.7k, p99 6.6k)."""
TOOL_PAUSE = SplitLognormal(0.3, low=1.0, high=2.9, least=0.01, most=3600)
"""Seconds of a tool call (TL: p50 0.3, p90 13.6, p99 216)."""
HUMAN_PAUSE = lognormal(84, log(1236 / 84) / 1.2816, least=1, most=4 * 3600)
"""Seconds until a human answers (TL: p50 84, p90 1,236), cut to half a working day (TL's p99: 13.9 h)."""
FULL = 196_000
"""Context at which a session is full."""
COMPACTS = 0.3
"""Share of full sessions that compact; the others end. (Sessions with a compaction are 4.5 % in TL, whose
windows reach a million tokens, and 22 % in KV, at p50 150k.)"""
COMPACTED = SplitLognormal(39_000, low=0.29, high=0.49, least=20_000, most=90_000)
"""First prompt after a compaction, of which a third still matches the old prefix (KV: 27k to 73k)."""
BREAK_HUMAN, BREAK_TOOL = 0.05, 0.0045
"""Share of steps that lose more than half of their prefix without shrinking (KV: 1.1 % of all, after
long pauses)."""
AGENT_FAMILIES = 0.1
"""Share of sessions that start sub-agents, once (KV: 2.5 %; raised, so that joins are exercised)."""
AGENT_TOOLS = 9_700
"""Of the parent's tool definitions, what a sub-agent's prompt starts with (KV median)."""
AGENT_FIRST = lognormal(10_900, 0.1, least=AGENT_TOOLS + 100)
AGENT_STEPS = lognormal(10, 0.5, least=2, most=24)
AGENT_APPEND = SplitLognormal(2_500, low=1.19, high=1.4, least=16, most=30_000)
"""Sub-agents: first prompt, calls and new tokens of a step (KV: call input p50 45k to 50k)."""


def claude_code(sessions: int, seed: int = 0, *, gap: float = 60.0) -> tuple[Header, list[Turn]]:
    """Draws `sessions` root sessions and their sub-agents.

    Lengths, kinds and starting points of the sessions are drawn in strata, so that their medians hold
    for a few dozen sessions; everything within a session is drawn independently.

    Args:
        sessions: root sessions.
        seed: of the draws and of the token content.
        gap: mean seconds between session starts (a Poisson process from time 0).

    Raises:
        ReplayError: fewer than one session or a gap that is not positive.
    """
    if sessions < 1:
        raise ReplayError(f"--sessions must be at least 1, not {sessions}")
    if not 0 < gap < float("inf"):
        raise ReplayError(f"the gap between sessions must be a positive number of seconds, not {gap}")
    rng = Random(f"claude-code {seed}")
    lengths, kinds, firsts, agents = (stratified(rng, sessions) for _ in range(4))
    turns: list[Turn] = []
    at = 0.0
    for number in range(sessions):
        resumed = kinds[number] < (RESUMED_SHORT if lengths[number] < 0.5 else RESUMED_LONG)
        first = round((RESUMED if resumed else FRESH).at(firsts[number]))
        steps = round(TOOL_STEPS.at(lengths[number]))
        session = _Session(f"s{number:02d}", Random(f"claude-code {seed} {number}"))
        session.begin(round(at, 3), first, "resume" if resumed else "start")
        session.work(steps, spawns=agents[number] < AGENT_FAMILIES)
        turns.extend(session.turns)
        at += exponential(rng, gap)
    return _header(sessions, seed, gap), turns


class _Session:
    """A session as it grows; `turns` holds its own and its sub-agents' turns."""

    def __init__(self, name: str, rng: Random):
        self.name = name
        self.rng = rng
        self.turns: list[Turn] = []
        self.count = 0
        self.context = 0
        """Tokens of prompt and output so far."""
        self._joins: list[str] = []

    def begin(self, at: float, first: int, cause: str) -> None:
        own = first - TOOLS - SYSTEM
        self._add(first, [("tools", TOOLS), ("system", SYSTEM), (f"{self.name}.0", own)], cause, at=at)

    def work(self, tool_steps: int, spawns: bool) -> None:
        """Tool-fed steps with human-fed ones between them; at one step, if `spawns`, sub-agents."""
        spawn_at = int(self.rng.random() * tool_steps) if spawns else -1
        for step in range(tool_steps):
            while self.rng.random() < HUMAN_SHARE:
                if not self._step("human"):
                    return
            if step == spawn_at:
                self._spawn(1 + int(self.rng.random() * 4))
            if not self._step("tool"):
                return

    def _step(self, cause: str, append: SplitLognormal | None = None) -> bool:
        """Adds a turn; false if the session ends here instead, at a full window."""
        human = cause == "human"
        new = round((append or _append(self.context)).draw(self.rng) * (HUMAN_FED if human else TOOL_FED))
        seconds = round((HUMAN_PAUSE if human else TOOL_PAUSE).draw(self.rng), 3)
        breaks = BREAK_HUMAN if human else BREAK_TOOL
        segment = f"{self.name}.{self.count}"
        if self.context + new > FULL:
            if self.rng.random() >= COMPACTS:
                return False
            after = round(COMPACTED.draw(self.rng))
            self._add(after, [(segment, after - after // 3)], "compaction", seconds, keep=after // 3)
        elif self.rng.random() < breaks:
            keep = round(self.context * 0.5 * self.rng.random())
            again = (f"{segment}.again", self.context - keep)
            self._add(self.context + new, [again, (segment, new)], cause, seconds, keep=keep)
        else:
            self._add(self.context + new, [(segment, new)], cause, seconds)
        return True

    def _spawn(self, count: int) -> None:
        """Sub-agents that run side by side; the next step waits for all of them."""
        spawner = str(self.turns[-1].ref)
        self._joins = [spawner]
        for number in range(1, count + 1):
            agent = _Session(f"{self.name}/agent-{number}", self.rng)
            first = round(AGENT_FIRST.draw(self.rng))
            append = [("tools", AGENT_TOOLS), (f"{agent.name}.0", first - AGENT_TOOLS)]
            agent._add(first, append, "subagent", after=[spawner])
            for _ in range(round(AGENT_STEPS.draw(self.rng)) - 1):
                agent._step("tool", AGENT_APPEND)
            self.turns.extend(agent.turns)
            self._joins.append(str(agent.turns[-1].ref))

    def _add(
        self,
        prompt: int,
        append: list[tuple[str, int]],
        cause: str,
        pause: float = 0.0,
        *,
        keep: int | None = None,
        at: float | None = None,
        after: list[str] | None = None,
    ) -> None:
        output = min(round(OUTPUT.draw(self.rng)), WINDOW - 1 - prompt)
        self.turns.append(
            Turn(
                session=self.name,
                turn=self.count,
                at=at,
                after=after or self._joins or None,
                pause=pause,
                keep=keep,
                append=append,
                output=output,
                cause=cause,
            )
        )
        self._joins = []
        self.count += 1
        self.context = prompt + output


def _append(context: int) -> SplitLognormal:
    return next(append for below, append in APPEND if context < below)


def _header(sessions: int, seed: int, gap: float) -> Header:
    return Header(
        format=FORMAT,
        version=VERSION,
        name="claude-code",
        origin=(
            "Generated from published fits of Claude Code traffic: TraceLab (arXiv 2606.30560) and "
            "callanjfox/kv-cache-tester. No recorded session is in it."
        ),
        licence="Apache-2.0",
        synthetic=True,
        seed=seed,
        notes=[
            f"{sessions} {'sessions start' if sessions > 1 else 'session starts'} as a Poisson process "
            f"with a mean gap of {gap:g} s.",
            "All sessions share the segments 'tools' and 'system'; everything else is private.",
            "A pause is a tool call's or a human's time; the model's own time is the backend's to add.",
            f"A context ends below {WINDOW} tokens; human pauses end at {HUMAN_PAUSE.most:g} s.",
        ],
    )
