"""HTTP/1.1 responses, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.backends.http.http1 import BadResponse, Response

BODY = bytes(range(256)) * 3


def chunked(*, extension: bytes = b"", trailer: bytes = b"") -> bytes:
    out = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for start in range(0, len(BODY), 100):
        part = BODY[start : start + 100]
        out += b"%X%s\r\n%s\r\n" % (len(part), extension, part)
    return out + b"0\r\n" + trailer + b"\r\n"


RESPONSES = [
    chunked(),
    chunked(extension=b";name=value"),
    chunked(trailer=b"X-Sum: 1\r\n"),
    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY),
    b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(),
]
SPLIT = b"a\r\n1\r\nb\r\n"
"""Chunk data that looks like chunks."""


@given(response=st.sampled_from(RESPONSES), cuts=st.lists(st.integers(0, 1200), max_size=15))
def test_the_body_does_not_depend_on_cuts(response: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(response), *(cut for cut in cuts if cut < len(response))})
    reader = Response()
    body = b"".join(reader.feed(response[a:b]) for a, b in itertools.pairwise(places))
    assert (body, reader.status, reader.complete, reader.keep_alive) == (BODY, 200, True, True)


@pytest.mark.parametrize("part", [SPLIT, b"\r\n", b"0", b"\r\n0\r\n\r\n"])
def test_line_endings_within_a_chunk_are_data(part: bytes) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"3\r\nabc\r\n%x\r\n%s\r\n" % (len(part), part) + b"0\r\n\r\n"
    reader = Response()
    assert reader.feed(data) == b"abc" + part
    assert reader.complete


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader = Response()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"
    assert not reader.complete
    reader.end_of_stream()
    assert reader.complete
    assert not reader.keep_alive


@pytest.mark.parametrize("response", [RESPONSES[0][:-5], RESPONSES[3][:-1], b"HTTP/1.1 200 OK\r\n"])
def test_a_cut_response_is_never_complete(response: bytes) -> None:
    reader = Response()
    reader.feed(response)
    reader.end_of_stream()
    assert not reader.complete


@pytest.mark.parametrize(
    "response",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
    ],
)
def test_what_is_not_http_is_refused(response: bytes) -> None:
    with pytest.raises(BadResponse):
        Response().feed(response)


@pytest.mark.parametrize(
    ("headers", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nextra", False),
    ],
)
def test_a_connection_is_used_again_only_when_http_allows_it(headers: bytes, again: bool) -> None:
    reader = Response()
    reader.feed(headers)
    assert (reader.complete, reader.keep_alive) == (True, again)
