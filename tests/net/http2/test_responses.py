# SPDX-License-Identifier: Apache-2.0
"""What the server sends: RFC 9113 section 8.1 from its side. `Client` judges order, sizes and fields of all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from adversary import Client
from http2_echo_server import Http2EchoServer, http2_echo_server
from hyperframe.frame import ContinuationFrame, DataFrame, HeadersFrame
from raw_frames import INITIAL_WINDOW, MAX_FRAME, TOO_LARGE

from headrace.net.grpc.call import GrpcCall
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN, Buffer, ResponseHead
from headrace.net.http2.frames import ErrorCode
from headrace.net.site import Site

GRPC = [("content-type", "application/grpc"), ("te", "trailers")]


class Routes:
    """Answers that the echo routes do not give."""

    def __init__(self) -> None:
        self.early: list[Exchange] = []

    def add_to(self, site: Site) -> None:
        site.routes.add("GET", "/headers/{size}", self.headers)
        site.routes.add("POST", "/early", self.answer_early, streams_body=True)
        site.routes.add("POST", "/failing-body", self.fail_in_body, streams_body=True)
        site.routes.add("POST", "/failing-end", self.fail_at_end, streams_body=True)
        site.routes.add("GET", "/failing-goodbye", self.fail_at_goodbye)
        site.routes.add("GET", "/nothing", lambda exchange: exchange.respond(ResponseHead(204)))
        site.routes.add("GET", "/streamed", self.streamed)
        assert site.services is not None
        site.services.unary("test.Echo", "LargeTrailers", self.large_trailers)

    def headers(self, exchange: Exchange) -> None:
        exchange.respond(OK_PLAIN, b"body", [(b"x-large", b"x" * int(exchange.params[0]))])

    def streamed(self, exchange: Exchange) -> None:
        exchange.start(OK_PLAIN)
        exchange.send(b"abc")
        exchange.finish()

    def answer_early(self, exchange: Exchange) -> None:
        self.early.append(exchange)
        exchange.on_body = lambda piece: exchange.respond(OK_PLAIN, b"enough")  # type: ignore[misc]

    def fail_in_body(self, exchange: Exchange) -> None:
        def fail(piece: bytes) -> None:
            raise RuntimeError("a handler's mistake")

        exchange.on_body = fail  # type: ignore[misc]

    def fail_at_end(self, exchange: Exchange) -> None:
        def fail() -> None:
            raise RuntimeError("a handler's mistake")

        exchange.on_body_end = fail  # type: ignore[misc]

    def fail_at_goodbye(self, exchange: Exchange) -> None:
        def fail() -> None:
            raise RuntimeError("a handler's mistake")

        exchange.on_disconnect = fail  # type: ignore[misc]

    def large_trailers(self, call: GrpcCall, message: Buffer) -> None:
        call.set_trailing_metadata([("x-large", "x" * int(bytes(message)))])
        call.reply(message)


@pytest.fixture(scope="module")
def routes() -> Routes:
    return Routes()


@pytest.fixture(scope="module")
def shared_echo_server(routes: Routes) -> Iterator[Http2EchoServer]:
    with http2_echo_server(add_to=routes.add_to) as echo_server:
        yield echo_server


def frames_of(client: Client, stream_id: int) -> list[Any]:
    return [frame for frame in client.frames if frame.stream_id == stream_id]


# Bodies.


@pytest.mark.parametrize("path", ["/hello", "/big/100000", "/streamed"])
def test_head_has_a_head_and_no_body(client: Client, path: str) -> None:
    """8.1, RFC 9110 section 9.3.2: no DATA but an empty one for HEAD, and the length GET would have had if any."""
    client.request(1, "HEAD", path)
    answer = client.expect_ok(1, b"")
    lengths = {"/hello": b"5", "/big/100000": b"100000", "/streamed": None}
    assert answer.get(b"content-length") == lengths[path]


def test_204_has_neither_body_nor_length(client: Client) -> None:
    """8.1.1, RFC 9110 section 8.6: a server MUST NOT send content-length with 204."""
    client.request(1, path="/nothing")
    answer = client.answer(1)
    assert (answer.status, answer.body, answer.get(b"content-length")) == (204, b"", None)


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 16_385, 65_535])
def test_bodies_of_every_size_arrive_with_their_length(client: Client, size: int) -> None:
    """8.1.1: content-length is the sum of the DATA."""
    client.request(1, path=f"/big/{size}")
    assert client.expect_ok(1, bytes(size)).get(b"content-length") == b"%d" % size


@pytest.mark.parametrize("most", [16_384, 20_000, 1_000_000])
def test_the_clients_frame_size_is_respected(echo_server: Http2EchoServer, most: int) -> None:
    """4.2: no frame is larger than the client's SETTINGS_MAX_FRAME_SIZE; larger ones are used where they may."""
    client = echo_server.connect({MAX_FRAME: most, INITIAL_WINDOW: 3_000_000})
    client.grant(0, 3_000_000)
    client.request(1, path="/big/2000000")
    client.expect_ok(1, bytes(2_000_000))
    sizes = [len(frame.data) for frame in frames_of(client, 1) if isinstance(frame, DataFrame)]
    assert max(sizes) <= most
    client.change_settings({MAX_FRAME: 16_384})
    client.request(3, path="/big/100000")
    client.expect_ok(3, bytes(100_000))


