"""Which turns a run sends, of which sessions, and what each waits for.

`Schedule` turns a trace and the user's `Settings` into a list of `Step`: it picks or clones
sessions, scales lengths and times, and places every prompt in the run's prefix tree. It knows no clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from typing import Any

from replay.errors import ReplayError
from replay.load.outcome import Request
from replay.trace import ROOT, PrefixTree, Tip, Trace, Turn


@dataclass(frozen=True, slots=True)
class Settings:
    """How a trace is asked again. Stored with the run; `compare` refuses to mix them."""

    sessions: int | None = None
    """Sessions (with their sub-agents) to replay; more than the trace holds are clones. Null: all."""
    concurrency: int | None = None
    """Sessions live at once; the next starts when one ends. Null: each starts at its recorded time."""
    speed: float = 1.0
    """Divides pauses and start times."""
    skip_idle: bool = False
    """Jump to the next request whenever the whole system is idle."""
    scale_tokens: float = 1.0
    """Multiplies all lengths."""
    outputs: str = "recorded"
    """``live``: what the model generated goes into the next prompt; ``recorded``: a stand-in of that length."""
    absolute: bool = False
    """Send each turn that has a recorded time at that time, late ones at once, instead of after its pause."""
    too_long: str = "refuse"
    """Prompts beyond the model's context or a simulated GPU tier: ``refuse`` the run, or ``drop`` the turn and what
    depends on it."""
    restart_at: float | None = None
    """Seconds from the run's start at which the engine is restarted, once nothing is in flight; null: never."""
    seed: int = 0
    """Seed of token content, added to the trace's."""

    def __post_init__(self) -> None:
        for name in ("sessions", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ReplayError(f"--{name} must be at least 1, not {value}")
        for name in ("speed", "scale_tokens"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ReplayError(f"--{name.replace('_', '-')} must be a positive number, not {value}")
        if self.restart_at is not None and not 0 <= self.restart_at < float("inf"):
            raise ReplayError(f"--restart-at must be a time in seconds, not {self.restart_at}")
        if self.absolute and self.concurrency:
            raise ReplayError("--absolute sends at recorded times and --concurrency when a slot frees; choose one")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the results file."""
        return asdict(self)


@dataclass(slots=True)
class Step:
    """One turn of a run."""

    turn: Turn
    session: str
    """Session id in this run (clones end in ``#n``)."""
    id: str
    family: int
    """Number of the family (a session and its sub-agents) in this run."""
    position: int
    """Number of the turn within its session, from 0."""
    at: float | None
    """Recorded start (a clone's is shifted a little), in seconds from the run's start, after ``--speed``."""
    pause: float
    """Seconds from the end of what it waits for, after ``--speed``."""
    output: int
    tip: Tip
    """End of the prompt in the prefix tree."""
    context: Tip
    """End of prompt and output."""
    needs: list[int] = field(default_factory=list)
    """Steps that must have finished."""
    parent: int = -1
    dropped: str | None = None
    """Why this step is never sent."""


class Schedule:
    """The steps of a run, family by family in the order of the trace, clones after originals."""

    def __init__(self, trace: Trace, settings: Settings, max_context: int | None = None, gpu_tokens: int | None = None):
        """Args:
            trace: what to ask.
            settings: how.
            max_context: most tokens of prompt and output together that the model takes; null: no limit.
            gpu_tokens: tokens that requests can hold in the GPU tier; null: not known before the run.

        Raises:
            ReplayError: prompts are longer than that and `settings.too_long` is ``refuse``, or all are.
        """
        self.trace = trace
        self.settings = settings
        self.tree = PrefixTree()
        self.steps: list[Step] = []
        families = trace.families
        wanted = settings.sessions or len(families)
        self.duplication = wanted / len(families) if wanted > len(families) else 1.0
        """How often each session of the trace is played, on average."""
        starts = [turn.at or 0.0 for turn, needs in zip(trace.turns, trace.after, strict=True) if not needs]
        self._first_at = min(starts)
        # Clones start between the originals, not on top of them.
        self._stagger = (max(starts) - min(starts)) / len(families) / self.duplication
        for number in range(wanted):
            self._add_family(families[number % len(families)], number, clone=number // len(families))
        self.families = wanted
        if len({step.id for step in self.steps}) < len(self.steps):
            raise ReplayError(
                f"{trace.header.name}: clones are named 'session#2', and the trace has sessions so named; rename them"
            )
        self._drop_too_long(max_context, gpu_tokens)

    def request(self, step: Step, ideal: int) -> Request:
        """What a backend is asked for a step.

        Args:
            step: one of `steps`.
            ideal: tokens of the longest prefix of its prompt that any earlier request of the run shares.
        """
        return Request(
            turn=step.turn,
            session=step.session,
            id=step.id,
            tree=self.tree,
            tip=step.tip,
            context=step.context,
            output=step.output,
            ideal=ideal,
            parent_id=self.steps[step.parent].id if step.parent >= 0 else None,
            family=step.family,
        )

    def _add_family(self, indices: list[int], number: int, clone: int) -> None:
        first = len(self.steps)
        step_of = {index: first + k for k, index in enumerate(indices)}
        positions: dict[str, int] = {}
        done: dict[int, Step] = {}
        for index in self._parents_first(indices):
            done[index] = self._step(index, number, clone, done, step_of)
        for index in indices:
            step = done[index]
            step.position = positions.get(step.session, 0)
            positions[step.session] = step.position + 1
            self.steps.append(step)

    def _parents_first(self, indices: list[int]) -> list[int]:
        """A turn may stand before its parent in the file; contexts are built parents first."""
        seen: set[int] = set()
        order: list[int] = []
        for turn in indices:
            index, chain = turn, []
            while index >= 0 and index not in seen:
                seen.add(index)
                chain.append(index)
                index = self.trace.parents[index]
            order.extend(reversed(chain))
        return order

    def _step(self, index: int, family: int, clone: int, done: dict[int, Step], step_of: dict[int, int]) -> Step:
        trace, settings = self.trace, self.settings
        turn, parent = trace.turns[index], trace.parents[index]
        session = turn.session if clone == 0 else f"{turn.session}#{clone + 1}"
        tip = ROOT
        if parent >= 0:
            tip = self._kept(done[parent], trace.keep[index], trace.prompt[parent], trace.turns[parent].output)
        for segment, tokens in turn.append:
            tip = self.tree.extend(tip, self._segment(segment, clone), self._scale(tokens))
        output = self._scale(turn.output)
        context = self.tree.extend(tip, ("output", f"{session}/{turn.turn}"), output) if output else tip
        needs = [step_of[need] for need in trace.after[index]]
        if parent >= 0 and trace.keep[index] > trace.prompt[parent] and step_of[parent] not in needs:
            needs.append(step_of[parent])
        return Step(
            turn=turn,
            session=session,
            id=f"{session}/{turn.turn}",
            family=family,
            position=0,
            at=None if turn.at is None else (turn.at - self._first_at + clone * self._stagger) / settings.speed,
            pause=turn.pause / settings.speed,
            output=output,
            tip=tip,
            context=context,
            needs=needs,
            parent=step_of[parent] if parent >= 0 else -1,
        )

    def _kept(self, parent: Step, keep: int, prompt: int, output: int) -> Tip:
        """The parent's context cut to `keep` tokens; its natural ends survive the rounding of scaled lengths."""
        if keep == prompt + output:
            return parent.context
        if keep == prompt:
            return parent.tip
        return self.tree.cut(parent.context, min(self._scale(keep), parent.context.depth))

    def _scale(self, tokens: int) -> int:
        if self.settings.scale_tokens == 1 or tokens == 0:
            return tokens
        return max(1, round(tokens * self.settings.scale_tokens))

    def _segment(self, segment: str, clone: int) -> Hashable:
        """Clones get private segments of their own; what independent sessions share stays shared."""
        return segment if clone == 0 or segment in self.trace.shared_segments else (segment, clone)

    def _drop_too_long(self, max_context: int | None, gpu_tokens: int | None) -> None:
        # The last token of an output is never in the cache.
        most, where, fix = max_context, "the model's", "choose a model with a longer context"
        if gpu_tokens is not None and (most is None or gpu_tokens + 1 < most):
            most, where, fix = gpu_tokens + 1, "the GPU tier's", "raise tiers.gpu.tokens or take a larger GPU"
        long = [step for step in self.steps if most is not None and step.context.depth > most]
        if not long or most is None:
            return
        none = len(long) == len(self.steps)
        if none or self.settings.too_long == "refuse":
            worst = max(long, key=lambda step: step.context.depth)
            raise ReplayError(
                f"{len(long):,} of {len(self.steps):,} turns do not fit {where} {most:,} tokens "
                f"(the longest, {worst.id}, has {worst.context.depth:,}); {fix}, "
                f"--scale-tokens {0.99 * most / worst.context.depth:.3g}{'' if none else ' or --too-long drop'}"
            )
        for step in long:
            step.dropped = f"prompt and output of {step.context.depth:,} tokens exceed {where} {most:,}"
