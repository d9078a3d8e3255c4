# SPDX-License-Identifier: Apache-2.0
"""RFC 9113 section 4.3: field blocks, HPACK, and what a server may remember of them; 6.10 (CONTINUATION)."""

from __future__ import annotations

import pytest
from adversary import Client
from hpack.hpack import encode_integer
from http2_echo_server import Http2EchoServer
from raw_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    TABLE_SIZE,
    TOO_LARGE,
    WINDOW_UPDATE,
    literal,
    raw,
    request_fields,
)

from headrace.net.http2.frames import ErrorCode

GET = literal(request_fields())
INDEXED_GET = b"\x82\x86\x04\x06/hello\x01\x04test"
"""`:method GET` and `:scheme http` by index, the others as literals."""


def table_size(size: int) -> bytes:
    update = encode_integer(size, 5)
    update[0] |= 0x20
    return bytes(update)


BROKEN_BLOCKS = {
    "index 0": b"\x80",
    "index beyond the tables": b"\xbf",
    "huge index": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x0f",
    "name index beyond the tables": b"\x7f\x40\x01x",
    "truncated integer": GET + b"\xff",
    "truncated name": GET + b"\x00\x10abc",
    "truncated value": GET + b"\x00\x01a\x10abc",
    "no value": GET + b"\x00\x01a",
    "bad Huffman padding": GET + b"\x00\x01a\x81\x00",
    "Huffman end of string": GET + b"\x00\x01a\x84\xff\xff\xff\xff",
    "table size update inside": GET + table_size(100),
    "table size over the limit": table_size(4097) + GET,
    "huge table size": table_size(1 << 30) + GET,
}


@pytest.mark.parametrize("block", BROKEN_BLOCKS.values(), ids=BROKEN_BLOCKS.keys())
def test_a_block_that_does_not_decode_is_a_compression_error(client: Client, block: bytes) -> None:
    """4.3: a decoding error in a field block is a connection error of type COMPRESSION_ERROR."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, block))
    client.expect_goaway(ErrorCode.COMPRESSION_ERROR)


@pytest.mark.parametrize("where", ["trailers", "closed", "refused", "half-closed", "malformed"])
def test_a_broken_block_is_noticed_wherever_it_is(echo_server: Http2EchoServer, where: str) -> None:
    """4.3: blocks of streams that are not served are decoded, too: the table is shared."""
    client = echo_server.connect()
    stream_id = 1
    if where == "trailers":
        client.request(1, "POST", "/echo", end=False)
    elif where == "closed":
        client.request(1, "POST", "/echo", end=False, more=TOO_LARGE)
        client.expect_reset(1, ErrorCode.NO_ERROR)
    elif where == "refused":
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, literal([("X", "y")])))
        client.expect_reset(1, ErrorCode.PROTOCOL_ERROR)
    elif where == "half-closed":
        client.request(1, "POST", "/hold")
    elif where == "malformed":
        stream_id = 3
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, stream_id, literal([("X", "y")]) + b"\x80"))
    client.expect_goaway(ErrorCode.COMPRESSION_ERROR)


@pytest.mark.parametrize("where", ["trailers of an open stream", "a reset stream", "a half-closed stream", "malformed"])
def test_an_unused_block_still_changes_the_table(echo_server: Http2EchoServer, where: str) -> None:
    """4.3: a receiver must decode every block it does not treat as a connection error, or close with COMPRESSION_ERROR."""
    client = echo_server.connect()
    added = b"\x40\x06x-seen\x04true"
    if where == "trailers of an open stream":
        client.request(1, "POST", "/echo", end=False)
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, added))
    elif where == "a reset stream":
        client.request(1, "POST", "/echo", end=False, more=TOO_LARGE)
        client.expect_reset(1, ErrorCode.NO_ERROR)
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, added))
    elif where == "a half-closed stream":
        client.request(1, "POST", "/hold")
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, added))
        client.expect_reset(1, ErrorCode.STREAM_CLOSED)
    else:
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET + literal([("X", "y")]) + added))
        client.expect_reset(1, ErrorCode.PROTOCOL_ERROR)
    # Entry 62 is now `x-seen: true`; without it this block does not decode.
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 3, GET + b"\xbe"))
    client.expect_ok(3)


def test_a_table_size_update_is_obeyed(client: Client) -> None:
    """4.3.1: the size may shrink to 0 and grow again at the start of a block; entries evicted are gone."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET + b"\x40\x01a\x01b"))
    client.expect_ok(1)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 3, GET + b"\xbe"))
    client.expect_ok(3)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 5, table_size(0) + table_size(4096) + GET))
    client.expect_ok(5)
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 7, GET + b"\xbe"))
    client.expect_goaway(ErrorCode.COMPRESSION_ERROR)