def test_many_concurrent_streams_are_interleaved(echo_server: Http2EchoServer) -> None:
    """5: streams are independent: while a large answer waits for window, small ones go past it."""
    client = echo_server.connect({INITIAL_WINDOW: 20_000})
    client.grant(0, 5_000_000)
    for number in range(50):
        client.request(2 * number + 1, path=f"/big/{30_000 + number}")
    client.ping()
    assert not any(answer.ended for answer in client.answers.values())
    for number in reversed(range(50)):
        client.grant(2 * number + 1, 20_000)
        client.expect_ok(2 * number + 1, bytes(30_000 + number))


def test_uploads_are_interleaved(client: Client) -> None:
    """5: DATA of several requests may alternate frame by frame."""
    ids = range(1, 41, 2)
    for stream_id in ids:
        client.request(stream_id, "POST", "/echo", end=False)
    for letter in b"abc":
        for stream_id in ids:
            client.data(stream_id, bytes([letter]) * stream_id, end=letter == ord("c"))
    for stream_id in ids:
        client.expect_ok(stream_id, b"".join(bytes([letter]) * stream_id for letter in b"abc"))


# Heads.


@pytest.mark.parametrize("size", [10, 16_000, 16_384, 20_000, 100_000])
def test_a_large_head_is_split(client: Client, size: int) -> None:
    """4.3, 6.2, 6.10: a block over the client's frame size continues in CONTINUATION frames, the last one saying so."""
    client.request(1, path=f"/headers/{size}")
    assert client.expect_ok(1, b"body").get(b"x-large") == b"x" * size
    parts = [frame for frame in frames_of(client, 1) if isinstance(frame, HeadersFrame | ContinuationFrame)]
    assert len(parts) == {10: 1, 16_000: 1, 16_384: 2, 20_000: 2, 100_000: 7}[size]


def test_a_large_head_without_a_body_ends_its_stream(client: Client) -> None:
    """6.2: END_STREAM stands on the HEADERS frame of a split block."""
    client.request(1, "HEAD", "/headers/40000")
    client.expect_ok(1, b"")
    first = next(frame for frame in frames_of(client, 1) if isinstance(frame, HeadersFrame))
    assert "END_STREAM" in first.flags
    assert "END_HEADERS" not in first.flags


# gRPC: trailers.


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def test_grpc_answers_end_with_trailers(client: Client) -> None:
    """8.1: HEADERS, DATA, HEADERS with END_STREAM."""
    client.request(1, "POST", "/test.Echo/Unary", end=False, more=GRPC)
    client.data(1, message(b"hi"), end=True)
    answer = client.expect_ok(1, message(b"hi"))
    assert answer.trailers is not None
    assert dict(answer.trailers)[b"grpc-status"] == b"0"


@pytest.mark.parametrize("size", [100, 16_300, 16_384, 40_000])
def test_large_trailers_are_split(client: Client, size: int) -> None:
    """4.2, 6.10: trailers respect the client's frame size, too."""
    client.request(1, "POST", "/test.Echo/LargeTrailers", end=False, more=GRPC)
    client.data(1, message(b"%d" % size), end=True)
    answer = client.expect_ok(1)
    assert answer.trailers is not None
    assert len(dict(answer.trailers)[b"x-large"]) == size


@pytest.mark.parametrize("window", [0, 3, 7])
def test_trailers_wait_for_the_body(echo_server: Http2EchoServer, window: int) -> None:
    """8.1: trailers come after the last DATA, which may wait for window; they need none themselves."""
    client = echo_server.connect({INITIAL_WINDOW: window})
    client.request(1, "POST", "/test.Echo/Unary", end=False, more=GRPC)
    client.data(1, message(b"hi"), end=True)
    client.ping()
    assert len(client.answers[1].body) == window
    assert client.answers[1].ended == (window == 7)
    if window < 7:
        client.grant(1, 7 - window)
    assert client.expect_ok(1, message(b"hi")).trailers is not None


def test_an_unknown_method_is_trailers_only(client: Client) -> None:
    """gRPC over HTTP/2: an error without messages is one HEADERS frame; a whole request gets no reset after it."""
    client.request(1, "POST", "/test.Echo/Nothing", more=GRPC)
    answer = client.expect_ok(1, b"")
    assert answer.get(b"grpc-status") == b"12"
    client.ping()
    assert answer.reset is None


