# SPDX-License-Identifier: Apache-2.0
"""A client of 0.7, played byte for byte: its requests are written out here, and its way of reading the answers.

Nothing in this file uses the server's own schemas: every number is the guide's and its protocol definitions'.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from support.serving import Serving

VALUES = struct.pack("<8i", *range(8))


def field(number: int, data: bytes) -> bytes:
    """A length-delimited protobuf field."""
    return bytes((number << 3 | 2,)) + varint(len(data)) + data


def number(field_number: int, value: int) -> bytes:
    return bytes((field_number << 3,)) + varint(value)


def varint(value: int) -> bytes:
    data = b""
    while value > 0x7F:
        data += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return data + bytes((value,))


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message: varints, bytes, and floats as their four bytes."""
    position = 0

    def read() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        tag = read()
        if tag & 7 == 0:
            yield tag >> 3, read()
        else:
            size = 4 if tag & 7 == 5 else read()
            yield tag >> 3, data[position : position + size]
            position += size


@contextmanager
def connected(server: Serving) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        yield sock


def post(server: Serving, target: str, header: str, body: bytes) -> tuple[str, dict[str, str], bytes]:
    """As libcurl writes it for the client of the time: no space behind the field's name, and no Expect."""
    request = (
        f"POST {target} HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\nNV-InferRequest:{header}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with connected(server) as sock:
        sock.sendall(request.encode() + body)
        data = b""
        while b"\r\n\r\n" not in data:
            data += sock.recv(65536)
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        while len(rest) < int(fields["content-length"]):
            rest += sock.recv(65536)
    return first, fields, rest


def test_raw_and_class_over_http(server: Serving) -> None:
    first, fields, body = post(
        server,
        "/api/infer/pair?format=binary",
        'batch_size: 1 input { name: "A" byte_size: 16 } input { name: "B" byte_size: 16 } '
        'output { name: "Y" byte_size: 16 } output { name: "X" byte_size: 16 cls { count: 2 } }',
        VALUES,
    )
    assert first == "HTTP/1.1 200 OK"
    assert fields["nv-status"].startswith('code: SUCCESS server_id: "inference:0" request_id: ')
    # The client knows how long the raw outputs are, and takes the rest for the header.
    assert body[:16] == VALUES[16:]
    classes = field(1, number(1, 3) + b"\x15" + struct.pack("<f", 3.0)) + field(
        1, number(1, 2) + b"\x15" + struct.pack("<f", 2.0)
    )
    raw = field(1, b"Y") + field(2, number(1, 16))
    assert body[16:] == (
        field(1, b"pair") + number(2, 1) + number(3, 1) + field(4, raw) + field(4, field(1, b"X") + field(3, classes))
    )


def test_the_guides_failure_over_http(server: Serving) -> None:
    first, fields, body = post(
        server,
        "/api/infer/nobody/7",
        'batch_size: 1 input { name: "input" byte_size: 4 } output { name: "output" byte_size: 4 cls { count: 3 } }',
        b"abcd",
    )
    assert first == "HTTP/1.1 400 Bad Request"
    assert fields["nv-status"].startswith(
        'code: INVALID_ARG msg: "unable to find platform for requested model \\\'nobody\\\'" server_id: "inference:0"'
    )
    assert body == b""


def literal(name: bytes, value: bytes) -> bytes:
    """A header field of HTTP/2 that needs no table and no Huffman code."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def call(server: Serving, method: str, message: bytes) -> bytes:
    """One gRPC call over a connection of its own: the bytes of the answer's message."""
    block = b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", f"/nvidia.inferenceserver.GRPCService/{method}".encode()),
            (b":authority", b"localhost:8001"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block)
    sent += frame(0, 1, 1, b"\0" + struct.pack(">I", len(message)) + message)
    with connected(server) as sock:
        sock.sendall(sent)
        data, answer = b"", b""
        while True:
            while len(data) < 9 or len(data) < 9 + int.from_bytes(data[:3], "big"):
                data += sock.recv(65536)
            size = int.from_bytes(data[:3], "big")
            kind, flags, stream = data[3], data[4], int.from_bytes(data[5:9], "big")
            payload, data = data[9 : 9 + size], data[9 + size :]
            if stream == 1 and kind == 0:
                answer += payload
            if stream == 1 and flags & 1:
                return answer[5:]


def header_bytes(batch: int) -> bytes:
    """InferRequestHeader of `pair`, with X as classes and Y raw."""
    return (
        number(1, batch)
        + field(2, field(1, b"A") + number(2, 16))
        + field(2, field(1, b"B") + number(2, 16))
        + field(3, field(1, b"X") + number(2, 16) + field(3, number(1, 1)))
        + field(3, field(1, b"Y") + number(2, 16))
    )


def infer_bytes(version: bytes, batch: int = 1) -> bytes:
    return field(1, b"pair") + version + field(3, header_bytes(batch)) + field(4, VALUES[:16]) + field(4, VALUES[16:])


def test_infer_over_grpc_with_the_version_as_text_as_number_and_unsaid(server: Serving) -> None:
    as_number = bytes((2 << 3,)) + varint((1 << 64) - 1)
    for version in (field(2, b"-1"), field(2, b"1"), field(2, b""), as_number, number(2, 1), b""):
        answer = dict(list(fields_of(call(server, "Infer", infer_bytes(version)))))
        all_fields = list(fields_of(call(server, "Infer", infer_bytes(version))))
        status = dict(fields_of(answer[1]))  # type: ignore[arg-type]
        assert status[1] == 1, status
        assert status[3] == b"inference:0"
        # One raw output for each that was asked for; that of the classes is empty.
        assert [data for tag, data in all_fields if tag == 3] == [b"", VALUES[16:]]
        header = list(fields_of(answer[2]))  # type: ignore[arg-type]
        assert header[:3] == [(1, b"pair"), (2, 1), (3, 1)]
        top = field(1, number(1, 3) + b"\x15" + struct.pack("<f", 3.0))
        assert header[3:] == [
            (4, field(1, b"X") + field(3, top)),
            (4, field(1, b"Y") + field(2, number(1, 16))),
        ]


def test_refusals_over_grpc(server: Serving) -> None:
    def refused(message: bytes) -> tuple[object, object]:
        answer = dict(fields_of(call(server, "Infer", message)))
        status = dict(fields_of(answer[1]))  # type: ignore[arg-type]
        return status[1], status[2]

    not_found, text = refused(infer_bytes(field(2, b"7")))
    assert (not_found, text) == (4, b"Servable not found for request: Specific(pair, 7)")
    invalid, text = refused(infer_bytes(field(2, b"-1"), batch=5))
    assert (invalid, text) == (5, b"unexpected batch size 5 for 'pair', max allowed is 4")
    internal, text = refused(infer_bytes(field(2, b"-1"), batch=2))
    assert (internal, text) == (3, b"expected 32 of data for inference input 'A', got 16")
    invalid, text = refused(infer_bytes(b"") + field(4, b"more"))
    assert (invalid, text) == (
        5,
        b"unexpected additional input data for model 'pair': give one raw_input for each input",
    )


def test_health_status_and_profile_over_grpc(server: Serving) -> None:
    health = dict(fields_of(call(server, "Health", field(1, b"live"))))
    assert health[2] == 1
    status = dict(fields_of(call(server, "Status", field(1, b"pair"))))
    shown = dict(fields_of(status[2]))  # type: ignore[arg-type]
    assert (shown[1], shown[2], shown[7]) == (b"inference:0", b"0.7.0", 2)
    profile = dict(fields_of(call(server, "Profile", field(1, b"start"))))
    assert dict(fields_of(profile[1]))[2] == b"Profile API not enabled"  # type: ignore[arg-type]
    first, second = (dict(fields_of(answer[1])) for answer in (status, profile))  # type: ignore[arg-type]
    assert second[4] == int(first[4]) + 1