def test_a_remembered_block_follows_the_table(client: Client) -> None:
    """4.3: the same bytes mean another thing when the table has changed: 62 is the newest entry."""
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, b"\x82\x86\x44\x06/hello\x01\x04test"))
    client.expect_ok(1, b"hello")
    by_index = b"\x82\x86\xbe\x01\x04test"
    for stream_id in (3, 5):
        client.send(raw(HEADERS, END_HEADERS | END_STREAM, stream_id, by_index))
        client.expect_ok(stream_id, b"hello")
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 7, b"\x82\x86\x44\x06/big/3\x01\x04test"))
    client.expect_ok(7, bytes(3))
    client.send(raw(HEADERS, END_HEADERS | END_STREAM, 9, by_index))
    client.expect_ok(9, bytes(3))


def test_the_header_tables_of_connections_are_independent(echo_server: Http2EchoServer) -> None:
    """4.3: each connection has a table of its own."""
    first, second = echo_server.connect(), echo_server.connect()
    first.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET + b"\x40\x01a\x01b"))
    first.expect_ok(1)
    first.send(raw(HEADERS, END_HEADERS | END_STREAM, 3, GET + b"\xbe"))
    first.expect_ok(3)
    second.send(raw(HEADERS, END_HEADERS | END_STREAM, 1, GET + b"\xbe"))
    second.expect_goaway(ErrorCode.COMPRESSION_ERROR)


@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.parametrize("path", ["/hello", "/big/100000", "/raise-nothing"])
def test_a_smaller_table_of_the_clients_is_confirmed(echo_server: Http2EchoServer, size: int, path: str) -> None:
    """4.3.1: after SETTINGS that shrink the table, the next block MUST start with a table size update.

    hpack's decoder refuses the block otherwise, as nghttp2's does.
    """
    client = echo_server.connect({TABLE_SIZE: size})
    client.grant(0, 1_000_000)
    client.request(1, path=path)
    client.grant(1, 1_000_000)
    assert client.answer(1).ended
    client.request(3, path=path)
    client.grant(3, 1_000_000)
    assert client.answer(3).ended


def test_a_table_that_shrinks_later_is_confirmed(echo_server: Http2EchoServer) -> None:
    """4.3.1: the same for SETTINGS in the middle of a connection, shrinking twice and growing again."""
    client = echo_server.connect()
    client.request(1)
    client.expect_ok(1)
    for stream_id, size in ((3, 2000), (5, 0), (7, 4096), (9, 64)):
        client.change_settings({TABLE_SIZE: size})
        client.request(stream_id)
        client.expect_ok(stream_id)


# 4.3 and 6.10: a field block is one unit.


