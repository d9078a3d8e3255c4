# SPDX-License-Identifier: Apache-2.0
"""The same for HTTP/2, and the watch itself."""

from __future__ import annotations

import asyncio

from headrace.core.limits import Limits
from headrace.net.http2.connection import Http2Connection
from headrace.net.site import WriteStall
from support.serving import echo_site


class SlowTransport(asyncio.Transport):
    """Takes everything and sends what the test says."""

    unsent = 0
    aborted = False

    def write(self, data: object) -> None: ...

    def write_eof(self) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


def test_a_closing_connection_waits_for_its_reader() -> None:
    site = echo_site(Limits(write_idle_seconds=30.0))()
    site.tick(5000.0)
    transport = SlowTransport()
    connection = Http2Connection(site)
    connection.connection_made(transport)
    connection.close()
    transport.unsent = 1000
    for later, aborted in ((5005.0, False), (5025.0, False), (5031.0, True)):
        connection.sweep(later)
        assert transport.aborted is aborted, later


def test_only_reading_is_a_sign_of_life() -> None:
    transport, watch = SlowTransport(), WriteStall()
    watch.start(100.0)
    for now, unsent, gave_up in (
        (110, 50, False),
        (120, 80, False),
        (131, 90, True),
        (132, 40, False),
        (163, 40, True),
    ):
        transport.unsent = unsent
        assert watch.is_stalled(transport, now, 30.0) is gave_up, now
