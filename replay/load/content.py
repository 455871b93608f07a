"""What prompts are made of: the tokens of each segment, spelt once and joined into request bodies.

A token's value is a pure function of (seed, segment, position), so any process can make any part of
any prompt, and a segment that grows keeps its start. Every token of an `Alphabet` is spelt with the
same number of bytes, so the first n tokens of a prompt are the first ``n * width`` bytes of its
spelling: cutting and continuing contexts of 200,000 tokens is slicing and joining of bytes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from replay.errors import ReplayError
from replay.trace import PrefixTree, Tip

Buffer = bytes | memoryview

# Ids below 1,000 hold the special and single-byte tokens of common vocabularies (Llama, Qwen, Mistral),
# and every model served today has more than 30,000 tokens.
DEFAULT_VOCABULARY = range(1_000, 30_000)
# What an engine generates stands beside what is drawn, and vocabularies go beyond 100,000 (Qwen3: 151,936 entries).
_DIGITS = 6

_CACHE_BYTES = 64 << 20
_SEGMENT_SHARE = 4

# Splitmix64 (Steele, Lea, Flood 2014).
_GOLDEN, _MIX1, _MIX2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFT1, _SHIFT2, _SHIFT3, _HALF = map(np.uint64, (30, 27, 31, 32))


@dataclass(frozen=True, eq=False)
class Alphabet:
    """Tokens that prompts are drawn from, each spelt with `width` bytes."""

    ids: npt.NDArray[np.int32]
    """Token id of each entry."""
    spelling: npt.NDArray[Any]
    """Spelling of each entry, an array of `width`-byte items."""
    text: bool
    """True: words of a chat message; false: numbers and commas of a JSON list."""
    name: str
    """Stored with the run."""

    @property
    def width(self) -> int:
        """Bytes of one token."""
        return int(self.spelling.dtype.itemsize)


def token_ids(vocabulary: range = DEFAULT_VOCABULARY) -> Alphabet:
    """Token ids as the items of a JSON list: ``"  123,"``, padded with spaces (JSON ignores them).

    Raises:
        ReplayError: an empty range, or ids below 0.
    """
    if not vocabulary or min(vocabulary) < 0:
        raise ReplayError(f"vocabulary {vocabulary}: give a range of token ids such as 1000:30000")
    ids = np.arange(vocabulary.start, vocabulary.stop, vocabulary.step, dtype=np.int32)
    digits = max(_DIGITS, len(str(max(vocabulary))))
    spelling = np.frombuffer(_spell(ids.tolist(), digits), np.dtype((np.void, digits + 1)))
    return Alphabet(ids, spelling, text=False, name=f"ids {vocabulary.start}:{vocabulary.stop}")


def _spell(ids: Iterable[int], digits: int) -> bytes:
    return b"".join([b"%*d," % (digits, value) for value in ids])


class Message(NamedTuple):
    """A chat message made of parts of segments."""

    role: str
    parts: list[Buffer]


class Content:
    """Tokens and bytes of the prompts of one run."""

    def __init__(self, seed: int, alphabet: Alphabet | None = None, *, cache_bytes: int = _CACHE_BYTES):
        """Args:
        seed: of the trace; equal seeds give equal tokens.
        alphabet: tokens to draw from; by default ids that every common vocabulary has.
        cache_bytes: most memory for joined prompts, of which sessions continue theirs; and a quarter as much
            for spelt segments, which sessions share.
        """
        self.seed = seed
        self.salt = ""
        """Set before the first prompt: other tokens for the same seed, where a server cannot salt its cache."""
        self.alphabet = alphabet or token_ids()
        self.live_outputs = 0
        """Outputs that stand in later prompts as the engine generated them."""
        self._live: dict[Hashable, npt.NDArray[np.int32]] = {}
        self._segments = _ByteLru(cache_bytes // _SEGMENT_SHARE)
        self._prefixes = _ByteLru(cache_bytes)

    def tokens(self, segment: Hashable, offset: int, count: int) -> npt.NDArray[np.int32]:
        """Token ids ``[offset, offset + count)`` of a segment."""
        picks = self._picks(segment, offset, count)
        ids = self.alphabet.ids[picks]
        live = self._live.get(segment)
        if live is not None:
            part = live[offset : offset + count]
            ids[: len(part)] = part
        return ids

    def piece(self, segment: Hashable, offset: int, count: int) -> Buffer:
        """The same tokens as they are spelt in a request."""
        width = self.alphabet.width
        spelt = self._segments.get(segment)
        have = 0 if spelt is None else len(spelt) // width
        if have < offset + count:
            spelt = (spelt or b"") + self._spelling(segment, have, offset + count - have)
            self._segments.put(segment, spelt)
        assert spelt is not None
        if offset == 0 and len(spelt) == count * width:
            return spelt
        return memoryview(spelt)[offset * width : (offset + count) * width]

    def prompt(self, tree: PrefixTree, tip: Tip) -> bytes:
        """All tokens of a context as they are spelt, for ids with a comma after the last.

        The bytes of the context that this one continues are reused: the work is one copy of the
        prompt's bytes and what is appended.
        """
        parts: list[Buffer] = []
        run, end = tip
        while run >= 0:
            known = self._prefixes.take(run)
            if known is not None:
                reach = min(end, len(known) // self.alphabet.width)
                if reach < end:
                    offset = tree.offset[run] + reach - tree.start[run]
                    parts.append(self.piece(tree.segments[run], offset, end - reach))
                parts.append(memoryview(known)[: reach * self.alphabet.width])
                break
            start = tree.start[run]
            parts.append(self.piece(tree.segments[run], tree.offset[run], end - start))
            run, end = tree.parent[run], start
        parts.reverse()
        joined = b"".join(parts)
        self._prefixes.put(tip.run, joined)
        return joined

    def messages(self, tree: PrefixTree, tip: Tip) -> list[Message]:
        """A context as chat messages: outputs are the assistant's, all between them the user's."""
        messages: list[Message] = []
        for segment, offset, count in tree.pieces(tip):
            role = "assistant" if is_output(segment) and messages else "user"
            if not messages or messages[-1].role != role:
                messages.append(Message(role, []))
            messages[-1].parts.append(self.piece(segment, offset, count))
        return messages

    def set_output(self, segment: Hashable, ids: Iterable[int]) -> bool:
        """Puts what the engine generated in the place of a recorded output, in prompts made from now on.

        Returns:
            False if it cannot: prompts are text, or the ids are not ids, or longer than this alphabet's.
        """
        try:
            values = np.fromiter(ids, np.int64)
        except (TypeError, ValueError, OverflowError):
            return False
        limit = 10 ** (self.alphabet.width - 1)
        if self.alphabet.text or not len(values) or values.min() < 0 or values.max() >= limit:
            return False
        self._live[segment] = values.astype(np.int32)
        self._segments.drop(segment)
        self.live_outputs += 1
        return True

    def _spelling(self, segment: Hashable, offset: int, count: int) -> bytes:
        live = self._live.get(segment)
        part = b"" if live is None else _spell(live[offset : offset + count].tolist(), self.alphabet.width - 1)
        done = len(part) // self.alphabet.width
        picks = self._picks(segment, offset + done, count - done)
        return part + self.alphabet.spelling[picks].tobytes()

    def _picks(self, segment: Hashable, offset: int, count: int) -> npt.NDArray[np.int64]:
        """Indices into the alphabet: splitmix64 of the position, scaled by multiplication."""
        name = hashlib.blake2b(f"{self.salt}{self.seed}:{segment!r}".encode(), digest_size=8).digest()
        x = np.arange(offset + 1, offset + count + 1, dtype=np.uint64)
        x *= _GOLDEN
        x += np.frombuffer(name, "<u8")
        x ^= x >> _SHIFT1
        x *= _MIX1
        x ^= x >> _SHIFT2
        x *= _MIX2
        x ^= x >> _SHIFT3
        x >>= _HALF
        x *= np.uint64(len(self.alphabet.ids))
        x >>= _HALF
        picks: npt.NDArray[np.int64] = x.view(np.int64)
        return picks


def is_output(segment: Hashable) -> bool:
    """Whether a segment is the output of a turn: ``("output", "session/turn")``."""
    return isinstance(segment, tuple) and len(segment) == 2 and segment[0] == "output"


@dataclass
class _ByteLru:
    """Bytes by key; the least recently used go when they are more than `limit` bytes together."""

    limit: int
    size: int = 0
    items: OrderedDict[Hashable, bytes] = field(default_factory=OrderedDict)

    def get(self, key: Hashable) -> bytes | None:
        value = self.items.get(key)
        if value is not None:
            self.items.move_to_end(key)
        return value

    def take(self, key: Hashable) -> bytes | None:
        value = self.items.pop(key, None)
        if value is not None:
            self.size -= len(value)
        return value

    def put(self, key: Hashable, value: bytes) -> None:
        self.take(key)
        self.items[key] = value
        self.size += len(value)
        while self.size > self.limit and len(self.items) > 1:
            self.size -= len(self.items.popitem(last=False)[1])

    drop = take

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.items)
