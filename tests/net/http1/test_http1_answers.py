# SPDX-License-Identifier: Apache-2.0
"""Responses: framing for every method and status, streaming with back-pressure, compression, errors, and what is refused."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
import zlib
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import pytest
from http1_fake import FakeWire
from http1_site import SECRET, Handlers
from http1_wire import Client, curl, get, post

from headrace.core.errors import INTERNAL_TEXT, Code, InvalidArgument
from headrace.net.http.exchange import Body, Exchange
from headrace.net.http.heads import HTTP_STATUS, OK_PLAIN, ResponseHead
from support.serving import Serving
from support.waiting import eventually


def hooked(hook: Callable[[Exchange], None]) -> FakeWire:
    wire = FakeWire()
    wire.handlers.on_hook = hook
    return wire


class TestFraming:
    def test_every_answer_has_date_length_and_type(self, client: Client) -> None:
        answer = client.ask(get())
        date = answer.get("date")
        assert date is not None
        assert date.endswith(" GMT")
        assert parsedate_to_datetime(date).year >= 2024
        assert answer.get("content-length") == "5"
        assert answer.get("content-type") == "text/plain; charset=utf-8"
        assert answer.reason == "OK"

    @pytest.mark.parametrize("path", ["/nowhere", "/raise", "/error/not_found", "/stream/1"])
    def test_so_have_errors_and_streams(self, client: Client, path: str) -> None:
        answer = client.ask(get(path))
        assert answer.get("date") is not None
        assert answer.get("content-type") is not None

    def test_head_has_the_length_but_no_body(self, client: Client) -> None:
        missing = str(len(client.ask(get("/nowhere")).body))
        for path, size in (("/hello", "5"), ("/big/100000", "100000"), ("/nowhere", missing)):
            answer = client.ask(get(path, method="HEAD"), to_head=True)
            assert answer.get("content-length") == size
        assert client.ask(get()).body == b"hello"

    def test_head_of_a_stream_has_no_body(self, client: Client) -> None:
        answer = client.ask(get("/stream/3", method="HEAD"), to_head=True)
        assert answer.status == 200
        assert client.ask(get()).body == b"hello"

    def test_curl_requests_the_head(self, server: Serving, handlers: Handlers) -> None:
        out = curl("--head", f"http://127.0.0.1:{server.port}/big/5000")
        assert "HTTP/1.1 200 OK" in out
        assert "content-length: 5000" in out

    def test_204_has_neither_length_nor_body(self, client: Client) -> None:
        answer = client.ask(get("/empty"))
        assert (answer.status, answer.get("content-length"), answer.reason) == (204, None, "No Content")
        assert client.ask(get()).body == b"hello"

    def test_304_does_not_claim_that_the_page_is_empty(self, client: Client) -> None:
        # RFC 9110, 8.6: a length in a 304 has to be that of the 200 it stands for.
        answer = client.ask(get("/not-modified"))
        assert (answer.status, answer.get("content-length"), answer.get("etag")) == (304, None, '"1"')
        assert client.ask(get()).body == b"hello"

    @pytest.mark.parametrize("status", [204, 304])
    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_handler_that_gives_them_a_body_breaks_nothing(self, status: int, streamed: bool) -> None:
        def answer(exchange: Exchange) -> None:
            if streamed:
                exchange.start(ResponseHead(status))
                exchange.send(b"stray bytes")
                exchange.finish()
            else:
                exchange.respond(ResponseHead(status), b"stray bytes")

        wire = hooked(answer)
        wire.feed(get("/hook"), get())
        assert b"stray" not in wire.transport.written
        assert wire.statuses() == [status, 200]

    def test_a_body_of_several_buffers(self) -> None:
        body: Body = [b"one ", bytearray(b"two "), memoryview(b"three")]
        wire = hooked(lambda exchange: exchange.respond(OK_PLAIN, body))
        wire.feed(get("/hook"))
        assert wire.answers()[0].body == b"one two three"

    def test_a_large_body_of_several_buffers(self, client: Client, handlers: Handlers) -> None:
        buffers = [bytes([number]) * 100_000 for number in range(50)]
        handlers.on_hook = lambda exchange: exchange.respond(OK_PLAIN, buffers)
        assert client.ask(get("/hook")).body == b"".join(buffers)

    def test_only_the_first_answer_counts(self) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.respond(OK_PLAIN, b"first")
            exchange.respond(OK_PLAIN, b"second")
            exchange.start(OK_PLAIN)
            exchange.send(b"third")
            exchange.finish()
            exchange.fail(InvalidArgument("fourth"))
            exchange.abort()

        wire = hooked(answer)
        wire.feed(get("/hook"), get())
        assert [answer.body for answer in wire.answers()] == [b"first", b"hello"]
        assert not wire.aborted()

    def test_exchange_reports_its_state(self) -> None:
        states: list[tuple[bool, bool]] = []

        def answer(exchange: Exchange) -> None:
            states.append((exchange.started, exchange.closed))
            exchange.start(OK_PLAIN)
            states.append((exchange.started, exchange.closed))
            exchange.finish()
            states.append((exchange.started, exchange.closed))

        hooked(answer).feed(get("/hook"))
        assert states == [(False, False), (True, False), (True, True)]

    def test_exchange_has_the_peers_address(self, client: Client, handlers: Handlers) -> None:
        handlers.on_hook = lambda exchange: exchange.respond(OK_PLAIN, exchange.peer.encode())
        host, port = client.socket.getsockname()
        assert client.ask(get("/hook")).body == f"{host}:{port}".encode()

    def test_the_access_log_has_every_answer_once(self) -> None:
        wire = FakeWire()
        lines: list[tuple[str, bytes, int]] = []
        wire.site.access_log = lambda peer, head, status: lines.append((peer, head.path, status))
        wire.feed(get(), get("/nowhere"), get("/stream/2"), get("/raise"), get("/empty"))
        assert lines == [
            ("192.0.2.1:4242", b"/hello", 200),
            ("192.0.2.1:4242", b"/nowhere", 404),
            ("192.0.2.1:4242", b"/stream/2", 200),
            ("192.0.2.1:4242", b"/raise", 500),
            ("192.0.2.1:4242", b"/empty", 204),
        ]


class TestStreaming:
    def test_is_chunked(self, client: Client) -> None:
        answer = client.ask(get("/stream/1000"))
        assert answer.get("transfer-encoding") == "chunked"
        assert answer.body == b"".join(b"piece %d\n" % number for number in range(1000))
        assert client.ask(get()).body == b"hello"

    def test_a_stream_of_nothing(self, client: Client) -> None:
        assert client.ask(get("/stream/0")).body == b""

    @pytest.mark.parametrize("size", [1, 16 * 1024, 16 * 1024 + 1, 1_000_000])
    def test_pieces_of_any_size(self, size: int) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN)
            exchange.send(b"")  # would end the body if it were written as a chunk
            exchange.send(memoryview(bytes(size)))
            exchange.send(bytearray(size))
            exchange.finish()

        wire = hooked(answer)
        wire.feed(get("/hook"), get())
        assert [len(answer.body) for answer in wire.answers()] == [2 * size, 5]

    def test_a_length_given_by_the_handler_replaces_chunks(self) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN, [(b"content-length", b"6")])
            exchange.send(b"abc")
            exchange.send(b"def")
            exchange.finish()

        wire = hooked(answer)
        wire.feed(get("/hook"), get())
        assert [answer.body for answer in wire.answers()] == [b"abcdef", b"hello"]
        assert wire.answers()[0].get("transfer-encoding") is None

    def test_extra_fields(self) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN, [(b"x-one", b"1")])
            exchange.finish()

        wire = hooked(answer)
        wire.feed(get("/hook"))
        assert wire.answers()[0].get("x-one") == "1"

    def test_a_client_that_does_not_read_pauses_the_handler(self, server: Serving, handlers: Handlers) -> None:
        piece = bytes(100_000)
        total = 100
        sent = 0
        waits = 0

        def answer(exchange: Exchange) -> None:
            def go_on() -> None:
                nonlocal sent, waits
                while sent < total:
                    sent += 1
                    if not exchange.send(piece):
                        waits += 1
                        return
                exchange.finish()

            exchange.on_writable = go_on
            exchange.start(OK_PLAIN)
            go_on()

        handlers.on_hook = answer
        with Client(server.port, receive_bytes=65_536) as client:
            client.send(get("/hook"))
            eventually(lambda: waits)
            server.call(lambda: None)
            assert sent < total, "the kernel's buffers do not hold 10 MB"
            assert len(client.answer().body) == total * len(piece)
            assert sent == total
            assert client.ask(get()).body == b"hello"

    def test_a_failing_drain_callback_cuts_the_answer(self, wire_log: pytest.LogCaptureFixture) -> None:
        def answer(exchange: Exchange) -> None:
            def fail() -> None:
                raise RuntimeError(SECRET)

            exchange.on_writable = fail
            exchange.start(OK_PLAIN)
            exchange.send(b"x")

        wire = hooked(answer)
        wire.feed(get("/hook"))
        wire.protocol.pause_writing()
        wire.protocol.resume_writing()
        assert wire.aborted()
        assert SECRET.encode() not in wire.transport.written
        assert len(wire_log.records) == 1

    def test_a_failure_after_the_start_cuts_the_answer(self, client: Client, handlers: Handlers) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN)
            exchange.send(b"half")
            raise RuntimeError(SECRET)

        handlers.on_hook = answer
        client.send(get("/hook"))
        rest = client.rest()
        assert SECRET.encode() not in rest
        assert b"0\r\n\r\n" not in rest, "a cut answer must not look whole"

    def test_abort_cuts_the_answer(self, client: Client, server: Serving, handlers: Handlers) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN)
            exchange.send(b"half")
            handlers.held.append(exchange)

        handlers.on_hook = answer
        client.send(get("/hook"))
        client.read_until(b"half")
        server.call(lambda: handlers.held[0].abort())
        assert b"0\r\n\r\n" not in client.rest()


class TestCompression:
    @pytest.mark.parametrize(
        ("accept", "coding"),
        [
            ("gzip", "gzip"),
            ("deflate", "deflate"),
            ("deflate, gzip", "gzip"),
            ("gzip;q=0.1, deflate;q=0.9", "deflate"),
            ("*", "gzip"),
            ("identity", None),
            ("gzip;q=0", None),
            ("br", None),
            ("", None),
        ],
    )
    def test_is_what_the_client_accepts(self, client: Client, accept: str, coding: str | None) -> None:
        answer = client.ask(get("/big/5000", f"Accept-Encoding: {accept}"))
        assert answer.get("content-encoding") == coding
        unpack: dict[str | None, Callable[[bytes], bytes]] = {
            "gzip": gzip.decompress,
            "deflate": zlib.decompress,
            None: bytes,
        }
        assert unpack[coding](answer.body) == bytes(5000)
        assert answer.get("content-length") == str(len(answer.body))

    def test_a_small_answer_is_not_compressed(self, client: Client) -> None:
        assert client.ask(get("/hello", "Accept-Encoding: gzip")).get("content-encoding") is None

    def test_head_has_the_compressed_length(self, client: Client) -> None:
        whole = client.ask(get("/big/5000", "Accept-Encoding: gzip"))
        head = client.ask(get("/big/5000", "Accept-Encoding: gzip", method="HEAD"), to_head=True)
        assert head.get("content-length") == whole.get("content-length")

    def test_what_a_handler_has_compressed_is_not_compressed_again(self) -> None:
        packed = gzip.compress(random_text())
        extra = [(b"content-encoding", b"gzip")]
        wire = hooked(lambda exchange: exchange.respond(OK_PLAIN, packed, extra))
        wire.feed(get("/hook", "Accept-Encoding: gzip"))
        answer = wire.answers()[0]
        assert answer.get("content-encoding") == "gzip"
        assert gzip.decompress(answer.body) == random_text()

    def test_a_fixed_head_is_not_compressed_either(self) -> None:
        packed = gzip.compress(random_text())
        head = ResponseHead(200, [(b"content-encoding", b"gzip")])
        wire = hooked(lambda exchange: exchange.respond(head, packed))
        wire.feed(get("/hook", "Accept-Encoding: gzip"))
        assert wire.answers()[0].get("content-encoding") == "gzip"
        assert wire.answers()[0].body == packed

    def test_curl_unpacks(self, server: Serving, handlers: Handlers) -> None:
        out = curl("--compressed", "-w", "%{size_download} %{size_header}", f"http://127.0.0.1:{server.port}/big/50000")
        body, _, sizes = out.rpartition("\0")
        assert len(body) == 49_999
        assert int(sizes.split()[0]) < 1000


def random_text() -> bytes:
    return b" ".join(b"%d" % (number * 7919 % 100_003) for number in range(2000))


class TestErrors:
    @pytest.mark.parametrize("code", Code, ids=lambda code: code.value)
    def test_every_row_of_the_table(self, client: Client, code: Code) -> None:
        answer = client.ask(get(f"/error/{code.value}"))
        assert answer.status == HTTP_STATUS[code]
        assert answer.get("content-type") == "application/json"
        assert json.loads(answer.body) == {"error": 'not like that: "quoted" \\ naïve'}
        assert answer.get("retry-after") is None
        assert client.ask(get()).status == 200, "an error of one request is not the end of the connection"

    def test_retry_after(self, client: Client) -> None:
        assert client.ask(get("/error/resource_exhausted?retry")).get("retry-after") == "7"

    @pytest.mark.parametrize(("seconds", "text"), [(0.0, "1"), (0.2, "1"), (1.2, "2"), (2.5, "3"), (60.0, "60")])
    def test_retry_after_is_never_too_early(self, seconds: float, text: str) -> None:
        wire = hooked(lambda exchange: exchange.fail(InvalidArgument("later", retry_after_seconds=seconds)))
        wire.feed(get("/hook"))
        assert wire.answers()[0].get("retry-after") == text

    def test_an_unknown_exception_does_not_expose_its_text(
        self, client: Client, wire_log: pytest.LogCaptureFixture
    ) -> None:
        answer = client.ask(get("/raise"))
        assert answer.status == 500
        assert json.loads(answer.body) == {"error": INTERNAL_TEXT}
        assert SECRET not in str(answer)
        records = [record for record in wire_log.records if record.exc_info]
        assert len(records) == 1
        assert SECRET in str(records[0].exc_info)
        assert client.ask(get()).status == 200

    def test_an_exception_after_the_answer_is_only_logged(self, wire_log: pytest.LogCaptureFixture) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.respond(OK_PLAIN, b"fine")
            raise RuntimeError(SECRET)

        wire = hooked(answer)
        wire.feed(get("/hook"), get())
        assert [answer.body for answer in wire.answers()] == [b"fine", b"hello"]
        assert len(wire_log.records) == 1

    def test_an_error_message_that_is_not_valid_text(self) -> None:
        wire = hooked(lambda exchange: exchange.fail(InvalidArgument("lone \ud800 surrogate")))
        wire.feed(get("/hook"), get())
        assert wire.statuses() == [400, 200]
        assert "surrogate" in json.loads(wire.answers()[0].body)["error"]

    def test_failing_later(self, client: Client, server: Serving, handlers: Handlers) -> None:
        client.send(get("/hold"))
        eventually(lambda: handlers.held)
        server.call(lambda: handlers.held[0].fail(RuntimeError(SECRET)))
        assert client.answer().status == 500

    @pytest.mark.parametrize("streamed", [False, True])
    @pytest.mark.parametrize(
        "field",
        [
            (b"x-bad", b"a\r\nset-cookie: b"),
            (b"x-bad", b"a\nb"),
            (b"x-bad", b"a\rb"),
            (b"x-bad", b"a\0b"),
            (b"x-bad\r\nset-cookie", b"a"),
            (b"x-bad\nset-cookie", b"a"),
            (b"x bad", b"a"),
            (b"x-bad:", b"a"),
            (b":status", b"200"),
            (b"", b"a"),
            (b"X-Bad", b"a"),
            ("x-bäd".encode(), b"a"),
        ],
    )
    def test_a_field_that_would_split_the_answer_is_a_500(
        self, wire_log: pytest.LogCaptureFixture, field: tuple[bytes, bytes], streamed: bool
    ) -> None:
        def answer(exchange: Exchange) -> None:
            if streamed:
                exchange.start(OK_PLAIN, [field])
            else:
                exchange.respond(OK_PLAIN, b"body", [field])

        wire = hooked(answer)
        wire.feed(get("/hook"), get())
        assert wire.statuses() == [500, 200]
        assert b"set-cookie" not in wire.transport.written

    @pytest.mark.parametrize("size", [10, 100_000])
    def test_a_body_that_is_not_bytes_is_a_500_or_cut(self, wire_log: pytest.LogCaptureFixture, size: int) -> None:
        bodies: list[object] = ["text" * size]
        wire = hooked(lambda exchange: exchange.respond(OK_PLAIN, bodies))  # type: ignore[arg-type]
        wire.feed(get("/hook"))
        assert wire.aborted() or wire.statuses() == [500]
        assert wire.protocol._current is None or wire.aborted()


def test_a_request_is_not_kept_alive_by_its_answer(server: Serving, handlers: Handlers, client: Client) -> None:
    seen: list[weakref.ref[Exchange]] = []

    def answer(exchange: Exchange) -> None:
        seen.append(weakref.ref(exchange))
        exchange.respond(OK_PLAIN, b"")

    handlers.on_hook = answer
    for _ in range(10):
        client.ask(post("/hook", b"x" * 100))
    server.call(gc.collect)
    assert [reference() for reference in seen] == [None] * 10
