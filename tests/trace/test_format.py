"""Reading and writing trace files, whole, compressed, cut and wrong."""

from __future__ import annotations

import gzip
import lzma
import os
import threading
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.trace import Header, Turn, read, write
from replay.trace.model import FORMAT, VERSION

HEADER = Header(format=FORMAT, version=VERSION, name="t", notes=["n"], seed=3)
TURNS = [
    Turn(session="s", turn=0, at=0.25, append=[("tools", 100), ("s0", 7)], output=4, cause="start"),
    Turn(session="s", turn=1, pause=1.5, keep=60, append=[("s1", 3)], cached=64),
]
LINE = b'{"format":"replay-trace","version":1,"name":"t"}\n'
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}

turns = st.builds(
    Turn,
    session=st.just("s"),
    turn=st.just(0),
    at=st.floats(0, 1e9),
    pause=st.floats(0, 1e9),
    append=st.lists(st.tuples(st.text(min_size=1), st.integers(1, 10**6)), min_size=1, max_size=4),
    output=st.integers(0, 10**6),
    cause=st.text(),
    cached=st.none() | st.integers(0, 10**6),
    messages=st.none() | st.lists(st.dictionaries(st.text(), st.text(), max_size=2), max_size=2),
)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_trace_reads_back_as_written(tmp_path, suffix):
    path = tmp_path / f"t.jsonl{suffix}"
    assert write(path, HEADER, TURNS) == 2
    trace = read(path)
    assert trace.header == HEADER
    assert trace.turns == TURNS
    assert trace.source == str(path)


@settings(deadline=None)
@given(turn=turns)
def test_any_turn_reads_back_as_written(tmp_path_factory, turn):
    path = tmp_path_factory.mktemp("any") / "t.jsonl"
    write(path, HEADER, [turn])
    assert read(path).turns == [turn]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_equal_traces_are_equal_files(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", HEADER, TURNS)
    write(tmp_path / f"b{suffix}", HEADER, TURNS)
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compression_is_told_by_content_not_by_name(tmp_path, suffix):
    plain = tmp_path / "plain"
    write(plain, HEADER, TURNS)
    path = tmp_path / "misnamed.jsonl"
    path.write_bytes(COMPRESS[suffix](plain.read_bytes()))
    assert read(path).turns == TURNS


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_compressed_parts_that_were_joined_are_all_read(tmp_path, suffix):
    plain = tmp_path / "plain"
    write(plain, HEADER, TURNS)
    header, first, second = plain.read_bytes().splitlines(keepends=True)
    path = tmp_path / f"joined{suffix}"
    path.write_bytes(COMPRESS[suffix](header + first) + COMPRESS[suffix](second))
    assert read(path).turns == TURNS


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_compressed_file_that_is_cut_is_refused(tmp_path, suffix, share):
    path = tmp_path / f"t{suffix}"
    write(
        path, HEADER, (Turn(session=f"s{os.urandom(8).hex()}", turn=0, at=0, append=[("a", 1)]) for _ in range(5_000))
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ReplayError, match="cannot be decompressed further"):
        read(path)


def test_a_pipe_can_be_read(tmp_path):
    plain, pipe = tmp_path / "plain", tmp_path / "pipe"
    write(plain, HEADER, TURNS)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(plain.read_bytes())))
    writer.start()
    assert read(pipe).turns == TURNS
    writer.join()


def test_blank_lines_are_skipped_and_line_numbers_stay_right(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        LINE + b'\n{"session":"s","turn":0,"at":0,"append":[["a",1]]}\n\n{"session":"s","turn":1,"keep":9}\n'
    )
    with pytest.raises(ReplayError, match=r"t.jsonl:5: turn s/1: keep is 9"):
        read(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\n", ":1: not a trace header"),
        (b'{"type":"user"}\n', "run 'replay import' first"),
        (b'{"format":"other","version":1,"name":"t"}\n', "format is 'other', expected 'replay-trace'"),
        (b'{"format":"replay-trace","version":2,"name":"t"}\n', "format version 2, this replay reads 1"),
        (b"\xff\xfe\n", ":1: not a trace header"),
        (LINE, "the trace has no turns"),
        (LINE + b'{"session":"s","tu', ":2: not a valid turn"),
        (LINE + b"[]\n", ":2: not a valid turn"),
        (LINE + LINE, ":2: not a valid turn"),
        (LINE + b'{"session":"s\xff","turn":0}\n', ":2: not a valid turn"),
        (LINE + b'{"session":"s","turn":0,"at":NaN}\n', ":2: not a valid turn"),
        (LINE + b'{"session":"s","turn":0,"at":-1}\n', ":2: not a valid turn: Expected `float` >= 0"),
        (LINE + b'{"session":"s","turn":0,"at":1e999}\n', ":2: not a valid turn"),
        (LINE + b'{"session":"s","turn":0,"at":0,"append":[["a",0]]}\n', ":2: not a valid turn: Expected `int` >= 1"),
        (LINE + b'{"session":"s","turn":0,"at":0,"append":[["a",1]],"kept":4}\n', "unknown field `kept`"),
        (LINE + b'{"session":"s","turn":0,"append":[["a",99999999999999999999]]}\n', ":2: not a valid turn"),
        (LINE + b'{"session":"s","turn":0,"tools":[{"a":' + b"[" * 50_000, ":2: not a valid turn"),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_line(tmp_path, content, problem):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(ReplayError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert problem in message
    assert "\n" not in message


def test_what_cannot_be_opened_is_told_with_the_path(tmp_path):
    with pytest.raises(ReplayError, match="no such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(ReplayError, match="is a directory"):
        read(tmp_path)
    with pytest.raises(ReplayError, match="cannot write: no such file"):
        write(tmp_path / "absent" / "t.jsonl", HEADER, TURNS)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_path():
    with pytest.raises(ReplayError, match="/dev/full: cannot write: no space left"):
        write("/dev/full", HEADER, TURNS)
