# SPDX-License-Identifier: Apache-2.0
"""Clients that go away: told to whoever asked, work dropped, nothing left behind. And those that only stop talking."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable
from functools import partial

import pytest
from http1_fake import FakeWire
from http1_site import SECRET, Handlers, answer_plain
from http1_wire import Client, get, post

from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from headrace.net.http1.connection import Http1Connection
from headrace.net.http1.exchange import Http1Exchange
from support.serving import Serving
from support.waiting import eventually

LEAVE: dict[str, Callable[[Client], None]] = {
    "close": lambda client: client.socket.close(),
    "reset": Client.reset,
    "half-close": Client.half_close,
}


@pytest.fixture(params=LEAVE)
def leave(request: pytest.FixtureRequest) -> Callable[[Client], None]:
    return LEAVE[request.param]


class TestDisconnected:
    def test_a_pending_request_is_notified_once(
        self, client: Client, server: Serving, handlers: Handlers, leave: Callable[[Client], None]
    ) -> None:
        client.send(get("/hold"))
        eventually(lambda: handlers.held)
        leave(client)
        eventually(lambda: handlers.events)
        eventually(lambda: server.connections() == 0)
        assert handlers.events == ["disconnect"]
        exchange = handlers.held[0]
        assert exchange.closed
        server.call(lambda: answer_plain(exchange))  # too late, and harmless
        server.call(lambda: exchange.send(b"x"))
        server.call(exchange.finish)
        server.call(exchange.abort)
        server.call(lambda: exchange.fail(RuntimeError("late")))
        assert handlers.events == ["disconnect"]

    def test_in_the_middle_of_a_streamed_body(
        self, client: Client, server: Serving, handlers: Handlers, leave: Callable[[Client], None]
    ) -> None:
        client.send(post("/upload", bytes(1000))[:-1])
        eventually(lambda: sum(map(len, handlers.pieces)) == 999)
        leave(client)
        eventually(lambda: handlers.events)
        eventually(lambda: server.connections() == 0)
        assert handlers.events == ["disconnect"]

    def test_in_the_middle_of_an_unwatched_streamed_body(
        self, client: Client, server: Serving, handlers: Handlers, leave: Callable[[Client], None]
    ) -> None:
        """Without `on_disconnect`, too, half a body must not become a request that waits for ever."""
        handlers.on_upload = lambda exchange: setattr(exchange, "on_disconnect", None)
        client.send(post("/upload", bytes(1000))[:-1])
        eventually(lambda: handlers.pieces)
        leave(client)
        eventually(lambda: server.connections() == 0)
        assert handlers.held[0].closed

    @pytest.mark.parametrize("size", [100, 1_000_000])
    def test_in_the_middle_of_a_whole_body(
        self, client: Client, server: Serving, handlers: Handlers, leave: Callable[[Client], None], size: int
    ) -> None:
        client.send(post("/echo", bytes(size))[:-1])
        eventually(lambda: server.connections() == 1)
        leave(client)
        eventually(lambda: server.connections() == 0)
        assert handlers.seen == []

    def test_in_the_middle_of_a_head(
        self, client: Client, server: Serving, handlers: Handlers, leave: Callable[[Client], None]
    ) -> None:
        client.send(get()[:-3])
        eventually(lambda: server.connections() == 1)
        leave(client)
        eventually(lambda: server.connections() == 0)
        assert handlers.seen == []

    def test_in_the_middle_of_a_streamed_answer(self, client: Client, server: Serving, handlers: Handlers) -> None:
        def answer(exchange: Exchange) -> None:
            exchange.on_disconnect = lambda: handlers.events.append("disconnect")
            exchange.start(OK_PLAIN)
            handlers.held.append(exchange)

        handlers.on_hook = answer
        client.send(get("/hook"))
        client.read_until(b"\r\n\r\n")
        client.reset()
        eventually(lambda: handlers.events)
        assert server.call(lambda: handlers.held[0].send(b"x")) in (True, False)
        assert handlers.held[0].closed

    def test_while_it_does_not_read(self, server: Serving, handlers: Handlers) -> None:
        with Client(server.port, receive_bytes=4096) as client:
            client.send(get("/big/20000000") + get("/hello"))
            client.read_until(b"\r\n\r\n")  # the answer is being written, and cannot be done
            client.reset()
            eventually(lambda: server.connections() == 0)
        assert handlers.paths() == ["/big/20000000"]

    def test_requests_behind_a_held_one_are_not_executed(
        self, client: Client, server: Serving, handlers: Handlers
    ) -> None:
        client.send(get("/hold") + get("/hello") * 5)
        eventually(lambda: handlers.held)
        client.reset()
        eventually(lambda: handlers.events)
        server.call(lambda: answer_plain(handlers.held[0]))
        assert handlers.paths() == ["/hold"]

    def test_before_the_first_byte(self, client: Client, server: Serving, leave: Callable[[Client], None]) -> None:
        eventually(lambda: server.connections() == 1)
        leave(client)
        eventually(lambda: server.connections() == 0)

    def test_a_callback_that_fails_is_logged(self, wire_log: pytest.LogCaptureFixture) -> None:
        wire = FakeWire()

        def hold(exchange: Exchange) -> None:
            def fail() -> None:
                raise RuntimeError(SECRET)

            exchange.on_disconnect = fail

        wire.handlers.on_hook = hold
        wire.feed(get("/hook"))
        wire.transport.abort()
        wire.settle()
        assert len(wire_log.records) == 1
        assert wire.site.connections == set()

    def test_an_answered_request_is_not_notified(self, client: Client, server: Serving, handlers: Handlers) -> None:
        client.send(get("/hold"))
        eventually(lambda: handlers.held)
        server.call(lambda: answer_plain(handlers.held[0]))
        assert client.answer().status == 200
        client.reset()
        eventually(lambda: server.connections() == 0)
        assert handlers.events == []

    def test_many_clients_leave_nothing_behind(self, server: Serving, handlers: Handlers) -> None:
        """Counted, not timed: no exchange and no connection survives its client."""
        requests = [
            get("/hold-deaf"),
            post("/echo", bytes(100_000))[:-1],
            get("/hold"),
            get()[:-1],
            post("/upload", b"x"),
        ]
        for number in range(300):
            with Client(server.port) as client:
                client.send(requests[number % len(requests)])
                if number % 2:
                    client.reset()

        def all_gone() -> bool:
            # A client that closed looks like one that half-closed, until it is written to.
            for exchange in list(handlers.held):
                server.call(answer_plain, exchange)
            return server.connections() == 0

        eventually(all_gone)
        handlers.clear()
        server.call(gc.collect)
        things = gc.get_objects()
        # By `type`: `isinstance` asks the things themselves, and some of other packages warn when they are asked.
        connections = [
            thing for thing in things if issubclass(type(thing), Http1Connection) and thing.site is server.site
        ]
        exchanges = [thing for thing in things if issubclass(type(thing), Http1Exchange)]
        assert connections == []
        assert [exchange for exchange in exchanges if exchange._connection.site is server.site] == []

    def test_a_connection_is_freed_without_the_collector(self) -> None:
        """Its memory must not wait for a collection, which counts objects and not bytes."""
        gc.collect()
        gc.disable()
        try:
            wire = FakeWire()
            wire.feed(post("/echo", bytes(1_000_000))[:-1])
            direct = wire.protocol._reader.direct
            assert direct is not None
            array = weakref.ref(direct.obj)
            del direct
            wire.transport.abort()
            wire.settle()
            assert array() is None
        finally:
            gc.enable()


class TestHalfClosed:
    """`printf ... | nc`: the client has said all it wants, and reads."""

    def ask(self, server: Serving, data: bytes) -> bytes:
        with Client(server.port) as client:
            client.send(data)
            client.half_close()
            return client.rest()

    def test_is_answered(self, server: Serving, handlers: Handlers) -> None:
        assert self.ask(server, get()).endswith(b"\r\n\r\nhello")
        assert self.ask(server, get() * 3).count(b"HTTP/1.1 200 OK") == 3

    def test_a_large_answer_arrives_whole(self, server: Serving, handlers: Handlers) -> None:
        assert self.ask(server, get("/big/20000000")).endswith(bytes(20_000_000))

    def test_large_answers_in_line_arrive_whole(self, server: Serving, handlers: Handlers) -> None:
        """The last requests wait until the client has read the first answers, and it has half-closed by then."""
        data = self.ask(server, get("/big/15000000") * 2 + get())
        assert data.count(b"HTTP/1.1 200 OK") == 3
        assert data.endswith(b"\r\n\r\nhello")

    def test_requests_in_line_for_a_slow_reader_are_answered(self) -> None:
        wire = FakeWire()
        wire.protocol.pause_writing()
        wire.feed(get() + get())
        wire.eof()
        assert not wire.closed()
        wire.protocol.resume_writing()
        assert [answer.get("connection") for answer in wire.answers()] == [None, "close"]
        assert wire.closed()

    def test_a_delayed_unwatched_answer_arrives(self, client: Client, server: Serving, handlers: Handlers) -> None:
        client.send(get("/hold-deaf") + get())
        eventually(lambda: handlers.held)
        client.half_close()
        server.call(partial(asyncio.sleep, 0.01))
        server.call(lambda: answer_plain(handlers.held[0]))
        assert client.answer().body == b"done"
        last = client.answer()
        assert (last.body, last.get("connection")) == (b"hello", "close")
        assert client.rest() == b""
        eventually(lambda: server.connections() == 0)

    def test_half_a_request_behind_it_is_dropped(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold-deaf"), post("/echo", b"abc")[:-1])
        wire.eof()
        assert not wire.closed()
        answer_plain(wire.handlers.held[0])
        assert [(answer.body, answer.get("connection")) for answer in wire.answers()] == [(b"done", "close")]
        assert wire.closed(), "there is nothing to linger for: the client has said all"
        assert wire.handlers.paths() == ["/hold-deaf"]

    def test_a_stream_that_began_before_ends_with_its_connection(self) -> None:
        wire = FakeWire()
        held: list[Exchange] = []

        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN)
            held.append(exchange)

        wire.handlers.on_hook = answer
        wire.feed(get("/hook"))
        wire.eof()
        held[0].send(b"last words")
        held[0].finish()
        assert wire.answers()[0].body == b"last words"
        assert wire.closed()

    def test_without_a_request_the_connection_closes(self, client: Client, server: Serving) -> None:
        assert client.ask(get()).status == 200
        client.half_close()
        assert client.rest() == b""
        eventually(lambda: server.connections() == 0)


def test_a_reset_does_not_overtake_a_refusal(server: Serving, handlers: Handlers) -> None:
    """The server refuses early and closes while the client still sends: the client must be able to read why."""
    for _ in range(20):
        with Client(server.port) as client:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            client.send(get("/echo", f"Content-Length: {1 << 40}", method="POST"))
            client.send_if_open(bytes(500_000))
            assert client.answer().status == 413
