"""Request bodies of the three interfaces, joined from bytes that exist already."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from replay.load.content import Buffer, Message

Endpoint = Literal["completions", "chat", "messages"]

PATHS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
}


def completions(fields: Mapping[str, Any], spelt_ids: bytes) -> list[Buffer]:
    """A body for ``/v1/completions``; `spelt_ids` are ids with a comma after each."""
    return [_open(fields), b',"prompt":[', memoryview(spelt_ids)[:-1], b"]}"]


def text_completions(fields: Mapping[str, Any], text: bytes) -> list[Buffer]:
    """A body for ``/v1/completions`` with a prompt of words."""
    return [_open(fields), b',"prompt":"', text, b'"}']


def chat(fields: Mapping[str, Any], messages: Sequence[Message]) -> list[Buffer]:
    """A body for ``/v1/chat/completions`` of messages made of words."""
    return [_open(fields), b',"messages":[', *_spelt(messages), b"]}"]


def anthropic(fields: Mapping[str, Any], messages: Sequence[Message]) -> list[Buffer]:
    """A body for ``/v1/messages`` of messages made of words; asks to cache up to the last message."""
    parts = _spelt(messages, mark_last=True)
    return [_open(fields), b',"messages":[', *parts, b"]}"]


def recorded(fields: Mapping[str, Any], messages: Sequence[bytes]) -> list[Buffer]:
    """A body of messages as the trace holds them, each run of them serialised."""
    return [_open(fields), b',"messages":[', b",".join(messages), b"]}"]


def serialise(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Messages as the items of a JSON list; null content and all other fields stay as they are."""
    return msgspec.json.encode(list(messages))[1:-1]


def _open(fields: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(fields)[:-1]


def _spelt(messages: Sequence[Message], *, mark_last: bool = False) -> list[Buffer]:
    # Words are letters and spaces: nothing in them needs escaping.
    parts: list[Buffer] = []
    for number, message in enumerate(messages):
        marked = mark_last and number == len(messages) - 1
        text = b'[{"type":"text","text":"' if marked else b'"'
        end = b'","cache_control":{"type":"ephemeral"}}]}' if marked else b'"}'
        parts += [b',{"role":"' if number else b'{"role":"', message.role.encode(), b'","content":', text]
        parts += message.parts
        parts.append(end)
    return parts


def head(path: str, host: str, headers: Mapping[str, str]) -> bytes:
    """An HTTP/1.1 request head without its last line (the length) and the empty line."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n"


def finish(start: bytes, headers: Mapping[str, str], body: Sequence[Buffer]) -> bytes:
    """The whole request: `start` from `head`, headers of this request, length and body."""
    more = "".join([f"{name}: {_header_value(value)}\r\n" for name, value in headers.items()])
    size = sum(map(len, body))
    return b"".join([start, more.encode("latin-1"), b"Content-Length: %d\r\n\r\n" % size, *body])


def _header_value(text: str) -> str:
    return text if _PLAIN(text) else quote(text, safe=_SAFE)


_SAFE = "#/@:.,;=+~!$&'()*[] -_"
_PLAIN = re.compile(r"[\w#/@:.,;=+~-]*", re.ASCII).fullmatch
