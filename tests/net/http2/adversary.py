# SPDX-License-Identifier: Apache-2.0
"""A raw HTTP/2 client that breaks rules on purpose, and holds the server to all of them while it does.

`Client` is a plain socket: it sends frames built by hyperframe and hpack or `raw_frames`, and as a `ProtocolChecker` checks
every frame that comes back.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable

import hpack
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from protocol_checker import Answer, ProtocolChecker, is_over
from raw_frames import ACK, PREFACE, SETTINGS, Fields, raw, request_fields

from headrace.net.http2.frames import ErrorCode

SECONDS = 30.0
"""How long an answer may take. Nothing is decided by how much of it was used."""


class Client(ProtocolChecker):
    """One connection. Methods that wait give up after `SECONDS` with an AssertionError that tells what came."""

    def __init__(self, port: int, own: dict[int, int] | None = None, *, handshake: bool = True) -> None:
        super().__init__()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.encoder = hpack.Encoder()
        self.ended = False
        self._received = b""
        self._pings = itertools.count(1)
        if handshake:
            try:
                self.shake_hands(own or {})
            except BaseException:
                self.socket.close()
                raise

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # Sending.

    def send(self, *frames: Frame | bytes) -> None:
        """Send frames in one write, as they are; what they do to the windows is kept account of."""
        data = b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames)
        for frame in frames:
            self.account(frame)
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            # The server has closed: what it said before is still to be read.
            pass

    def shake_hands(self, own: dict[int, int]) -> None:
        """Preface and settings both ways, acknowledged both ways."""
        self.send(PREFACE, SettingsFrame(0, own))
        self.wait(lambda frame: isinstance(frame, SettingsFrame) and "ACK" not in frame.flags)
        self.send(raw(SETTINGS, ACK, 0))
        self.wait(lambda frame: isinstance(frame, SettingsFrame) and "ACK" in frame.flags)
        self.ping()
        self.announced = self.sending.connection

    def change_settings(self, values: dict[int, int]) -> None:
        """Send SETTINGS and wait until they hold."""
        self.send(SettingsFrame(0, values))
        self.wait(lambda frame: isinstance(frame, SettingsFrame) and "ACK" in frame.flags)

    def request(
        self, stream_id: int, method: str = "GET", path: str = "/hello", *, end: bool = True, more: Fields = ()
    ) -> None:
        self.headers(stream_id, request_fields(method, path, more), end=end)

    def headers(self, stream_id: int, fields: Fields, *, end: bool = True, done: bool = True) -> None:
        """A HEADERS frame; `done` is END_HEADERS."""
        self.send(self.headers_frame(stream_id, fields, end=end, done=done))

    def headers_frame(self, stream_id: int, fields: Fields, *, end: bool = True, done: bool = True) -> HeadersFrame:
        flags = [*(["END_STREAM"] if end else []), *(["END_HEADERS"] if done else [])]
        return HeadersFrame(stream_id, self.encoder.encode(list(fields)), flags=flags)

    def data(self, stream_id: int, data: bytes = b"", *, end: bool = False) -> None:
        self.send(DataFrame(stream_id, data, flags=["END_STREAM"] if end else []))

    def reset(self, stream_id: int, code: int = ErrorCode.CANCEL) -> None:
        self.send(RstStreamFrame(stream_id, error_code=code))

    def grant(self, stream_id: int, size: int) -> None:
        self.send(WindowUpdateFrame(stream_id, window_increment=size))

    # Receiving.

    def wait(self, wanted: Callable[[Frame], bool]) -> Frame:
        """Read until a frame is the wanted one."""
        while (frame := self._read()) is not None:
            if wanted(frame):
                return frame
        raise AssertionError(f"the server closed; before that it sent {self.seen}")

    def ping(self) -> None:
        """A barrier: when the answer is here, everything the server had to say to what was sent before is here, too."""
        mark = b"%08d" % next(self._pings)
        self.send(PingFrame(0, mark))
        self.wait(lambda frame: isinstance(frame, PingFrame) and "ACK" in frame.flags and frame.opaque_data == mark)

    def answer(self, stream_id: int) -> Answer:
        """The whole answer on a stream: up to END_STREAM or a reset."""
        while stream_id not in self.answers or not is_over(self.answers[stream_id]):
            if self._read() is None:
                raise AssertionError(f"no answer on stream {stream_id}; the server sent {self.seen}")
        return self.answers[stream_id]

    def expect_ok(self, stream_id: int, body: bytes | None = None) -> Answer:
        answer = self.answer(stream_id)
        assert answer.reset is None, self.seen
        assert answer.status == 200, self.seen
        if body is not None:
            assert answer.body == body
        return answer

    def expect_reset(self, stream_id: int, *codes: ErrorCode) -> None:
        """A stream error, and a connection that goes on."""
        while self.answer_to(stream_id).reset is None:
            if self._read() is None:
                raise AssertionError(f"no reset of stream {stream_id}; the server sent {self.seen}")
        assert self.answers[stream_id].reset in codes, self.seen
        self.ping()

    def expect_goaway(self, *codes: ErrorCode) -> GoAwayFrame:
        """A connection error: GOAWAY with one of these codes, then the end of the connection (5.4.1)."""
        frame = self.wait(lambda frame: isinstance(frame, GoAwayFrame))
        assert isinstance(frame, GoAwayFrame)
        assert ErrorCode(frame.error_code) in codes, self.seen
        while (after := self._read()) is not None:
            assert not isinstance(after, GoAwayFrame), self.seen
        return frame

    def expect_error(self, stream_id: int, *codes: ErrorCode) -> None:
        """A stream error, or a connection error instead of it, which 5.4.1 allows."""
        self.wait(
            lambda frame: (
                isinstance(frame, GoAwayFrame) or (isinstance(frame, RstStreamFrame) and frame.stream_id == stream_id)
            )
        )
        last = self.frames[-1]
        assert isinstance(last, GoAwayFrame | RstStreamFrame)
        assert ErrorCode(last.error_code) in codes, self.seen
        if isinstance(last, RstStreamFrame):
            self.ping()
        else:
            self.expect_end()

    def expect_end(self) -> None:
        """The server closes the connection."""
        while self._read() is not None:
            pass

    # Inside.

    def _read(self) -> Frame | None:
        """The next frame; None when the server has closed."""
        head = self._take(9)
        if head is None:
            return None
        frame, length = Frame.parse_frame_header(memoryview(head))
        self.check_header(head, length)
        payload = self._take(length)
        assert payload is not None, "the server closed inside a frame"
        frame.parse_body(memoryview(payload))
        self.check_frame(frame, payload)
        return frame

    def _take(self, size: int) -> bytes | None:
        while len(self._received) < size:
            try:
                more = b"" if self.ended else self.socket.recv(1 << 20)
            except TimeoutError:
                raise AssertionError(f"nothing more came; the server had sent {self.seen}") from None
            except ConnectionResetError:
                more = b""
            if not more:
                assert not self._received, "the server closed inside a frame"
                self.ended = True
                return None
            self._received += more
        taken, self._received = self._received[:size], self._received[size:]
        return taken
