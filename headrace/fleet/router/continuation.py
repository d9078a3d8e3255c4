# SPDX-License-Identifier: Apache-2.0
"""Continuation of streams: when a backend dies in the middle of a stream, another one resumes it without a gap.

A `ContinuableRequest` asks its backend for records (`core.continuation`), keeps them up to a limit, and takes them out of
what the client gets. If the backend closes the connection too early, hangs or says that it cannot go on, the request is sent
to another backend with the records. A backend without support for records answers as usual, and its stream is not continued.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import TYPE_CHECKING

import orjson

from headrace.core.continuation import (
    CONTINUATION_HEADER,
    CONTINUE_PATH,
    FAILED,
    RECORD,
    TRACK,
    continuation_proof,
)
from headrace.core.errors import FailedPrecondition
from headrace.core.fleet_key import machine_key, user_folder
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.proxied_request import ProxiedRequest
from headrace.fleet.router.stream_latency import is_event_stream

if TYPE_CHECKING:
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.settings import ContinuationSettings
    from headrace.fleet.router.upstream import ConnectionPool, UpstreamConnection
    from headrace.net.http.heads import Buffer

log = logging.getLogger("headrace.router")

_STREAM = re.compile(rb'"stream"\s*:\s*true')
_TRACKING = b"\r\n%b: %b" % (CONTINUATION_HEADER, TRACK)
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: [0-9]+")
_SEARCH_SECONDS = 0.25
_NEXT_RECORD = b"\n" + RECORD
_PLAIN_REFUSALS = (400, 401, 403, 404, 405, 409, 413, 422)
"""Statuses of a backend that refuses to continue a stream for good: it is not retried."""


class Continuations:
    """Decides which requests can be continued, and counts."""

    def __init__(self, settings: ContinuationSettings, key: bytes) -> None:
        """`key`: the key of the fleet; empty: that of this machine."""
        self.settings = settings
        self._key = key
        self.record_bytes = 0
        """Total bytes of the stored records."""
        self.continued = 0
        """Number of continuations at another backend."""
        self.lost = 0
        """Streams that were lost: no backend could continue them."""
        self.too_long = 0
        """Streams whose records went over a limit."""

    def may_continue(self, body: Buffer) -> bool:
        """Return whether a request with this body may become a stream that is continued."""
        return self.settings.enabled and _STREAM.search(body) is not None

    def make_request(self) -> ContinuableRequest:
        """Return a new request."""
        return ContinuableRequest()

    def outcomes(self) -> dict[tuple[str, ...], float]:
        """Return the counts by outcome, for metrics."""
        return {("continued",): self.continued, ("lost",): self.lost, ("too_long",): self.too_long}

    def key(self) -> bytes:
        """Return the key that authenticates the router to backends."""
        if not self._key:
            try:
                self._key = machine_key(user_folder())
            except FailedPrecondition as error:
                log.warning("Streams cannot be continued: %s", error.message)
        return self._key


class RecordFilter:
    """Removes the records from a stream, whatever its chunk boundaries."""

    __slots__ = ("_held", "_in_line", "error", "failed", "fresh", "sent")

    def __init__(self, sent: int = 0) -> None:
        """`sent`: bytes since the last record, of an earlier attempt."""
        self.fresh: list[bytes] = []
        """Records that were found and not taken yet."""
        self.sent = sent
        """Bytes since the last record."""
        self.failed = False
        """Whether the backend has announced that it cannot continue."""
        self.error = b""
        """Bytes that followed that notice."""
        self._held = b""
        """The beginning of a line that may be a record."""
        self._in_line = False
        """Whether the next byte is in the middle of a line."""

    def feed(self, data: bytes) -> bytes:
        """Return the piece without its records and without an error."""
        if self._held:
            data, self._held = self._held + data, b""
        if not self._in_line and data.startswith(RECORD) and data.endswith(b"\n"):
            # The usual piece: a record, and the events behind it.
            end = data.find(b"\n") + 1
            if data.find(_NEXT_RECORD, end - 1) < 0:
                self._add(data[len(RECORD) : end - 1])
                return self._passed(data[end:])
        return self._split(data)

    def _split(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        while data:
            if not self._in_line and data.startswith(RECORD):
                end = data.find(b"\n")
                if end < 0:
                    self._held = data
                    break
                self._add(data[len(RECORD) : end])
                data = data[end + 1 :]
                continue
            found = data.find(_NEXT_RECORD) + 1
            if found:
                passed.append(self._passed(data[:found]))
                data = data[found:]
                self._in_line = False
                continue
            last = data.rfind(b"\n") + 1
            tail = data[last:]
            if tail and (last or not self._in_line) and RECORD.startswith(tail):
                self._held, self._in_line = tail, False
                data = data[:last]
            else:
                self._in_line = bool(tail)
            passed.append(self._passed(data))
            break
        return b"".join(passed)

    def _passed(self, data: bytes) -> bytes:
        if self.failed:
            self.error += data
            return b""
        self.sent += len(data)
        return data

    def _add(self, record: bytes) -> None:
        if record == FAILED:
            self.failed = True
        else:
            self.fresh.append(record)
            self.sent = 0


class ContinuableRequest(ProxiedRequest):
    """A request for a stream. While its client has nothing, it is sent again; then it is continued."""

    extra_head = _TRACKING
    _filter: RecordFilter | None = None
    """Filter of the current stream; None until the response is known to be a stream."""
    _records: bytearray | None = None
    """The records so far; None before the first one, and when there are too many."""
    _untracked = False
    """Whether the client got data that no record covers: the backend writes no records, or they exceeded a limit."""
    _attempts = 0
    """Total number of continuations tried."""
    _fruitless = 0
    """Attempts since the last record."""
    _searching = False
    """Whether the current attempt is one to continue."""
    _continuation = b""
    """Head and body of the request that continues the stream; empty: send the client's own request."""
    _refusal: UpstreamHead | None = None
    """The error response of a backend that does not continue the stream, until its body is complete."""
    _error = b""
    """Last events of a backend that could not continue."""
    _revision: str | None = None
    """The revision of the backend that began the stream."""
    _reason = ""
    _deadline = 0.0
    _timer: asyncio.TimerHandle | None = None

    @property
    def repeatable(self) -> bool:
        """Whether the request may be sent again: yes until the client has received part of the response."""
        return not self.exchange.started

    # Called by the connection.

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        """Take a whole response."""
        is_stream = head.status == 200 and head.length < 0 and is_event_stream(head)
        stream = RecordFilter()
        passed = stream.feed(bytes(body)) if is_stream else body
        if self.exchange.started or stream.failed:
            self.connection = None  # the connection is back in its pool
            self.response_started(head, -1)
            self.response_data(body)
            self.response_ended()
        else:
            super().response_received(head, passed)

    def response_started(self, head: UpstreamHead, length: int) -> None:
        """Take the head of a stream."""
        is_stream = head.status == 200 and is_event_stream(head)
        if not self.exchange.started:
            self._filter = RecordFilter() if is_stream else None
            self._untracked = not is_stream
            super().response_started(head, length)
            return
        if not is_stream:
            self._refusal = head
            return
        self._filter = RecordFilter(self._filter.sent if self._filter is not None else 0)
        if self.connection is not None:
            self.exchange.on_writable = self.connection.resume_reading
        self._outcome = head.outcome

    def response_data(self, data: Buffer) -> bool:
        """Send a piece of the stream to the client, without its records."""
        stream = self._filter
        if self._refusal is not None:
            return True
        if stream is None:
            return super().response_data(data)
        passed = stream.feed(bytes(data))
        if stream.fresh:
            fresh, stream.fresh = stream.fresh, []
            self._keep(b",".join(fresh))
        elif self._records is None and passed:
            self._untracked = True
        if passed and self.strategy is not None:
            self.strategy.response_piece(passed)
        if passed and self.usage is not None:
            self.usage.add(passed)
        if passed and self.timer is not None:
            self.timer.piece(passed)
        return self.exchange.send(passed) if passed else True

    def response_chunk(self, data: bytes, begin: int) -> bool:
        """Send one chunk to the client, without its records."""
        if self._filter is None:
            return super().response_chunk(data, begin)
        return self.response_data(data[begin:-2])

    def response_ended(self) -> None:
        """Finish the stream, or continue it elsewhere if the backend announced that it cannot."""
        stream = self._filter
        if self._refusal is not None:
            self._refused()
            return
        if stream is not None and stream.failed:
            if self._can_go_on():
                self._error = stream.error
                self._go_on(Outcome.REFUSED, "cannot go on with a stream")
                return
            self.exchange.send(stream.error)
        self._forget()
        super().response_ended()

    def response_failed(self, reason: str, *, unanswered: bool = False, timed_out: bool = False) -> None:
        """Continue the stream, or send the request again."""
        if self.backend is None or self.connection is None:
            return
        if self._refusal is not None:
            self._refused()
        elif self.exchange.started and self._can_go_on():
            self._go_on(Outcome.FAILED, reason)
        elif self._searching:
            self._end_search(Outcome.FAILED, reason)
        else:
            # While nothing has reached the client, the whole request may be sent again.
            self._forget()
            super().response_failed(reason, unanswered=not timed_out, timed_out=timed_out)

    def connection_failed(self, reason: str) -> None:
        """Look for another backend."""
        if self._searching and self.backend is not None:
            self._go_on(Outcome.FAILED, reason)
        else:
            super().connection_failed(reason)

    def _client_gone(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._forget()
        super()._client_gone()

    # Requests that are sent.

    def _first_bytes(self, pool: ConnectionPool) -> bytes:
        if not self._continuation:
            return super()._first_bytes(pool)
        end = pool.head_end_with_host if self.plan.hostless else pool.head_end
        return self._continuation.replace(b"\r\n\r\n", end, 1)

    def _send_rest(self, connection: UpstreamConnection) -> None:
        if self._searching:
            self._attempts += 1
            self._fruitless += 1
            self.router.continuations.continued += 1
        if self._continuation:
            self.connection = connection
        else:
            super()._send_rest(connection)

    def _build_continuation(self, records: bytes) -> bytes:
        """Return the request that continues the stream: the client's head with another path, proof and length."""
        exchange = self.exchange
        document = {"path": exchange.head.path.decode(), "sent": self._filter.sent if self._filter is not None else 0}
        members = orjson.dumps(document)[1:-1]
        body = b'{%b,"records":[%b],"request":%b}' % (members, records, bytes(exchange.body))
        _, _, fields = self.plan.buffered.partition(b"\r\n")
        fields = _CONTENT_LENGTH.sub(b"", fields, count=1)
        proof = continuation_proof(self.router.continuations.key(), body, time.time())
        return b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n%b: %b\r\n%b%b\r\n\r\n%b" % (
            CONTINUE_PATH.encode(),
            len(body),
            CONTINUATION_HEADER,
            proof,
            fields,
            exchange.peer_address,
            body,
        )

    # Records.

    def _keep(self, records: bytes) -> None:
        """Store records; each one is progress of the stream."""
        self._fruitless, self._deadline, self._error = 0, 0.0, b""
        if self._untracked:
            return
        kept, continuations = self._records, self.router.continuations
        size = len(records) + 1
        full = (len(kept) if kept is not None else 0) + size > continuations.settings.stream_bytes
        if full or continuations.record_bytes + size > continuations.settings.total_bytes:
            continuations.too_long += 1
            self._forget()
            self._untracked = True
            return
        if kept is None:
            self._records = bytearray(records)
        else:
            kept += b","
            kept += records
        continuations.record_bytes += size

    def _forget(self) -> None:
        records, self._records = self._records, None
        if records is not None:
            self.router.continuations.record_bytes -= len(records) + 1

    # Continuing.

    def _can_go_on(self) -> bool:
        continuations = self.router.continuations
        settings = continuations.settings
        return (
            not self._untracked
            and not self.exchange.closed
            and self._attempts < settings.tries
            and self._fruitless < settings.fruitless_tries
            and bool(continuations.key())
        )

    def _go_on(self, outcome: int, reason: str) -> None:
        """End the current attempt, and look for a backend that continues the stream."""
        backend = self.backend
        if backend is not None:
            self._reason = f"{backend.name} {reason}"
            log.info("%s: another backend is to continue the stream", self._reason)
            self.tried = (*self.tried, backend)
            if self._revision is None:
                self._revision = backend.address.revision
        self.end_attempt(outcome)
        self._searching = True
        if not self._deadline:
            self._deadline = asyncio.get_running_loop().time() + self.router.continuations.settings.wait_seconds
        self._search()

    def _search(self) -> None:
        """Continue the stream at a backend, or wait for one."""
        self._timer = None
        loop = asyncio.get_running_loop()
        if not self._can_go_on() or loop.time() >= self._deadline:
            self._lose()
            return
        next_backend = self._pick_other()
        if next_backend is None:
            # A backend that was tried before may be up again.
            self.tried = ()
            self._timer = loop.call_later(_SEARCH_SECONDS, self._search)
            return
        self._continuation = self._build_continuation(bytes(self._records)) if self._records is not None else b""
        self._failed_attempts = 1  # counts as a retry of the backend
        self.send_to(next_backend)

    def _refused(self) -> None:
        """Look for another backend: this one does not continue the stream."""
        head, self._refusal = self._refusal, None
        if head is None:
            return
        reason = f"did not continue the stream: status {head.status}"
        if head.status in _PLAIN_REFUSALS:
            self._end_search(head.outcome, reason)
        else:
            self._go_on(head.outcome, reason)

    def _end_search(self, outcome: int, reason: str) -> None:
        if self.backend is not None:
            self._reason = f"{self.backend.name} {reason}"
        self.end_attempt(outcome)
        self._lose()

    def _lose(self) -> None:
        """End the stream without a continuation: with the backend's error, or by closing the connection."""
        self.router.continuations.lost += 1
        self._forget()
        self.release()
        log.warning("%s: the client's response is cut", self._reason)
        exchange = self.exchange
        if self._error:
            exchange.send(self._error)
            exchange.finish()
        else:
            exchange.abort()

    def _pick_other(self) -> Backend | None:
        """Choose a backend that was not tried, of the same revision if there is one."""
        if not self._revision:
            return super()._pick_other()
        tried = self.tried
        others = (backend for backend in self.router.backends.all if backend.address.revision != self._revision)
        try:
            self.tried = (*tried, *others)
            chosen = super()._pick_other()
        finally:
            self.tried = tried
        return chosen or super()._pick_other()
