"""Prompts of unknown clients as contexts of a prefix tree: equal tokens share a prefix, whoever sent them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from replay.load.content import Content
from replay.trace import ROOT, PrefixTree, Tip

Ids = npt.NDArray[np.int32]

# A word with the space before it, or one character of space; longer words are several tokens, as in real
# vocabularies. Prompts made of single-token words are counted exactly.
_WORDS = re.compile(r" ?\S{1,8}|\s")


class Prompts:
    """Finds the longest known prefix of a prompt and adds the rest to the tree.

    A run of the tree holds the tokens that one prompt or output added; runs that follow the same
    position are found by their first token, and compared as arrays. So a prompt of 100,000 tokens costs
    one comparison of what is known and one copy of what is new.
    """

    def __init__(self) -> None:
        self.tree = PrefixTree()
        self._ids: list[Ids] = []
        self._next: dict[Hashable, int] = {}
        self._words: dict[str, int] = {}
        self._made = Content(0)

    def context(self, ids: Ids, salt: str = "") -> Tip:
        """The context of a prompt.

        Args:
            ids: its tokens.
            salt: prompts with different salts share nothing (vLLM's ``cache_salt``).
        """
        return self._extend(ROOT, ids, salt)

    def answer(self, prompt: Tip, tokens: int) -> tuple[Tip, Ids]:
        """What the model "generates" after a prompt, and the context after it: new ids, the same ones on each run."""
        ids = self._made.tokens(("generated", len(self.tree), prompt), 0, tokens)
        return self._extend(prompt, ids, ""), ids

    def _extend(self, tip: Tip, ids: Ids, salt: str) -> Tip:
        position = 0
        while position < len(ids):
            place = (*tip, int(ids[position]), salt if tip == ROOT else "")
            run = self._next.get(place)
            rest = ids[position:]
            if run is None:
                tip = self.tree.extend(tip, len(self._ids), len(rest))
                self._next[place] = tip.run
                self._ids.append(rest.copy())
                return tip
            known = self._ids[run]
            length = min(len(known), len(rest))
            differs = known[:length] != rest[:length]
            same = int(differs.argmax()) if differs.any() else length
            tip = Tip(run, self.tree.start[run] + same)
            position += same
        return tip

    def words(self, text: str) -> list[int]:
        """A text as tokens: a number a word, the same for the same word."""
        words = self._words
        return [words.setdefault(word, len(words)) for word in _WORDS.findall(text)]

    def read(self, prompt: Any) -> Ids:
        """A ``prompt`` of the completions interface: ids or text, alone or as a list of one.

        Raises:
            ValueError: anything else.
        """
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return np.array(self.words(prompt), np.int32)
        if not isinstance(prompt, list):
            raise ValueError("prompt must be a text, a list of token ids, or a list of one of these")
        try:
            ids = np.fromiter(prompt, np.int64, len(prompt))
        except (TypeError, ValueError):
            raise ValueError("prompt must hold one text or one list of token ids") from None
        if len(ids) and not 0 <= ids.min() <= ids.max() < 2**31:
            raise ValueError("token ids must be from 0 to 2147483647")
        return ids.astype(np.int32)

    def render(self, messages: Any, tools: Any) -> Ids:
        """Chat messages as the tokens of a template: tools, then a line of role and text for each message.

        Raises:
            ValueError: not a list of messages.
        """
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        ids = self.words(str(tools)) if tools else []
        for message in messages:
            if not isinstance(message, dict):
                raise ValueError("a message must be an object")
            ids += self.words(f"<{message.get('role')}>")
            ids += self.words("".join(_texts(message)))
            ids += self.words("\n")
        ids += self.words("<assistant>")
        return np.array(ids, np.int32)


def _texts(message: dict[str, Any]) -> Iterable[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else None
        yield text if isinstance(text, str) else str(part)
    if message.get("tool_calls"):
        yield str(message["tool_calls"])
