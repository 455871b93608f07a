"""Synthetic traces: sessions drawn from published distributions, and small fixed workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replay.errors import unknown_name
from replay.trace.model import Header, Turn
from replay.trace.synth.agents import claude_code
from replay.trace.synth.documents import doc_qa, evict_and_return

Profile = Callable[..., tuple[Header, list[Turn]]]

PROFILES: dict[str, Profile] = {
    "claude-code": claude_code,
    "doc-qa": doc_qa,
    "evict-and-return": evict_and_return,
}
"""What `generate` knows, by name. Each takes `sessions` and `seed` and its own keywords."""


def generate(profile: str, sessions: int, seed: int, **options: Any) -> tuple[Header, list[Turn]]:
    """Draws a trace; the same arguments give the same trace, byte for byte.

    Args:
        profile: a name in `PROFILES`.
        sessions: root sessions (``claude-code``), documents of each length (``doc-qa``) or other
            documents between the visits (``evict-and-return``).
        seed: of the draws, and of the token content.
        options: keywords of the profile's function.

    Raises:
        ReplayError: no such profile, or fewer than one session.
    """
    if profile not in PROFILES:
        raise unknown_name("profile", profile, PROFILES)
    return PROFILES[profile](sessions, seed, **options)
