# SPDX-License-Identifier: Apache-2.0
"""Answers that begin like the one before, which take a short way: they end where they should, and nowhere else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.fleet.router.backends import Backends
from headrace.fleet.router.responses import UpstreamHead, UpstreamHeadParser
from headrace.fleet.router.settings import BackendAddress, RouterSettings
from headrace.fleet.router.upstream import CoarseClock, ConnectionPool, UpstreamConnection
from headrace.net.http.heads import Buffer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
KNOWN = HEAD + b"ok"


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: Buffer) -> None:
        """Nobody looks at it."""

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


class _Handler:
    """A handler that only takes whole responses."""

    upgrade = sending = False

    def __init__(self, *, silent: bool = False) -> None:
        self.is_head = silent
        self.fast_path = not silent
        self.bodies: list[bytes] = []

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        self.bodies.append(bytes(body))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was not to be called")


class _Line:
    """A connection to a backend, without a socket."""

    def __init__(self) -> None:
        settings = RouterSettings((BackendAddress.parse("http://127.0.0.1:9"),))
        self.pool = ConnectionPool(Backends(settings).all[0], settings, UpstreamHeadParser(), CoarseClock())
        self.transport = _Transport()
        self._connection = UpstreamConnection(self.pool)
        self._connection.connection_made(self.transport)
        self.pool.release(self._connection)

    def ask(self, *pieces: bytes, silent: bool = False) -> list[bytes]:
        """Send a request and have it answered so; the bodies of the answers that were read."""
        handler = _Handler(silent=silent)
        assert self.pool.send(handler, b"") is self._connection
        for piece in pieces:
            self._connection.data_received(piece)
        return handler.bodies


@pytest.fixture
def line() -> _Line:
    created = _Line()
    for _ in range(3):
        assert created.ask(KNOWN) == [b"ok"]
    return created


def test_a_body_equal_to_the_previous_answer_is_a_body(line: _Line) -> None:
    around = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(KNOWN)
    for _ in range(2):
        assert line.ask(around, KNOWN) == [KNOWN]
        assert line.ask(KNOWN) == [b"ok"]


def test_the_same_in_pieces(line: _Line) -> None:
    for cut in range(1, len(KNOWN)):
        assert line.ask(KNOWN[:cut], KNOWN[cut:]) == [b"ok"]
        assert line.ask(KNOWN) == [b"ok"]


def test_another_answer_of_the_same_length(line: _Line) -> None:
    assert line.ask(KNOWN.replace(b"200 OK", b"299 OK").replace(b"ok", b"no")) == [b"no"]
    assert line.ask(KNOWN) == [b"ok"]


def test_answers_of_changing_lengths(line: _Line) -> None:
    for length in (1, 3, 2, 3, 1, 0, 2, 0, 5000, 1):
        body = b"x" * length
        assert line.ask(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + body) == [body]
    assert line.ask(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n", b"xxx") == [b"xxx"]
    assert line.ask(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx") == [b"x"]


def test_an_answer_to_head_ends_with_its_head(line: _Line) -> None:
    assert line.ask(HEAD, silent=True) == [b""]
    assert line.ask(KNOWN) == [b"ok"]
    assert not line.transport.is_closing()
    line.ask(KNOWN, silent=True)
    assert line.transport.is_closing(), "what follows is no answer to anyone"
    assert line.pool.idle == []
