# SPDX-License-Identifier: Apache-2.0
"""Cutting bytes into messages, wherever the network cuts them first; metadata and status as header fields."""

from __future__ import annotations

import gzip
import struct
import zlib
from contextlib import suppress
from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import Code, Internal, InvalidArgument, TooLarge, Unimplemented
from headrace.net.grpc.messages import MessageAssembler, custom_metadata, encode_metadata, prefixed, prefixed_gzip
from headrace.net.grpc.status import GRPC_STATUS, Status, status_block
from headrace.net.http.heads import RequestHead
from headrace.net.http2.headers import encode_fields

PACKERS = {None: bytes, b"gzip": gzip.compress, b"deflate": zlib.compress}


def feed(assembler: MessageAssembler, data: bytes, cuts: list[int]) -> list[bytes]:
    """Feed in pieces, from memory that is overwritten afterwards, as the receive buffer is."""
    points = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    results: list[bytes | memoryview] = []
    for start, stop in zip(points, points[1:], strict=False):
        piece = bytearray(data[start:stop])
        results += assembler.feed(memoryview(piece))
        piece[:] = b"\xee" * len(piece)
    return [bytes(message) for message in results]


CUTS = st.lists(st.integers(0, 1 << 20), max_size=30)


@given(st.lists(st.binary(max_size=300), max_size=10), CUTS, st.sampled_from([*PACKERS]))
def test_messages_survive_any_cuts(messages: list[bytes], cuts: list[int], encoding: bytes | None) -> None:
    pack = PACKERS[encoding]
    flag = int(encoding is not None)
    data = b"".join(struct.pack(">BI", flag, len(pack(message))) + pack(message) for message in messages)
    assembler = MessageAssembler(1000, encoding)
    assert feed(assembler, data, cuts) == messages
    assert not assembler.incomplete


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5), CUTS, st.integers(1, 1 << 20))
def test_a_cut_end_is_incomplete(messages: list[bytes], cuts: list[int], short: int) -> None:
    data = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)
    missing = short % (5 + len(messages[-1])) or 1
    assembler = MessageAssembler(1000, None)
    assert feed(assembler, data[:-missing], cuts) == messages[:-1]
    assert assembler.incomplete == (missing < 5 + len(messages[-1]))


@given(st.lists(st.binary(max_size=50), max_size=5), CUTS)
def test_messages_before_a_fault_are_delivered_wherever_it_was_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages) + b"\2\0\0\0\0"
    points = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    assembler, found = MessageAssembler(1000, None), []
    with pytest.raises(InvalidArgument):
        for start, stop in zip(points, points[1:], strict=False):
            for message in assembler.feed(memoryview(data[start:stop])):
                found.append(bytes(message))
    assert found == messages


@given(st.binary(max_size=400), CUTS, st.sampled_from([None, b"identity", b"gzip", b"deflate", b"br", b"\xff"]))
def test_garbage_gives_short_messages_or_an_error(data: bytes, cuts: list[int], encoding: bytes | None) -> None:
    assembler = MessageAssembler(100, encoding)
    # Any other exception is a fault of ours and fails the test.
    with suppress(InvalidArgument, TooLarge, Internal, Unimplemented):
        assert all(len(message) <= 100 for message in feed(assembler, data, cuts))


@given(st.integers(101, 0xFFFFFFFF), st.sampled_from([0, 1]), CUTS)
def test_a_size_over_the_limit_is_refused_before_memory_is_allocated(size: int, flag: int, cuts: list[int]) -> None:
    with pytest.raises(TooLarge, match=f"{size} vs. 100"):
        feed(MessageAssembler(100, b"gzip"), struct.pack(">BI", flag, size), cuts)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_what_is_written_is_read(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    for written, encoding in (
        (prefixed([*pieces], len(whole)), None),
        (prefixed_gzip([*pieces]), b"gzip"),
    ):
        assert feed(MessageAssembler(1000, encoding), b"".join(written), [3]) == [whole]


def test_complete_messages_in_a_frame_cost_no_array_each() -> None:
    """Thousands may wait for a handler: an empty one must not take a hundred times its five bytes."""
    (first, second) = MessageAssembler(1000, None).feed(memoryview(b"\0\0\0\0\0" + b"\0\0\0\0\1x"))
    assert (first, second) == (b"", b"x")
    assert type(first) is type(second) is bytes


# Status and metadata.


def decode(block: bytes) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in hpack.Decoder().decode(block, raw=True)]


@given(st.sampled_from(Status), st.text(max_size=300))
def test_any_text_can_be_a_status_message(status: Status, text: str) -> None:
    fields = dict(decode(status_block(status, text)))
    assert fields[b"grpc-status"] == b"%d" % status
    written = fields.get(b"grpc-message", b"")
    assert all(0x20 <= byte < 0x7F for byte in written)
    assert unquote(written.decode()) == text


@given(st.text(min_size=1000, max_size=1200), st.integers(1, 50))
def test_a_long_text_is_cut_at_a_character(text: str, times: int) -> None:
    written = dict(decode(status_block(Status.ABORTED, text * times)))[b"grpc-message"]
    assert len(written) <= 4096
    assert (text * times).startswith(unquote(written.decode(), errors="strict"))


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert dict(decode(status_block(Status.ABORTED, "a\ud800b")))[b"grpc-message"] == b"a?b"


def test_every_error_code_has_a_status() -> None:
    assert set(GRPC_STATUS) == set(Code)
    assert Status.OK not in GRPC_STATUS.values()
    assert Status.UNKNOWN not in GRPC_STATUS.values()


KEYS = st.from_regex(r"[a-z0-9_.\-]{1,20}", fullmatch=True).filter(
    lambda key: (
        not key.startswith("grpc-")
        and key not in ("te", "content-type", "user-agent", "host", "content-length", "accept-encoding")
    )
)
TEXTS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
PAIRS = st.one_of(
    st.tuples(KEYS.filter(lambda key: not key.endswith("-bin")), TEXTS),
    st.tuples(KEYS.map(lambda key: key + "-bin"), st.binary(max_size=30)),
)


@given(st.lists(PAIRS, max_size=10))
def test_metadata_is_read_as_it_was_written(pairs: list[tuple[str, str | bytes]]) -> None:
    head = RequestHead(b"POST", b"/", decode(encode_fields(encode_metadata(pairs))), version="2")
    assert custom_metadata(head) == pairs


@pytest.mark.parametrize("pair", [("x-text", b"bytes"), ("x-bytes-bin", "text")])
def test_bytes_belong_under_bin_keys_and_text_elsewhere(pair: tuple[str, str | bytes]) -> None:
    with pytest.raises(ValueError, match=pair[0]):
        encode_metadata([pair])


@pytest.mark.parametrize("pair", [("X-Upper", "a"), ("x-break", "a\r\nb"), ("x-nul", "\0"), ("", "a"), ("x:y", "a")])
def test_metadata_that_would_break_the_head_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        encode_fields(encode_metadata([pair]))


def test_what_belongs_to_the_protocol_is_not_metadata() -> None:
    fields = [(b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"grpc-timeout", b"1S"), (b"host", b"h")]
    assert custom_metadata(RequestHead(b"POST", b"/", [*fields, (b"x-own", b"1")], version="2")) == [("x-own", "1")]


@pytest.mark.parametrize("text", [b"!", b"A", b"AAAAA", b"AA=A", b"\xff"])
def test_what_is_not_base64_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        custom_metadata(RequestHead(b"POST", b"/", [(b"x-bin", text)], version="2"))
