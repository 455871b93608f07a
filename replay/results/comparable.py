"""Whether two runs were asked the same, so that a difference between them is the backend's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replay.errors import ReplayError

_SAME = (
    "trace_sha256", "model", "gpu", "families", "seed", "speed", "scale_tokens", "concurrency", "skip_idle", "outputs",
)  # fmt: skip
_PLAYED = ("absolute", "too_long", "restart_at")
"""Further settings of the driver, kept in `settings.replay`."""
_ABSENT = {"concurrency": "recorded start times", "restart_at": "never"}
"""Settings whose null is no gap in what is known, and what it means."""


def check(a: dict[str, Any], b: dict[str, Any], *, force: bool) -> list[str]:
    """Warnings about comparing two runs.

    Args:
        a: row of `runs`, with `settings` decoded.
        b: the other.
        force: compare although they were asked differently; the differences are among the warnings then.

    Raises:
        ReplayError: they were asked differently, and `force` is not given.
    """
    differences = list(_differences(a, b))
    if differences and not force:
        raise ReplayError(
            f"{_name(a)} and {_name(b)} were not asked the same, so they do not compare: {'; '.join(differences)}. "
            "Run one again with the other's options, or compare all the same with --force"
        )
    forced = [f"not asked the same (--force): {difference}" for difference in differences]
    return [*forced, *_warnings(a, b)]


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    for key, left, right in _settings(a, b):
        unknown = left is None or right is None
        if left == right or (unknown and key not in _ABSENT):
            continue
        shown = (_shown(key, value) for value in (left, right))
        yield f"{key} {' and '.join(shown)}"
    if (a["trace_sha256"] is None or b["trace_sha256"] is None) and a["trace"] != b["trace"]:
        yield f"trace {a['trace']} and {b['trace']}"


def _settings(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from ((key, a[key], b[key]) for key in _SAME)
    played = [(run["settings"].get("replay") or {}) for run in (a, b)]
    yield from ((key, played[0].get(key), played[1].get(key)) for key in _PLAYED)


def _warnings(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    if a["id"] == b["id"]:
        yield "this compares a run with itself"
    unknown = [
        key for key, left, right in _settings(a, b) if (left is None) != (right is None) and key != "concurrency"
    ]
    if unknown:
        yield f"stored for only one of the two, so taken to be the same: {', '.join(unknown)}"
    if a["simulated"] != b["simulated"]:
        yield f"{_name(a if a['simulated'] else b)} is simulated and the other was measured"
    for run in (a, b):
        if run["verdict"] != "valid":
            reasons = "; ".join(run["reasons"] or ()) or "no reason stored"
            yield f"{_name(run)} is {run['verdict'] or 'not judged yet'}: {reasons}"
    versions = [(run["settings"].get("versions") or {}).get("replay") for run in (a, b)]
    if versions[0] != versions[1]:
        yield f"run by different versions of replay: {versions[0] or 'unknown'} and {versions[1] or 'unknown'}"


def _shown(key: str, value: Any) -> str:
    if value is None:
        return _ABSENT.get(key, "unknown")
    return str(value)[:12] if key == "trace_sha256" else str(value)


def _name(run: dict[str, Any]) -> str:
    return f"{run['name']} ({run['id']})"
