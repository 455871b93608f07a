"""The HTTP clients of a run: one for each instance of the engine, made alike in every process that sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from replay.backends.http import HttpBackend
from replay.backends.http.attribution.lookups import Lookups
from replay.backends.http.attribution.loss import Known
from replay.backends.http.check import SelfCheck
from replay.backends.http.history import History
from replay.load.outcome import Clock

if TYPE_CHECKING:
    from replay.backends.connect import Where


@dataclass(frozen=True, slots=True)
class Servers:
    """The instances and how they are asked; can be pickled."""

    where: Where
    urls: tuple[str, ...]
    model: str | None
    """Name that the servers know; null: the first that they list."""
    seed: int
    """Of token content."""
    outputs: str
    """``live`` or ``recorded``."""
    lookups: tuple[Path, ...] = ()
    """Files in which LMCache says what it served: its server's events, or the log of each instance."""
    in_logs: bool = False
    """`lookups` are logs."""
    salt: str = field(default_factory=lambda: token_hex(8))

    def clients(self, clock: Clock, *, worker: int | None = None) -> list[HttpBackend]:
        """A client for each instance, not yet entered; they share what they know of earlier prompts.

        Args:
            clock: the run's clock.
            worker: number of this process if it only sends what it is told to: it leaves resets and metrics to
                the one that tells it.

        Raises:
            ReplayError: an address, key variable or header that cannot be used, or no vocabulary.
        """
        where, sends = self.where, worker is not None
        content = HttpBackend.content_for(where.preset, self.seed, tokenizer=where.tokenizer)
        files = {path: Lookups(path, log=self.in_logs) for path in self.lookups}
        known, history = Known(), History()
        return [
            HttpBackend(
                url,
                where.preset,
                content,
                clock,
                model=self.model,
                api_key_env=where.api_key_env,
                headers=dict(where.headers),
                endpoint=where.endpoint,  # type: ignore[arg-type]
                kv_events=where.kv_events,
                outputs=self.outputs,
                isolation="none" if sends and where.isolation == "reset" else where.isolation,
                salt=self.salt,
                scrape_s=None if sends else 10.0,
                lookups=files[self.lookups[number % len(self.lookups)]] if files else None,
                worker=worker or 0,
                known=known,
                history=history,
            )
            for number, url in enumerate(self.urls)
        ]

    def for_worker(self) -> Servers:
        """The same without what cannot leave this process."""
        return replace(self, where=replace(self.where, engine=None))


def addresses(target: str) -> tuple[str, ...]:
    """The URLs of a target that names one or several, with commas between them."""
    return tuple(re.split(r",(?=https?://)", target))


def checked(clients: Sequence[HttpBackend]) -> dict[str, Any]:
    """What the clients of all instances noticed, as `HttpBackend.self_check` gives it for one."""
    check = SelfCheck(clients[0].preset)
    for client in clients:
        check.merge(client.check)
    counts = [client.counts() for client in clients]
    # One content makes the prompts for all of them.
    added = {name: sum(c[name] for c in counts) for name in counts[0] if name != "live_outputs"}
    return {**check.summary(), **added, "live_outputs": counts[0]["live_outputs"]}
