# SPDX-License-Identifier: Apache-2.0
"""The way back of a call: what its backend answers, to the client, as it comes.

The base of `call.ProxiedCall`, told by `upstream.UpstreamStream` and its connection. A small answer that came whole is
written whole, with others to the same client; of all others the head waits for what follows it in the same read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.fleet.router.backend import Outcome
from headrace.net.grpc.call import HEAD_BLOCK
from headrace.net.grpc.status import Status
from headrace.net.http2.frames import DATA, DEFAULT_FRAME_BYTES, END_HEADERS, END_STREAM, HEADER, HEADERS
from headrace.net.http2.stream import Stream

if TYPE_CHECKING:
    from headrace.fleet.router.h2.headers import Answer
    from headrace.fleet.router.h2.upstream import UpstreamStream

_pack = HEADER.pack


class AnsweredCall(Stream):
    """See the module."""

    # Defaults on the class, as in `Stream`.
    over = False
    """Whether the client has its status, or is gone."""
    whole = b""
    """All frames of an answer, for `write_whole` of the backend's connection."""
    _upstream: UpstreamStream | None = None
    _started = False
    """Whether the head of an answer has been written."""
    _head: bytes | None = None
    """The head of an answer that is written with what follows it, or at the end of the read."""
    _piece = b""
    _outcome = Outcome.OK

    # Called by the stream to the backend, and by its connection.

    def answer_head(self, upstream: UpstreamStream, answer: Answer, ends: bool) -> None:
        """The head of the answer; `ends` says that it is all of it."""
        if self.over:
            return
        if ends:
            self._settle(answer.outcome, answer.grpc_status)
            self.send_headers(answer.block, end=True)
            return
        self._forget_request()
        self._head = answer.block
        self._outcome = answer.outcome
        upstream.connection.unsaid.append(self)

    def answer_data(self, upstream: UpstreamStream, piece: bytes) -> None:
        """Bytes of the answer."""
        if self._head is not None:
            if not self._piece:
                self._piece = piece
                return
            self.say()
        if not self.send_data([piece]):
            upstream.pause()

    def answer_tail(self, upstream: UpstreamStream, answer: Answer) -> None:
        """The trailers: the end of the answer."""
        if self.over:
            return
        head, piece, tail = self._head, self._piece, answer.block
        size = len(piece)
        if (
            head is not None
            and size
            and self.remote_closed
            and len(head) + size + len(tail) <= DEFAULT_FRAME_BYTES
            and self.connection.has_room(self, size)
        ):
            # The whole answer in one read: it is written with others to this client.
            self._settle(answer.outcome, answer.grpc_status)
            self.connection.send_window -= size
            self.local_closed = True
            self.whole = _joined(self.id, head, piece, tail)
            upstream.connection.write_whole(self)
            return
        self.say()
        self._settle(answer.outcome, answer.grpc_status)
        self.send_data([], trailers=tail)

    def answer_whole(self, upstream: UpstreamStream, head: Answer, piece: bytes, tail: Answer) -> None:
        """All of an answer at once."""
        self._head = head.block
        self._piece = piece
        self.answer_tail(upstream, tail)

    def answer_end(self, upstream: UpstreamStream) -> None:
        """The answer ended without trailers: no gRPC, but for the client to judge."""
        if not self.over:
            self.say()
            self._settle(self._outcome, Status.UNKNOWN)
            self.send_data([], end=True)

    def say(self) -> None:
        """Write what there is of the answer."""
        head, self._head = self._head, None
        if head is None or self.over:
            return
        self._started = True
        self.send_headers(head)
        piece, self._piece = self._piece, b""
        if piece and not self.send_data([piece]) and self._upstream is not None:
            self._upstream.pause()

    # Filled in by `ProxiedCall`.

    def _settle(self, outcome: int, status: int) -> None:
        """The backend has done its part."""
        raise NotImplementedError

    def _forget_request(self) -> None:
        """The request will not be sent again."""
        raise NotImplementedError

    # Inside.

    def _say_status(self, block: bytes) -> None:
        """End the answer with a status of ours."""
        if self._started:
            self.send_data([], trailers=block)
        else:
            self.send_headers(HEAD_BLOCK + block, end=True)


def _joined(number: int, head: bytes, piece: bytes, tail: bytes) -> bytes:
    """A whole answer as frames."""
    size, fields, last = len(piece), len(head), len(tail)
    return (
        _pack(fields >> 8, fields & 0xFF, HEADERS, END_HEADERS, number)
        + head
        + _pack(size >> 8, size & 0xFF, DATA, 0, number)
        + piece
        + _pack(last >> 8, last & 0xFF, HEADERS, END_HEADERS | END_STREAM, number)
        + tail
    )
