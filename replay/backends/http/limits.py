"""What the HTTP client allows itself: every limit is here, and is stored with the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the HTTP client. The defaults suit 200k-token prompts, minutes of queueing and long tool pauses."""

    connections: int | None = None
    """Most connections at once; null: as many as there are requests in flight."""
    connect_s: float = 30.0
    """Longest time to open a connection."""
    idle_s: float = 900.0
    """Longest silence of the server while it owes bytes, queueing and prefill included."""
    total_s: float = 3600.0
    """Longest time of one request."""
    keep_alive_s: float = 4.0
    """Age at which an unused connection is not used again. Uvicorn, which serves vLLM and SGLang, closes
    after 5 s; to be the one who closes avoids sending into a connection that is going away."""
    retries: int = 2
    """Further attempts of a request of which nothing was answered: refused, or reset before the first byte."""
    retry_wait_s: float = 0.2
    """Wait before the first further attempt; doubles each time."""
    parse_bytes: int = 1 << 18
    """Received bytes that wait unparsed at most: parsing waits for the end of the reply, so that it does not
    delay the time stamps of other replies, unless this much has come."""
