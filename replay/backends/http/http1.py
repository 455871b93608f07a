"""An HTTP/1.1 response from bytes, as they come (RFC 9112)."""

from __future__ import annotations

_HEAD_LIMIT = 1 << 20


class BadResponse(Exception):
    """The bytes are not an HTTP/1.1 response."""


class Response:
    """Reads one response: `feed` takes bytes and returns the part of the body that they hold."""

    def __init__(self) -> None:
        self.status = 0
        """Status code; 0 until the head is complete."""
        self.headers: dict[str, str] = {}
        """By lower-case name; of a repeated header the last value."""
        self.complete = False
        """The whole body has come."""
        self.keep_alive = True
        """The connection may be used again."""
        self.eager = True
        """The end of the response cannot be seen from its last bytes: parse what comes at once."""
        self._rest = b""
        self._left: int | None = None
        self._chunked = False
        self._trailer = False

    def feed(self, data: bytes) -> bytes:
        """The body bytes in `data`, chunked coding removed.

        Raises:
            BadResponse: the bytes break HTTP's rules.
        """
        if self.complete:
            self.keep_alive = False
            return b""
        if self._rest:
            data, self._rest = self._rest + data, b""
        while not self.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _HEAD_LIMIT or not b"HTTP/1.".startswith(data[:7]):
                    raise BadResponse("the reply does not start with an HTTP/1.1 status line and headers")
                self._rest = data
                return b""
            self._head(data[:end])
            data = data[end + 4 :]
        if self._chunked:
            return self._dechunk(data)
        if self._left is None:
            return data
        body = data[: self._left]
        self._left -= len(body)
        if self._left == 0:
            self.complete = True
            if len(data) > len(body):
                self.keep_alive = False
        return body

    def end_of_stream(self) -> None:
        """The server closed the connection: the end of a body without a length."""
        self.keep_alive = False
        if self.status and not self._chunked and self._left is None:
            self.complete = True

    def _head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        code = rest[:3]
        if not version.startswith(b"HTTP/1.") or not code.isdigit() or len(code) != 3:
            raise BadResponse("the reply does not start with an HTTP/1.1 status line")
        if code.startswith(b"1"):
            return
        self.status = int(code)
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon:
                raise BadResponse("a header without a colon")
            self.headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = connection != "close" and (version != b"HTTP/1.0" or connection == "keep-alive")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._chunked = True
            self._left = 0
            self.eager = False
        elif self.status in (204, 304):
            self.complete = True
        elif "content-length" in self.headers:
            length = self.headers["content-length"]
            if not length.isdigit():
                raise BadResponse("a content-length that is no number")
            self._left = int(length)
            self.complete = self._left == 0
        else:
            self.keep_alive = False

    def _dechunk(self, data: bytes) -> bytes:
        body: list[bytes] = []
        position, size = 0, len(data)
        left = self._left or 0
        if left == 0 and not self._trailer:
            position = _whole_chunks(data, body)
        while position < size:
            if left > 0:
                part = data[position : position + left]
                body.append(part)
                position += len(part)
                left -= len(part)
                if left == 0:
                    left = -2
                continue
            end = data.find(b"\n", position)
            if end < 0:
                self._rest = data[position:]
                break
            line = data[position:end].rstrip(b"\r")
            position = end + 1
            if left == -2:
                if line:
                    raise BadResponse("a chunk is longer than it says")
                left = 0
            elif self._trailer:
                if not line:
                    self.complete = True
                    self.keep_alive = self.keep_alive and position == size
                    break
            else:
                left = _hex(line)
                self._trailer = left == 0
        self._left = left
        if len(self._rest) > _HEAD_LIMIT:
            raise BadResponse("a chunk without a size")
        return body[0] if len(body) == 1 else b"".join(body)


def _whole_chunks(data: bytes, body: list[bytes]) -> int:
    """Takes the chunks that start `data` if all are plain and whole; returns where it stopped, for the careful reader.

    Chunks whose data holds a line ending of HTTP's are not plain.
    """
    parts = data.split(b"\r\n")
    chunks = parts[1:-1:2]
    sizes = parts[: 2 * len(chunks) : 2]
    if sizes and sizes[-1] == b"0":
        sizes.pop()
        chunks.pop()
    digits = b"".join(sizes)
    try:
        if not digits.isalnum() or [int(size, 16) for size in sizes] != [*map(len, chunks)] or b"" in chunks:
            return 0
    except ValueError:
        return 0
    body += chunks
    return len(digits) + sum(map(len, chunks)) + 4 * len(chunks)


def _hex(line: bytes) -> int:
    digits = line.split(b";", 1)[0].strip()
    try:
        if not digits or digits[:1] in b"+-" or b"_" in digits:
            raise ValueError
        return int(digits, 16)
    except ValueError:
        raise BadResponse("a chunk size that is no hexadecimal number") from None
