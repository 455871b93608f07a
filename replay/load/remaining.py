"""How long a run goes on at least: the pauses that its schedule still has, as if every answer came at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from replay.load.schedule import Schedule


class Remaining:
    """Pauses to come. Not known where idle time is skipped."""

    def __init__(self, schedule: Schedule):
        settings, self._steps = schedule.settings, schedule.steps
        self._known = not settings.skip_idle
        self._live = settings.concurrency
        self._tails, gone = self._chains()
        # Recorded times, where they rule, are reached whatever came before.
        times = (step.at or 0.0 for step, never in zip(self._steps, gone, strict=True) if not never)
        self._last_at = max(times, default=0.0) if settings.absolute else None
        self._lengths = [0.0] * schedule.families
        """Longest chain of pauses of each family."""
        for step, tail, never in zip(self._steps, self._tails, gone, strict=True):
            if not step.needs and not never:
                self._lengths[step.family] = max(self._lengths[step.family], tail)

    def _chains(self) -> tuple[list[float], list[bool]]:
        """For each step the longest chain of pauses after it, and whether it is never sent."""
        children: list[list[int]] = [[] for _ in self._steps]
        missing = [len(step.needs) for step in self._steps]
        for i, step in enumerate(self._steps):
            for need in step.needs:
                children[need].append(i)
        order = [i for i, n in enumerate(missing) if not n]
        for i in order:  # grows meanwhile
            for child in children[i]:
                missing[child] -= 1
                if not missing[child]:
                    order.append(child)
        gone = [step.dropped is not None for step in self._steps]
        for i in order:
            gone[i] = gone[i] or any(gone[need] for need in self._steps[i].needs)
        tails = [0.0] * len(self._steps)
        for i in reversed(order):
            chains = (self._steps[child].pause + tails[child] for child in children[i] if not gone[child])
            tails[i] = max(chains, default=0.0)
        return tails, gone

    def seconds(
        self,
        now: float,
        waiting: Iterable[tuple[float, int]],
        in_flight: Iterable[int],
        queued: Collection[int],
    ) -> float | None:
        """Seconds from now on; null if not known.

        Args:
            now: on the schedule's time.
            waiting: steps that are to be sent, with their times.
            in_flight: steps that are sent and not answered.
            queued: families that wait for a slot.
        """
        if not self._known:
            return None
        if self._last_at is not None:
            return max(0.0, self._last_at - now)
        tails = self._tails
        ends = [due + tails[i] - now for due, i in waiting]
        ends += [tails[i] for i in in_flight]
        most = max(ends, default=0.0)
        if queued and self._live:
            lengths = [self._lengths[family] for family in queued]
            most = max(most, *lengths, sum(lengths) / self._live)
        return max(0.0, most)
