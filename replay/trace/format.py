"""Reads and writes the native trace format: JSON Lines, a header line and then a line a turn.

`schemas/trace.schema.json` describes it; `json_schema` generates that file from the model.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from replay.errors import ReplayError
from replay.schema import DIALECT, definitions
from replay.trace.files import open_input, open_output
from replay.trace.model import FORMAT, VERSION, Header, Trace, Turn

_BAD_LINE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BROKEN_STREAM = (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError)


def read(path: str | Path) -> Trace:
    """Reads a trace file and checks it.

    Raises:
        ReplayError: anything wrong with it, naming file and line.
    """
    lines: list[int] = []
    turns: list[Turn] = []
    header: Header | None = None
    for number, item in _items(path):
        if isinstance(item, Header):
            header = item
        else:
            turns.append(item)
            lines.append(number)
    if header is None:
        raise ReplayError(f"{path}: the file is empty; a trace starts with a header line")
    return Trace(header, turns, source=str(path), lines=lines)


def _items(path: str | Path) -> Iterator[tuple[int, Header | Turn]]:
    decode_turn = msgspec.json.Decoder(Turn).decode
    number = 0
    with open_input(path) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    yield number, _header(path, line)
                elif not line.isspace():
                    yield number, decode_turn(line)
        except _BAD_LINE as error:
            raise ReplayError(f"{path}:{number}: not a valid turn: {error}") from None
        except _BROKEN_STREAM as error:
            raise ReplayError(f"{path}:{number + 1}: cannot be decompressed further: {error}") from None


def _header(path: str | Path, line: bytes) -> Header:
    hint = "for a foreign log, run 'replay import' first"
    try:
        header = msgspec.json.decode(line, type=Header)
    except _BAD_LINE as error:
        raise ReplayError(f"{path}:1: not a trace header: {error}; {hint}") from None
    if header.format != FORMAT:
        raise ReplayError(f"{path}:1: format is {header.format!r}, expected {FORMAT!r}; {hint}")
    if header.version != VERSION:
        versions = f"format version {header.version}, this replay reads {VERSION}"
        raise ReplayError(f"{path}:1: {versions}; update replay")
    return header


def write(path: str | Path, header: Header, turns: Iterable[Turn]) -> int:
    """Writes a trace file, compressed if the name ends in .gz, .xz or .zst; returns the number of turns.

    Raises:
        ReplayError: the file cannot be written.
    """
    encode = msgspec.json.Encoder().encode
    count = 0
    try:
        with open_output(path) as stream:
            stream.write(encode(header) + b"\n")
            for turn in turns:
                stream.write(encode(turn) + b"\n")
                count += 1
    except OSError as error:
        raise ReplayError(f"{path}: cannot write: {(error.strerror or str(error)).lower()}") from None
    return count


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of a trace file: the header or a turn."""
    (header, turn), components = definitions(Header, Turn)
    components["Header"]["properties"]["format"]["const"] = FORMAT
    components["Header"]["properties"]["version"]["const"] = VERSION
    return {
        "$schema": DIALECT,
        "title": "One line of a replay trace (JSON Lines): the header, then a line a turn",
        "oneOf": [header, turn],
        "$defs": components,
    }
