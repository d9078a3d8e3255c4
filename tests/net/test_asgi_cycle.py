# SPDX-License-Identifier: Apache-2.0
"""The ASGI bridge on a fake exchange: every message, every way to fail, and back-pressure both ways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from headrace.core.errors import NotFound
from headrace.net.asgi_host import LifespanFailed, MountedApp, WebSocketSession, address_of
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import HTTP_STATUS, Fields, RequestHead, ResponseHead

Test = Callable[[], Coroutine[Any, Any, None]]
GET = {"type": "http.request", "body": b"", "more_body": False}
GONE = {"type": "http.disconnect"}


class FakeExchange(Exchange):
    """Keeps everything that happens to it in `events`; `room` is what `send` returns."""

    def __init__(
        self, method: bytes = b"GET", target: bytes = b"/", fields: Fields = (), *, version: str = "1.1", **options: Any
    ) -> None:
        self.head = RequestHead(method, target, fields, version=version, **options)
        self.on_body = self.on_body_end = self.on_disconnect = self.on_writable = None
        self.room = True
        self.events: list[Any] = []
        self.over = asyncio.Event()
        self._changed = asyncio.Event()

    peer = "[::1]:5000"

    @property
    def started(self) -> bool:
        return bool(self.events)

    @property
    def closed(self) -> bool:
        return self.over.is_set()

    def respond(self, head: ResponseHead, body: Any = b"", extra: Fields = ()) -> None:
        assert not self.events
        memoryview(b"".join(body) if isinstance(body, list) else body)  # as the real ones, refuses what is no bytes
        self._note((head.status, list(extra), b"".join(body) if isinstance(body, list) else body))
        self.over.set()

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        assert not self.events
        self._note((head.status, list(extra)))

    def send(self, data: Any) -> bool:
        assert data  # an empty chunk would end a chunked body
        self._note(bytes(data))
        return self.room

    def finish(self) -> None:
        self._note("finish")
        self.over.set()

    def abort(self) -> None:
        self._note("abort")
        self.over.set()

    def pause_body(self) -> None:
        self._note("pause")

    def resume_body(self) -> None:
        self._note("resume")

    def body(self, *pieces: bytes) -> None:  # type: ignore[override]
        for piece in pieces:
            assert self.on_body is not None
            self.on_body(piece)

    def body_end(self) -> None:
        assert self.on_body_end is not None
        self.on_body_end()

    def disconnect(self) -> None:
        self.over.set()
        assert self.on_disconnect is not None
        self.on_disconnect()

    async def until(self, count: int) -> None:
        """Wait for so many events."""
        while len(self.events) < count:
            self._changed.clear()
            await self._changed.wait()

    def _note(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()


def run(test: Test) -> None:
    asyncio.run(asyncio.wait_for(test(), 40))


async def drive(app: Any, exchange: FakeExchange, root_path: str = "") -> MountedApp:
    """Hand a bodiless request to an application and wait until the application has returned."""
    asgi = MountedApp(app, root_path)
    asgi.handle(exchange)
    exchange.body_end()
    await asgi.shutdown()
    return asgi


def answer(*messages: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(data: bytes = b"", more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


# Scopes.


def test_the_scope_of_an_http_request() -> None:
    async def test() -> None:
        scopes: list[Any] = []

        async def app(scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
            scopes.append(scope)
            await answer(start(), body())(scope, receive, send)

        fields = [(b"host", b"h"), (b"x", b"1"), (b"x", b"2")]
        await drive(app, FakeExchange(b"POST", b"/api/caf%C3%A9%2Fx?a=%20b", fields), "/api/")
        await drive(app, FakeExchange(version="2", scheme=b"https", authority=b"host:1"))
        first, second = scopes
        assert first == {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST",
            "path": "/api/caf\u00e9/x",
            "raw_path": b"/api/caf%C3%A9%2Fx",
            "query_string": b"a=%20b",
            "root_path": "/api",
            "headers": fields,
            "client": ("::1", 5000),
            "server": None,
            "extensions": {},
        }
        assert (second["http_version"], second["scheme"]) == ("2", "https")
        assert second["headers"] == [(b"host", b"host:1")]

    run(test)


@pytest.mark.parametrize(
    ("peer", "address"), [("1.2.3.4:5", ("1.2.3.4", 5)), ("[::1]:5", ("::1", 5)), ("unix", None), ("gone", None)]
)
def test_the_clients_address(peer: str, address: tuple[str, int] | None) -> None:
    assert address_of(peer) == address


# Responses.


@pytest.mark.parametrize(
    ("messages", "events"),
    [
        ([start(), body(b"x")], [(200, [], b"x")]),
        ([start(404, (b"A-Name", b"v")), body(b"x")], [(404, [(b"a-name", b"v")], b"x")]),
        ([start(200, (b"content-length", b"999")), body(b"x")], [(200, [], b"x")]),
        ([start(), {"type": "http.response.body"}], [(200, [], b"")]),
        ([start(), body(b"a", True), body(b"", True), body(b"b")], [(200, []), b"a", b"b", "finish"]),
        ([start(), body(b"", True), body(b"")], [(200, []), "finish"]),
        (
            [start(200, (b"content-length", b"2")), body(b"a", True), body(b"b")],
            [(200, [(b"content-length", b"2")]), b"a", b"b", "finish"],
        ),
        ([start(200, (b"connection", b"close"), (b"transfer-encoding", b"chunked")), body(b"x")], [(200, [], b"x")]),
        # Compressed already: `respond` would compress it again.
        (
            [start(200, (b"content-encoding", b"gzip"), (b"content-length", b"1")), body(b"x")],
            [(200, [(b"content-encoding", b"gzip"), (b"content-length", b"1")]), b"x", "finish"],
        ),
    ],
)
def test_the_messages_of_an_application_are_sent(messages: Any, events: Any) -> None:
    async def test() -> None:
        exchange = FakeExchange()
        await drive(answer(*messages), exchange)
        assert exchange.events == events

    run(test)


@pytest.mark.parametrize("bodies", [[body()], [body(b"12345")], [body(b"", True), body(b"12345")]])
def test_head_keeps_the_length_and_has_no_body(bodies: Any) -> None:
    async def test() -> None:
        exchange = FakeExchange(b"HEAD")
        await drive(answer(start(200, (b"content-length", b"5")), *bodies), exchange)
        assert exchange.events == [(200, [(b"content-length", b"5")]), "finish"]

    run(test)


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([], 500),
        ([start()], 500),
        ([body(b"x")], 500),
        ([start(), start()], 500),
        ([{"type": "http.response.nonsense"}], 500),
        ([start(200, (b"x", b"a\r\nset-cookie: b")), body(b"x")], 500),
        ([start(), body("text")], 500),  # type: ignore[arg-type]
    ],
)
def test_a_broken_application_gives_500_and_a_log_line(
    messages: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        exchange = FakeExchange()
        await drive(answer(*messages), exchange)
        assert [event[0] for event in exchange.events] == [status]

    run(test)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize(
    "messages",
    [
        [start(), body(b"x", True)],
        [start(200, (b"content-length", b"3")), body(b"x", True), body(b"x")],
        [start(200, (b"content-length", b"1")), body(b"x", True), body(b"x", True)],
        [start(), body(b"x", True), {"type": "http.response.nonsense"}],
    ],
)
def test_a_response_that_breaks_off_is_cut(messages: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        exchange = FakeExchange()
        await drive(answer(*messages), exchange)
        assert "finish" not in exchange.events
        assert exchange.events[-1] == "abort"

    run(test)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_exceptions_become_errors(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def fails(scope: Any, receive: Any, send: Any) -> None:
            raise KeyError("secret")

        async def knows(scope: Any, receive: Any, send: Any) -> None:
            raise NotFound("no such thing")

        first, second = FakeExchange(), FakeExchange()
        await drive(fails, first)
        await drive(knows, second)
        assert first.events[0][0] == 500
        assert b"secret" not in first.events[0][2]
        assert second.events[0][0] == HTTP_STATUS[NotFound.code]
        assert b"no such thing" in second.events[0][2]

    run(test)
    assert len(caplog.records) == 1  # only the one that is a bug


def test_a_failing_background_task_does_not_touch_a_finished_response(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answer(start(), body(b"x"))(scope, receive, send)
            raise KeyError("late")

        exchange = FakeExchange()
        await drive(app, exchange)
        assert exchange.events == [(200, [], b"x")]

    run(test)
    assert len(caplog.records) == 1


# Bodies and back-pressure.


def test_the_body_arrives_in_order_and_then_the_end() -> None:
    async def test() -> None:
        got: asyncio.Queue[Any] = asyncio.Queue()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for _ in range(3):
                got.put_nowait(await receive())
            await answer(start(), body())(scope, receive, send)
            got.put_nowait(await receive())

        asgi, exchange = MountedApp(app), FakeExchange(b"POST")
        asgi.handle(exchange)
        exchange.body(b"a", b"b")
        assert await got.get() == {"type": "http.request", "body": b"ab", "more_body": True}
        exchange.body(b"c")
        assert await got.get() == {"type": "http.request", "body": b"c", "more_body": True}
        exchange.body_end()
        assert await got.get() == GET
        assert await got.get() == GONE  # the response is complete
        await asgi.shutdown()

    run(test)


def test_the_last_piece_is_marked_as_the_last() -> None:
    async def test() -> None:
        got: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            got.append(await receive())
            await answer(start(), body())(scope, receive, send)

        asgi, exchange = MountedApp(app), FakeExchange(b"POST")
        asgi.handle(exchange)
        exchange.body(b"all")
        exchange.body_end()
        await asgi.shutdown()
        assert got == [{"type": "http.request", "body": b"all", "more_body": False}]

    run(test)


def test_a_client_that_sends_faster_than_the_application_reads_is_held_back() -> None:
    async def test() -> None:
        read = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await read.wait()
            size = 0
            more = True
            while more:
                message = await receive()
                size += len(message["body"])
                more = message["more_body"]
            await answer(start(), body(b"%d" % size))(scope, receive, send)

        asgi, exchange = MountedApp(app), FakeExchange(b"POST")
        asgi.handle(exchange)
        exchange.body(b"x" * 200_000)
        assert exchange.events == []
        exchange.body(b"x" * 200_000, b"x")
        assert exchange.events == ["pause"]
        exchange.events.clear()
        read.set()
        await exchange.until(1)
        assert exchange.events == ["resume"]
        exchange.events.clear()
        exchange.body_end()
        await asgi.shutdown()
        assert exchange.events == [(200, [], b"400001")]

    run(test)


def test_an_unread_body_does_not_block_the_connection_forever() -> None:
    async def test() -> None:
        asgi, exchange = MountedApp(answer(start(), body(b"x"))), FakeExchange(b"POST")
        asgi.handle(exchange)
        exchange.body(b"x" * 300_000)
        assert exchange.events.pop() == "pause"
        await asgi.shutdown()
        assert exchange.events == [(200, [], b"x"), "resume"]
        exchange.body(b"x" * 300_000)  # and what still comes is dropped
        assert exchange.events[-1] == "resume"

    run(test)


def test_send_waits_for_a_client_that_does_not_read() -> None:
    async def test() -> None:
        asgi = MountedApp(answer(start(), body(b"a", True), body(b"b", True), body(b"c")))
        exchange = FakeExchange()
        exchange.room = False
        asgi.handle(exchange)
        for expected in (b"a", b"b"):
            for _ in range(10):
                await asyncio.sleep(0)
            assert exchange.events[-1] == expected
            assert exchange.on_writable is not None
            exchange.on_writable()
        await asgi.shutdown()
        assert exchange.events[-2:] == [b"c", "finish"]

    run(test)


class FakeConnection:
    """What a session needs of a WebSocketConnection."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def pause_messages(self) -> None:
        self.events.append("pause")

    def resume_messages(self) -> None:
        self.events.append("resume")


