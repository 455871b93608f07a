"""Real servers over HTTP: `HttpBackend` sends requests and says which tier served them."""

from replay.backends.http.client import HttpBackend
from replay.backends.http.limits import Limits

__all__ = ["HttpBackend", "Limits"]
