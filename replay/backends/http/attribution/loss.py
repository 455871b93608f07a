"""Why ideal tokens were not served, as far as a client can tell from outside the engine."""

from __future__ import annotations

from collections.abc import Callable

from replay.backends.http.attribution.served import Served
from replay.backends.preset import Preset
from replay.trace import PrefixTree, Tip


class Prefilled:
    """Which prefixes were part of an earlier prompt, and not only of a recorded output."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}

    def add(self, tree: PrefixTree, tip: Tip) -> None:
        """Notes a prompt that is sent now; costs what it appends to those before."""
        run, end = tip
        while run >= 0 and self._used.get(run, 0) < end - tree.start[run]:
            self._used[run] = end - tree.start[run]
            run, end = tree.parent[run], tree.start[run]

    def longest(self, tree: PrefixTree, tip: Tip) -> int:
        """Tokens of the longest prefix of `tip` that was in an earlier prompt."""
        run, end = tip
        while run >= 0:
            used = self._used.get(run, 0)
            if used:
                return tree.start[run] + min(used, end - tree.start[run])
            run, end = tree.parent[run], tree.start[run]
        return 0


class Known:
    """What earlier prompts of a run held; the clients of all its instances share one."""

    def __init__(self) -> None:
        self._prefilled = Prefilled()
        self._warm: Prefilled | None = None

    def note(self, tree: PrefixTree, tip: Tip, end: Tip) -> tuple[int, int | None]:
        """Tokens of a prompt that were in earlier prompts, and of these since the engine's last restart.

        Args:
            tree: prefix tree of the run.
            tip: end of the prompt, which is sent now.
            end: end of what the engine will have computed once it has answered.
        """
        known = self._prefilled.longest(tree, tip)
        self._prefilled.add(tree, end)
        if self._warm is None:
            return known, None
        warm = self._warm.longest(tree, tip)
        self._warm.add(tree, end)
        return known, warm

    def restarted(self) -> None:
        """Notes that the engine was restarted: what is lost from now on may be `cold`."""
        self._warm = Prefilled()


def split(
    preset: Preset,
    served: Served,
    *,
    prompt: int,
    ideal: int,
    prefilled: int,
    warm: int | None = None,
    evicted: Callable[[], int | None] = lambda: None,
) -> dict[str, int] | None:
    """Ideal tokens that no tier served, by cause; null if it is unknown how many there are.

    Args:
        preset: the backend, for its granularity.
        served: tokens by tier.
        prompt: tokens of the prompt, as the server counted them.
        ideal: longest prefix shared with any earlier request, outputs included.
        prefilled: longest prefix that an earlier prompt held; beyond it the ideal counts on the recorded
            output being what the server generated, and where it was not, those tokens `diverged`.
        warm: longest prefix that a prompt held since the engine was last restarted; null: it never was.
        evicted: tokens that the engine's events say were evicted, null if it publishes none; asked only
            where tokens are left to explain.
    """
    if served.computed is None:
        return None
    cached = prompt - served.computed
    left = max(0, ideal - cached)
    lost = dict.fromkeys(("granularity", "diverged", "cold", "never_stored", "unknown"), 0)
    if not left:
        return lost

    def give(cause: str, tokens: int) -> None:
        nonlocal left
        lost[cause] += min(left, max(0, tokens))
        left -= min(left, max(0, tokens))

    if not preset.prefix_caching:
        give("never_stored", left)
    give("diverged", ideal - prefilled)
    # The last prompt token always runs, and only whole blocks are kept.
    reachable = max(0, min(ideal, prefilled, prompt - 1))
    give("granularity", min(ideal, prefilled) - reachable // preset.block_tokens * preset.block_tokens)
    if warm is not None and warm < min(ideal, prefilled):
        # Of the last block since the restart the rest is cold, and so all of it.
        give("cold", min(ideal, prefilled) - max(warm // preset.block_tokens * preset.block_tokens, cached))
    if left:
        gone = evicted()
        if gone is not None:
            lost["evicted"] = 0
            give("evicted", gone)
    give("unknown", left)
    return lost
