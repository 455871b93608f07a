"""How figures are written for people: tokens, shares, seconds, bars. Unknown is a dash, never a zero."""

from __future__ import annotations

import unicodedata

UNKNOWN = "-"


def tokens(n: float | None) -> str:
    """``9,876``, ``395 k``, ``48.3 M``: three digits from ten thousand on."""
    if n is None:
        return UNKNOWN
    if abs(n) < 10_000:
        return f"{round(n):,}"
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        if abs(n) < 999.5 * factor:
            return f"{digits(n / factor)} {unit}"
    return f"{n / 1e12:,.1f} T"


def count(n: int | None, noun: str) -> str:
    """``1 turn``, ``2,037 turns``, ``64 families``."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{UNKNOWN if n is None else f'{n:,}'} {noun if n == 1 else plural}"


def share(part: float | None, whole: float | None) -> str:
    """A percentage with one decimal; what is not nothing never reads 0.0 %, nor what is not all 100.0 %."""
    if part is None or not whole:
        return UNKNOWN
    percent = 100 * part / whole
    if percent in (0, 100):
        return f"{percent:.0f} %"
    if 0 < percent < 0.05:
        return "< 0.1 %"
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %"


def seconds(value: float | None) -> str:
    """Seconds without their unit, to three digits: ``0.0123``, ``0.162``, ``2.82``, ``123``."""
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        return "< 0.0001"
    return f"{value:.4f}" if abs(value) < 0.1 else digits(value)


def milliseconds(value: float | None) -> str:
    """A short time, given in seconds, with its unit: ``12.0 ms``."""
    return UNKNOWN if value is None else f"{digits(1000 * value)} ms"


def duration(value: float | None) -> str:
    """A length of time with its unit: ``41.2 s``, ``7.3 min``, ``10.6 h``."""
    if value is None:
        return UNKNOWN
    for limit, factor, unit in ((120, 1, "s"), (7200, 60, "min")):
        if abs(value) < limit:
            return f"{seconds(value / factor)} {unit}"
    return f"{digits(value / 3600)} h"


def rate(value: float | None) -> str:
    """A rate without its unit."""
    return UNKNOWN if value is None else tokens(value) if value >= 1000 else seconds(value)


def digits(value: float) -> str:
    """Three significant digits, no exponent; more before the point where the number is large."""
    for limit, places in ((0.9995, 3), (9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            return f"{value:.{places}f}"
    return f"{value:,.0f}"


def bar(part: float | None, whole: float | None, width: int, *, ascii_only: bool = False) -> str:
    """A bar of at most `width` characters; anything above nothing shows."""
    if not part or not whole:
        return ""
    eighths = max(1, round(8 * width * min(1.0, part / whole)))
    if ascii_only:
        return "#" * max(1, round(eighths / 8))
    full, rest = divmod(eighths, 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()


def plain(text: object) -> str:
    """Text of foreign origin for a terminal: control and formatting characters become ``?``."""
    return "".join("?" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in str(text))
