# SPDX-License-Identifier: Apache-2.0
"""For any requests, cut anywhere, with anything going on around them: the same answers. For any bytes: no failure, no pile.

The protocol is driven without a socket, so that a case takes microseconds and its order is ours.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from http1_fake import FakeWire
from http1_site import Handlers, answer_plain, http1_site
from http1_wire import get, parse_answers, post, post_chunked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.limits import Limits
from headrace.net.site import Site
from support.properties import examples

LIMITS = Limits(header_bytes=4000, header_count=30, body_bytes=300_000, chunk_count=40, pipelined_requests=3)

H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


class Bytes(bytes):
    """Bytes whose `repr` is short enough for a report."""

    def __repr__(self) -> str:
        return super().__repr__() if len(self) < 1000 else f"{bytes(self[:100])!r} + {len(self) - 100} bytes"


bodies = st.one_of(st.binary(max_size=60), st.sampled_from([b"GET /hello HTTP/1.1\r\nHost: a\r\n\r\n", bytes(70_000)]))
fields = st.lists(
    st.sampled_from(["X-One: 1", "Accept-Encoding: gzip", "X-Empty:", "Accept: */*", "Content-Type: text/plain "]),
    max_size=3,
    unique=True,
)


@st.composite
def requests(draw: st.DrawFn) -> Bytes:
    return Bytes(draw_request(draw))


def draw_request(draw: st.DrawFn) -> bytes:
    kind = draw(st.integers(0, 11))
    extra = draw(fields)
    if kind <= 2:
        return get("/hello", *extra)
    if kind == 3:
        return get("/hold", *extra)
    if kind == 4:
        return get(draw(st.sampled_from(["/nowhere", "/stream/3", "/empty", "/big/2000", "/raise", "*"])), *extra)
    if kind == 5:
        return get("/hello", "Connection: keep-alive", version="1.0")
    if kind == 6:
        return b"\r\n" + get("/hello", *H2C)
    path = draw(st.sampled_from(["/echo", "/upload", "/hold"]))
    if kind == 7:
        return post(path, draw(bodies), *H2C)
    if kind == 8:
        return post_chunked(path, *filter(None, draw(st.lists(bodies, max_size=3))))
    if kind == 9:
        return post(path, draw(bodies), "Expect: 100-continue")
    return post(path, draw(bodies), *extra)


def cut(data: bytes, seed: int, mean: int) -> Iterator[bytes]:
    """`data` in pieces of about `mean` bytes."""
    rng = random.Random(seed)
    mean = max(mean, len(data) // 500)
    position = 0
    while position < len(data):
        size = max(1, int(rng.expovariate(1 / mean)))
        yield data[position : position + size]
        position += size


class Driven(FakeWire):
    """A connection whose held requests are answered when nothing else can happen."""

    def __init__(self, site: Site, handlers: Handlers) -> None:
        handlers.clear()
        site.connections.clear()
        super().__init__(site=site, handlers=handlers)

    def release(self) -> bool:
        """Answer a held request. An upload is held, too, but answers itself."""
        while self.handlers.held:
            exchange = self.handlers.held.pop(0)
            if exchange.head.path == b"/hold" and not exchange.closed:
                answer_plain(exchange, b"held " + bytes(exchange.body))
                return True
        return False

    def drive(self, pieces: Iterator[bytes]) -> Driven:
        for piece in pieces:
            while not self.reading() and not self.ended():
                assert self.release(), "nobody will ever read on"
            self.feed(piece)
            self.check_bounds()
        while self.release():
            pass
        return self

    def check_bounds(self) -> None:
        reader = self.protocol._reader
        assert sum(map(len, reader._pieces)) <= LIMITS.body_bytes
        assert reader.direct is None or len(reader.direct) <= LIMITS.body_bytes
        assert reader._unreported_bytes <= LIMITS.header_bytes
        assert len(reader._target) <= 256 * 1024 + LIMITS.header_bytes
        assert len(self.protocol._queue) <= 13_000, "no more than fit in a packet"

    def final_answers(self) -> list[tuple[int, bytes]]:
        answers = parse_answers(bytes(self.transport.written))
        return [(answer.status, answer.body) for answer in answers if answer.status != 100]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of refusals are logged here as they should be; nobody wants to read them."""
    caplog.set_level(logging.CRITICAL, "headrace.wire")


@pytest.fixture(scope="module")
def shared_site() -> tuple[Site, Handlers]:
    """One site for all cases: heads that one case made known are recognised in the next."""
    handlers = Handlers()
    return http1_site(handlers, LIMITS), handlers


quick = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@quick
@given(sequence=st.lists(requests(), min_size=1, max_size=8), seed=st.integers(0, 2**32), mean=st.integers(1, 400))
def test_the_same_answers_wherever_the_bytes_are_cut(
    shared_site: tuple[Site, Handlers], sequence: list[bytes], seed: int, mean: int
) -> None:
    whole = Driven(*shared_site).drive(iter(sequence))
    expected, seen = whole.final_answers(), list(whole.handlers.seen)
    assert len(expected) == len(sequence)
    pieces = Driven(*shared_site).drive(cut(b"".join(sequence), seed, mean))
    assert pieces.final_answers() == expected
    assert pieces.handlers.seen == seen
    assert not pieces.ended()
    at_once = Driven(*shared_site).drive(cut(b"".join(sequence), seed, 100_000))
    assert at_once.final_answers() == expected


