"""A server's fault as one line that holds neither the key nor text of the prompt."""

from __future__ import annotations

from typing import Any

import msgspec

from replay.backends.http.replies import Reply

_LIMIT = 240
_WINDOW = 16


def fault(reply: Reply, status: int) -> str | None:
    """What is wrong with a reply that came to its end, in a few words; null if nothing is."""
    if status != 200:
        return f"HTTP {status}"
    if reply.error is not None:
        return "error within the reply"
    if reply.malformed:
        return f"{reply.malformed} part(s) of the reply were cut short or are not what the interface promises"
    if not reply.has_output and not reply.counts.output:
        return "the reply holds no output"
    return None


def describe_error(what: str, reply: Reply, *, secret: str, sent: bytes) -> str:
    """`what`, and the server's own message where it has one.

    Args:
        what: the client's view, in a few words.
        reply: holds an error event or the body of a failed request.
        secret: the API key, removed wherever it stands; may be empty.
        sent: the request; a message that repeats part of it (as validation errors do) is withheld.
    """
    message = _message(reply.error) if reply.error is not None else _body_message(bytes(reply.whole))
    message = " ".join(message.split())[:_LIMIT]
    if secret:
        message = message.replace(secret, "[key]")
    if _repeats(message, sent):
        message = "(message withheld: it repeats the request)"
    return f"{what}: {message}" if message else what


def _body_message(body: bytes) -> str:
    if not body:
        return ""
    try:
        return _message(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[: 4 * _LIMIT].decode(errors="replace")


def _message(error: Any) -> str:
    """The text of an error in OpenAI's, Anthropic's, FastAPI's or a plain form."""
    if isinstance(error, dict):
        for name in ("error", "message", "detail", "type"):
            if error.get(name):
                return _message(error[name])
        return ""
    if isinstance(error, list):
        return "; ".join(_message(item.get("msg") if isinstance(item, dict) else item) for item in error[:3])
    return str(error) if error is not None else ""


def _repeats(message: str, sent: bytes) -> bool:
    raw = message.encode()
    body = sent[sent.find(b"\r\n\r\n") :]
    return any(raw[i : i + _WINDOW] in body for i in range(0, len(raw) - _WINDOW + 1, _WINDOW // 2))
