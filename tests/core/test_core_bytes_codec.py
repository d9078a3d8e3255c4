# SPDX-License-Identifier: Apache-2.0
"""BYTES elements on the wire: length, then content."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.dtypes import decode_bytes_elements, encode_bytes_elements
from headrace.core.errors import InvalidArgument


def element(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


@given(st.lists(st.binary()))
def test_round_trip(elements):
    wire = encode_bytes_elements(elements)
    assert wire == b"".join(map(element, elements))
    assert decode_bytes_elements(wire, len(elements)).tolist() == elements
    assert decode_bytes_elements(memoryview(wire), len(elements)).tolist() == elements


@given(st.lists(st.text()))
def test_text_travels_as_utf8(elements):
    decoded = decode_bytes_elements(encode_bytes_elements(elements), len(elements))
    assert [content.decode() for content in decoded] == elements


@given(st.binary(max_size=64), st.integers(0, 20))
def test_garbage_is_decoded_exactly_or_refused(wire, count):
    try:
        elements = decode_bytes_elements(wire, count)
    except InvalidArgument:
        return
    assert elements.dtype == object
    assert encode_bytes_elements(elements) == wire


def test_elements_are_copies_that_outlive_the_buffer():
    buffer = bytearray(element(b"abc"))
    (content,) = decode_bytes_elements(memoryview(buffer), 1)
    buffer[:] = bytes(len(buffer))
    assert type(content) is bytes
    assert content == b"abc"


@pytest.mark.parametrize(
    ("wire", "count", "words"),
    [
        (b"", 1, "expected 1 string elements for the tensor, got 0"),
        (b"\0\0\0", 1, "incomplete string length indicator for the tensor, expecting 4 bytes but only 3"),
        (element(b"a"), 2, "expected 2 string elements for the tensor, got 1"),
        (element(b"abcd") + b"\0\0\0", 2, "expecting 4 bytes but only 3"),
        (struct.pack("<I", 5) + b"four", 1, "expecting string of length 5 but only 4"),
        (struct.pack("<I", 0xFFFFFFFF), 1, "expecting string of length 4294967295 but only 0"),
        (element(b"a") + b"x", 1, "expecting 4 bytes but only 1"),
        (element(b"a"), 0, "expected 0 string elements for the tensor, got 1"),
    ],
)
def test_what_does_not_fill_the_buffer_exactly_is_refused(wire, count, words):
    with pytest.raises(InvalidArgument, match=words):
        decode_bytes_elements(wire, count)


def test_an_impossible_count_is_refused_before_memory_is_allocated(monkeypatch):
    monkeypatch.setattr(np, "empty", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(InvalidArgument):
        decode_bytes_elements(b"\0" * 16, 1 << 40)


@pytest.mark.parametrize("wrong", [5, None, 1.5, True, ["a"], object()])
def test_only_bytes_and_text_are_elements(wrong):
    with pytest.raises(InvalidArgument, match="use bytes or text"):
        encode_bytes_elements([b"fine", wrong])


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(InvalidArgument, match="surrogate"):
        encode_bytes_elements(["\ud800"])
