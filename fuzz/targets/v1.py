# SPDX-License-Identifier: Apache-2.0
"""Target `v1`: TensorRT Inference Server's protocol; headers as protobuf text and bytes, and bodies."""

from __future__ import annotations

from fuzz.http_request import post
from fuzz.in_memory_server import Server
from fuzz.target import Check, Target, require
from headrace.api.v1 import headers
from headrace.core.errors import INTERNAL_TEXT

_WORDS = (
    b"batch_size: 1",
    b'input { name: "INPUT0" dims: [4] }',
    b'input { name: "INPUT0" byte_size: 16 }',
    b"batch_byte_size: 16",
    b'output { name: "OUTPUT0" cls { count: 3 } }',
    b" id: 7",
    b" flags: 3",
    b"correlation_id: 9",
    b"{",
    b"}",
    b'"',
    b"#",
    b"dims: -1",
    b"shared_memory { name: 'a' offset: 0 byte_size: 4 }",
)


def _open_header() -> Check:
    def check(data: bytes) -> None:
        # The short way for requests that are numbered, against the whole parser; and what is remembered, against both.
        expected = headers._read_text(data)
        for _ in range(2):
            require(headers.header_from_text(data) == expected, "the header means another thing by the short way")
        headers.header_from_bytes(data)

    return check


def _open_body() -> Check:
    server = Server()

    def check(data: bytes) -> None:
        header, _, body = data.partition(b"\n")
        field = b"nv-inferrequest: " + bytes(byte for byte in header if 0x20 <= byte < 0x7F)
        answer = post(server, b"/api/infer/four", body, (field.rstrip(),))
        require(answer.status in (200, 400), f"answered {answer.status}")
        require(b"nv-status" in answer.fields, "an answer without NV-Status")
        # INTERNAL alone is also that protocol's word for a body that is too short.
        require(INTERNAL_TEXT.encode() not in answer.fields[b"nv-status"], f"{answer.fields[b'nv-status']!r}")

    return check


HEADER = Target(
    "a header as text: the short way of numbered requests means what the parser says", _open_header, _WORDS, 1024
)
BODY = Target("a request's header and body: 200 or 400, never by our fault", _open_body, _WORDS, 2048)
