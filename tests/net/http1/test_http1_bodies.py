# SPDX-License-Identifier: Apache-2.0
"""Request bodies: chunked, announced, compressed, large enough for the kernel to write, streamed, and held back."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from pathlib import Path

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain
from http1_wire import Client, curl, get, post, post_chunked

from headrace.core.limits import Limits
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from support.serving import Serving
from support.waiting import eventually

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def random_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class TestChunked:
    def test_chunks_are_joined(self, client: Client) -> None:
        assert client.ask(post_chunked("/echo", b"one ", b"two ", b"three")).body == b"one two three"

    def test_an_empty_chunked_body(self, client: Client, handlers: Handlers) -> None:
        assert client.ask(post_chunked("/echo")).body == b""
        assert handlers.seen == [("POST", "/echo", b"")]

    def test_extensions_and_trailers_are_read_over(self, client: Client) -> None:
        head = get("/echo", "Transfer-Encoding: chunked", method="POST")
        client.send(head + b'5;name="value"\r\nhello\r\n0\r\nX-Sum: 1\r\nHost: other\r\n\r\n' + get())
        assert [client.answer().body, client.answer().body] == [b"hello", b"hello"]

    def test_a_trailer_changes_no_field(self, client: Client, handlers: Handlers) -> None:
        seen: list[bytes | None] = []

        def record_user(exchange: Exchange) -> None:
            seen.append(exchange.head.get(b"x-user"))
            answer_plain(exchange)

        handlers.on_hook = record_user
        head = get("/hook", "Transfer-Encoding: chunked", "X-User: me", method="POST")
        assert client.ask(head + b"0\r\nX-User: root\r\n\r\n").status == 200
        assert seen == [b"me"]

    def test_sizes_in_either_case_and_with_zeros(self, client: Client) -> None:
        head = get("/echo", "Transfer-Encoding: chunked", method="POST")
        assert (
            client.ask(head + b"A\r\n0123456789\r\n00000a\r\nabcdefghij\r\n0\r\n\r\n").body == b"0123456789abcdefghij"
        )

    def test_one_byte_at_a_time(self) -> None:
        wire = FakeWire()
        wire.feed(*(bytes([byte]) for byte in post_chunked("/echo", b"hello", b"world") + get()))
        assert [answer.body for answer in wire.answers()] == [b"helloworld", b"hello"]

    def test_curl_uploads_from_a_pipe(self, server: Serving, handlers: Handlers) -> None:
        body = random_bytes(300_000)
        url = f"http://127.0.0.1:{server.port}/upload"
        assert curl("-X", "POST", "-T", "-", url, data=body) == "300000"
        assert b"".join(handlers.pieces) == body


class TestDirect:
    """Bodies over 64 KiB, which the kernel writes straight into their own memory."""

    @pytest.mark.parametrize("size", [64 * 1024, 64 * 1024 + 1, 600_000, 20_000_000])
    def test_arrives_as_it_was_sent(self, client: Client, handlers: Handlers, size: int) -> None:
        body = random_bytes(size)
        assert client.ask(post("/echo", body)).body == body
        assert client.ask(get()).body == b"hello"

    def test_in_odd_pieces(self, client: Client) -> None:
        body = random_bytes(600_000)
        request = post("/echo", body)
        cuts = random.Random(7)
        while request:
            size = cuts.choice([1, 2, 3, 1000, 4097, 65_536, 99_991])
            client.send(request[:size])
            request = request[size:]
        assert client.answer().body == body

    @pytest.mark.parametrize("size", [70_000, 600_000])
    def test_the_next_request_in_the_same_packet(self, size: int) -> None:
        body = random_bytes(size)
        wire = FakeWire()
        wire.feed(post("/echo", body) + get() + post("/echo", b"small"))
        assert [answer.body for answer in wire.answers()] == [body, b"hello", b"small"]

    def test_several_in_a_row_behind_a_held_request(self, client: Client, server: Serving, handlers: Handlers) -> None:
        bodies = [random_bytes(size) for size in (100_000, 200_000, 300_000)]
        client.send(get("/hold"))
        eventually(lambda: handlers.held)
        client.send(b"".join(post("/echo", body) for body in bodies) + get())
        server.call(lambda: answer_plain(handlers.held[0]))
        assert client.answer().body == b"done"
        assert [client.answer().body for _ in bodies] == bodies
        assert client.answer().body == b"hello"

    def test_split_at_every_place_around_the_end_of_the_head(self) -> None:
        body = random_bytes(66_000)
        request = post("/echo", body)
        end = len(request) - len(body)
        for cut in range(end - 5, end + 5):
            wire = FakeWire()
            wire.feed(request[:cut], request[cut:] + get())
            assert [answer.body for answer in wire.answers()] == [body, b"hello"], cut

    def test_a_known_head_whose_body_arrives_in_pieces(self) -> None:
        """The second time, the head is recognised without being parsed."""
        wire = FakeWire()
        for size in (10, 5_000, 70_000):
            body = random_bytes(size)
            request = post("/echo", body)
            wire.feed(request, request[:-3], request[-3:-2], request[-2:] + request, request[:-size], body)
            assert [answer.body for answer in wire.answers()] == [body] * 4, size
            wire.transport.written.clear()

    def test_a_body_equal_to_the_last_request_is_a_body(self) -> None:
        """What comes in place of a body is not taken for a request, however well it is known."""
        wire = FakeWire()
        known = post("/echo", b"0123")
        around = post("/echo", known).removesuffix(known)
        chunked = get("/echo", "Transfer-Encoding: chunked", method="POST") + b"%x\r\n" % len(known)
        for _ in range(2):
            # Three times, since the first makes it known, and the second makes it the last one.
            wire.feed(known, known, known, around, known, known, known, chunked, known, b"\r\n0\r\n\r\n")
            bodies = [b"0123", b"0123", b"0123", known, b"0123", b"0123", known]
            assert [answer.body for answer in wire.answers()] == bodies
            wire.transport.written.clear()

    def test_the_same_again_waits_for_its_turn(self) -> None:
        wire = FakeWire()
        known = post("/hold", b"0123")
        for count in range(1, 4):
            wire.feed(known)
            answer_plain(wire.handlers.held[-1])
            assert (len(wire.handlers.held), len(wire.answers())) == (count, count)
        wire.feed(known, known)
        assert len(wire.handlers.held) == 4
        answer_plain(wire.handlers.held[-1])
        assert (len(wire.handlers.held), len(wire.answers())) == (5, 4)

    def test_the_kernel_writes_it_where_it_stays(self) -> None:
        """And nothing after it: what follows is read as requests again."""
        wire = FakeWire()
        body = random_bytes(600_000)
        request = post("/hold", body)
        wire.feed(request[:-500_000])
        receiver = wire.transport.protocol
        assert isinstance(receiver, asyncio.BufferedProtocol)
        assert len(memoryview(receiver.get_buffer(1 << 20))) == 500_000
        wire.feed(request[-500_000:])
        assert wire.transport.protocol is wire.protocol
        assert isinstance(wire.handlers.held[0].body, memoryview)
        assert bytes(wire.handlers.held[0].body) == body

    @pytest.mark.parametrize("event", ["slow", "drain", "expire", "eof", "lost"])
    def test_what_happens_while_it_arrives(self, event: str) -> None:
        """Another protocol reads the body: everything else must reach the connection all the same."""
        wire = FakeWire()
        request = post("/echo", random_bytes(600_000))
        wire.feed(request[:-1000])
        receiver = wire.transport.protocol
        assert isinstance(receiver, asyncio.BufferedProtocol)
        if event == "slow":
            wire.sweep(61.0)
            assert wire.statuses() == [408]
            wire.feed(request[-1000:] + get() * 2)
            assert wire.statuses() == [408], "what still comes is dropped"
            wire.sweep(3.0)
            assert wire.aborted()
        elif event == "drain":
            wire.protocol.drain()
            wire.sweep(1.0)
            wire.feed(request[-1000:])
            assert wire.answers()[0].get("connection") == "close"
        elif event == "expire":
            wire.protocol.expire()
            assert wire.statuses() == [503]
        elif event == "eof":
            assert not receiver.eof_received()
        else:
            receiver.connection_lost(None)
            assert wire.site.connections == set()
        assert wire.handlers.paths() == (["/echo"] if event == "drain" else [])

    def test_back_pressure_while_it_arrives(self) -> None:
        wire = FakeWire()
        request = post("/echo", random_bytes(600_000))
        wire.feed(get("/hold") + request[:-1000])
        receiver = wire.transport.protocol
        assert isinstance(receiver, asyncio.BufferedProtocol)
        receiver.pause_writing()
        assert wire.protocol.write_paused
        answer_plain(wire.handlers.held[0])
        wire.feed(request[-1000:])
        assert wire.statuses() == [200], "the second answer waits for the reader"
        wire.protocol.resume_writing()
        assert wire.statuses() == [200, 200]

    def test_the_memory_is_freed_when_the_client_disconnects(self) -> None:
        wire = FakeWire()
        wire.feed(post("/echo", bytes(1_000_000))[:-1])
        assert wire.protocol._reader.direct is not None
        wire.transport.abort()
        wire.settle()
        # Not left to the garbage collector, which counts objects and not their bytes.
        assert wire.protocol._reader.direct is None


class TestExpect:
    def test_curl_gets_leave_to_send(self, server: Serving, handlers: Handlers, tmp_path: Path) -> None:
        file = tmp_path / "body"
        file.write_bytes(random_bytes(3_000_000))
        url = f"http://127.0.0.1:{server.port}/echo"
        out = tmp_path / "out"
        notes = curl("-v", "-H", "Expect: 100-continue", "--data-binary", f"@{file}", "-o", str(out), url)
        assert notes.count("< HTTP/1.1 100 Continue") == 1
        assert out.read_bytes() == file.read_bytes()

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_leave_is_given_once_and_before_the_body(self, client: Client, path: str) -> None:
        client.send(get(path, "Content-Length: 5", "Expect: 100-Continue", method="POST"))
        assert client.answer().status == 100
        client.send(b"hello")
        assert client.answer().body in (b"hello", b"5")
        client.send(get())
        assert client.answer().body == b"hello"

    def test_a_chunked_body_gets_leave(self, client: Client) -> None:
        request = post_chunked("/echo", b"hello", fields=("Expect: 100-continue",))
        end = request.index(b"\r\n\r\n") + 4
        client.send(request[:end])
        assert client.answer().status == 100
        assert client.ask(request[end:]).body == b"hello"

    @pytest.mark.parametrize("fields", [(), ("Content-Length: 0",)])
    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_without_a_body_no_leave_is_needed(self, client: Client, path: str, fields: tuple[str, ...]) -> None:
        answer = client.ask(get(path, "Expect: 100-continue", *fields, method="POST"))
        assert answer.status == 200

    def test_http_1_0_cannot_read_an_interim_answer(self, client: Client) -> None:
        assert client.ask(post("/echo", b"hello", "Expect: 100-continue", version="1.0")).status == 200

    @pytest.mark.parametrize("path", ["/echo", "/upload", "/nowhere"])
    def test_other_expectations_are_refused(self, client: Client, handlers: Handlers, path: str) -> None:
        answer = client.ask(post(path, b"hello", "Expect: a-miracle"))
        assert (answer.status, answer.get("connection")) == (417, "close")
        assert client.rest() == b""
        assert handlers.seen == []

    def test_too_large_is_sent_instead_of_100_continue(self, client: Client, handlers: Handlers) -> None:
        size = Limits().body_bytes + 1
        answer = client.ask(get("/echo", f"Content-Length: {size}", "Expect: 100-continue", method="POST"))
        assert (answer.status, answer.get("connection")) == (413, "close")
        assert client.rest() == b""

    def test_no_leave_after_an_early_answer(self, client: Client) -> None:
        client.send(get("/early", "Content-Length: 5", "Expect: 100-continue", method="POST"))
        answer = client.answer()
        assert (answer.status, answer.body, answer.get("connection")) == (200, b"early", "close")
        assert client.rest() == b""

    def test_no_leave_inside_an_answer_that_began_early(self) -> None:
        wire = FakeWire()
        wire.handlers.on_upload = lambda exchange: exchange.start(OK_PLAIN)
        wire.feed(get("/upload", "Content-Length: 5", "Expect: 100-continue", method="POST"))
        assert bytes(wire.transport.written).count(b"HTTP/1.1") == 1

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_leave_waits_for_its_turn(self, client: Client, server: Serving, handlers: Handlers, path: str) -> None:
        client.send(get("/hold") + get(path, "Content-Length: 5", "Expect: 100-continue", method="POST"))
        eventually(lambda: handlers.held)
        server.call(lambda: answer_plain(handlers.held[0]))
        assert client.answer().body == b"done"
        assert client.answer().status == 100
        assert client.ask(b"hello").body in (b"hello", b"5")
        assert client.ask(get()).body == b"hello"

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_a_client_that_did_not_wait_its_turn(self, path: str) -> None:
        wire = FakeWire()
        wire.feed(get("/hold"), post(path, b"hello", "Expect: 100-continue"))
        answer_plain(wire.handlers.held[0])
        assert wire.statuses() == [200, 200], "no leave for what is there already"
        assert wire.answers()[-1].body in (b"hello", b"5")

    def test_a_complete_upload_gets_no_100_continue(self) -> None:
        wire = FakeWire()
        wire.handlers.on_upload = lambda exchange: setattr(exchange, "on_body_end", None)
        wire.feed(get("/hold"), post("/upload", b"hello", "Expect: 100-continue"))
        answer_plain(wire.handlers.held.pop(0))
        assert wire.statuses() == [200]
        answer_plain(wire.handlers.held.pop(0))
        assert wire.statuses() == [200, 200]

    def test_leave_waits_for_answers_that_wait_for_the_reader(self) -> None:
        wire = FakeWire()
        wire.protocol.pause_writing()
        wire.feed(get(), get("/echo", "Content-Length: 5", "Expect: 100-continue", method="POST"))
        wire.protocol.resume_writing()
        assert wire.statuses() == [200, 100]
        wire.feed(b"hello")
        assert wire.statuses() == [200, 100, 200]


class TestCoding:
    @pytest.mark.parametrize(
        ("coding", "packed"),
        [
            ("gzip", gzip.compress(b"some text " * 1000, mtime=0)),
            ("x-gzip", gzip.compress(b"some text " * 1000, mtime=0)),
            ("deflate", zlib.compress(b"some text " * 1000)),
            ("identity", b"some text " * 1000),
        ],
    )
    @pytest.mark.parametrize("chunked", [False, True])
    def test_is_undone(self, client: Client, coding: str, packed: bytes, chunked: bool) -> None:
        field = f"Content-Encoding: {coding}"
        request = (
            post_chunked("/echo", packed[:9], packed[9:], fields=(field,)) if chunked else post("/echo", packed, field)
        )
        assert client.ask(request).body == b"some text " * 1000

    @pytest.mark.parametrize(
        ("coding", "body"),
        [("br", b"x"), ("gzip, gzip", b"x"), ("gzip", b"not gzip"), ("gzip", gzip.compress(b"cut", mtime=0)[:-3])],
    )
    def test_what_cannot_be_undone_is_the_clients_fault(self, client: Client, coding: str, body: bytes) -> None:
        answer = client.ask(post("/echo", body, f"Content-Encoding: {coding}"))
        assert answer.status == 400
        assert client.ask(get()).status == 200, "the body was read: the connection can go on"

    def test_a_bomb_is_refused_at_the_limit(self) -> None:
        wire = FakeWire(Limits(body_bytes=100_000))
        bomb = gzip.compress(bytes(10_000_000))
        assert len(bomb) < 100_000
        wire.feed(post("/echo", bomb, "Content-Encoding: gzip"), get())
        assert wire.statuses() == [413, 200]
        assert wire.handlers.paths() == ["/hello"]


class TestStreamed:
    def test_pieces_arrive_as_they_are_sent(self, client: Client, server: Serving, handlers: Handlers) -> None:
        client.send(get("/upload", "Content-Length: 6", method="POST") + b"abc")
        eventually(lambda: b"".join(handlers.pieces) == b"abc")
        client.send(b"def")
        assert client.answer().body == b"6"

    def test_an_empty_body_ends_immediately(self, client: Client, handlers: Handlers) -> None:
        for _ in range(3):
            answer = client.ask(post("/upload", b""))
            assert (answer.body, answer.get("connection")) == (b"0", None)

    def test_a_bodyless_request_answered_immediately_keeps_its_connection(self, client: Client) -> None:
        for _ in range(3):
            answer = client.ask(get("/streamed-get"))
            assert (answer.body, answer.get("connection")) == (b"early", None)

    def test_more_than_the_limit_of_whole_bodies(self) -> None:
        wire = FakeWire(Limits(body_bytes=1000))
        wire.feed(post("/upload", bytes(5000)), post_chunked("/upload", bytes(3000), bytes(3000)))
        assert [answer.body for answer in wire.answers()] == [b"5000", b"11000"]

    def test_an_answer_before_the_end_closes_and_has_connection_close(self, client: Client, handlers: Handlers) -> None:
        client.send(get("/early", "Content-Length: 1000000", method="POST") + bytes(1000))
        answer = client.answer()
        assert (answer.body, answer.get("connection")) == (b"early", "close")
        assert client.rest() == b""

    def test_the_rest_of_an_abandoned_body_is_not_a_request(self, client: Client, handlers: Handlers) -> None:
        hidden = get("/hello")
        client.send(get("/early", f"Content-Length: {len(hidden)}", method="POST") + hidden + hidden)
        assert client.answer().body == b"early"
        assert client.rest() == b""
        assert handlers.paths() == ["/early"]

    def test_pause_applies_backpressure_to_the_client(
        self, client: Client, server: Serving, handlers: Handlers
    ) -> None:
        size = 30_000_000
        handlers.on_upload = lambda exchange: exchange.pause_body()
        client.send(get("/upload", f"Content-Length: {size}", method="POST"))
        eventually(lambda: handlers.held)
        client.socket.settimeout(0.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < size:
                sent += client.socket.send(bytes(min(65_536, size - sent)))
        assert sum(map(len, handlers.pieces)) <= 512 * 1024, "no more than what had been read when the pause came"
        client.socket.settimeout(60)
        server.call(lambda: handlers.held[0].resume_body())
        client.send(bytes(size - sent))
        assert client.answer().body == b"%d" % size

    def test_pausing_twice_is_pausing_once(self) -> None:
        wire = FakeWire()
        wire.feed(post("/upload", bytes(10))[:-5])
        exchange = wire.handlers.held[0]
        exchange.pause_body()
        exchange.pause_body()
        assert not wire.reading()
        exchange.resume_body()
        assert wire.reading()
        exchange.resume_body()
        wire.feed(bytes(5))
        assert wire.statuses() == [200]

    def test_resuming_what_was_not_paused_does_not_let_others_through(self) -> None:
        wire = FakeWire(Limits(pipelined_requests=2))
        wire.handlers.on_upload = lambda exchange: setattr(exchange, "on_body_end", lambda: None)
        wire.feed(post("/upload", b"abc") + get() * 2)
        assert not wire.reading()
        wire.handlers.held[0].resume_body()
        assert not wire.reading()
        answer_plain(wire.handlers.held[0])
        assert wire.reading()

    def test_an_answer_begun_before_the_end_of_the_body_is_the_last(self) -> None:
        """It says so at its beginning, so it must keep to it, even if the rest of the body came in time."""
        wire = FakeWire()

        def begin(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN)
            exchange.on_body_end = exchange.finish

        wire.handlers.on_upload = begin
        wire.feed(post("/upload", b"abc")[:-1], b"c")
        assert wire.answers()[0].get("connection") == "close"
        assert wire.ended()

    def test_a_handler_that_paused_and_answered_leaves_the_connection_usable(self) -> None:
        wire = FakeWire()

        def pause(exchange: Exchange) -> None:
            exchange.on_body_end = exchange.pause_body

        wire.handlers.on_upload = pause
        wire.feed(post("/upload", b"abc"))
        assert not wire.reading()
        answer_plain(wire.handlers.held[0])
        wire.feed(get())
        assert wire.statuses() == [200, 200]

    def test_a_finished_exchange_cannot_pause_its_successor(self) -> None:
        wire = FakeWire()
        wire.feed(post("/upload", b"abc"))
        wire.handlers.held[0].pause_body()
        wire.feed(get())
        assert wire.statuses() == [200, 200]

    def test_a_pause_of_the_server_is_not_a_clients_silence(self) -> None:
        wire = FakeWire()
        wire.feed(post("/upload", bytes(10))[:-5])
        exchange = wire.handlers.held[0]
        exchange.pause_body()
        wire.sweep(wire.site.limits.body_idle_seconds * 3)
        exchange.resume_body()
        wire.sweep(wire.site.limits.body_idle_seconds / 2)
        wire.feed(bytes(5))
        assert wire.statuses() == [200]

    @pytest.mark.parametrize("where", ["on_body", "on_body_end", "on_body of a waiting request"])
    def test_a_callback_that_fails_is_a_500(
        self, wire_log: pytest.LogCaptureFixture, where: str, request: pytest.FixtureRequest
    ) -> None:
        wire = FakeWire()

        def fail(*_: object) -> None:
            raise RuntimeError("a secret of the callback")

        wire.handlers.on_upload = lambda exchange: setattr(exchange, where.split()[0], fail)
        if "waiting" in where:
            wire.feed(get("/hold") + post("/upload", b"abc"))
            answer_plain(wire.handlers.held[0])
        else:
            wire.feed(post("/upload", b"abc"))
        answer = wire.answers()[-1]
        assert (answer.status, b"secret" in answer.body) == (500, False)
        assert len([record for record in wire_log.records if record.exc_info]) == 1

    @pytest.mark.parametrize("waiting", [False, True])
    def test_after_an_answer_no_piece_is_delivered(self, waiting: bool) -> None:
        wire = FakeWire()

        def answer_at_once(exchange: Exchange) -> None:
            def piece(data: bytes) -> None:
                wire.handlers.pieces.append(data)
                answer_plain(exchange)

            exchange.on_body = piece

        wire.handlers.on_upload = answer_at_once
        if waiting:
            wire.feed(get("/hold") + post_chunked("/upload", b"a", b"b", b"c"))
            answer_plain(wire.handlers.held[0])
            assert wire.statuses() == [200, 200]
        else:
            wire.feed(post_chunked("/upload", b"a", b"b", b"c") + get())
            assert wire.statuses() == [200]
            assert wire.handlers.paths() == ["/upload"]
        assert wire.handlers.pieces == [b"a"]
