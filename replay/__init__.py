"""Replay LLM agent traces against serving caches.

The command line is a thin layer over this library; see ``replay.trace``, ``replay.load``,
``replay.backends``, ``replay.engine``, ``replay.results`` and ``replay.plan``.
"""

__version__ = "0.1.0"
