"""The engine model behind an OpenAI-compatible server, in real time: for testing clients without a GPU."""

from replay.serve.app import Server, serve
from replay.serve.faults import Fault, parse_fault

__all__ = ["Fault", "Server", "parse_fault", "serve"]
