# SPDX-License-Identifier: Apache-2.0
"""What grpcio would never send: every one ends with a status, none ends the connection or leaves a handler behind."""

from __future__ import annotations

import gzip
import struct
import zlib

import grpc
import pytest
from grpc_echo_client import SECONDS, RawCall, channel_to, messages_of, open_streams, prefixed, unary

from headrace.core.limits import Limits
from support.serving import EchoCalls, Serving, echo_site, serving
from support.waiting import eventually

CODE = grpc.StatusCode

GZIP = ("grpc-encoding", "gzip")
DEFLATE = ("grpc-encoding", "deflate")

# What is sent, and with which fields: the status it must get from a unary and from a streaming method.
BROKEN = {
    "cut in the prefix": ((), b"\0\0\0", CODE.INTERNAL),
    "cut after the prefix": ((), struct.pack(">BI", 0, 10), CODE.INTERNAL),
    "cut in the message": ((), prefixed(b"0123456789")[:-1], CODE.INTERNAL),
    "cut in the second message": ((), prefixed(b"x") + b"\0\0", None),
    "a flag of 2": ((), prefixed(b"x", flag=2), CODE.INVALID_ARGUMENT),
    "a flag of 255": ((), prefixed(b"x", flag=255), CODE.INVALID_ARGUMENT),
    "compressed without an encoding": ((), prefixed(gzip.compress(b"x"), flag=1), CODE.INTERNAL),
    "compressed as identity": ((("grpc-encoding", "identity"),), prefixed(b"x", flag=1), CODE.INTERNAL),
    "an unknown encoding": ((("grpc-encoding", "snappy"),), prefixed(b"x", flag=1), CODE.UNIMPLEMENTED),
    "not gzip": ((GZIP,), prefixed(b"nonsense", flag=1), CODE.INVALID_ARGUMENT),
    "gzip cut short": ((GZIP,), prefixed(gzip.compress(b"x" * 99)[:-9], flag=1), CODE.INVALID_ARGUMENT),
    "gzip and more": ((GZIP,), prefixed(gzip.compress(b"x") + b"more", flag=1), CODE.INVALID_ARGUMENT),
    "not deflate": ((DEFLATE,), prefixed(b"\xff" * 20, flag=1), CODE.INVALID_ARGUMENT),
    "too large": ((), struct.pack(">BI", 0, 70 << 20), CODE.RESOURCE_EXHAUSTED),
    "the largest": ((), struct.pack(">BI", 0, 0xFFFFFFFF) + bytes(100), CODE.RESOURCE_EXHAUSTED),
    "HTTP in place of gRPC": ((), b"GET / HTTP/1.1\r\n\r\n", None),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("method", ["Unary", "Chat"])
@pytest.mark.parametrize("split", [False, True])
def test_a_broken_message_ends_the_call(server: Serving, calls: EchoCalls, name: str, method: str, split: bool) -> None:
    fields, data, status = BROKEN[name]
    with RawCall(server, method, *fields) as call:
        if split:
            for byte in data[:30]:
                if call.ended:
                    break
                call.send(bytes([byte]))
            if not call.ended:
                call.send(data[30:], end=True)
        else:
            call.send(data, end=True)
        call.receive()
        assert call.headers[":status"] == "200"
        assert call.status is not CODE.OK
        assert status is None or call.status is status
        assert call.message
    eventually(lambda: not calls._calls._tasks)
    assert not open_streams(server)


def test_a_refused_encoding_is_answered_with_supported_ones(server: Serving) -> None:
    with RawCall(server, "Unary", ("grpc-encoding", "snappy")) as call:
        call.send(prefixed(b"x", flag=1), end=True)
        assert "gzip" in call.receive().headers["grpc-accept-encoding"]


def test_a_broken_message_after_good_ones(server: Serving, calls: EchoCalls) -> None:
    with RawCall(server, "Chat") as call:
        call.send(prefixed(b"one"))
        call.receive(until=lambda: len(call.data) == 8)
        call.send(prefixed(b"two", flag=9))
        call.receive()
        assert messages_of(call.data) == [b"one"]
        assert call.trailers["grpc-status"] == "3"
    eventually(lambda: not calls._calls._tasks)


def test_a_client_that_compresses_gets_a_compressed_answer(server: Serving) -> None:
    message = b"x" * 5000
    with RawCall(server, "Unary", GZIP) as call:
        call.send(prefixed(gzip.compress(message), flag=1), end=True)
        call.receive()
    assert call.headers["grpc-encoding"] == "gzip"
    flag, size = struct.unpack_from(">BI", call.data)
    assert (flag, size) == (1, len(call.data) - 5)
    assert gzip.decompress(call.data[5:]) == message
    with RawCall(server, "Chat", GZIP) as call:
        call.send(prefixed(gzip.compress(message), flag=1), end=True)
        call.receive()
    assert gzip.decompress(call.data[5:]) == message


@pytest.mark.parametrize("fields", [(), (("grpc-encoding", "identity"),), (GZIP,), (("grpc-accept-encoding", "gzip"),)])
def test_what_is_not_compressed_gets_a_plain_answer(server: Serving, fields: tuple[tuple[str, str], ...]) -> None:
    with RawCall(server, "Unary", *fields) as call:
        call.send(prefixed(b"short"), end=True)
        assert messages_of(call.receive().data) == [b"short"]


def test_deflate_is_the_zlib_format_or_bare(server: Serving) -> None:
    bare = zlib.compressobj(wbits=-15)
    for packed in (zlib.compress(b"x" * 100), bare.compress(b"x" * 100) + bare.flush()):
        with RawCall(server, "Unary", DEFLATE) as call:
            call.send(prefixed(packed, flag=1), end=True)
            assert messages_of(call.receive().data) == [b"x" * 100]


@pytest.mark.parametrize(
    "kind", ["application/grpc", "application/grpc+proto", "application/grpc+json", "application/grpc;charset=utf-8"]
)
def test_content_types_of_grpc(server: Serving, kind: str) -> None:
    with RawCall(server, "Unary", ("content-type", kind)) as call:
        call.send(prefixed(b"x"), end=True)
        assert call.receive().status is CODE.OK
        assert call.headers["content-type"] == "application/grpc"


@pytest.mark.parametrize("kind", ["application/json", "application/grpc-web", "application/grpcx", "text/plain"])
def test_other_content_types_are_plain_http(server: Serving, kind: str) -> None:
    with RawCall(server, "Unary", ("content-type", kind)) as call:
        call.send(prefixed(b"x"), end=True)
        assert call.receive().headers[":status"] == "404"


@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE"])
def test_only_post_is_grpc(server: Serving, verb: str) -> None:
    with RawCall(server, "Unary", verb=verb) as call:
        call.send(prefixed(b"x"), end=True)
        assert call.receive().status is CODE.INVALID_ARGUMENT


def test_metadata_that_is_not_base64(server: Serving) -> None:
    with RawCall(server, "Metadata", ("x-bad-bin", "!!!")) as call:
        call.send(prefixed(b"x"), end=True)
        assert call.receive().status is CODE.INVALID_ARGUMENT


@pytest.mark.parametrize("text", ["AA==,/w==", "AA,/w"])
def test_binary_metadata_padded_and_joined(server: Serving, text: str) -> None:
    with RawCall(server, "Metadata", ("x-two-bin", text)) as call:
        call.send(prefixed(b"x"), end=True)
        assert call.receive().status is CODE.OK


def test_a_small_limit_applies_to_short_messages_too() -> None:
    with serving(echo_site(Limits(message_bytes=1000))) as server, channel_to(server) as channel:
        assert unary(channel)(bytes(1000), timeout=SECONDS) == bytes(1000)
        with pytest.raises(grpc.RpcError) as failure:
            unary(channel)(bytes(1001), timeout=SECONDS)
        assert failure.value.code() is CODE.RESOURCE_EXHAUSTED


def test_tiny_messages_by_the_hundred_thousand_cost_little(server: Serving, calls: EchoCalls) -> None:
    """They may come faster than the handler takes them; what waits is bounded by the window, not by an array each."""
    with RawCall(server, "Collect") as call:
        frame = prefixed(b"") * 3000
        for _ in range(20):
            call.send(frame)
        call.send(b"", end=True)
        assert messages_of(call.receive().data) == [b"," * 59_999]
