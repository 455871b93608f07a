"""What a launch is made of: the user's choices, the services beside the engine, and one process's command."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import random
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from replay.errors import ReplayError

LOOPBACK = "127.0.0.1"
_SECRET = re.compile(r"key|token$|secret|password", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """How an engine is started, beyond the preset."""

    model: str
    """A Hugging Face folder (with `dummy_weights`, ``config.json`` is enough) or a name the engine knows."""
    served_name: str = "model"
    """Name that requests give."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; null: the model's own."""
    dummy_weights: bool = False
    """Random weights: timing and caching are the real thing's, the text is noise."""


@dataclass(frozen=True)
class Command:
    """One process to start."""

    name: str
    """Unique within a launch; names its log file."""
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables beyond the ones that replay itself has."""
    ready: str = ""
    """URL that answers 200, or ``tcp://host:port`` that accepts, once the process can serve."""

    def shown(self) -> str:
        """The command line without secrets, as stored with a run."""
        words, hide = [], False
        for word in self.argv:
            flag, equals, _ = word.partition("=")
            secret = word.startswith("-") and _SECRET.search(flag)
            words.append("***" if hide else f"{flag}=***" if secret and equals else word)
            hide = bool(secret) and not equals
        return " ".join(words)


@dataclass(frozen=True)
class Services:
    """Where the services beside the engine listen; null: not part of this launch."""

    scratch: Path
    """Temporary folder of the launch, removed at its end."""
    lmcache_port: int | None = None
    """LMCache's server: request port (ZeroMQ)."""
    lmcache_http: int | None = None
    """LMCache's server: HTTP port (health, metrics, clear)."""
    remote: str | None = None
    """Remote tier, ``redis://host:port`` or ``mooncakestore://host:port``."""

    @property
    def events(self) -> Path:
        """File for the events of LMCache's server."""
        return self.scratch / "lmcache-events.jsonl"


# Below those that systems hand out for outgoing connections, of which one could take the port of a server while that
# starts or restarts.
_PORTS = range(15_000, 32_000)
_given: set[int] = set()


def free_port() -> int:
    """A TCP port that nothing listens on now; another one each time.

    Raises:
        ReplayError: there is none.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        if port in _given:
            continue
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((LOOPBACK, port))
            _given.add(port)
            return port
    raise ReplayError(f"--target launch: no free port from {_PORTS[0]} to {_PORTS[-1]}; stop what listens there")


def environment(extra: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The environment of a child process: replay's own, without API keys, with `extra`."""
    inherited = {key: value for key, value in os.environ.items() if "API_KEY" not in key}
    ours = {
        # Compiled kernels outlast the run; everything else that a server puts into /tmp goes with it.
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}",
        **inherited,
        "TMPDIR": str(scratch),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        # LMCache's chunk keys come from Python's hash unless told otherwise: equal in every process only so.
        "PYTHONHASHSEED": "0",
    }
    return {**ours, **extra}


def compact(value: object) -> str:
    """JSON for a command line."""
    return json.dumps(value, separators=(",", ":"))
