# SPDX-License-Identifier: Apache-2.0
"""The wire format of protobuf: varints, and the fields of messages that are whole, cut off or damaged."""

import pytest
from google.protobuf import struct_pb2
from google.protobuf.internal import encoder
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.wire_format import (
    DELIMITED,
    FIXED64,
    InvalidMessage,
    TruncatedMessage,
    decode_varint,
    encode_delimited,
    encode_varint,
    read_fields,
)


@given(st.integers(0, (1 << 64) - 1))
def test_a_varint_is_protobufs_and_round_trips(value):
    encoded = encode_varint(value)
    assert encoded == encoder._VarintBytes(value)
    assert decode_varint(encoded, 0, len(encoded)) == (value, len(encoded))
    with pytest.raises(TruncatedMessage):
        decode_varint(encoded, 0, len(encoded) - 1)


def test_a_varint_that_does_not_end_is_refused():
    with pytest.raises(InvalidMessage):
        decode_varint(b"\x80" * 11, 0, 11)
    with pytest.raises(InvalidMessage):
        decode_varint(b"\x80" * 5 + b"\x00", 0, 6, max_bytes=5)


def test_the_fields_of_a_message_are_found():
    value = struct_pb2.Value(string_value="text" * 100).SerializeToString()
    (field,) = read_fields(value, 0, len(value))
    assert (field.number, field.wire_type, field.start, field.end) == (3, DELIMITED, 0, len(value))
    assert value[field.content : field.end] == b"text" * 100
    assert encode_delimited(3, b"text" * 100) == value
    number = struct_pb2.Value(number_value=1.5).SerializeToString()
    assert [field.wire_type for field in read_fields(number, 0, len(number))] == [FIXED64]


def test_a_message_that_is_cut_off_is_refused_unless_it_may_be():
    message = encode_delimited(1, b"one") + encode_delimited(2, b"second")
    end = len(message) - 2
    with pytest.raises(TruncatedMessage):
        list(read_fields(message, 0, end))
    first, second = read_fields(message, 0, end, truncated=True)
    assert message[first.content : first.end] == b"one"
    assert message[second.content : second.end] == b"seco"


@pytest.mark.parametrize("message", [b"\x02\x01x", b"\x0b", b"\x0f"])
def test_field_number_0_and_unknown_wire_types_are_refused(message):
    with pytest.raises(InvalidMessage):
        list(read_fields(message, 0, len(message)))
