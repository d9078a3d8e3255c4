# SPDX-License-Identifier: Apache-2.0
"""Malformed requests of the v2 protocol, each as the bytes of one connection. For `reliability`.

Every one asks for the model `identity` (INPUT0, FP32, any shape) in a way that is wrong in one point: on the wire, in the
JSON, in the binary part, or in the protobuf message.
"""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import hpack
from tritonclient.grpc import service_pb2

INFER = "/v2/models/identity/infer"
TENSOR: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
GOOD = json.dumps({"inputs": [TENSOR]}).encode()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def post(body: bytes, *fields: str, path: str = INFER, length: str | None = None) -> bytes:
    """An HTTP/1.1 request with this body, and more fields."""
    size = str(len(body)) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {size}", "Connection: close", *fields, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def tensor(**changes: Any) -> bytes:
    """The good request with another tensor."""
    return post(json.dumps({"inputs": [TENSOR | changes]}).encode())


def binary(header: dict[str, Any], raw: bytes, told: str | None = None) -> bytes:
    """JSON and raw numbers."""
    text = json.dumps({"inputs": [header]}).encode()
    return post(text + raw, f"Inference-Header-Content-Length: {len(text) if told is None else told}")


def on_the_wire() -> dict[str, bytes]:
    """HTTP/1.1 that is none."""
    plain = post(GOOD)
    head, _, body = plain.partition(b"\r\n\r\n")
    chunked = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked") + b"\r\n\r\n"
    return {
        "garbage": bytes(range(256)) * 4,
        "no such method": plain.replace(b"POST", b"P\x00ST"),
        "no host": plain.replace(b"Host: a\r\n", b""),
        "version 9": plain.replace(b"HTTP/1.1", b"HTTP/9.9"),
        "a header of 1 MB": plain.replace(b"Host: a", b"Host: a\r\nX-Long: " + b"a" * 1_000_000),
        "20,000 headers": plain.replace(b"Host: a", b"Host: a" + b"\r\nX-Many: a" * 20_000),
        "a path of 1 MB": plain.replace(INFER.encode(), b"/" + b"a" * 1_000_000),
        "NUL in a header": plain.replace(b"Host: a", b"Host: a\r\nX-Nul: a\x00b"),
        "a space before the colon": plain.replace(b"Host: a", b"Host: a\r\nX-Space : a"),
        "negative length": post(GOOD, length="-5"),
        "length in words": post(GOOD, length="many"),
        "length of 10**30": post(GOOD, length="1" + "0" * 30),
        "two lengths": plain.replace(b"Host: a", b"Host: a\r\nContent-Length: 3"),
        "length and chunks": plain.replace(b"Host: a", b"Host: a\r\nTransfer-Encoding: chunked"),
        "chunk size in words": chunked + b"zz\r\n{}\r\n0\r\n\r\n",
        "negative chunk": chunked + b"-2\r\n{}\r\n0\r\n\r\n",
        "chunk of 2**70 bytes": chunked + b"4" + b"0" * 18 + b"\r\n{}\r\n",
        "a name with dots": post(GOOD, path="/v2/models/..%2f..%2fetc%2fpasswd/infer"),
        "a name with NUL": post(GOOD, path="/v2/models/%00/infer"),
        "a version of 30 digits": post(GOOD, path=f"/v2/models/identity/versions/{'9' * 30}/infer"),
        "gzip that is none": post(GOOD, "Content-Encoding: gzip"),
        "1 GB of zeros in gzip": post(gzip.compress(bytes(1 << 30), 6), "Content-Encoding: gzip"),
    }


