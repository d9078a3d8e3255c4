# SPDX-License-Identifier: Apache-2.0
"""Flow control against a model (RFC 9113 section 6.9): never a byte too many, and never one held back without need."""

from __future__ import annotations

import asyncio

from fake_transport import Http2Harness
from hyperframe.frame import DataFrame, GoAwayFrame, RstStreamFrame
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from protocol_checker import Windows
from raw_frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    RST_STREAM,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
    settings,
)

from support.properties import examples

SIZES = st.sampled_from([1, 2, 100, 5_000, 16_384, 16_385, 40_000])
INCREMENTS = st.sampled_from([1, 3, 1_000, 16_384, 30_000, 100_000])
INITIALS = st.sampled_from([0, 1, 100, 16_384, 65_535, 200_000])
MOST = 2**31 - 1


class FlowControl(RuleBasedStateMachine):
    """A client that opens and closes windows as it likes, and knows what each answer must have got."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio._set_running_loop(self.loop)
        self.unplugged = Http2Harness()
        self.windows = Windows()
        self.left: dict[int, int] = {}
        self.ended: set[int] = set()
        self.paused = False
        self.frame_bytes = 16_384
        self.next_id = 1

    def teardown(self) -> None:
        asyncio._set_running_loop(None)
        if hasattr(self, "loop"):
            self.loop.close()

    @rule(size=SIZES)
    def ask(self, size: int) -> None:
        block = literal(request_fields(path=f"/big/{size}"))
        self.windows.of(self.next_id)
        self.left[self.next_id] = size
        self.unplugged.feed(raw(HEADERS, END_HEADERS | END_STREAM, self.next_id, block))
        self.next_id += 2
        self.read_frames()

    @rule(increment=INCREMENTS)
    def open_connection(self, increment: int) -> None:
        self.windows.grant(0, increment)
        self.unplugged.feed(raw(WINDOW_UPDATE, 0, 0, increment.to_bytes(4, "big")))
        self.read_frames()

    @precondition(lambda self: self.left)
    @rule(data=st.data(), increment=INCREMENTS)
    def open_stream(self, data: st.DataObject, increment: int) -> None:
        stream_id = data.draw(st.sampled_from(sorted(self.left)))
        self.windows.grant(stream_id, increment)
        self.unplugged.feed(raw(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big")))
        self.read_frames()

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        stream_id = data.draw(st.sampled_from(sorted(self.left)))
        del self.left[stream_id]
        self.unplugged.feed(raw(RST_STREAM, 0, stream_id, bytes(4)))
        self.read_frames()

    @rule(initial=INITIALS)
    def change_initial(self, initial: int) -> None:
        self.windows.resize(initial)
        self.unplugged.feed(settings({INITIAL_WINDOW: initial}))
        self.read_frames()

    @rule(size=st.sampled_from([16_384, 20_000, 100_000]))
    def change_frame_size(self, size: int) -> None:
        self.frame_bytes = size
        self.unplugged.feed(settings({MAX_FRAME: size}))
        self.read_frames()

    @precondition(lambda self: not self.paused)
    @rule()
    def fill_socket(self) -> None:
        self.paused = True
        self.unplugged.connection.pause_writing()

    @precondition(lambda self: self.paused)
    @rule()
    def empty_socket(self) -> None:
        self.paused = False
        self.unplugged.connection.resume_writing()
        self.read_frames()

    def read_frames(self) -> None:
        """Take what was sent off the windows."""
        for frame in self.unplugged.frames():
            assert not isinstance(frame, GoAwayFrame | RstStreamFrame), frame
            if isinstance(frame, DataFrame):
                size = len(frame.data)
                assert frame.stream_id in self.left, "DATA on a stream that is over"
                assert size <= self.frame_bytes
                self.windows.spend(frame.stream_id, size)
                self.left[frame.stream_id] -= size
                assert self.left[frame.stream_id] >= 0
                if size:
                    assert self.windows.connection >= 0
                    assert self.windows.of(frame.stream_id) >= 0
                if "END_STREAM" in frame.flags:
                    assert self.left.pop(frame.stream_id) == 0

    @invariant()
    def nothing_waits_without_need(self) -> None:
        if hasattr(self, "left") and not self.paused:
            for stream_id in self.left:
                assert self.windows.connection <= 0 or self.windows.of(stream_id) <= 0, f"stream {stream_id} waits"

    @invariant()
    def both_sides_agree(self) -> None:
        if hasattr(self, "left"):
            connection = self.unplugged.connection
            assert sorted(connection.streams) == sorted(self.left)
            assert connection.send_window == self.windows.connection
            for stream_id, stream in connection.streams.items():
                assert stream.send_window == self.windows.of(stream_id)


TestFlowControl = FlowControl.TestCase
TestFlowControl.settings = hypothesis_settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None, derandomize=True
)
