"""Replay LLM agent traces against serving caches.

The command line is a thin layer over this library; see ``replay.trace``, ``replay.load``,
``replay.backends``, ``replay.engine``, ``replay.results`` and ``replay.plan``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay.results import open_results

__version__ = "0.1.0"
__all__ = ["__version__", "open_results"]


def __getattr__(name: str) -> Any:
    """``replay.open_results``, imported when it is first asked for: DuckDB is not light."""
    if name == "open_results":
        from replay.results import open_results

        return open_results
    raise AttributeError(f"module 'replay' has no attribute {name!r}")
