# SPDX-License-Identifier: Apache-2.0
"""How much of anything a client may send, and how long it may take. Refused before the memory or the time is spent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain, http1_site
from http1_wire import Client, get, post, post_chunked

from headrace.core.limits import Limits
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http1.connection import Http1Connection
from support.serving import Serving, serving
from support.waiting import eventually

SMALL = Limits(header_bytes=2000, header_count=20, body_bytes=10_000, chunk_count=50)
"""Small enough that a test need not send much; one packet may still bring 256 KiB at once."""

CHUNKED = get("/echo", "Transfer-Encoding: chunked", method="POST")


def refused(wire: FakeWire) -> int:
    """The status of the one refusal, after checking that it was the end."""
    (answer,) = wire.answers()
    assert answer.get("connection") == "close"
    assert answer.get("content-type") == "application/json"
    assert json.loads(answer.body)["error"]
    assert wire.ended()
    assert wire.handlers.seen == []
    return answer.status


def feed_until_refused(wire: FakeWire, piece: bytes, at_most: int) -> int:
    """Feed the same piece again and again; how many bytes it took."""
    fed = 0
    while not wire.ended():
        assert fed <= at_most, "it takes and takes"
        wire.feed(piece)
        fed += len(piece)
    return fed


class TestHeads:
    def test_too_many_bytes(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/hello", "X-Long: " + "x" * 2000))
        assert refused(wire) == 431

    def test_too_many_bytes_in_many_fields(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/hello", *("X-Long: " + "x" * 150 for _ in range(15))))
        assert refused(wire) == 431

    def test_as_many_bytes_as_allowed(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/hello", "X-Long: " + "x" * 1900))
        assert wire.statuses() == [200]

    def test_too_many_fields(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/hello", *(f"x-{number}: y" for number in range(19))))
        assert wire.statuses() == [200]
        wire = FakeWire(SMALL)
        wire.feed(get("/hello", *(f"x-{number}: y" for number in range(20))))
        assert refused(wire) == 431

    @pytest.mark.parametrize("default", [False, True])
    @pytest.mark.parametrize(
        ("start", "piece"),
        [
            ("GET /hello HTTP/1.1\r\nHost: test\r\nX-Long: ", "x" * 100),
            ("GET /hello HTTP/1.1\r\nHost: test\r\n", "x-short: y\r\n"),
            ("GET /hello HTTP/1.1\r\nHost: test\r\nX", "x" * 100),
            ("GET /", "x" * 100),
            ("GET /?", "x" * 100),
            ("GET http://", "x" * 100),
            ("", "\r\n" * 50),
            ("", "\r" * 50),
            ("", "\n" * 50),
        ],
        ids=["value", "fields", "name", "path", "query", "authority", "empty lines", "carriage returns", "line feeds"],
    )
    def test_what_never_ends(self, start: str, piece: str, default: bool) -> None:
        limits = Limits() if default else SMALL
        wire = FakeWire(limits)
        if start:
            wire.feed(start.encode())
        feed_until_refused(wire, piece.encode(), limits.header_bytes + 1000)
        assert refused(wire) in (400, 431)

    def test_what_never_ends_in_large_packets(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(b"GET /hello HTTP/1.1\r\nHost: test\r\nX-Long: ")
        assert feed_until_refused(wire, b"x" * 256 * 1024, 256 * 1024) == 256 * 1024
        assert refused(wire) == 431

    def test_the_count_restarts_with_each_request(self) -> None:
        wire = FakeWire(SMALL)
        for _ in range(10):
            for piece in (
                b"\r\n",
                b"GET /hel",
                b"lo HTTP/1.1\r\n",
                b"Host: test\r\nX-Long: ",
                b"x" * 1000,
                b"\r\n\r\n",
            ):
                wire.feed(piece)
        assert wire.statuses() == [200] * 10

    def test_over_a_socket(self, client: Client, handlers: Handlers) -> None:
        client.send_if_open(b"GET /hello HTTP/1.1\r\nHost: test\r\nX-Long: " + b"x" * 400_000)
        answer = client.answer()
        assert (answer.status, answer.get("connection")) == (431, "close")
        assert client.rest() == b""


class TestBodies:
    def test_an_announced_length_is_refused_immediately(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/echo", "Content-Length: 10001", method="POST"))
        assert refused(wire) == 413

    def test_as_much_as_allowed(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(post("/echo", bytes(10_000)), post_chunked("/echo", bytes(9_999), b"x"))
        assert [len(answer.body) for answer in wire.answers()] == [10_000, 10_000]

    def test_chunks_are_counted(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(CHUNKED)
        assert feed_until_refused(wire, b"3e8\r\n" + bytes(1000) + b"\r\n", 12_000) <= 11 * 1007
        assert refused(wire) == 413

    def test_one_endless_chunk(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(CHUNKED + b"fffffffffffffff\r\n")
        assert feed_until_refused(wire, bytes(1000), 12_000) == 11_000
        assert refused(wire) == 413

    def test_too_many_chunks(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(post_chunked("/echo", *[b"x"] * 49))
        assert wire.statuses() == [200]
        wire = FakeWire(SMALL)
        wire.feed(post_chunked("/echo", *[b"x"] * 51))
        assert refused(wire) == 413

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_an_endless_chunk_extension(self, path: str) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get(path, "Transfer-Encoding: chunked", method="POST") + b"5;a=")
        feed_until_refused(wire, b"x" * 100, 3000)
        assert wire.statuses() == [431]

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_endless_trailers(self, path: str) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get(path, "Transfer-Encoding: chunked", method="POST") + b"1\r\nx\r\n0\r\n")
        feed_until_refused(wire, b"X-Sum: 1234567890\r\n", 3000)
        assert wire.statuses() == [431]

    def test_huge_trailers_in_one_packet(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(CHUNKED + b"0\r\n" + b"X-Sum: 1234567890\r\n" * 1000 + b"\r\n" + get())
        assert refused(wire) == 431

    def test_a_streamed_body_may_be_endless(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/upload", "Transfer-Encoding: chunked", method="POST") + b"ffffffff\r\n")
        for _ in range(100):
            wire.feed(bytes(1000))
        assert sum(map(len, wire.handlers.pieces)) == 100_000

    def test_too_many_chunks_of_a_streamed_body_end_it(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(post_chunked("/upload", *[b"x"] * 60))
        (answer,) = wire.answers()
        assert (answer.status, answer.get("connection")) == (413, "close")
        assert wire.handlers.events == ["disconnect"], "the handler is told that no more will come"
        assert wire.handlers.held[0].closed

    def test_a_refused_body_leaves_no_memory(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(CHUNKED)
        feed_until_refused(wire, b"3e8\r\n" + bytes(1000) + b"\r\n", 12_000)
        assert wire.protocol._reader._pieces == []
        assert wire.protocol._reader.exchange is None

    def test_over_a_socket(self, client: Client, handlers: Handlers) -> None:
        client.send(CHUNKED)
        chunk = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        for _ in range(70):
            client.send_if_open(chunk)
        answer = client.answer()
        assert (answer.status, answer.get("connection")) == (413, "close")
        assert client.rest() == b""
        assert handlers.seen == []

    def test_a_refusal_waits_for_answers_that_are_owed(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/hold") + get() + get("/echo", "Content-Length: 10001", method="POST"))
        assert wire.transport.written == b""
        answer_plain(wire.handlers.held[0])
        assert [(answer.body, answer.get("connection")) for answer in wire.answers()] == [
            (b"done", None),
            (b"hello", "close"),
        ]
        assert wire.ended()

    def test_an_upload_that_fails_while_it_waits(self) -> None:
        wire = FakeWire(SMALL)
        wire.feed(get("/hold") + get("/upload", "Transfer-Encoding: chunked", method="POST") + b"1\r\nx\r\nzz\r\n")
        answer_plain(wire.handlers.held[0])
        assert [(answer.body, answer.get("connection")) for answer in wire.answers()] == [(b"done", "close")]
        assert wire.handlers.paths() == ["/hold"], "half an upload must not reach its handler"

    def test_a_refusal_cuts_a_stream_that_it_interrupts(self) -> None:
        wire = FakeWire(SMALL)
        wire.handlers.on_upload = lambda exchange: exchange.start(OK_PLAIN)
        wire.feed(get("/upload", "Transfer-Encoding: chunked", method="POST") + b"zz\r\n")
        assert wire.aborted()
        assert bytes(wire.transport.written).count(b"HTTP/1.1") == 1
        assert wire.handlers.events == ["disconnect"]

    def test_refusals_are_in_the_access_log_when_there_was_a_head(self) -> None:
        wire = FakeWire(SMALL)
        lines: list[tuple[bytes, int]] = []
        wire.site.access_log = lambda peer, head, status: lines.append((head.path, status))
        wire.feed(get("/echo", "Content-Length: 10001", method="POST"))
        assert lines == [(b"/echo", 413)]


class TestTime:
    """The clock is moved by hand, just short of a limit and then past it."""

    def nearly(self, wire: FakeWire, seconds: float) -> None:
        wire.sweep(seconds - 0.5)
        assert not wire.ended()
        assert wire.transport.written == b""
        wire.sweep(1.0)

    def test_a_slow_head(self) -> None:
        wire = FakeWire()
        wire.feed(get()[:-1])
        self.nearly(wire, Limits().header_seconds)
        assert refused(wire) == 408

    def test_a_head_in_drops_has_no_more_time(self) -> None:
        wire = FakeWire()
        wire.feed(b"GET /hello HTTP/1.1\r\nHost: test\r\n")
        for number in range(9):
            wire.sweep(1.0)
            wire.feed(b"x-%d: y\r\n" % number)
        assert not wire.ended()
        wire.sweep(1.5)
        assert refused(wire) == 408

    def test_the_time_of_a_head_begins_with_its_first_byte(self) -> None:
        wire = FakeWire()
        wire.sweep(60.0)
        wire.feed(get()[:-1])
        wire.sweep(9.0)
        wire.feed(b"\n")
        assert wire.statuses() == [200]

    @pytest.mark.parametrize("size", [1000, 100_000])
    def test_a_stalled_body(self, size: int) -> None:
        wire = FakeWire()
        wire.feed(post("/echo", bytes(size))[:-1])
        self.nearly(wire, Limits().body_idle_seconds)
        assert refused(wire) == 408
        assert wire.protocol._reader.direct is None

    def test_a_stalled_body_after_a_known_head(self) -> None:
        wire = FakeWire()
        request = post("/echo", b"abcde")
        wire.feed(request)
        wire.transport.written.clear()
        wire.handlers.seen.clear()
        wire.feed(request[:-1])
        self.nearly(wire, Limits().body_idle_seconds)
        assert refused(wire) == 408

    def test_a_body_that_moves_has_time(self) -> None:
        wire = FakeWire()
        request = post("/echo", b"abcde")
        wire.feed(request[:-5])
        for byte in b"abcde":
            wire.sweep(50.0)
            wire.feed(bytes([byte]))
        assert wire.statuses() == [200]

    def test_a_large_body_that_moves_has_time(self) -> None:
        wire = FakeWire()
        request = post("/echo", bytes(400_000))
        wire.feed(request[:-4])
        for byte in request[-4:]:
            wire.sweep(50.0)
            wire.feed(bytes([byte]))
        assert wire.statuses() == [200]

    def test_a_stalled_streamed_body(self) -> None:
        wire = FakeWire()
        wire.feed(post("/upload", bytes(10))[:-1])
        self.nearly(wire, Limits().body_idle_seconds)
        assert wire.statuses() == [408]
        assert wire.ended()
        assert wire.handlers.events == ["disconnect"]

    def test_a_stalled_streamed_body_without_a_watcher(self) -> None:
        wire = FakeWire()
        wire.handlers.on_upload = lambda exchange: setattr(exchange, "on_disconnect", None)
        wire.feed(post("/upload", bytes(10))[:-1])
        wire.sweep(Limits().body_idle_seconds + 1)
        assert wire.statuses() == [408]
        wire.sweep(3.0)
        assert wire.site.connections == set()

    @pytest.mark.parametrize("rest", [get()[:-1], post("/echo", b"abc")[:-1]])
    def test_our_own_pause_is_not_the_clients_slowness(self, rest: bytes) -> None:
        wire = FakeWire(Limits(pipelined_requests=2))
        wire.feed(get("/hold") + get() * 2 + rest)
        assert not wire.reading()
        wire.sweep(1000.0)
        answer_plain(wire.handlers.held[0])
        wire.sweep(5.0)
        assert wire.statuses() == [200] * 3
        wire.feed(b"\n" if rest == get()[:-1] else b"c")
        assert wire.statuses() == [200] * 4

    def test_an_idle_connection(self) -> None:
        wire = FakeWire()
        wire.feed(get())
        wire.sweep(Limits().idle_seconds - 0.5)
        assert not wire.ended()
        wire.feed(get())
        wire.sweep(Limits().idle_seconds - 0.5)
        assert not wire.ended()
        wire.sweep(1.0)
        assert wire.ended()
        assert wire.statuses() == [200, 200], "nobody asked: no 408"

    def test_a_held_request_is_not_idle(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold"))
        wire.sweep(100_000.0)
        answer_plain(wire.handlers.held[0])
        assert wire.statuses() == [200]

    def test_a_client_that_leaves_its_answer_unread(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold"))
        wire.protocol.pause_writing()
        wire.transport.unsent = 1_000_000
        wire.sweep(0.0)
        wire.sweep(59.0)
        wire.transport.unsent = 999_999
        wire.sweep(59.0)
        wire.sweep(59.0)
        assert not wire.aborted(), "it reads, however slowly"
        wire.sweep(2.0)
        assert wire.aborted()
        assert wire.handlers.events == ["disconnect"]
        assert wire.site.connections == set()

    def test_a_slow_reader_of_a_last_answer_gets_all_of_it(self) -> None:
        """The linger after an answer must not cut the answer: it begins when everything is sent."""
        wire = FakeWire()
        wire.feed(get("/big/1000000", "Connection: close"))
        for unsent in range(900_000, 0, -100_000):
            wire.transport.unsent = unsent
            wire.sweep(30.0)
            assert not wire.aborted()
        wire.transport.unsent = 0
        wire.sweep(1.0)
        assert not wire.aborted()
        wire.sweep(2.0)
        assert wire.aborted()

    def test_a_client_that_leaves_its_last_answer_unread(self) -> None:
        wire = FakeWire()
        wire.feed(get("/big/1000000", "Connection: close"))
        wire.transport.unsent = 900_000
        wire.sweep(0.0)
        wire.sweep(59.0)
        assert not wire.aborted()
        wire.sweep(2.0)
        assert wire.aborted()

    def test_a_client_that_does_not_close_is_closed(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hello", "Connection: close"))
        assert wire.ended()
        wire.feed(b"anything " * 1000)
        wire.sweep(1.9)
        assert not wire.aborted()
        wire.sweep(0.2)
        assert wire.aborted()
        assert wire.site.connections == set()


@pytest.fixture(scope="module")
def impatient() -> Iterator[tuple[Serving, Handlers]]:
    """A server whose clock tests move: they must not be swept in the middle by a server that others share."""
    handlers = Handlers()
    with serving(lambda: http1_site(handlers)) as running:
        yield running, handlers


class TestTimeOverSockets:
    def test_a_slow_head_and_a_slow_body(self, impatient: tuple[Serving, Handlers]) -> None:
        server, _ = impatient
        with Client(server.port) as slow_head, Client(server.port) as slow_body, Client(server.port) as idle:
            slow_head.send(get()[:-1])
            slow_body.send(post("/echo", bytes(100))[:-1])
            idle.ask(get())
            eventually(lambda: self.phases(server) == [0, 1, 2])
            server.sweep(11.0)
            answer = slow_head.answer()
            assert (answer.status, answer.get("connection")) == (408, "close")
            assert slow_head.rest() == b""
            server.sweep(50.0)
            answer = slow_body.answer()
            assert (answer.status, answer.get("connection")) == (408, "close")
            server.sweep(60.0)
            assert idle.rest() == b""
        eventually(lambda: server.connections() == 0)

    def swept_away(self, server: Serving) -> bool:
        """A minute passes. More than one may have to: the kernel takes a little more now and then, which is progress."""
        server.sweep(61.0)
        return server.connections() == 0

    def phases(self, server: Serving) -> list[int]:
        connections = server.call(lambda: list(server.site.connections))
        return sorted(connection._reader.phase for connection in connections if isinstance(connection, Http1Connection))

    @pytest.mark.parametrize("field", ["Connection: keep-alive", "Connection: close"])
    def test_a_client_that_never_reads(self, impatient: tuple[Serving, Handlers], field: str) -> None:
        server, handlers = impatient
        handlers.clear()
        with Client(server.port, receive_bytes=4096) as client:
            client.send(get("/big/30000000", field))
            eventually(lambda: handlers.seen)
            eventually(lambda: self.swept_away(server))
            assert len(client.rest()) < 30_000_000

    def test_a_slow_reader_of_a_last_answer_gets_all_of_it(self, impatient: tuple[Serving, Handlers]) -> None:
        server, handlers = impatient
        handlers.clear()
        with Client(server.port, receive_bytes=4096) as client:
            client.send(get("/big/8000000", version="1.0"))
            eventually(lambda: handlers.seen)
            for _ in range(10):
                server.sweep(5.0)
                client.more(300_000)
            assert len(client.rest()) > 8_000_000

    def test_a_paused_stream_is_notified_when_its_reader_is_cut(self, impatient: tuple[Serving, Handlers]) -> None:
        server, handlers = impatient
        handlers.clear()

        def answer(exchange: Exchange) -> None:
            exchange.on_disconnect = lambda: handlers.events.append("disconnect")
            exchange.start(OK_PLAIN)
            while exchange.send(bytes(100_000)):
                pass

        handlers.on_hook = answer
        with Client(server.port, receive_bytes=4096) as client:
            client.send(get("/hook"))
            eventually(lambda: handlers.seen)
            eventually(lambda: self.swept_away(server))
            assert handlers.events == ["disconnect"]