INTERRUPTIONS = {
    "DATA": raw(DATA, 0, 1, b"x"),
    "DATA on an open stream": raw(DATA, 0, 1, b""),
    "HEADERS of the same stream": raw(HEADERS, END_HEADERS, 3, GET),
    "HEADERS of another stream": raw(HEADERS, END_HEADERS, 5, GET),
    "PRIORITY": raw(PRIORITY, 0, 3, bytes(5)),
    "RST_STREAM": raw(RST_STREAM, 0, 3, bytes(4)),
    "SETTINGS": raw(SETTINGS, 0, 0),
    "PING": raw(PING, 0, 0, bytes(8)),
    "GOAWAY": raw(GOAWAY, 0, 0, bytes(8)),
    "WINDOW_UPDATE": raw(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "CONTINUATION of another stream": raw(CONTINUATION, END_HEADERS, 1, GET),
    "CONTINUATION of stream 0": raw(CONTINUATION, END_HEADERS, 0, GET),
}


@pytest.mark.parametrize("frame", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_nothing_is_allowed_between_headers_and_continuation(client: Client, frame: bytes) -> None:
    """4.3, 6.2, 6.10: any other frame inside a field block is a connection error of type PROTOCOL_ERROR."""
    client.request(1, "POST", "/upload", end=False)
    client.send(raw(HEADERS, 0, 3, GET[:10]), frame)
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("frame", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_nothing_is_allowed_between_two_continuations(client: Client, frame: bytes) -> None:
    """6.10: the same after a CONTINUATION without END_HEADERS."""
    client.request(1, "POST", "/upload", end=False)
    client.send(raw(HEADERS, 0, 3, GET[:10]), raw(CONTINUATION, 0, 3, GET[10:20]), frame)
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("before", ["nothing", "whole HEADERS", "whole CONTINUATION", "DATA", "trailers"])
def test_continuation_needs_an_unfinished_block(client: Client, before: str) -> None:
    """6.10: a CONTINUATION MUST follow HEADERS or CONTINUATION without END_HEADERS; else PROTOCOL_ERROR."""
    if before == "whole HEADERS":
        client.request(1, "POST", "/hold", end=False)
    elif before == "whole CONTINUATION":
        client.send(raw(HEADERS, 0, 1, GET[:10]), raw(CONTINUATION, END_HEADERS, 1, GET[10:]))
    elif before == "DATA":
        client.request(1, "POST", "/hold", end=False)
        client.data(1, b"x")
    elif before == "trailers":
        client.request(1, "POST", "/hold", end=False)
        client.headers(1, [("a", "b")])
    client.send(raw(CONTINUATION, END_HEADERS, 1, GET))
    client.expect_goaway(ErrorCode.PROTOCOL_ERROR)


@pytest.mark.parametrize("split", [0, 1, 10, len(GET) - 1, len(GET)])
def test_a_block_may_be_split_anywhere(client: Client, split: int) -> None:
    """4.3, 6.10: fragments are joined before they are decoded; any of them may be empty."""
    client.send(raw(HEADERS, END_STREAM, 1, GET[:split]), raw(CONTINUATION, END_HEADERS, 1, GET[split:]))
    client.expect_ok(1, b"hello")


def test_a_block_may_have_many_fragments(client: Client) -> None:
    """6.10: any number of CONTINUATION frames; ours is bounded (see test_floods), far above this."""
    client.send(raw(HEADERS, END_STREAM, 1, b""), *(raw(CONTINUATION, 0, 1, GET[i : i + 1]) for i in range(40)))
    client.send(raw(CONTINUATION, END_HEADERS, 1, GET[40:]))
    client.expect_ok(1, b"hello")


def test_end_stream_of_a_split_block_counts_from_its_headers_frame(client: Client) -> None:
    """6.2: HEADERS with END_STREAM may be followed by CONTINUATION; bit 1 of a CONTINUATION means nothing."""
    post = literal(request_fields("POST", "/echo"))
    client.send(raw(HEADERS, 0, 1, post[:10]), raw(CONTINUATION, END_HEADERS | END_STREAM, 1, post[10:]))
    client.data(1, b"body", end=True)
    client.expect_ok(1, b"body")


def test_trailers_may_be_split(client: Client) -> None:
    """6.10: so may a block that ends a request."""
    client.request(1, "POST", "/echo", end=False)
    client.data(1, b"body")
    trailers = literal([("x-sum", "1")])
    client.send(raw(HEADERS, END_STREAM, 1, trailers[:3]), raw(CONTINUATION, END_HEADERS, 1, trailers[3:]))
    client.expect_ok(1, b"body")
