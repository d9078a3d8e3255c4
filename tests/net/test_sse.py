# SPDX-License-Identifier: Apache-2.0
"""Server-Sent Events: what a reader of the specification gets back, and back-pressure."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import Fields, RequestHead, ResponseHead
from headrace.net.http.sse import EventStream, encode_event


class FakeExchange(Exchange):
    """Keeps what is sent; `room` is what `send` returns."""

    def __init__(self) -> None:
        self.head = RequestHead(b"GET", b"/", [], version="1.1")
        self.on_writable = self.on_disconnect = None
        self.room = True
        self.fields: dict[bytes, bytes] = {}
        self.sent: list[bytes] = []
        self.queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.ended: str | None = None

    @property
    def closed(self) -> bool:
        return self.ended is not None

    def start(self, head: ResponseHead, extra: Fields = ()) -> None:
        assert head.status == 200
        self.fields = dict((*head.fields, *extra))

    def send(self, data: Any) -> bool:
        assert self.ended is None
        self.sent.append(bytes(data))
        self.queue.put_nowait(bytes(data))
        return self.room

    def finish(self) -> None:
        self.ended = self.ended or "finished"

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    def disconnect(self) -> None:
        self.ended = "gone"
        assert self.on_disconnect is not None
        self.on_disconnect()


def read_events(stream: bytes) -> list[dict[str, str]]:
    """The specification's algorithm, for one stream."""
    events = []
    data: list[str] = []
    fields: dict[str, str] = {}
    for line in re.split("\r\n|\r|\n", stream.decode())[:-1]:
        if not line:
            if data:
                events.append(fields | {"data": "\n".join(data)})
            data, fields = [], {}
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name:
            fields[name] = value
    return events


def test_one_line_is_one_field() -> None:
    assert encode_event("hello") == b"data: hello\n\n"
    assert encode_event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert encode_event("") == b"data: \n\n"


def test_event_and_id_are_first() -> None:
    assert encode_event("x", event="token", id="7") == b"event: token\nid: 7\ndata: x\n\n"


@pytest.mark.parametrize("data", ["a\nb", "a\r\nb", "a\rb", "a\n", "\n", "a\n\nb", "\r\n\r\n", "a\u2028b\x0bc\x85d"])
def test_lines_split_where_the_specification_splits(data: str) -> None:
    assert read_events(encode_event(data)) == [{"data": re.sub("\r\n|\r", "\n", data)}]


@given(data=st.text(), event=st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1))
def test_no_text_breaks_out_of_its_event(data: str, event: str) -> None:
    stream = encode_event(data, event=event) + encode_event("next")
    assert read_events(stream) == [{"event": event, "data": re.sub("\r\n|\r", "\n", data)}, {"data": "next"}]


@pytest.mark.parametrize("bad", ["a\nb", "a\rb"])
def test_a_line_break_in_a_name_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="line breaks"):
        encode_event("x", event=bad)
    with pytest.raises(ValueError, match="line breaks"):
        encode_event("x", id=bad)
    with pytest.raises(ValueError, match="NUL"):
        encode_event("x", id="\0")


def test_the_head_and_the_end() -> None:
    exchange = FakeExchange()
    stream = EventStream(exchange, extra=[(b"x-id", b"1")])
    assert exchange.fields[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert exchange.fields[b"cache-control"] == b"no-cache"
    assert exchange.fields[b"x-id"] == b"1"
    assert stream.send("a")
    assert stream.ping()
    stream.finish()
    assert read_events(b"".join(exchange.sent)) == [{"data": "a"}]
    assert exchange.sent[1].startswith(b":")
    assert (exchange.ended, stream.closed) == ("finished", True)
    assert stream.send("after the end") is False
    assert len(exchange.sent) == 2


def test_abort_cuts() -> None:
    exchange = FakeExchange()
    EventStream(exchange).abort()
    assert exchange.ended == "aborted"


def test_send_asks_to_pause_and_pings_are_omitted_meanwhile() -> None:
    exchange = FakeExchange()
    stream = EventStream(exchange)
    received: list[str] = []
    stream.on_writable = lambda: received.append("writable")
    exchange.room = False
    assert stream.send("a") is False
    assert stream.ping() is False
    assert len(exchange.sent) == 1
    exchange.room = True
    assert exchange.on_writable is not None
    exchange.on_writable()
    assert received == ["writable"]
    assert stream.ping()


def test_the_owners_on_disconnect_is_still_called() -> None:
    exchange = FakeExchange()
    received: list[str] = []
    exchange.on_disconnect = lambda: received.append("gone")
    stream = EventStream(exchange)
    exchange.disconnect()
    assert received == ["gone"]
    assert stream.closed


def test_send_wait_waits_for_buffer_space_or_for_the_end() -> None:
    async def main() -> None:
        exchange = FakeExchange()
        stream = EventStream(exchange)
        assert await stream.send_wait("a")
        exchange.room = False
        first = asyncio.ensure_future(stream.send_wait("b"))
        second = asyncio.ensure_future(stream.send_wait("c"))
        third = asyncio.ensure_future(stream.send_wait("d"))
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.sleep(0)
        assert third.cancelled()
        assert not first.done()
        assert exchange.on_writable is not None
        exchange.on_writable()
        assert await first
        assert await second
        blocked = asyncio.ensure_future(stream.send_wait("e"))
        await asyncio.sleep(0)
        exchange.disconnect()
        assert await blocked is False
        assert await stream.send_wait("f") is False
        assert len(exchange.sent) == 5

    asyncio.run(main())


def test_the_ping_timer_runs_until_the_end() -> None:
    async def main() -> None:
        exchange = FakeExchange()
        stream = EventStream(exchange, ping_seconds=0.001)
        for _ in range(3):
            assert await exchange.queue.get() == b": ping\n\n"
        stream.finish()
        assert stream._timer is None

    asyncio.run(asyncio.wait_for(main(), 40))
