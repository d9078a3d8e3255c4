# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 request to the in-memory server, and its response. For the targets whose input is a body."""

from __future__ import annotations

from collections.abc import Sequence

import httptools

from fuzz.in_memory_server import Server
from fuzz.target import require


class Answer:
    """A response, parsed by httptools."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.fields: dict[bytes, bytes] = {}
        self.body = b""
        self.complete = False
        self._read = 0

    def read(self, written: bytes) -> bool:
        """Parse the new bytes; return whether the response is complete."""
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
    """Send a POST, wait for the whole response, and close; raise if the server or the response is wrong."""
    connection, answer = server.connect(), Answer()
    head = b"POST %b HTTP/1.1\r\nhost: fuzz\r\ncontent-length: %d\r\n" % (path, len(body))
    connection.send(head + b"".join(b"%b\r\n" % field for field in fields) + b"\r\n" + body)
    connection.until(lambda: answer.read(connection.written) or connection.over)
    answer.read(connection.written)
    connection.hang_up()
    server.check()
    require(answer.complete, "the connection was closed before the response was complete")
    return answer
