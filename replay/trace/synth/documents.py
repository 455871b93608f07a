"""Fixed workloads of documents and questions, asked strictly one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from replay.errors import ReplayError
from replay.trace.model import FORMAT, VERSION, Header, Turn


def doc_qa(
    sessions: int = 1, seed: int = 0, *, lengths: Sequence[int] = (1024, 4096, 16384), question: int = 32
) -> tuple[Header, list[Turn]]:
    """Each document is asked twice with different questions; one output token.

    Args:
        sessions: documents of each length.
        seed: of the token content.
        lengths: tokens of the documents.
        question: tokens of each question.

    Raises:
        ReplayError: fewer than one document.
    """
    _at_least_one(sessions)
    asked = _Sequence(question)
    for number in range(sessions):
        for length in lengths:
            name = f"doc-{length}-{number}"
            asked.ask(name, length)
            asked.ask(name, length)
    each = f"{sessions} document{'s' if sessions > 1 else ''} of each of {', '.join(map(str, lengths))}"
    origin = f"{each} tokens, asked twice with different {question}-token questions"
    return _header("doc-qa", seed, origin), asked.turns


def evict_and_return(
    sessions: int = 36, seed: int = 0, *, length: int = 16384, question: int = 32
) -> tuple[Header, list[Turn]]:
    """One document is asked twice, then `sessions` other documents once, then the first again.

    With a GPU tier that holds fewer than all of them, the last turn shows which lower tier kept the
    first document, or that none did.

    Args:
        sessions: other documents between the second and third visit.
        seed: of the token content.
        length: tokens of every document.
        question: tokens of each question.

    Raises:
        ReplayError: fewer than one other document.
    """
    _at_least_one(sessions)
    asked = _Sequence(question)
    asked.ask("first", length)
    asked.ask("first", length)
    for number in range(sessions):
        asked.ask(f"other-{number:02d}", length)
    asked.ask("first", length)
    others = f"{sessions} other{'s' if sessions > 1 else ''} of that length"
    visits = f"a {length}-token document twice, {others}, the first again"
    origin = f"{visits}; each visit asks another {question}-token question"
    return _header("evict-and-return", seed, origin), asked.turns


class _Sequence:
    """Turns of which each waits for the one before."""

    def __init__(self, question: int):
        self.question = question
        self.turns: list[Turn] = []
        self._visits: dict[str, int] = {}

    def ask(self, document: str, length: int) -> None:
        visit = self._visits.get(document, 0)
        self._visits[document] = visit + 1
        text = (f"{document}.text", length)
        question = (f"{document}.q{visit}", self.question)
        self.turns.append(
            Turn(
                session=document,
                turn=visit,
                at=None if self.turns else 0.0,
                after=[str(self.turns[-1].ref)] if self.turns else None,
                keep=length if visit else None,
                append=[question] if visit else [text, question],
                output=1,
                cause="human" if visit else "start",
            )
        )


def _at_least_one(sessions: int) -> None:
    if sessions < 1:
        raise ReplayError(f"--sessions must be at least 1, not {sessions}")


def _header(name: str, seed: int, origin: str) -> Header:
    return Header(
        format=FORMAT,
        version=VERSION,
        name=name,
        origin=f"Generated: {origin}, one output token, strictly one at a time.",
        licence="Apache-2.0",
        synthetic=True,
        seed=seed,
    )