@pytest.mark.parametrize(("message", "fits"), [("x", 15), (b"x" * 100_000, 2), (b"x" * 300_000, 0)])
def test_a_websocket_client_is_held_back_while_the_application_does_not_read(message: str | bytes, fits: int) -> None:
    async def test() -> None:
        session, connection = WebSocketSession(FakeExchange()), FakeConnection()
        assert await session.receive() == {"type": "websocket.connect"}
        session._opened(connection)  # type: ignore[arg-type]
        for _ in range(fits):
            session._on_message(message)
        assert connection.events == []
        session._on_message(message)
        assert connection.events == ["pause"]
        await session.receive()
        assert connection.events == ["pause", "resume"]

    run(test)


# The client goes away.


def test_a_stream_is_stopped_when_its_client_disconnects(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        sent: list[int] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(start())
            for n in range(1000):
                await send(body(b"x", True))
                sent.append(n)

        asgi, exchange = MountedApp(app), FakeExchange()
        exchange.room = False
        asgi.handle(exchange)
        await exchange.until(2)
        exchange.disconnect()
        await asgi.shutdown()
        assert sent == [0]

    with caplog.at_level(logging.WARNING):
        run(test)
    assert caplog.records == []


def test_receive_reports_the_disconnect_and_the_task_is_not_cancelled() -> None:
    async def test() -> None:
        got: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            got.append(await receive())
            got.append(await receive())
            await answer(start(), body(b"x"))(scope, receive, send)
            got.append("background")

        asgi, exchange = MountedApp(app), FakeExchange()
        asgi.handle(exchange)
        exchange.body_end()
        for _ in range(10):
            await asyncio.sleep(0)
        exchange.disconnect()
        await asgi.shutdown()
        assert got == [GET, GONE, "background"]
        assert exchange.events == []

    run(test)


def test_abort_cancels_background_tasks_and_leaves_the_response_alone() -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await answer(start(), body(b"x"))(scope, receive, send)
            await asyncio.Event().wait()

        asgi, exchange = MountedApp(app), FakeExchange()
        asgi.handle(exchange)
        await exchange.until(1)
        asgi.abort()
        await asgi.shutdown()
        assert exchange.events == [(200, [], b"x")]

    run(test)


def test_abort_cancels_and_cuts() -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send(start())
            await send(body(b"x", True))
            await asyncio.Event().wait()

        asgi, exchange = MountedApp(app), FakeExchange()
        asgi.handle(exchange)
        await exchange.until(2)
        asgi.abort()
        await asgi.shutdown()
        assert exchange.events[-1] == "abort"

    run(test)


# Lifespan.


def test_lifespan_runs_around_and_passes_its_state_to_requests() -> None:
    async def test() -> None:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                seen.append((await receive())["type"])
                scope["state"]["model"] = "m"
                await send({"type": "lifespan.startup.complete"})
                seen.append((await receive())["type"])
                await send({"type": "lifespan.shutdown.complete"})
                return
            seen.append(dict(scope["state"]))
            scope["state"]["model"] = "changed by one request"
            await answer(start(), body())(scope, receive, send)

        asgi = MountedApp(app)
        await asgi.startup()
        for _ in range(2):
            exchange = FakeExchange()
            asgi.handle(exchange)
            exchange.body_end()
            await exchange.over.wait()
        await asgi.shutdown()
        assert seen == ["lifespan.startup", {"model": "m"}, {"model": "m"}, "lifespan.shutdown"]

    run(test)


def test_a_failed_startup_is_raised_with_its_reason() -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no database"})

        asgi = MountedApp(app)
        with pytest.raises(LifespanFailed, match="no database"):
            await asgi.startup()
        await asgi.shutdown()

    run(test)


def test_an_application_without_lifespan_is_served_all_the_same() -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                raise ValueError("only http")
            await answer(start(), body(b"x"))(scope, receive, send)

        asgi = MountedApp(app)
        await asgi.startup()
        exchange = FakeExchange()
        asgi.handle(exchange)
        exchange.body_end()
        await asgi.shutdown()
        assert exchange.events == [(200, [], b"x")]

    run(test)


def test_a_failed_shutdown_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.failed", "message": "disk full"})

        asgi = MountedApp(app)
        await asgi.startup()
        await asgi.shutdown()

    run(test)
    assert "disk full" in caplog.text
