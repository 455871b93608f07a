"""When a streamed output's tokens are sent: as the engine model decodes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from replay.backends.sim import Ahead

# A look or a write at most so often; tokens that come faster are sent together.
_TICK_S = 0.002
_LOOK_S = 0.02


async def decoded(first: float, ahead: Ahead, end: asyncio.Future[Any], most: int) -> AsyncIterator[int]:
    """Yields how many tokens there are, each time that there are more, until `most` or the request's end.

    The model takes many decode steps at once, and knows only of all of them when they begin and end: their tokens are
    spread evenly in between. What arrives meanwhile may end the steps sooner, so it is asked again for each token.

    Args:
        first: time on the event loop at which the first token came.
        ahead: the steps under way.
        end: done when the request has ended.
        most: tokens to wait for.
    """
    loop = asyncio.get_running_loop()
    sent, at = 1, first
    while sent < most and not end.done():
        steps = ahead()
        if steps is None or steps.after <= sent:
            await asyncio.sleep(min(_LOOK_S, max(_TICK_S, steps.end - loop.time() if steps else _LOOK_S)))
            continue
        if steps.before <= sent:
            at = max(at, steps.start)
        gap = (steps.end - at) / (steps.after - sent)
        await asyncio.sleep(max(_TICK_S, at + gap - loop.time()))
        due = int((loop.time() - at) / gap) if gap > 0 else most
        due = min(max(1, due), steps.after - sent, most - sent)
        sent, at = sent + due, at + due * gap
        yield sent
