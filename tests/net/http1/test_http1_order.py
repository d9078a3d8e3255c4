# SPDX-License-Identifier: Apache-2.0
"""Many requests on one connection: keep-alive, HTTP/1.0, and pipelining answered in order whoever is ready first."""

from __future__ import annotations

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain
from http1_wire import Client, curl, get, post, post_chunked

from headrace.core.limits import Limits
from support.serving import Serving
from support.waiting import eventually


def release(server: Serving, handlers: Handlers, body: bytes = b"done") -> None:
    """Answer the request that is held the longest, once it is there."""
    eventually(lambda: handlers.held)
    server.call(lambda: answer_plain(handlers.held.pop(0), body))


class TestKeepAlive:
    def test_a_connection_serves_request_after_request(self, client: Client, handlers: Handlers) -> None:
        for number in range(5):
            answer = client.ask(post("/echo", b"number %d" % number))
            assert (answer.status, answer.body) == (200, b"number %d" % number)
            assert answer.get("connection") is None
        assert len(handlers.seen) == 5

    def test_connection_close_is_honoured_and_sent(self, client: Client) -> None:
        answer = client.ask(get("/hello", "Connection: close"))
        assert answer.get("connection") == "close"
        assert client.rest() == b""

    @pytest.mark.parametrize("value", ["Close", "keep-alive, close", "close, TE"])
    def test_close_is_found_in_any_spelling(self, client: Client, value: str) -> None:
        assert client.ask(get("/hello", f"Connection: {value}")).get("connection") == "close"
        assert client.rest() == b""

    def test_http_1_0_closes(self, client: Client) -> None:
        answer = client.ask(get("/hello", version="1.0"))
        assert (answer.status, answer.body, answer.get("connection")) == (200, b"hello", "close")
        assert client.rest() == b""

    def test_http_1_0_may_keep_the_connection(self, client: Client) -> None:
        for _ in range(3):
            answer = client.ask(get("/hello", "Connection: Keep-Alive", version="1.0"))
            assert (answer.body, answer.get("connection")) == (b"hello", "keep-alive")

    def test_http_1_0_needs_no_host(self, client: Client) -> None:
        assert client.ask(b"GET /hello HTTP/1.0\r\n\r\n").status == 200

    def test_http_1_0_gets_a_streamed_answer_without_chunks(self, client: Client) -> None:
        client.send(get("/stream/3", "Connection: keep-alive", version="1.0"))
        head, _, body = client.rest().partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"piece 0\npiece 1\npiece 2\n"

    def test_empty_lines_between_requests_are_skipped(self, client: Client) -> None:
        client.send(b"\r\n\r\n" + get() + b"\r\n" + get())
        assert [client.answer().body, client.answer().body] == [b"hello", b"hello"]

    def test_curl_reuses_its_connection(self, server: Serving, handlers: Handlers) -> None:
        url = f"http://127.0.0.1:{server.port}/hello"
        assert "Re-using existing connection" in curl("-v", url, url)

    def test_curl_speaks_http_1_0(self, server: Serving, handlers: Handlers) -> None:
        assert curl("--http1.0", f"http://127.0.0.1:{server.port}/hello") == "hello"


