# SPDX-License-Identifier: Apache-2.0
"""The client's end of an HTTP/1.1 connection for tests: bytes out, answers in. Written from the RFC, not from the server."""

from __future__ import annotations

import socket
import struct
import subprocess
from dataclasses import dataclass

PATIENCE_SECONDS = 60.0
"""How long a test waits for what must come. Nothing is decided by it but how long a failing test takes."""


@dataclass
class Answer:
    status: int
    fields: list[tuple[str, str]]
    body: bytes = b""
    reason: str = ""

    def get(self, name: str) -> str | None:
        values = [value for key, value in self.fields if key == name]
        if len(values) > 1:
            raise AssertionError(f"{name} is there {len(values)} times: {values}")
        return values[0] if values else None


class NotWhole(Exception):
    """At least `missing` more bytes are needed."""

    def __init__(self, missing: int = 1) -> None:
        super().__init__(missing)
        self.missing = missing


def parse_answer(data: bytes, start: int = 0, *, to_head: bool = False, at_end: bool = False) -> tuple[Answer, int]:
    """The answer that begins at `start`, and where it ends; strict, so that a malformed answer fails the test."""
    end = data.find(b"\r\n\r\n", start)
    if end < 0:
        raise NotWhole
    lines = data[start:end].split(b"\r\n")
    end += 4
    version, status, reason = lines[0].decode("latin-1").split(" ", 2)
    if version != "HTTP/1.1":
        raise AssertionError(f"a strange status line: {lines[0]!r}")
    fields: list[tuple[str, str]] = []
    for line in lines[1:]:
        name, colon, value = line.partition(b": ")
        if not colon or b"\n" in line or b"\r" in line or name != name.lower() or not name:
            raise AssertionError(f"a strange line in the head: {line!r}")
        fields.append((name.decode("ascii"), value.decode("latin-1")))
    answer = Answer(int(status), fields, reason=reason)
    length, coding = answer.get("content-length"), answer.get("transfer-encoding")
    if length is not None and coding is not None:
        raise AssertionError("both content-length and transfer-encoding")
    if to_head or answer.status < 200 or answer.status in (204, 304):
        return answer, end
    if coding is not None:
        if coding != "chunked":
            raise AssertionError(f"transfer-encoding: {coding}")
        answer.body, end = _unchunk(data, end)
    elif length is not None:
        answer.body, end = _take(data, end, int(length))
    elif not at_end:
        raise NotWhole
    else:
        answer.body, end = data[end:], len(data)
    return answer, end


def parse_answers(data: bytes) -> list[Answer]:
    """All answers in `data`, which must end with the last of them."""
    answers = []
    position = 0
    while position < len(data):
        answer, position = parse_answer(data, position, at_end=True)
        answers.append(answer)
    return answers


def _take(data: bytes, start: int, size: int) -> tuple[bytes, int]:
    if len(data) < start + size:
        raise NotWhole(start + size - len(data))
    return data[start : start + size], start + size


def _unchunk(data: bytes, position: int) -> tuple[bytes, int]:
    pieces: list[bytes] = []
    while True:
        line = data.find(b"\r\n", position)
        if line < 0:
            raise NotWhole
        size = int(data[position:line], 16)
        piece, position = _take(data, line + 2, size)
        ending, position = _take(data, position, 2)
        if ending != b"\r\n":
            raise AssertionError("a chunk does not end where it says")
        if not size:
            return b"".join(pieces), position
        pieces.append(piece)


class Client:
    """One connection. Reading gives up after `PATIENCE_SECONDS`, which fails the test."""

    def __init__(self, port: int, *, receive_bytes: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_SECONDS)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""
        self.at_end = False

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_if_open(self, data: bytes) -> None:
        """Send to a server that may have closed already."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def more(self, wanted: int = 1) -> None:
        """Read at least so many bytes, unless the end comes before."""
        pieces = [self.buffer]
        while wanted > 0 and not self.at_end:
            try:
                data = self.socket.recv(256 * 1024)
            except ConnectionResetError:
                data = b""
            self.at_end = not data
            wanted -= len(data)
            pieces.append(data)
        self.buffer = b"".join(pieces)

    def answer(self, *, to_head: bool = False) -> Answer:
        while True:
            try:
                answer, end = parse_answer(self.buffer, to_head=to_head, at_end=self.at_end)
            except NotWhole as cut:
                if self.at_end:
                    raise AssertionError(f"the connection ended inside an answer: {self.buffer[:500]!r}") from None
                self.more(cut.missing)
            else:
                self.buffer = self.buffer[end:]
                return answer

    def read_until(self, wanted: bytes) -> None:
        while wanted not in self.buffer:
            if self.at_end:
                raise AssertionError(f"the connection ended without {wanted!r}: {self.buffer[:500]!r}")
            self.more()

    def rest(self) -> bytes:
        """Everything until the server closes."""
        while not self.at_end:
            self.more()
        rest, self.buffer = self.buffer, b""
        return rest

    def ask(self, data: bytes, *, to_head: bool = False) -> Answer:
        self.send(data)
        return self.answer(to_head=to_head)


def get(path: str = "/hello", *fields: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: test", *fields]
    return "".join(line + "\r\n" for line in [*lines, ""]).encode("latin-1")


def post(path: str, body: bytes, *fields: str, version: str = "1.1") -> bytes:
    return get(path, f"Content-Length: {len(body)}", *fields, method="POST", version=version) + body


def post_chunked(path: str, *chunks: bytes, fields: tuple[str, ...] = ()) -> bytes:
    head = get(path, "Transfer-Encoding: chunked", *fields, method="POST")
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def curl(*arguments: str, data: bytes | None = None) -> str:
    """What curl prints; its own output goes to stdout, its notes (`-v`) with it."""
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--max-time", "20", "--noproxy", "*", *arguments],
        input=data,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"curl ended with {done.returncode}: {done.stdout.decode(errors='replace')}")
    return done.stdout.decode(errors="replace")
