"""Which tier served a prompt's tokens, from what the engine says about a request: a module an engine.

Each module has ``tiers(preset, counts, extra) -> Served``, a pure function of the last usage of the
reply and of the fields beside it (see `replies.Reply`).
"""

from replay.backends.http.attribution.choose import tiers
from replay.backends.http.attribution.served import Served, Usage, read_usage
from replay.backends.http.attribution.simulated import take_model

__all__ = ["Served", "Usage", "read_usage", "take_model", "tiers"]
