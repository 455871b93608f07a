"""Foreign logs to the native format, one module a format.

An importer module has `NAME`, `ABOUT` (a few words for messages), `matches(head)` (is this the beginning
of such a file?) and `load(paths, keep_text, progress)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from replay.errors import ReplayError, unknown_name
from replay.trace.importers import blocks, claude_code, mooncake
from replay.trace.importers.sources import expand, head
from replay.trace.model import FORMAT, VERSION, Header, Turn

FORMATS: dict[str, ModuleType] = {module.NAME: module for module in (blocks, claude_code, mooncake)}
"""Importers by the name that ``--format`` takes."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """A trace read from foreign logs."""

    header: Header
    turns: list[Turn]
    notes: list[str]
    """What was estimated, dropped or counted, one line each; also in the header."""


def load(
    sources: Sequence[str | Path],
    format: str | None = None,
    keep_text: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Reads foreign logs as one trace.

    Args:
        sources: files or folders (searched for ``*.json`` and ``*.jsonl``), compressed or not.
        format: a key of `FORMATS`; null: told from the content of each file.
        keep_text: put the messages into the turns. Otherwise nothing of the text, no path and no name
            that a user chose reaches the result.
        progress: called as ``progress(files done, files in all)``.

    Raises:
        ReplayError: a source is missing or broken, of no known format, or holds no model call.
    """
    if format is not None and format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    notes: list[str] = []
    groups = _by_format(sources, format, notes)
    total = sum(len(paths) for paths in groups.values())
    turns: list[Turn] = []
    headers: list[Header] = []
    done = 0
    for name, paths in groups.items():
        header, found, said = FORMATS[name].load(paths, keep_text, _offset(progress, done, total))
        headers.append(header)
        turns.extend(found)
        notes.extend(said)
        done += len(paths)
    sizes = {header.block_tokens for header in headers}
    merged = Header(
        format=FORMAT,
        version=VERSION,
        name="+".join(header.name for header in headers),
        origin=" ".join(header.origin for header in headers),
        block_tokens=sizes.pop() if len(sizes) == 1 else None,
        notes=notes,
    )
    return Imported(merged, turns, notes)


def _by_format(sources: Sequence[str | Path], format: str | None, notes: list[str]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    skipped = 0
    for path, named in expand(sources):
        name = format or detect(head(path))
        if name is not None:
            groups.setdefault(name, []).append(path)
        elif named:
            raise _unknown(path)
        else:
            skipped += 1
    if not groups and not skipped:
        raise ReplayError(f"{', '.join(map(str, sources))}: no logs in there: no file that ends in .json or .jsonl")
    if not groups:
        raise _unknown(", ".join(str(source) for source in sources))
    if skipped:
        notes.append(f"files of unknown format in the given folders, skipped: {skipped:,}")
    return groups


def detect(beginning: bytes) -> str | None:
    """The format that a file with this beginning has, a key of `FORMATS`, or null."""
    return next((name for name, module in FORMATS.items() if module.matches(beginning)), None)


def _unknown(what: str | Path) -> ReplayError:
    if isinstance(what, Path) and FORMAT.encode() in head(what)[:200]:
        return ReplayError(f"{what}: already in the native format; use it as it is")
    known = "; ".join(f"{name} ({module.ABOUT})" for name, module in FORMATS.items())
    return ReplayError(f"{what}: no known format found; known: {known}; force one with --format")


def _offset(progress: Progress | None, done: int, total: int) -> Progress:
    return lambda count, _: progress(done + count, total) if progress else None
