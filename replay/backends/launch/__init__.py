"""Starts real engines on this machine with a preset's settings, and leaves nothing behind."""

from replay.backends.launch.launcher import Launched

__all__ = ["Launched"]