class TestPipelining:
    def test_requests_in_one_packet_are_answered_in_order(self, client: Client) -> None:
        client.send(b"".join(post("/echo", b"%d" % number) for number in range(50)))
        assert [client.answer().body for _ in range(50)] == [b"%d" % number for number in range(50)]

    def test_later_requests_wait_for_one_that_is_held(
        self, client: Client, server: Serving, handlers: Handlers
    ) -> None:
        client.send(get("/hold") + get("/hello") + post("/echo", b"last"))
        release(server, handlers)
        assert [client.answer().body for _ in range(3)] == [b"done", b"hello", b"last"]
        assert handlers.paths() == ["/hold", "/hello", "/echo"]

    def test_a_request_is_not_executed_before_the_one_in_front_is_answered(
        self, client: Client, server: Serving, handlers: Handlers
    ) -> None:
        client.send(get("/hold") + get("/hold"))
        eventually(lambda: handlers.held)
        server.call(lambda: None)
        assert handlers.paths() == ["/hold"]
        release(server, handlers, b"first")
        release(server, handlers, b"second")
        assert [client.answer().body for _ in range(2)] == [b"first", b"second"]

    @pytest.mark.parametrize("in_pieces", [False, True])
    def test_more_requests_than_may_wait_are_all_answered(
        self, client: Client, server: Serving, handlers: Handlers, in_pieces: bool
    ) -> None:
        limit = Limits().pipelined_requests
        requests = [get("/hold"), *(post("/echo", b"%d" % number) for number in range(3 * limit))]
        if in_pieces:
            for request in requests:
                client.send(request)
        else:
            client.send(b"".join(requests))
        release(server, handlers)
        bodies = [client.answer().body for _ in requests]
        assert bodies == [b"done", *(b"%d" % number for number in range(3 * limit))]
        assert client.ask(get()).status == 200

    def test_reading_pauses_when_enough_requests_wait_and_resumes_when_fewer_do(self) -> None:
        wire = FakeWire(Limits(pipelined_requests=3))
        wire.feed(get("/hold"), get(), get())
        assert wire.reading()
        wire.feed(get())
        assert not wire.reading()
        answer_plain(wire.handlers.held[0])
        assert wire.reading()
        assert wire.statuses() == [200] * 4

    def test_reading_stops_again_each_time(self) -> None:
        wire = FakeWire(Limits(pipelined_requests=2))
        for _ in range(3):
            wire.feed(get("/hold"), get(), get())
            assert not wire.reading()
            answer_plain(wire.handlers.held.pop())
            assert wire.reading()
        assert wire.statuses() == [200] * 9

    def test_a_packet_far_over_the_limit_does_not_confuse_the_count(self) -> None:
        wire = FakeWire(Limits(pipelined_requests=3))
        wire.feed(get("/hold") + get() * 2 + get("/hold") + get() * 20)
        assert not wire.reading()
        answer_plain(wire.handlers.held.pop())
        assert not wire.reading()
        answer_plain(wire.handlers.held.pop())
        assert wire.reading()
        assert wire.statuses() == [200] * 24

    def test_a_streamed_upload_behind_a_held_request(self, client: Client, server: Serving, handlers: Handlers) -> None:
        body = bytes(range(256)) * 8192
        client.send(get("/hold"))
        eventually(lambda: handlers.held)
        client.send(post("/upload", body[:100_000])[:50_000])
        release(server, handlers)
        client.send(post("/upload", body[:100_000])[50_000:] + get())
        assert [client.answer().body for _ in range(3)] == [b"done", b"100000", b"hello"]
        assert b"".join(handlers.pieces) == body[:100_000]

    def test_requests_behind_a_streamed_upload(self, client: Client, handlers: Handlers) -> None:
        client.send(post("/upload", b"abc") + get() + post_chunked("/upload", b"de", b"f") + post("/echo", b"x"))
        assert [client.answer().body for _ in range(4)] == [b"3", b"hello", b"6", b"x"]

    def test_the_body_of_a_waiting_upload_does_not_pile_up(self) -> None:
        limit = 4
        wire = FakeWire(Limits(pipelined_requests=limit))
        wire.feed(get("/hold") + get("/hold") + get() * (limit - 2) + post("/upload", bytes(1000))[:-500])
        assert not wire.reading()
        answer_plain(wire.handlers.held.pop(0))
        assert not wire.reading(), "the upload still waits behind the second held request"
        answer_plain(wire.handlers.held.pop(0))
        assert wire.reading()
        wire.feed(bytes(500))
        assert [answer.body for answer in wire.answers()] == [b"done", b"done", b"hello", b"hello", b"1000"]

    def test_an_upload_completed_while_waiting(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold") + post("/upload", b"abc") + get() + post("/upload", b"de"))
        answer_plain(wire.handlers.held[0])
        assert [answer.body for answer in wire.answers()] == [b"done", b"3", b"hello", b"5"]
        assert wire.reading()

    def test_an_upload_answered_while_the_next_request_is_half_there(self) -> None:
        wire = FakeWire()
        wire.handlers.on_upload = lambda exchange: setattr(exchange, "on_body_end", lambda: None)
        request = post("/echo", b"x" * 100)
        wire.feed(post("/upload", b"abc"), request[:-50])
        answer_plain(wire.handlers.held[0])
        wire.feed(request[-50:])
        assert [answer.body for answer in wire.answers()] == [b"done", b"x" * 100]
        assert not wire.ended()

    def test_nothing_is_executed_after_a_request_that_closes(self, client: Client, handlers: Handlers) -> None:
        client.send(get("/hello", "Connection: close") + get("/hello") * 3)
        assert client.answer().status == 200
        assert client.rest() == b""
        assert handlers.paths() == ["/hello"]

    def test_nothing_is_executed_after_a_held_request_that_closes(
        self, client: Client, server: Serving, handlers: Handlers
    ) -> None:
        client.send(get("/hold", "Connection: close"))
        eventually(lambda: handlers.held)
        client.send(get("/hello") * 3)
        release(server, handlers)
        assert client.answer().body == b"done"
        assert client.rest() == b""
        assert handlers.paths() == ["/hold"]

    def test_nothing_is_executed_after_http_1_0(self, client: Client, handlers: Handlers) -> None:
        client.send(get("/hello", version="1.0") + get("/hello", version="1.0"))
        assert client.answer().status == 200
        assert client.rest() == b""
        assert handlers.paths() == ["/hello"]

    def test_large_answers_to_pipelined_requests_wait_for_the_reader(self, client: Client, handlers: Handlers) -> None:
        client.send(get("/big/3000000") * 6 + get())
        eventually(lambda: handlers.seen)
        assert [len(client.answer().body) for _ in range(6)] == [3_000_000] * 6
        assert client.answer().body == b"hello"

    def test_an_answer_that_fills_the_socket_delays_the_next(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold") + get("/hold") + get())
        wire.protocol.pause_writing()
        answer_plain(wire.handlers.held.pop())
        assert wire.handlers.paths() == ["/hold"]
        wire.protocol.resume_writing()
        assert wire.handlers.paths() == ["/hold", "/hold"]
        answer_plain(wire.handlers.held.pop())
        assert wire.statuses() == [200] * 3

    def test_while_a_client_does_not_read_no_further_request_is_executed(self) -> None:
        wire = FakeWire()
        wire.protocol.pause_writing()
        wire.feed(get() + get())
        assert wire.handlers.seen == []
        wire.protocol.resume_writing()
        assert wire.statuses() == [200, 200]
