"""Faults that the server can be told to have, so that clients can be tested against them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from replay.errors import ReplayError, unknown_name

KINDS = {
    "slow": "the first byte comes VALUE seconds late (default 1)",
    "stall": "after the first token nothing comes for VALUE seconds (default 1)",
    "reset": "the connection is reset after the first token",
    "refuse": "the connection is reset before any byte",
    "status": "the reply is an HTTP error VALUE (default 500)",
    "truncate": "the stream ends within an event",
    "garbage": "an event is not JSON",
    "error": "an error event comes within the stream",
    "no-usage": "the usage is left out",
}
_DEFAULTS = {"slow": 1.0, "stall": 1.0, "status": 500.0}
_FORM = re.compile(r"([a-z-]+)(?:=([0-9.]+))?(?:@([0-9]+))?")


@dataclass(frozen=True)
class Fault:
    """One fault, had by every `every`-th request."""

    kind: str
    value: float = 0.0
    """Seconds, or the status code."""
    every: int = 1

    def hits(self, number: int) -> bool:
        """Whether the request with this number, counted from 1, has the fault."""
        return number % self.every == 0

    def __str__(self) -> str:
        value = f"={self.value:g}" if self.kind in _DEFAULTS else ""
        return f"{self.kind}{value}@{self.every}"


def parse_fault(text: str) -> Fault:
    """Reads ``KIND[=VALUE][@N]``: every N-th request has it (default: every one).

    Raises:
        ReplayError: unknown kind, or not of that form.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ReplayError(f"--fault {text}: write KIND[=VALUE][@N], e.g. stall=2.5@10 for every tenth request")
    kind, value, every = found.groups()
    if kind not in KINDS:
        raise unknown_name("fault", kind, KINDS)
    if value is not None and kind not in _DEFAULTS:
        raise ReplayError(f"--fault {text}: {kind} takes no value")
    try:
        number = float(value) if value is not None else _DEFAULTS.get(kind, 0.0)
    except ValueError:
        raise ReplayError(f"--fault {text}: {value} is not a number") from None
    if kind == "status" and not 400 <= number <= 599:
        raise ReplayError(f"--fault {text}: an HTTP error is a status from 400 to 599")
    if every is not None and int(every) < 1:
        raise ReplayError(f"--fault {text}: @N counts from 1")
    return Fault(kind, number, int(every or 1))
