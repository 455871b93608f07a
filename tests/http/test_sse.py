"""Server-sent events: every legal way to cut and write them gives the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.http.sse import Event, EventReader


def read(*pieces: bytes) -> list[Event]:
    reader = EventReader()
    events = [event for piece in pieces for event in reader.feed(piece)]
    last = reader.close()
    return [*events, last] if last else events


STREAM = (
    b": ping\n\n"
    b"data: one\n\n"
    b'event: error\ndata: {"a":\n'
    b"data: 1}\n\n"
    b"id: 7\nretry: 10\n\n"
    b"data:no space\n\n\n" + "data: ü€😀\n\n".encode()
)
EVENTS = [
    (b"", b"one"),
    (b"error", b'{"a":\n1}'),
    (b"", b"no space"),
    (b"", "ü€😀".encode()),
]


@given(
    ending=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 2 * len(STREAM)), max_size=12),
    mark=st.booleans(),
)
def test_events_do_not_depend_on_cuts_or_line_endings(ending: bytes, cuts: list[int], mark: bool) -> None:
    data = (b"\xef\xbb\xbf" if mark else b"") + STREAM.replace(b"\n", ending)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assert read(*(data[a:b] for a, b in itertools.pairwise(places))) == EVENTS


def test_one_byte_at_a_time_gives_each_event_as_soon_as_it_is_complete() -> None:
    reader = EventReader()
    seen = [len(reader.feed(bytes([byte]))) for byte in b"data: x\r\n\r\ndata: y\n\n"]
    assert [i for i, count in enumerate(seen) if count] == [9, 19]  # a CR ends the line before its LF comes


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\ndata: b\n\ndata: c\n\n", [b"a\nb", b"c"]),
        (b"data: a\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\n\n: ping\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\rdata: b\n\n", [b"a\nb"]),
        (b"data: a data: b\n\n", [b"a data: b"]),
        (b"data: \n\n", [b""]),
    ],
)
def test_whole_events_in_one_read_are_the_same_as_byte_by_byte(data: bytes, events: list[bytes]) -> None:
    assert read(data) == read(*(bytes([byte]) for byte in data)) == [(b"", event) for event in events]


def test_an_event_of_many_megabytes_is_one_event() -> None:
    big = b"x" * 20_000_000
    pieces = [b"data: ", *(big[i : i + 65_536] for i in range(0, len(big), 65_536)), b"\n\n"]
    assert read(*pieces) == [(b"", big)]


def test_a_last_event_without_its_empty_line_is_given_at_the_end() -> None:
    assert read(b"data: [DONE]\n") == [(b"", b"[DONE]")]
    assert read(b"data: cut sho") == [(b"", b"cut sho")]


@pytest.mark.parametrize("noise", [b"\n\n\n", b": only a comment\n\n", b"unknown: field\n\n", b""])
def test_what_is_no_event_gives_none(noise: bytes) -> None:
    assert read(noise) == []