# 100 Continue.


@pytest.mark.parametrize("path", ["/echo", "/upload"])
def test_100_continue_is_sent_when_it_is_waited_for(client: Client, path: str) -> None:
    """8.1, RFC 9110 section 10.1.1: a client that expects 100 gets it, or a final answer, before it sends the body."""
    client.request(1, "POST", path, end=False, more=[("expect", "100-continue")])
    client.ping()
    assert [dict(fields)[b":status"] for fields in client.answers[1].informational] == [b"100"]
    client.data(1, b"body", end=True)
    client.expect_ok(1, b"body" if path == "/echo" else b"4")
    assert len(client.answers[1].informational) == 1


def test_100_continue_is_not_sent_for_a_body_we_refuse(client: Client) -> None:
    """RFC 9110 section 10.1.1: a final status takes its place."""
    client.request(1, "POST", "/echo", end=False, more=[("expect", "100-continue"), *TOO_LARGE])
    answer = client.answer(1)
    assert (answer.status, answer.informational) == (413, [])


def test_100_continue_is_not_sent_without_a_body(client: Client) -> None:
    """RFC 9110 section 10.1.1: nothing to wait for."""
    client.request(1, "POST", "/echo", more=[("expect", "100-continue")])
    assert client.expect_ok(1, b"").informational == []


# Answers before the end of the request.


@pytest.mark.parametrize("path", ["/early", "/echo", "/test.Echo/Nothing"])
def test_an_answer_before_the_end_of_the_request_resets_without_error(client: Client, path: str) -> None:
    """8.1: after a complete answer a server MAY ask the client to stop with RST_STREAM(NO_ERROR), after END_STREAM."""
    more = {"/early": [], "/echo": TOO_LARGE}.get(path, GRPC)
    client.request(1, "POST", path, end=False, more=more)
    if path == "/early":
        client.data(1, b"first piece")
    answer = client.answer(1)
    assert answer.ended
    client.expect_reset(1, ErrorCode.NO_ERROR)
    client.data(1, bytes(1000))
    client.data(1, b"", end=True)
    client.request(3)
    client.expect_ok(3)


def test_a_request_that_ends_with_the_answered_frame_is_not_disturbed(client: Client) -> None:
    """8.1: answered early, and the frame that made it so was the last."""
    client.request(1, "POST", "/early", end=False)
    client.data(1, b"all", end=True)
    client.expect_ok(1, b"enough")
    client.ping()
    assert client.answers[1].reset in (None, ErrorCode.NO_ERROR)


def test_a_whole_request_gets_no_reset(client: Client, routes: Routes) -> None:
    """5.1: a stream that both sides have ended is closed; RST_STREAM on it would be noise, whatever route it took."""
    for stream_id, (method, path) in enumerate((("GET", "/hello"), ("POST", "/upload"), ("GET", "/big/40000"))):
        client.request(2 * stream_id + 1, method, path)
        client.expect_ok(2 * stream_id + 1)
    client.ping()
    assert not any("RstStream" in words for words in client.seen)


# Handlers that fail.


@pytest.mark.parametrize("path", ["/failing-body", "/failing-end"])
def test_a_failing_body_handler_costs_its_stream_and_no_other(shared_echo_server: Http2EchoServer, path: str) -> None:
    """5.4.2: a fault of ours on one stream is that stream's."""
    with shared_echo_server.connect() as client:
        client.request(1, "POST", "/hold")
        client.request(3, "POST", path, end=False)
        client.data(3, b"piece", end=True)
        answer = client.answer(3)
        assert answer.reset is not None or answer.status == 500
        client.request(5)
        client.expect_ok(5)
        assert shared_echo_server.handlers.events == []
    shared_echo_server.disconnect()


def test_a_handler_that_fails_at_goodbye_does_not_silence_the_others(shared_echo_server: Http2EchoServer) -> None:
    """When a connection is lost every handler is told, whatever the one before it does."""
    shared_echo_server.disconnect()
    with shared_echo_server.connect() as client:
        client.request(1, path="/failing-goodbye")
        client.request(3, "POST", "/hold")
        client.request(5, path="/failing-goodbye")
        client.request(7, "POST", "/hold")
        client.ping()
    shared_echo_server.until(lambda: shared_echo_server.handlers.events == ["disconnect", "disconnect"])
    shared_echo_server.disconnect()


def test_a_stream_the_handler_aborts_is_reset(echo_server: Http2EchoServer) -> None:
    """5.4.2: RST_STREAM with INTERNAL_ERROR, and only that."""
    client = echo_server.connect()
    client.request(1, "POST", "/hold")
    client.ping()
    echo_server.server.call(echo_server.handlers.held[0].abort)
    client.expect_reset(1, ErrorCode.INTERNAL_ERROR)
