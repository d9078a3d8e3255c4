# SPDX-License-Identifier: Apache-2.0
"""One connection to a backend: sends a request, reads its answer, and goes back to its pool.

Made by `pools`, given to one `Customer` at a time (`flows.Flow`), which it tells what comes. Whole answers that
arrive in one piece, with a head that is known, take the short way through `data_received`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from headrace.fleet.router.answers import CHUNKED, UNTIL_CLOSE, AnswerHead, BadAnswer, ChunkedBody, chunk_begins

if TYPE_CHECKING:
    from headrace.fleet.router.customers import Customer
    from headrace.fleet.router.pools import Pool
    from headrace.net.http.exchange import Buffer


class Mode:
    """What is read next. Plain numbers, for speed."""

    HEAD = 0
    GATHER = 1
    """A body of known length that is passed on in one piece."""
    LENGTH = 2
    CHUNKED = 3
    UNTIL_CLOSE = 4


class Upstream(asyncio.Protocol):
    """See the module."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known = pool.answers.known
        self._clock = pool.clock
        self.transport: asyncio.Transport | None = None
        """None before and after; closing when no request may be sent any more."""
        self.customer: Customer | None = None
        self.reused = False
        """Whether it has carried a request before: then it may have been closed without our knowing."""
        self.since = 0.0
        """When something last happened, by the coarse clock."""
        self.write_paused = False
        self._read_paused = False
        self._mode = Mode.HEAD
        self._begun = b""
        self._last: AnswerHead
        self._last_size = -1
        """The head of the last answer and the bytes of all of it; -1 unless the next byte begins another one."""
        self._head: AnswerHead | None = None
        self._pieces: list[bytes] = []
        self._left = 0
        self._chunks: ChunkedBody | None = None
        self._between_chunks = False
        """The next byte begins a chunk of an answer that is passed on as it comes."""

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The backend is there."""
        self.transport = cast("asyncio.Transport", transport)
        self.since = self._clock.now
        self._pool.all.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer."""
        customer = self.customer
        if customer is None:
            # Nobody asked. It must not be taken for the answer to the next request.
            self.abort()
            return
        if self._last_size >= 0 and customer.plain:
            head: AnswerHead | None = self._last
            body = data.removeprefix(self._last.text) if len(data) == self._last_size else data
            if body is data:
                # Not the last head again, but for a second at least one of few.
                end = data.find(b"\r\n\r\n") + 4
                head = self._known.get(data[:end])
                if head is not None and head.size == len(data):
                    self._last, self._last_size = head, head.size
                    body = data[end:]
            if head is not None and body is not data:
                self.customer = None
                self.since = self._clock.now
                self._pool.idle.append(self)
                customer.answered(head, body)
                return
        if self._between_chunks:
            begin = chunk_begins(data)
            if begin:
                self.since = self._clock.now
                if not customer.answer_chunk(data, begin):
                    self._pause(customer)
                return
        self._last_size = -1
        if self._mode != Mode.HEAD:
            # Not for a head: one that comes byte by byte has the time of any other.
            self.since = self._clock.now
        try:
            self._read(data, customer)
        except BadAnswer as bad:
            self._fail(f"sent an answer that cannot be passed on: {bad}")

    def eof_received(self) -> None:
        """The backend sends no more; the transport closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.transport = None
        self._pool.lost(self)
        customer, self.customer = self.customer, None
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()
        if customer is None:
            return
        if self._mode == Mode.UNTIL_CLOSE and exc is None:
            customer.answer_ended()
        elif self._mode == Mode.HEAD and not self._begun:
            customer.failed("closed the connection before it answered", untouched=True)
        else:
            customer.failed("closed the connection in the middle of its answer")

    def pause_writing(self) -> None:
        """The backend reads more slowly than the client sends."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """The backend has caught up."""
        self.write_paused = False
        if self.customer is not None:
            self.customer.writable()

    # Called by customers.

    def begin(self, customer: Customer, text: Buffer) -> None:
        """Send a request, or its head, on a new connection; else `Pool.send` does so."""
        self.customer = customer
        self.since = self._clock.now
        if self.transport is not None:
            self.transport.write(text)

    def write(self, data: Buffer) -> None:
        """Send more of a request's body."""
        self.since = self._clock.now
        if self.transport is not None:
            self.transport.write(data)

    def resume(self) -> None:
        """Read again, after `answer_piece` returned False."""
        if self._read_paused:
            self._read_paused = False
            self.since = self._clock.now
            if self.transport is not None and not self.transport.is_closing():
                self.transport.resume_reading()

    def detach(self) -> asyncio.Transport:
        """Give the transport to another protocol and forget it."""
        transport, self.transport = self.transport, None
        self.customer = None
        self._pool.lost(self)
        if transport is None:
            raise ConnectionResetError("the backend has gone")
        return transport

    def drop(self) -> None:
        """The customer has gone: the answer is of no use to anyone."""
        self.customer = None
        self.abort()

    # Called by the pool.

    def sweep(self, now: float) -> None:
        """Keep the time limits."""
        timeouts = self._pool.timeouts
        waited = now - self.since
        if self.customer is None:
            if waited > timeouts.keep_alive_seconds:
                self.close()
        elif self._mode == Mode.HEAD:
            if waited > timeouts.response_seconds:
                self._fail(f"did not answer within {timeouts.response_seconds:g} seconds", late=True)
        elif waited > timeouts.idle_seconds and not self._read_paused:
            self._fail(f"fell silent for {timeouts.idle_seconds:g} seconds in its answer", late=True)

    def close(self) -> None:
        """Close after what was written."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    # Inside.

    def _fail(self, why: str, *, late: bool = False) -> None:
        customer, self.customer = self.customer, None
        self.abort()
        if customer is not None:
            customer.failed(why, late=late)

    def _read(self, data: bytes, customer: Customer) -> None:
        mode = self._mode
        if mode == Mode.HEAD:
            self._read_head(self._begun + data if self._begun else data, customer)
        elif mode == Mode.GATHER:
            self._gather(data, customer)
        elif mode == Mode.LENGTH:
            self._read_length(data, customer)
        elif mode == Mode.CHUNKED:
            self._read_chunks(data, customer)
        else:
            self._pass(data, customer)

    def _read_head(self, data: bytes, customer: Customer) -> None:
        while True:
            most = self._pool.head_bytes
            end = data.find(b"\r\n\r\n", 0, most) + 4
            if end < 4:
                if len(data) >= most:
                    raise BadAnswer(f"its head is over {most} bytes")
                self._begun = data
                return
            head = self._pool.answers.read(data[:end])
            data = data[end:]
            if head.status >= 200:
                break
            if head.status == 101:
                if not customer.upgrade:
                    raise BadAnswer("it switched protocols without being asked")
                self._begun = b""
                customer.switched(head, data)
                return
            # An interim answer: the client has had its 100 Continue from us, and needs no other.
            self._begun = b""
            if not data:
                return
        self._begun = b""
        self._head = head
        self.since = self._clock.now
        length = 0 if customer.silent else head.length
        if len(data) == length:
            self._release(reuse=True)
            customer.answered(head, data)
        elif length >= 0:
            if len(data) < length and length > self._pool.whole_bytes:
                self._mode = Mode.LENGTH
                self._left = length
                customer.answer_begun(head, length)
                self._read_length(data, customer)
            else:
                self._mode = Mode.GATHER
                self._left = length
                self._gather(data, customer)
        elif length == CHUNKED:
            self._mode = Mode.CHUNKED
            self._chunks = ChunkedBody(self._pieces.append)
            self._read_chunks(data, customer)
        elif length == UNTIL_CLOSE:
            self._mode = Mode.UNTIL_CLOSE
            customer.answer_begun(head, -1)
            self._pass(data, customer)

    def _gather(self, data: bytes, customer: Customer) -> None:
        excess = len(data) > self._left
        if excess:
            data = data[: self._left]
        self._pieces.append(data)
        self._left -= len(data)
        if self._left:
            return
        body = self._taken()
        head = self._head
        self._release(reuse=not excess)
        if head is not None:
            customer.answered(head, body)

    def _read_length(self, data: bytes, customer: Customer) -> None:
        excess = len(data) > self._left
        if excess:
            data = data[: self._left]
        self._left -= len(data)
        self._pass(data, customer)
        if not self._left:
            self._release(reuse=not excess)
            customer.answer_ended()

    def _read_chunks(self, data: bytes, customer: Customer) -> None:
        chunks, head = self._chunks, self._head
        if chunks is None or head is None:
            return
        begun = self._left < 0
        chunks.feed(data)
        if chunks.done and not begun:
            # All of it came with its head: it has a length after all.
            body = self._taken()
            self._release(reuse=not chunks.excess)
            customer.answered(head, body)
            return
        if not begun:
            self._left = -1
            customer.answer_begun(head, -1)
        if self._pieces:
            self._pass(self._taken(), customer)
        self._between_chunks = chunks.between(data)
        if chunks.done:
            self._release(reuse=not chunks.excess)
            customer.answer_ended()

    def _taken(self) -> bytes:
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    def _pass(self, data: bytes, customer: Customer) -> None:
        if data and not customer.answer_piece(data):
            self._pause(customer)

    def _pause(self, customer: Customer) -> None:
        if self.customer is customer and not self._read_paused:
            self._read_paused = True
            if self.transport is not None:
                self.transport.pause_reading()

    def _release(self, *, reuse: bool) -> None:
        """The answer has come to its end: take the next request, if all is well."""
        customer, self.customer = self.customer, None
        head, self._head = self._head, None
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()
        self._mode = Mode.HEAD
        self._between_chunks = False
        self._left = 0
        if customer is None or head is None:
            return
        if reuse and head.keeps and not customer.sending:
            self.reused = True
            self._last, self._last_size = head, head.size
            self.resume()
            self._pool.give_back(self)
        else:
            self.abort()
