# SPDX-License-Identifier: Apache-2.0
"""Check every frame that a server sends against the rules of HTTP/2, whatever the client did.

It must not exceed a window or a frame size, speak on a stream after its end or before its beginning, tear a header block
apart, grant more window than was used, take a GOAWAY back, or emit a block that does not decode.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import hpack
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from raw_frames import (
    ACK,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    TABLE_SIZE,
    WINDOW_UPDATE,
)

from headrace.net.http2.frames import ErrorCode

_FLAGS_SENT = {
    DATA: END_STREAM,
    HEADERS: END_STREAM | END_HEADERS,
    RST_STREAM: 0,
    SETTINGS: ACK,
    PING: ACK,
    GOAWAY: 0,
    WINDOW_UPDATE: 0,
    CONTINUATION: END_HEADERS,
}
"""What this server has reason to send, with which flags: it neither pads nor pushes nor prioritises."""


@dataclass
class Answer:
    """What came back on one stream."""

    fields: list[tuple[bytes, bytes]] = field(default_factory=list)
    informational: list[list[tuple[bytes, bytes]]] = field(default_factory=list)
    body: bytes = b""
    trailers: list[tuple[bytes, bytes]] | None = None
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(dict(self.fields)[b":status"])

    def get(self, name: bytes) -> bytes | None:
        return dict(self.fields).get(name)


class Windows:
    """What one side may still send, on the connection and on each stream."""

    def __init__(self) -> None:
        self.connection = 65_535
        self.initial = 65_535
        self.streams: dict[int, int] = {}

    def of(self, stream_id: int) -> int:
        return self.streams.setdefault(stream_id, self.initial)

    def grant(self, stream_id: int, size: int) -> None:
        if stream_id:
            self.streams[stream_id] = self.of(stream_id) + size
        else:
            self.connection += size

    def spend(self, stream_id: int, size: int) -> None:
        self.connection -= size
        self.streams[stream_id] = self.of(stream_id) - size

    def resize(self, initial: int) -> None:
        for stream_id in self.streams:
            self.streams[stream_id] += initial - self.initial
        self.initial = initial


def is_over(answer: Answer) -> bool:
    return answer.ended or answer.reset is not None


class ProtocolChecker:
    """Tracks the state of a connection as the client must see it, and asserts the rules."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        """Every frame the server sent, as text."""
        self.frames: list[Frame] = []
        self.answers: dict[int, Answer] = {}
        self.theirs: dict[int, int] = {}
        """The server's settings."""
        self.sending = Windows()
        """What we may send; the server must not let it grow beyond what it announced first."""
        self.receiving = Windows()
        """What the server may send."""
        self.announced = 0
        """The connection's window after the handshake; before that, nothing is known of it."""
        self._decoder = hpack.Decoder(max_header_list_size=1 << 24)
        self._unacknowledged: list[dict[int, int]] = []
        self._frame_bytes = 16_384
        self._block: tuple[int, bool, bytes] | None = None
        self._opened: set[int] = set()
        self._last_word = 2**31 - 1

    def check_header(self, head: bytes, length: int) -> None:
        """The nine bytes before a payload."""
        assert head[3] in _FLAGS_SENT, f"a frame of type {head[3]}, which a server does not send"
        assert not head[4] & ~_FLAGS_SENT[head[3]], "a flag that means nothing (4.1)"
        assert not head[5] & 0x80, "the reserved bit (4.1)"
        assert length <= self._frame_bytes, f"a frame of {length} bytes; we take {self._frame_bytes}"

    def check_frame(self, frame: Frame, payload: bytes) -> None:
        """A frame the server sent."""
        self.seen.append(_words(frame))
        self.frames.append(frame)
        stream_id = frame.stream_id
        if self._block is not None:
            assert isinstance(frame, ContinuationFrame), "a header block was torn apart (4.3)"
            assert frame.stream_id == self._block[0], "a header block was torn apart (4.3)"
        if len(self.frames) == 1:
            assert isinstance(frame, SettingsFrame) and "ACK" not in frame.flags, "SETTINGS must come first (3.4)"
        if stream_id:
            assert stream_id in self._opened, f"a frame on stream {stream_id}, which we did not open (5.1)"
        if isinstance(frame, DataFrame):
            self._judge_data(frame, len(payload))
        elif isinstance(frame, GoAwayFrame):
            assert frame.last_stream_id <= self._last_word, "a later last stream than before (6.8)"
            self._last_word = frame.last_stream_id
        elif isinstance(frame, HeadersFrame):
            assert not is_over(self.answer_to(stream_id)), "HEADERS after the end of a stream (5.1)"
            self._gather(stream_id, "END_STREAM" in frame.flags, frame.data, "END_HEADERS" in frame.flags)
        elif isinstance(frame, ContinuationFrame):
            assert self._block is not None, "CONTINUATION without HEADERS (6.10)"
            _, end, block = self._block
            self._gather(stream_id, end, block + frame.data, "END_HEADERS" in frame.flags)
        elif isinstance(frame, RstStreamFrame):
            assert self.answer_to(stream_id).reset is None, "a stream was reset twice (5.4.2)"
            self.answers[stream_id].reset = frame.error_code
        elif isinstance(frame, SettingsFrame):
            self._judge_settings(frame)
        elif isinstance(frame, WindowUpdateFrame):
            self.sending.grant(stream_id, frame.window_increment)
            if self.announced:
                most = self.theirs[INITIAL_WINDOW] if stream_id else self.announced
                now = self.sending.of(stream_id) if stream_id else self.sending.connection
                assert now <= most, "more window was granted than used (6.9)"

    def _judge_data(self, frame: DataFrame, size: int) -> None:
        answer = self.answer_to(frame.stream_id)
        assert answer.fields, "DATA before HEADERS (8.1)"
        assert not is_over(answer), "DATA after the end of a stream (5.1)"
        self.receiving.spend(frame.stream_id, size)
        if size:
            assert self.receiving.connection >= 0, "more DATA than the connection's window (6.9.1)"
            assert self.receiving.of(frame.stream_id) >= 0, "more DATA than the stream's window (6.9.1)"
        answer.body += frame.data
        answer.ended = "END_STREAM" in frame.flags

    def _judge_settings(self, frame: SettingsFrame) -> None:
        if "ACK" not in frame.flags:
            self.theirs.update(frame.settings)
            assert self.theirs.get(ENABLE_PUSH, 0) == 0, "a server must not enable push (6.5.2)"
            self.sending.resize(self.theirs.get(INITIAL_WINDOW, 65_535))
            return
        assert self._unacknowledged, "an acknowledgement of nothing (6.5.3)"
        ours = self._unacknowledged.pop(0)
        # Only now must the server know them; before, the old ones held.
        if INITIAL_WINDOW in ours:
            self.receiving.resize(ours[INITIAL_WINDOW])
        self._frame_bytes = ours.get(MAX_FRAME, self._frame_bytes)
        self._decoder.max_allowed_table_size = ours.get(TABLE_SIZE, self._decoder.max_allowed_table_size)

    def _gather(self, stream_id: int, end: bool, block: bytes, done: bool) -> None:
        if not done:
            self._block = (stream_id, end, block)
            return
        self._block = None
        fields = list(self._decoder.decode(block, raw=True))
        answer = self.answer_to(stream_id)
        _check_answer_fields(fields, trailers=bool(answer.fields))
        if answer.fields:
            assert end, "trailers without END_STREAM (8.1)"
            answer.trailers = fields
        elif dict(fields)[b":status"].startswith(b"1"):
            assert not end, "an informational response that ends the stream (8.1)"
            answer.informational.append(fields)
        else:
            answer.fields = fields
        answer.ended = end

    def account(self, frame: Frame | bytes) -> None:
        """A frame we send: what it allows the server, and what it uses of what the server allows us."""
        if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self._unacknowledged.append(dict(frame.settings))
        elif isinstance(frame, WindowUpdateFrame):
            self.receiving.grant(frame.stream_id, frame.window_increment)
        elif isinstance(frame, HeadersFrame):
            self._opened.add(frame.stream_id)
        elif isinstance(frame, DataFrame):
            self.sending.spend(frame.stream_id, len(frame.serialize_body()))
        elif isinstance(frame, bytes):
            self._account_raw(frame.removeprefix(PREFACE))

    def _account_raw(self, data: bytes) -> None:
        while len(data) >= 9:
            high, low, kind, flags, stream_id = struct.unpack_from(">HBBBI", data)
            payload, data = data[9 : 9 + (high << 8 | low)], data[9 + (high << 8 | low) :]
            if kind == DATA:
                self.sending.spend(stream_id & 0x7FFFFFFF, len(payload))
            elif kind == HEADERS:
                self._opened.add(stream_id & 0x7FFFFFFF)
            elif kind == SETTINGS and not flags & ACK and len(payload) % 6 == 0:
                self._unacknowledged.append(dict(struct.iter_unpack(">HI", payload)))
            elif kind == WINDOW_UPDATE and len(payload) == 4:
                self.receiving.grant(stream_id & 0x7FFFFFFF, int.from_bytes(payload, "big") & 0x7FFFFFFF)

    def answer_to(self, stream_id: int) -> Answer:
        return self.answers.setdefault(stream_id, Answer())


def _check_answer_fields(fields: Iterable[tuple[bytes, bytes]], *, trailers: bool) -> None:
    """8.2 and 8.3.2, of what the server sends."""
    regular = False
    for name, value in fields:
        assert name == name.lower(), "a field name with a capital (8.2.1)"
        assert not set(value) & {0, 10, 13} and value.strip(b" \t") == value, "a forbidden character (8.2.1)"
        assert name not in (b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"), "connection field (8.2.2)"
        if name.startswith(b":"):
            assert name == b":status" and not trailers and not regular, "a misplaced pseudo-header (8.3)"
        else:
            regular = True


def _words(frame: Frame) -> str:
    code = getattr(frame, "error_code", None)
    text = f"{type(frame).__name__.removesuffix('Frame')} {frame.stream_id} {','.join(sorted(frame.flags))}".strip()
    if code is not None:
        text += f" {ErrorCode(code).name}"
    if isinstance(frame, GoAwayFrame):
        text += f" {frame.additional_data!r}"
    return text
