"""Makes the bytes of each request of a run, and the reader that fits its reply."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from replay.backends.http import bodies, fields
from replay.backends.http.bodies import Endpoint
from replay.backends.http.history import History
from replay.backends.http.replies import AnthropicReply, OpenAIReply, Reply
from replay.backends.http.wire import Pool
from replay.backends.preset import Preset
from replay.errors import ReplayError
from replay.load.content import Content
from replay.load.outcome import Request


def request_headers(preset: Preset, api_key_env: str | None, more: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The headers of every request, the API key in one of them; and the key, to keep it out of all else.

    Args:
        preset: Anthropic's service wants its key in a header of its own.
        api_key_env: environment variable that holds the key; null: there is none.
        more: the user's headers.

    Raises:
        ReplayError: the variable holds no key, or a header cannot be sent.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "replay"}
    if preset.engine == "anthropic":
        headers["anthropic-version"] = "2023-06-01"
    for name, value in more.items():
        if not value.isprintable() or not name.isprintable() or ":" in name or not name:
            raise ReplayError(f"header {name!r}: name and value must be printable, on one line")
        headers[name] = value
    if api_key_env is None:
        return headers, ""
    key = os.environ.get(api_key_env, "")
    if not key:
        raise ReplayError(f"the environment variable {api_key_env} is empty; put the API key there")
    if not key.isascii() or not key.isprintable():
        raise ReplayError(f"the environment variable {api_key_env} holds no usable API key (line break or non-ASCII)")
    if preset.engine == "anthropic":
        headers["x-api-key"] = key
    else:
        headers["Authorization"] = f"Bearer {key}"
    return headers, key


class Composer:
    """Composes the requests of one run."""

    def __init__(
        self,
        preset: Preset,
        content: Content,
        pool: Pool,
        headers: Mapping[str, str],
        *,
        url: str,
        model: str,
        endpoint: Endpoint | None,
        session_header: str,
        salt: str,
        isolate: bool,
        stream: bool,
        live: bool,
        history: History,
    ):
        """Args:
        preset: decides which fields the engine takes.
        content: makes prompts.
        pool: knows the server's address.
        headers: of every request.
        url: address of the server.
        model: name that the server knows.
        endpoint: interface to use; null: the engine's best, and where the trace has text, that of its messages.
        session_header: header with the session's id; empty: none.
        salt: makes request ids unique on the server.
        isolate: also keep the run's prompts apart from those of earlier runs by it.
        stream: ask for streams of events.
        live: ask for the generated token ids.
        history: the messages of earlier requests.
        """
        self.endpoint: Endpoint = endpoint or fields.default_endpoint(preset)
        self.history = history
        self._forced = endpoint is not None
        self._preset = preset
        self._content = content
        self._url = url
        self._session_header = session_header
        self._salt = salt
        if isolate and not fields.can_salt(preset):
            content.salt = salt
        self._starts = {
            name: bodies.head(pool.prefix + path, pool.authority, headers) for name, path in bodies.PATHS.items()
        }
        self._common: dict[Endpoint, dict[str, Any]] = {
            name: fields.common(
                preset, name, url=url, model=model, stream=stream, live=live, salt=salt if isolate else None
            )
            for name in bodies.PATHS
        }

    def request_id(self, request: Request) -> str:
        """The id on the wire: unique on the server, not only within the run, as engines refuse ids in use."""
        return f"{self._salt}-{request.id}"

    def endpoint_of(self, request: Request) -> Endpoint:
        """The interface that a request goes to."""
        if request.turn.messages is None or self.endpoint != "completions" or self._forced:
            return self.endpoint
        return self.history.endpoint(request)

    def compose(self, endpoint: Endpoint, request: Request) -> bytes:
        """The whole request, head and body."""
        name = self.request_id(request)
        values = self._common[endpoint] | fields.per_request(
            self._preset, endpoint, url=self._url, output=request.output, request_id=name
        )
        if request.turn.messages is not None and endpoint != "completions":
            messages, more = self.history.messages(request, system_apart=endpoint == "messages")
            body = bodies.recorded(values | more, messages)
        elif endpoint == "completions":
            make = bodies.text_completions if self._content.alphabet.text else bodies.completions
            body = make(values, self._content.prompt(request.tree, request.tip))
        else:
            join = bodies.chat if endpoint == "chat" else bodies.anthropic
            body = join(values, self._content.messages(request.tree, request.tip))
        own = {"X-Request-Id": name}
        if self._session_header:
            own[self._session_header] = request.session
        return bodies.finish(self._starts[endpoint], own, body)

    @staticmethod
    def reply(endpoint: Endpoint, request: Request) -> Reply:
        """A reader for a request's reply."""
        keep_text = request.turn.messages is not None
        return AnthropicReply(keep_text=keep_text) if endpoint == "messages" else OpenAIReply(keep_text=keep_text)
