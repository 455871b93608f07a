"""Gates: limits on a comparison that decide whether CI passes, e.g. ``ttft_p50 <= -25%``.

::

    gate   = metric ("<=" | "<" | ">=" | ">") value
    value  = ("+" | "-") number "%"                 change against the first run, relative
           | ("+" | "-") number [unit]              change against the first run, absolute
           | number [unit]                          the run's own figure
    unit   = "s" | "ms" (times; required)  "k" | "M" | "G" (tokens, counts, rates)  "%" | "pp" (shares)

A sign makes it a change; `%` after a sign is always relative, `pp` are percentage points of a share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from replay.errors import ReplayError, unknown_name
from replay.results.metrics import METRICS, Cell, Kind

Scope = Literal["value", "difference", "change"]

_GATE = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z%]*)\s*")
_UNITS: dict[Kind, dict[str, float]] = {
    "seconds": {"s": 1.0, "ms": 1e-3},
    "tokens": {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9},
    "rate": {"": 1.0, "k": 1e3, "M": 1e6},
    "count": {"": 1.0, "k": 1e3, "M": 1e6},
    "share": {"%": 0.01},
}
_EXAMPLES = {
    "seconds": "{0} {1} 2s, {0} {1} +100ms or {0} {1} -25%",
    "tokens": "{0} {1} 1.5M or {0} {1} -25%",
    "rate": "{0} {1} 12 or {0} {1} +29%",
    "count": "{0} {1} 0 or {0} {1} +10%",
    "share": "{0} {1} 50%, {0} {1} +1pp or {0} {1} -25%",
}


class Gate(msgspec.Struct, frozen=True):
    """One parsed gate."""

    text: str
    """As the user wrote it."""
    metric: str
    op: str
    scope: Scope
    """What is held against the limit: the run's figure, its difference to the first run, or the relative change."""
    limit: float
    """In seconds, tokens, ... of the metric; shares and relative changes as fractions of 1."""

    def holds(self, value: float) -> bool:
        """Whether a figure keeps the limit."""
        compared = {"<=": value <= self.limit, "<": value < self.limit, ">=": value >= self.limit}
        return compared.get(self.op, value > self.limit)


class Result(msgspec.Struct, frozen=True):
    """What a gate found."""

    gate: str
    passed: bool
    value: float | None
    """What was held against the limit."""
    limit: float | None
    scope: Scope
    certain: bool | None
    """Whether the whole 95 % interval is on the same side of the limit as the value; null without an interval."""
    reason: str = ""
    """Why it failed without a value."""


def parse(text: str) -> Gate:
    """Reads a gate.

    Raises:
        ReplayError: unknown metric, or not of the grammar above.
    """
    match = _GATE.fullmatch(text)
    if match is None:
        raise ReplayError(
            f"--gate {text!r}: write it as METRIC OP VALUE, e.g. 'ttft_p50 <= -25%', 'ttft_p95 <= 2s' or "
            "'throughput >= +29%'; OP is one of <= < >= >"
        )
    metric, op, sign, number, unit = match.groups()
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS, f"in --gate {text!r}")
    kind = METRICS[metric].kind
    value = float(number) * (-1 if sign == "-" else 1)
    if sign and unit == "%":
        return Gate(text, metric, op, "change", value / 100)
    if sign and unit == "pp" and kind == "share":
        return Gate(text, metric, op, "difference", value / 100)
    if unit not in _UNITS[kind] or (sign and kind == "share"):
        raise ReplayError(_unit_error(text, metric, op, kind, sign, number, unit))
    return Gate(text, metric, op, "difference" if sign else "value", value * _UNITS[kind][unit])


def check(gate: Gate, metrics: Mapping[str, Cell]) -> Result:
    """Holds a gate against the compared metrics. An unknown figure fails."""
    cell = metrics[gate.metric]
    value, ends = {
        "value": (cell.b, ()),
        "difference": (cell.difference, (cell.low, cell.high)),
        "change": (cell.change, (cell.change_low, cell.change_high)),
    }[gate.scope]
    if value is None:
        return Result(gate.text, False, None, gate.limit, gate.scope, None, _why_unknown(gate, cell))
    passed = gate.holds(value)
    known = [end for end in ends if end is not None]
    certain = all(gate.holds(end) is passed for end in known) if known else None
    return Result(gate.text, passed, value, gate.limit, gate.scope, certain)


def _why_unknown(gate: Gate, cell: Cell) -> str:
    if gate.scope == "change" and cell.difference is not None:
        return f"{gate.metric} is 0 in the first run, so there is no relative change; give an absolute limit"
    return f"{gate.metric} is unknown: the backend does not say, or there are too few turns for it"


def _unit_error(text: str, metric: str, op: str, kind: Kind, sign: str, number: str, unit: str) -> str:
    examples = _EXAMPLES[kind].format(metric, op)
    if unit == "%" and not sign:
        return f"--gate {text!r}: {metric} is no share; write +{number}% or -{number}% for a change, e.g. {examples}"
    wrong = f"the unit {unit!r} does not fit" if unit else "a unit is missing"
    return f"--gate {text!r}: {wrong} {metric} ({kind}); write e.g. {examples}"
