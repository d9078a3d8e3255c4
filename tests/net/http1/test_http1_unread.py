# SPDX-License-Identifier: Apache-2.0
"""How long a client may take to read its last answer."""

from __future__ import annotations

from http1_fake import FakeWire
from http1_wire import get

from headrace.core.limits import Limits


def test_a_last_answer_that_is_still_being_read_is_not_cut() -> None:
    wire = FakeWire(Limits(write_idle_seconds=30.0))
    wire.site.tick(5000.0)
    wire.feed(get("/hello", "Connection: close"))
    wire.transport.unsent = 1000
    wire.sweep(5.0)
    assert not wire.aborted(), "it has been unread for five seconds, whatever the clock says"
    wire.sweep(20.0)
    assert not wire.aborted()
    wire.transport.unsent = 500
    wire.sweep(20.0)
    assert not wire.aborted(), "some of it was read meanwhile"
    wire.sweep(31.0)
    assert wire.aborted()