@quick
@given(
    sequence=st.lists(requests(), min_size=1, max_size=6),
    events=st.lists(st.sampled_from(["feed", "feed", "feed", "release", "pause", "resume", "sweep"]), max_size=40),
    ending=st.sampled_from(["none", "none", "drain", "eof"]),
    end_at=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
def test_the_same_answers_whatever_happens_around_them(
    shared_site: tuple[Site, Handlers], sequence: list[bytes], events: list[str], ending: str, end_at: int, seed: int
) -> None:
    expected = Driven(*shared_site).drive(iter(sequence)).final_answers()
    wire = Driven(*shared_site)
    pieces = cut(b"".join(sequence), seed, 50)
    for number, event in enumerate([*events, *["feed"] * 20]):
        if number == end_at and ending == "drain":
            wire.protocol.drain()
        if number == end_at and ending == "eof" and wire.reading():
            wire.eof()
            break
        if event == "feed" and wire.reading() and not wire.closed():
            wire.feed(next(pieces, b""))
        elif event == "release":
            wire.release()
        elif event == "pause" and not wire.protocol.write_paused:
            wire.protocol.pause_writing()
        elif event == "resume" and wire.protocol.write_paused:
            wire.protocol.resume_writing()
        elif event == "sweep":
            wire.sweep(0.01)
        wire.check_bounds()
    if wire.protocol.write_paused:
        wire.protocol.resume_writing()
    if ending == "none":
        wire.drive(pieces)
        assert wire.final_answers() == expected
    else:
        while wire.release():
            pass
        answers = wire.final_answers()
        assert answers == expected[: len(answers)]
    for _ in range(4):
        wire.sweep(1000.0)
    assert wire.site.connections == set()


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    data = bytearray(b"".join(draw(st.lists(requests(), min_size=1, max_size=4))))
    for _ in range(draw(st.integers(1, 6))):
        position = draw(st.integers(0, max(0, min(len(data) - 1, 2000))))
        change = draw(st.integers(0, 4))
        if change == 0:
            data[position : position + 1] = draw(st.binary(min_size=1, max_size=1))
        elif change == 1:
            data[position:position] = draw(
                st.sampled_from([b"\r", b"\n", b"\r\n", b" ", b"\0", b":", b";", b",", b"\xff"])
            )
        elif change == 2:
            del data[position : position + draw(st.integers(1, 20))]
        elif change == 3:
            data[position:position] = data[position : position + draw(st.integers(1, 50))]
        else:
            data[position:position] = draw(
                st.sampled_from(
                    [
                        b"\r\nContent-Length: 7",
                        b"\r\nTransfer-Encoding: chunked",
                        b"\r\nUpgrade: websocket",
                        b"\r\n\r\n",
                    ]
                )
            )
    return Bytes(data)


garbage = st.one_of(
    st.binary(max_size=300),
    st.text("GETPOS /HT1.\r\n:ahello0x-", max_size=200).map(str.encode),
    mutations(),
)


@settings(quick, max_examples=examples(400))
@given(data=garbage, seed=st.integers(0, 2**32), mean=st.integers(1, 300), ending=st.booleans())
def test_any_bytes_are_survived(
    shared_site: tuple[Site, Handlers], data: bytes, seed: int, mean: int, ending: bool
) -> None:
    wire = Driven(*shared_site)
    for piece in cut(data, seed, mean):
        while not wire.reading() and wire.release():
            pass
        if not wire.reading():
            break
        wire.feed(piece)
        wire.check_bounds()
    if ending and wire.reading():
        wire.eof()
    while wire.release():
        pass
    whole = bytes(wire.transport.written)
    if b"HEAD " not in data:
        for answer in parse_answers(whole):
            assert answer.status in (100, 200, 204, 400, 404, 405, 408, 413, 417, 431, 500, 501, 505)
    for _ in range(4):
        wire.sweep(1000.0)
    assert wire.site.connections == set(), "whatever it was, it ends"
    assert wire.protocol._reader.direct is None
    assert wire.protocol._reader._pieces == []


@settings(quick, max_examples=examples(200))
@given(first=mutations(), second=st.lists(requests(), min_size=1, max_size=3))
def test_what_one_client_sends_changes_nothing_for_the_next(first: bytes, second: list[bytes]) -> None:
    """Known heads are shared between connections: whatever was learnt from odd bytes must be true of them."""
    fresh = Handlers()
    expected = Driven(http1_site(fresh, LIMITS), fresh).drive(iter(second)).final_answers()
    handlers = Handlers()
    site = http1_site(handlers, LIMITS)
    before = Driven(site, handlers)
    for piece in cut(first, 0, 100_000):
        if before.reading():
            before.feed(piece)
    assert Driven(site, handlers).drive(iter(second)).final_answers() == expected
    # And the same odd bytes again mean what they meant the first time.
    again = Driven(site, handlers)
    for piece in cut(first, 0, 100_000):
        if again.reading():
            again.feed(piece)
    assert bytes(again.transport.written).split(b"date:")[0] == bytes(before.transport.written).split(b"date:")[0]


@settings(quick, max_examples=examples(300))
@given(data=mutations(), seed=st.integers(0, 2**32), mean=st.integers(1, 60))
def test_odd_bytes_mean_the_same_wherever_they_are_cut(data: bytes, seed: int, mean: int) -> None:
    """What is executed must not depend on packets, nor on whether a head was known: that is what smuggling lives on."""
    data = data.replace(b"/hold", b"/echo")
    handlers = Handlers()
    site = http1_site(handlers, LIMITS)
    executed = []
    for pieces in ([data], [data], cut(data, seed, mean), cut(data, seed + 1, 1)):
        wire = Driven(site, handlers)
        for piece in pieces:
            wire.feed(piece)
        executed.append((list(handlers.seen), b"".join(handlers.pieces), wire.ended()))
    assert executed[1:] == executed[:1] * 3
