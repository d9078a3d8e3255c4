# SPDX-License-Identifier: Apache-2.0
"""Streamed answers in chunks: whole ones are passed on as they are; however they are cut, the text is the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet.router.backends import Backends
from headrace.fleet.router.responses import UpstreamHeadParser, chunk_data_start
from headrace.fleet.router.settings import BackendAddress, RouterSettings
from headrace.fleet.router.upstream import CoarseClock, ConnectionPool, UpstreamConnection

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Recorder:
    """A handler that records what it receives."""

    fast_path, sending, is_head, upgrade = True, False, False, False

    def __init__(self) -> None:
        self.text, self.chunks = b"", 0
        self.ended, self.why = False, ""

    def response_received(self, head: Any, body: Any) -> None:
        self.text, self.ended = self.text + bytes(body), True

    def response_started(self, head: Any, length: int) -> None:
        assert length == -1

    def response_data(self, data: Any) -> bool:
        self.text += bytes(data)
        return True

    def response_chunk(self, data: bytes, begin: int) -> bool:
        self.chunks += 1
        return self.response_data(data[begin:-2])

    def response_ended(self) -> None:
        self.ended = True

    def response_failed(self, why: str, *, unanswered: bool = False, timed_out: bool = False) -> None:
        self.why = why


class Transport:
    """Of a connection that is only read."""

    def abort(self) -> None:
        pass


def receive_chunks(*pieces: bytes) -> Recorder:
    """What a handler receives if these come one after the other."""
    settings = RouterSettings((BackendAddress.parse("http://127.0.0.1:1"),))
    pool = ConnectionPool(Backends(settings).all[0], settings, UpstreamHeadParser(), CoarseClock())
    connection = UpstreamConnection(pool)
    connection.transport = Transport()  # type: ignore[assignment]
    handler = Recorder()
    connection.handler = handler  # type: ignore[assignment]
    for piece in pieces:
        if piece and connection.handler is not None:
            connection.data_received(piece)
    return handler


def chunk(text: bytes, form: bytes = b"%x") -> bytes:
    return form % len(text) + b"\r\n" + text + b"\r\n"


def test_complete_chunks_are_forwarded_unchanged() -> None:
    reported = receive_chunks(
        HEAD, chunk(b"data: 1\n\n"), chunk(b"x" * 300, b"%X"), chunk(b"data: 3\n\n"), b"0\r\n\r\n"
    )
    assert reported.text == b"data: 1\n\n" + b"x" * 300 + b"data: 3\n\n"
    assert reported.chunks == 3
    assert reported.ended


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from((b"%x", b"%X", b"%04x", b"%x;kind=event")),
)
def test_the_text_is_the_same_however_it_is_cut(texts: list[bytes], cuts: list[int], form: bytes) -> None:
    body = b"".join(chunk(text, form) for text in texts) + b"0\r\n\r\n"
    places = [0, *sorted(cuts), len(body)]
    reported = receive_chunks(HEAD, *(body[a:b] for a, b in zip(places, places[1:], strict=False)))
    assert reported.text == b"".join(texts)
    assert reported.ended
    assert reported.why == ""


@pytest.mark.parametrize("size", [b"0x3", b"+3", b" 3", b"0_3", b"-3", b"3\n", b"g", b""])
def test_an_invalid_size_is_refused_at_every_chunk(size: bytes) -> None:
    bad = size + b"\r\nabc\r\n"
    assert chunk_data_start(bad) == 0
    reported = receive_chunks(HEAD, chunk(b"abc"), bad, b"0\r\n\r\n")
    assert reported.text == b"abc"
    assert reported.why


def test_a_chunk_of_the_wrong_length_is_not_forwarded_as_complete() -> None:
    assert chunk_data_start(b"3\r\nabc\r\n") == 3
    for data in (
        b"3\r\nabcd\r\n",
        b"3\r\nab\r\n",
        b"3\r\nabc\r\n3\r\nabc\r\n",
        b"3\r\nabc\n\n",
        b"0\r\n\r\n",
        b"3\nabcd\r\n",
    ):
        assert chunk_data_start(data) == 0
