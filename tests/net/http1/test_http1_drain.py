# SPDX-License-Identifier: Apache-2.0
"""Draining a connection: nothing that a client has sent is lost, and the client is told that it was the last."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain, http1_site
from http1_wire import Client, get, post

from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_PLAIN
from support.serving import Serving, serving
from support.waiting import eventually


def closing(wire: FakeWire) -> list[tuple[bytes, str | None]]:
    return [(answer.body, answer.get("connection")) for answer in wire.answers()]


class TestConnection:
    def test_an_idle_one_closes_at_the_next_sweep(self) -> None:
        wire = FakeWire()
        wire.feed(get())
        wire.protocol.drain()
        assert not wire.ended(), "a request may be on its way"
        wire.sweep()
        assert wire.ended()
        assert closing(wire) == [(b"hello", None)]

    def test_a_request_that_was_on_its_way_is_answered(self) -> None:
        wire = FakeWire()
        wire.feed(get())
        wire.protocol.drain()
        wire.feed(get())
        assert closing(wire) == [(b"hello", None), (b"hello", "close")]
        assert wire.ended()

    def test_a_new_connection(self) -> None:
        wire = FakeWire()
        wire.protocol.drain()
        wire.feed(post("/echo", b"first"))
        assert closing(wire) == [(b"first", "close")]

    def test_a_held_request_is_answered(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold"))
        wire.protocol.drain()
        wire.sweep(10.0)
        assert not wire.ended()
        answer_plain(wire.handlers.held[0])
        assert closing(wire) == [(b"done", "close")]
        assert wire.ended()
        assert wire.handlers.events == []

    def test_all_requests_in_line_are_answered(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold") + get() + post("/upload", b"abc") + get("/hold"))
        wire.protocol.drain()
        answer_plain(wire.handlers.held.pop(0))
        wire.sweep()
        assert not wire.ended()
        answer_plain(wire.handlers.held.pop())
        assert closing(wire) == [(b"done", None), (b"hello", None), (b"3", None), (b"done", "close")]
        assert wire.ended()

    @pytest.mark.parametrize("size", [10, 100_000])
    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_a_body_on_its_way_is_read_and_answered(self, path: str, size: int) -> None:
        wire = FakeWire()
        request = post(path, bytes(size))
        wire.feed(request[:-5])
        wire.protocol.drain()
        wire.sweep()
        wire.feed(request[-5:])
        (answer,) = wire.answers()
        assert (answer.status, answer.get("connection")) == (200, "close")
        assert wire.ended()

    def test_a_head_on_its_way_is_read_and_answered(self) -> None:
        wire = FakeWire()
        wire.feed(get()[:-1])
        wire.protocol.drain()
        wire.sweep()
        wire.feed(b"\n")
        assert closing(wire) == [(b"hello", "close")]

    def test_a_request_half_there_behind_a_held_one_is_read_and_answered(self) -> None:
        wire = FakeWire()
        request = post("/echo", b"abc")
        wire.feed(get("/hold") + request[:-1])
        wire.protocol.drain()
        answer_plain(wire.handlers.held[0])
        wire.feed(request[-1:])
        assert closing(wire) == [(b"done", None), (b"abc", "close")]

    def test_a_known_head_whose_body_is_still_being_sent(self) -> None:
        wire = FakeWire()
        request = post("/echo", b"abc")
        wire.feed(request, request[:-1])
        wire.protocol.drain()
        wire.sweep()
        wire.feed(request[-1:])
        assert closing(wire) == [(b"abc", None), (b"abc", "close")]

    def test_a_stream_continues_to_its_end(self) -> None:
        wire = FakeWire()
        held: list[Exchange] = []

        def answer(exchange: Exchange) -> None:
            exchange.start(OK_PLAIN)
            held.append(exchange)

        wire.handlers.on_hook = answer
        wire.feed(get("/hook"))
        wire.protocol.drain()
        wire.sweep(100.0)
        assert held[0].send(b"still here")
        held[0].finish()
        assert wire.answers()[0].body == b"still here"
        assert wire.ended()

    def test_nothing_is_executed_after_the_last_answer(self) -> None:
        wire = FakeWire()
        wire.protocol.drain()
        wire.feed(get() + get("/hold"))
        assert closing(wire) == [(b"hello", "close")]
        assert wire.handlers.paths() == ["/hello"]

    def test_nothing_is_executed_after_the_last_answer_to_a_known_head(self) -> None:
        wire = FakeWire()
        wire.feed(get() + get("/nowhere"))
        wire.transport.written.clear()
        wire.handlers.seen.clear()
        wire.protocol.drain()
        wire.feed(get() + get() + get("/nowhere") + b"garbage")
        assert closing(wire) == [(b"hello", "close")]
        assert wire.handlers.paths() == ["/hello"]

    def test_http_1_0(self) -> None:
        wire = FakeWire()
        wire.protocol.drain()
        wire.feed(get("/hello", "Connection: keep-alive", version="1.0"))
        assert closing(wire) == [(b"hello", "close")]

    def test_an_answer_still_unread(self) -> None:
        wire = FakeWire()
        wire.feed(get())
        wire.protocol.pause_writing()
        wire.feed(get())
        wire.protocol.drain()
        wire.sweep()
        assert not wire.ended()
        wire.protocol.resume_writing()
        assert closing(wire) == [(b"hello", None), (b"hello", "close")]

    def test_draining_does_not_forgive_slowness(self) -> None:
        wire = FakeWire()
        wire.feed(get()[:-1])
        wire.protocol.drain()
        wire.sweep(11.0)
        assert wire.statuses() == [408]


class TestExpired:
    """The time to drain is over: whoever waits is told, whoever works is told to stop."""

    def test_an_idle_connection_closes(self) -> None:
        wire = FakeWire()
        wire.feed(get())
        wire.protocol.expire()
        assert closing(wire) == [(b"hello", None)]
        assert wire.ended()

    def test_a_pending_request_gets_an_answer_and_its_handler_is_notified(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold") + get())
        wire.protocol.expire()
        (answer,) = wire.answers()
        assert (answer.status, answer.get("connection")) == (503, "close")
        assert wire.handlers.events == ["disconnect"]
        assert wire.ended()
        wire.sweep(10.0)
        assert wire.handlers.events == ["disconnect"]
        assert wire.site.connections == set()

    @pytest.mark.parametrize("path", ["/echo", "/upload"])
    def test_a_request_that_is_half_there_gets_an_answer(self, path: str) -> None:
        wire = FakeWire()
        wire.feed(post(path, b"abc")[:-1])
        wire.protocol.expire()
        (answer,) = wire.answers()
        assert (answer.status, answer.get("connection")) == (503, "close")
        assert wire.handlers.events == ([] if path == "/echo" else ["disconnect"])

    def test_a_stream_is_cut_and_its_handler_is_notified(self) -> None:
        wire = FakeWire()
        held: list[Exchange] = []

        def answer(exchange: Exchange) -> None:
            exchange.on_disconnect = lambda: wire.handlers.events.append("disconnect")
            exchange.start(OK_PLAIN)
            exchange.send(b"half")
            held.append(exchange)

        wire.handlers.on_hook = answer
        wire.feed(get("/hook"))
        wire.protocol.expire()
        assert wire.handlers.events == ["disconnect"]
        held[0].send(b"more")  # does nothing
        held[0].finish()
        assert b"0\r\n\r\n" not in wire.transport.written

    def test_twice_is_once(self) -> None:
        wire = FakeWire()
        wire.feed(get("/hold"))
        wire.protocol.expire()
        wire.protocol.expire()
        wire.protocol.abort()
        wire.settle()
        assert wire.statuses() == [503]
        assert wire.handlers.events == ["disconnect"]


class TestServer:
    def test_a_drain_loses_nothing(self) -> None:
        """As SIGTERM does it: held, in line, on its way, idle and silent clients at once."""
        handlers = Handlers()
        request = post("/echo", bytes(200_000))
        with serving(lambda: http1_site(handlers)) as server:
            with (
                Client(server.port) as held,
                Client(server.port) as sending,
                Client(server.port) as idle,
                Client(server.port) as silent,
            ):
                held.send(get("/hold") + get())
                sending.send(request[:-100_000])
                idle.ask(get("/nowhere"))
                eventually(lambda: handlers.held and server.connections() == 4)
                drained = self.begin_drain(server)
                eventually(lambda: server.site.draining)
                sending.send(request[-100_000:])
                assert len(sending.answer().body) == 200_000
                assert sending.rest() == b""
                assert idle.rest() == b""
                assert silent.rest() == b""
                server.call(lambda: answer_plain(handlers.held[0]))
                assert [held.answer().body, held.answer().body] == [b"done", b"hello"]
                assert held.rest() == b""
            assert drained.result(60) == 0
            assert server.connections() == 0

    @staticmethod
    def begin_drain(server: Serving) -> Future[int]:
        return asyncio.run_coroutine_threadsafe(server.server.drain(20.0), server.loop)