def in_the_json() -> dict[str, bytes]:
    """JSON that is none, or not the protocol's."""
    numbers = TENSOR | {"parameters": {"binary_data_size": 16}}
    del numbers["data"]
    return {
        "empty body": post(b""),
        "half of it": post(GOOD[:40]),
        "not UTF-8": post(GOOD.replace(b"INPUT0", b"\xff\xfe\xfd")),
        "100,000 brackets": post(b"[" * 100_000),
        "a list": post(b"[1, 2, 3]"),
        "inputs is a number": post(b'{"inputs": 5}'),
        "no inputs": post(b'{"inputs": []}'),
        "an input is null": post(b'{"inputs": [null]}'),
        "no name": post(json.dumps({"inputs": [{"datatype": "FP32", "shape": [1, 1], "data": [1]}]}).encode()),
        "another name": tensor(name="NOBODY"),
        "a name of 1 MB": tensor(name="a" * 1_000_000),
        "the same input twice": post(json.dumps({"inputs": [TENSOR, TENSOR]}).encode()),
        "no such type": tensor(datatype="FP33"),
        "another type": tensor(datatype="BYTES"),
        "text for numbers": tensor(data=["a", "b", "c", "d"]),
        "too few numbers": tensor(data=[1]),
        "too many numbers": tensor(data=[1] * 99),
        "a negative shape": tensor(shape=[-1, 4]),
        "a shape of 2**40": tensor(shape=[1, 1 << 40]),
        "a shape that overflows": tensor(shape=[1, 1 << 32, 1 << 32]),
        "a shape in words": tensor(shape=["one", "four"]),
        "a shape of 5,000 dimensions": tensor(shape=[1] * 5_000),
        "no such output": post(json.dumps({"inputs": [TENSOR], "outputs": [{"name": "NOBODY"}]}).encode()),
        "shared memory that is not there": tensor(
            parameters={"shared_memory_region": "r", "shared_memory_byte_size": 16}
        ),
        "binary, negative size": binary(numbers | {"parameters": {"binary_data_size": -16}}, bytes(16)),
        "binary, size of 2**62": binary(numbers | {"parameters": {"binary_data_size": 1 << 62}}, bytes(16)),
        "binary, too short": binary(numbers, bytes(3)),
        "binary, header too long": binary(numbers, bytes(16), told="999999"),
        "binary, header negative": binary(numbers, bytes(16), told="-1"),
        "binary, header in words": binary(numbers, bytes(16), told="many"),
    }


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack("!I", len(payload))[1:] + bytes((kind, flags)) + struct.pack("!I", stream) + payload


def call(message: bytes, told: int | None = None) -> bytes:
    """A gRPC call with this message, on a connection of its own; `told` is the length that it claims."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/inference.GRPCInferenceService/ModelInfer"),
        (":authority", "a"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    data = struct.pack("!BI", 0, len(message) if told is None else told) + message
    pieces = [data[start : start + 16_000] for start in range(0, len(data), 16_000)]
    sent = b"".join(frame(0, int(piece is pieces[-1]), 1, piece) for piece in pieces)
    return PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, hpack.Encoder().encode(fields)) + sent


def message(**changes: Any) -> bytes:
    """A ModelInferRequest that is wrong in one point."""
    request = service_pb2.ModelInferRequest(model_name=changes.get("model", "identity"))
    given = request.inputs.add(name="INPUT0", datatype=changes.get("datatype", "FP32"))
    given.shape.extend(changes.get("shape", [1, 4]))
    request.raw_input_contents.extend(changes.get("raw", [bytes(16)]))
    if "numbers" in changes:
        given.contents.fp32_contents.extend(changes["numbers"])
    return bytes(request.SerializeToString())


def in_grpc() -> dict[str, bytes]:
    """HTTP/2 and protobuf that are none, or not the protocol's."""
    return {
        "preface and garbage": PREFACE + bytes(range(256)) * 20,
        "a frame of 16 MB": PREFACE + b"\xff\xff\xff" + bytes(6) + bytes(100_000),
        "data on stream 0": PREFACE + frame(4, 0, 0, b"") + frame(0, 0, 0, b"hello"),
        "HPACK that is none": PREFACE + frame(4, 0, 0, b"") + frame(1, 5, 1, b"\xff" * 50),
        "50,000 resets": PREFACE
        + frame(4, 0, 0, b"")
        + b"".join(frame(1, 4, 2 * i + 1, b"\x82") + frame(3, 0, 2 * i + 1, bytes(4)) for i in range(50_000)),
        "a message of garbage": call(b"\xff" * 100),
        "an empty message": call(b""),
        "a message that claims 2 GB": call(b"abc", 1 << 31),
        "raw, too short": call(message(raw=[bytes(3)])),
        "raw, missing": call(message(raw=[])),
        "raw and typed": call(message(numbers=[1, 2, 3, 4])),
        "raw, ten for one": call(message(raw=[bytes(16)] * 10)),
        "grpc, a negative shape": call(message(shape=[-1, -4])),
        "grpc, a shape that overflows": call(message(shape=[1 << 62, 4])),
        "grpc, no such type": call(message(datatype="FP33")),
        "grpc, a name with dots": call(message(model="../../etc")),
    }
