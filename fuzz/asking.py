# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 request to a server without a socket, and its answer. Used by the targets of bodies."""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from fuzz.line import Server
from fuzz.target import must


class Answer:
    """An answer as httptools reads it."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.fields: dict[bytes, bytes] = {}
        self.body = b""
        self.complete = False
        self._read = 0

    def read(self, written: bytes) -> bool:
        """Read what is new; whether all has come."""
        self._parser.feed_data(written[self._read :])
        self._read = len(written)
        self.status = self._parser.get_status_code()
        return self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools."""
        self.fields[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        """Called by httptools."""
        self.body += piece

    def on_message_complete(self) -> None:
        """Called by httptools."""
        self.complete = True


def post(server: Server, path: bytes, body: bytes, fields: Sequence[bytes] = ()) -> Answer:
    """Ask, wait for the whole answer, and hang up. What must hold of every answer does, or it raises."""
    line, answer = server.line(), Answer()
    head = b"POST %b HTTP/1.1\r\nhost: fuzz\r\ncontent-length: %d\r\n" % (path, len(body))
    line.send(head + b"".join(b"%b\r\n" % field for field in fields) + b"\r\n" + body)
    line.until(lambda: answer.read(line.written) or line.over)
    answer.read(line.written)
    line.hang_up()
    server.check()
    must(answer.complete, "the connection was closed before its answer")
    return answer
