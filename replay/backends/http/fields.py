"""The fields of a request beside its prompt, by engine: lengths, isolation, and what to report back.

vLLM: ``entrypoints/openai/completion/protocol.py`` (0.30 to 0.33). SGLang: ``entrypoints/openai/protocol.py``
(0.5.23). Hosted services refuse fields that they do not know, so they get only the standard ones.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from replay.backends.http.bodies import Endpoint
from replay.backends.preset import Preset

_OWN_ENGINES = ("vllm", "sglang")


def default_endpoint(preset: Preset) -> Endpoint:
    """Token ids where the engine takes them, since blocks then align exactly; else chat."""
    if preset.engine in _OWN_ENGINES:
        return "completions"
    return "messages" if preset.engine == "anthropic" else "chat"


def can_salt(preset: Preset) -> bool:
    """The engine and what stands behind it keep prompts with different ``cache_salt`` apart.

    LMCache in vLLM's process does not: its keys hold tokens alone (0.5.3 to 0.5.6, ``v1/token_database.py``).
    """
    return preset.engine in _OWN_ENGINES and preset.connector != "lmcache"


def common(
    preset: Preset, endpoint: Endpoint, *, url: str, model: str, stream: bool, live: bool, salt: str | None
) -> dict[str, Any]:
    """Fields that are the same in all requests of a run.

    Args:
        preset: names engine and connector.
        endpoint: the interface.
        url: address of the server.
        model: name that the server knows.
        stream: ask for a stream of events.
        live: ask for the generated token ids.
        salt: isolates the run, where the engine can.
    """
    fields: dict[str, Any] = {"model": model, "stream": stream}
    if stream and endpoint != "messages":
        fields["stream_options"] = {"include_usage": True}
    if preset.engine not in _OWN_ENGINES:
        return fields
    if salt is not None:
        fields["cache_salt"] = salt
    if preset.engine == "sglang":
        fields["return_cached_tokens_details"] = True
    elif preset.connector == "lmcache-mp":
        fields["kv_transfer_params"] = {"cached_token_stats": True}
    if endpoint != "messages":
        fields |= {"ignore_eos": True, "temperature": 0}
        # A token may be no text yet (half a character), or never be any (no tokenizer): ids tell when the first came.
        if live or endpoint == "completions":
            fields["return_token_ids"] = True
    elif preset.engine == "vllm":
        fields["temperature"] = 0
    return fields


def per_request(preset: Preset, endpoint: Endpoint, *, url: str, output: int, request_id: str) -> dict[str, Any]:
    """Fields of one request: its length, and its id where the engine takes one."""
    tokens = max(1, output)
    if preset.engine in _OWN_ENGINES and endpoint != "messages":
        name = "request_id" if preset.engine == "vllm" else "rid"
        return {"max_tokens": tokens, "min_tokens": tokens, name: request_id}
    # OpenAI's own service refuses max_tokens for its newer models; other servers know no other name.
    host = urlsplit(url).hostname or ""
    own_service = endpoint == "chat" and (host == "openai.com" or host.endswith(".openai.com"))
    return {"max_completion_tokens" if own_service else "max_tokens": tokens}
