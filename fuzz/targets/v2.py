# SPDX-License-Identifier: Apache-2.0
"""Target `v2`: requests in JSON, in JSON with binary tensors, and over gRPC; each twice, because layouts are cached."""

from __future__ import annotations

import json
import struct
from typing import Any

from hpack import Decoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from fuzz.http_request import Answer, post
from fuzz.in_memory_server import Server
from fuzz.target import Check, Target, require
from fuzz.targets.connections import PREFACE
from headrace.net.http2.headers import encode_field

_STATUSES = (200, 400, 404, 413, 501, 503)
_INTERNAL, _UNKNOWN = b"13", b"2"
_WORDS = (
    b'"inputs"',
    b'"outputs"',
    b'"name":"INPUT0"',
    b'"datatype":"FP32"',
    b'"datatype":"BYTES"',
    b'"datatype":"BF16"',
    b'"datatype":"BOOL"',
    b'"shape":[1,4]',
    b'"data":[1,2,3,4]',
    b'"parameters":{"binary_data_size":16}',
    b'"binary_data":true',
    b'"binary_data_output":true',
    b'"classification":2',
    b'"shared_memory_region":"r"',
    b'"id":"1"',
    b'"sequence_id":1',
    b'"timeout":1',
    b'"priority":1',
    b"NaN",
    b"Infinity",
    b"null",
    b"[[[",
    b"\\ud800",
)


def _same_twice(ask: Any) -> None:
    """The first answer may have taught the server a layout: the second must say the same."""
    first, second = ask(), ask()
    require(first == second, f"first {str(first)[:200]}, then {str(second)[:200]}")


def _checked(answer: Answer) -> tuple[int, bytes]:
    require(answer.status in _STATUSES, f"answered {answer.status}")
    if answer.status != 200:
        require(bool(json.loads(answer.body)["error"]), "an error without a word")
    return answer.status, answer.body


def _open_json() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        for model in (b"any", b"four"):
            _same_twice(lambda path=b"/v2/models/%b/infer" % model: _checked(post(server, path, data)))

    return check


def _open_binary() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        field = b"inference-header-content-length: %d" % int.from_bytes(data[:2], "little")
        for model in (b"any", b"four"):
            _same_twice(lambda path=b"/v2/models/%b/infer" % model: _checked(post(server, path, data[2:], (field,))))

    return check


def _open_grpc() -> Check:
    server = Server()
    path = b"/inference.GRPCInferenceService/ModelInfer"
    names = (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"fuzz")
    fields = *names, (b"content-type", b"application/grpc"), (b"te", b"trailers")
    headers = HeadersFrame(1, b"".join(encode_field(*field) for field in fields), flags=["END_HEADERS"])
    start = PREFACE + SettingsFrame(0).serialize() + headers.serialize()

    def ask(data: bytes) -> tuple[bytes, bytes]:
        connection = server.connect()
        message = struct.pack(">BI", 0, len(data)) + data
        connection.send(start + DataFrame(1, message, flags=["END_STREAM"]).serialize())
        connection.until(lambda: _ended(connection.written) or connection.over)
        connection.hang_up()
        server.check()
        status, body = _answered(connection.written)
        require(status not in (b"", _INTERNAL, _UNKNOWN), f"grpc-status {status!r}")
        return status, body

    return lambda data: _same_twice(lambda: ask(data))


def _frames(written: bytes) -> list[Any]:
    frames = []
    while len(written) >= 9:
        frame, length = Frame.parse_frame_header(memoryview(written[:9]))
        frame.parse_body(memoryview(written[9 : 9 + length]))
        frames.append(frame)
        written = written[9 + length :]
    return frames


def _ended(written: bytes) -> bool:
    return any(frame.stream_id == 1 and "END_STREAM" in frame.flags for frame in _frames(written))


def _answered(written: bytes) -> tuple[bytes, bytes]:
    decoder, status, body = Decoder(), b"", b""
    for frame in _frames(written):
        if isinstance(frame, HeadersFrame):
            fields = {bytes(name): bytes(value) for name, value in decoder.decode(frame.data, raw=True)}
            status = fields.get(b"grpc-status", status)
        elif isinstance(frame, DataFrame):
            body += frame.data
    return status, body


JSON = Target("a request in JSON: an answer or a clear refusal, and the same when asked again", _open_json, _WORDS)
BINARY = Target("a JSON header and binary tensors: the same, also when its layout is recognised", _open_binary, _WORDS)
GRPC = Target(
    "a message of ModelInfer: neither INTERNAL nor UNKNOWN, and the same when asked again",
    _open_grpc,
    (
        b"\x0a\x03any",
        b"\x0a\x04four",
        b"\x2a",
        b"INPUT0",
        b"FP32",
        b"BYTES",
        b"\x1a\x02\x01\x04",
        b"\x3a\x10",
        b"\x22",
        b"OUTPUT0",
    ),
    2048,
)
