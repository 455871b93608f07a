"""Several simulated instances of an engine behind a router."""

from __future__ import annotations

from typing import Any

import msgspec

from replay.backends.choice import Choice
from replay.backends.preset import Preset
from replay.backends.sim import SimBackend
from replay.load.events import CacheEvent
from replay.load.outcome import Clock, Outcome, Request


class SimRouter:
    """A `Backend` that simulates all instances of a preset and what routes requests to them.

    Each instance has its own GPU tier. The remote tier is one for all; under LMCache's server all tiers
    below the GPU are. Links to shared tiers are shared too.
    """

    def __init__(self, preset: Preset, model: str, gpu: str, clock: Clock):
        """Instances with empty tiers; see `SimBackend` for the arguments and what is raised."""
        alone = msgspec.structs.replace(preset, instances=1)
        first = SimBackend(alone, model, gpu, clock)
        more = (SimBackend(alone, model, gpu, clock, beside=first) for _ in range(preset.instances - 1))
        self.instances = [first, *more]
        self._choice = Choice(preset.instances, preset.router)

    async def __aenter__(self) -> SimRouter:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for instance in self.instances:
            instance.engine.stop()

    async def send(self, request: Request) -> Outcome:
        """Runs a request on the instance that the router chooses."""
        chosen = self._choice.take(request).instance
        try:
            outcome = await self.instances[chosen].send(request)
        finally:
            self._choice.done(chosen)
        outcome.instance = chosen
        return outcome

    async def restart(self) -> None:
        """Restarts every instance."""
        for instance in self.instances:
            await instance.restart()

    def cache_events(self) -> list[CacheEvent]:
        """What each tier stored, evicted and dropped so far, in order of time; a shared tier counts once."""
        return sorted((event for each in self.instances for event in each.cache_events()), key=lambda event: event.at)

    def describe(self) -> dict[str, Any]:
        """Profiles, and capacities of all instances together; a shared tier counts once."""
        tiers: dict[str, dict[str, float]] = {}
        for instance in self.instances:
            own = {tier.name for tier in instance.engine.tiers.own} if instance.engine.tiers else set()
            for name, size in instance.describe()["tiers"].items():
                if name in {"gpu", *own}:
                    before = tiers.get(name, {"tokens": 0, "gib": 0.0})
                    tiers[name] = {unit: before[unit] + size[unit] for unit in before}
        about = self.instances[0].describe()
        return {**about, "tiers": tiers, "instances": len(self.instances), "router": self._choice.policy}

    def self_check(self) -> dict[str, Any]:
        """How many requests each instance got."""
        return {"requests_per_instance": list(self._choice.requests)}
