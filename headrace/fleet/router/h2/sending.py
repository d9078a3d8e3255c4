# SPDX-License-Identifier: Apache-2.0
"""The sending side of a connection to a backend: new streams, and as few writes as there can be.

The base of `connection.UpstreamConnection`. Each write is a system call, so that what one turn of the loop brings for the
backend is one write, and what one read from the backend brings for one client is one write too.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.net.http2.connection import Http2Connection

if TYPE_CHECKING:
    from headrace.fleet.router.h2.answering import AnsweredCall
    from headrace.fleet.router.h2.upstream import UpstreamStream
    from headrace.net.http.exchange import Buffer
    from headrace.net.site import Site

MOST_STREAMS = 1000
"""Calls on one connection, if the backend names no limit or a higher one."""
_LAST_STREAM = 1 << 30


class UpstreamSending(Http2Connection):
    """See the module."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._loop = asyncio.get_running_loop()
        self.load = 0
        """Calls on this connection, those included whose head has not been written yet."""
        self.most = MOST_STREAMS
        """Calls that it may have."""
        self.unsaid: list[AnsweredCall] = []
        """Calls whose answer began in the present read; what has come of it is written at its end, in one piece."""
        self._whole: dict[Http2Connection, list[AnsweredCall]] = {}
        """Calls answered wholly in the present read, by the client's connection."""
        self._unsent: list[UpstreamStream] = []
        self._queue: list[Buffer] = []
        """Frames of this turn of the loop."""
        self._flush_due = False
        self._next = 1

    # Called by calls and their streams.

    def open(self, stream: UpstreamStream) -> None:
        """A new call. Its head is written with what follows it in the same turn of the loop, or at the turn's end."""
        self.load += 1
        self._unsent.append(stream)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write(self, data: Buffer) -> None:
        """See `SendingSide.write`."""
        self._queue.append(data)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write_many(self, buffers: list[Buffer]) -> None:
        """See `SendingSide.write_many`."""
        self._queue += buffers
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def write_whole(self, call: AnsweredCall) -> None:
        """`call.whole` is to be written at the end of the read."""
        connection = call.connection
        calls = self._whole.get(connection)
        if calls is None:
            self._whole[connection] = [call]
        else:
            calls.append(call)

    def begin(self, stream: UpstreamStream) -> int:
        """The number of a stream whose head is about to be written."""
        number = self._next
        self._next = number + 2
        self.highest_stream = number
        self.streams[number] = stream
        if number > _LAST_STREAM:
            # No more numbers soon: it is closed when it has been idle for a while.
            self.most = 0
        return number

    # Called by the connection.

    def write_answers(self) -> None:
        """The read is over: write what it brought for the clients."""
        if self._whole:
            self._write_whole()
        if self.unsaid:
            unsaid, self.unsaid = self.unsaid, []
            for call in unsaid:
                call.say()

    # Inside.

    def _flush(self) -> None:
        """Write what this turn of the loop brought, after the heads that nothing has followed yet."""
        try:
            unsent, self._unsent = self._unsent, []
            for stream in unsent:
                if stream.unsent:
                    stream.write_head(end=False)
        finally:
            self._flush_due = False
            self._write_queue()

    def _write_queue(self) -> None:
        queue, self._queue = self._queue, []
        if self._out is None or not queue:
            return
        if len(queue) == 1:
            self._out.write(queue[0])
        else:
            self._out.writelines(queue)

    def _write_whole(self) -> None:
        whole, self._whole = self._whole, {}
        for connection, calls in whole.items():
            connection.write(calls[0].whole if len(calls) == 1 else b"".join([call.whole for call in calls]))
            for call in calls:
                # Not before: the last stream of a connection that drains closes it.
                connection.closed_locally(call)
