# SPDX-License-Identifier: Apache-2.0
"""Takes the weights out of a NetDef's bytes before protobuf reads the rest.

Called by `files`. Caffe2 writes each number of a weight with a tag of its own, five bytes for four; protobuf would make
a list of them, and Python would take them out one by one. Here they stay where they are, as an array over the file.
Reading and translating a ResNet-50 of 102 MB takes 0.54 s of CPU time and 270 MB so, and 2.4 s and 380 MB without
(Neoverse-N1, the same in three runs). What is not laid out as expected is left to protobuf, which also finds what is
wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headrace.backends.contract import Array

Weights = dict[tuple[int, int], Array]
"""By the index of the operator and that of its argument."""

_LARGE = 4096
"""Bytes. Smaller operators are not worth a look."""

_OPERATOR, _ARGUMENT, _FLOATS = 2, 5, 5
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FLOAT_TAG = _FLOATS << 3 | _FOUR_BYTES


class _UnexpectedError(Exception):
    """The bytes are no message, or one that is written in an unusual way."""


class _Field(NamedTuple):
    number: int
    wire: int
    begin: int
    """Where its tag is."""
    value: int
    """Where its value is, behind the length if it has one."""
    end: int


def set_weights_aside(content: bytes) -> tuple[bytes, Weights]:
    """The NetDef without its large lists of floats, and those."""
    weights: Weights = {}
    try:
        return _light_net(content, weights), weights
    except _UnexpectedError:
        return content, {}


def _light_net(content: bytes, weights: Weights) -> bytes:
    parts: list[bytes] = []
    index = 0
    for field in _fields(content, 0, len(content)):
        if field.number == _OPERATOR and field.wire == _LENGTH:
            if field.end - field.value > _LARGE:
                body = _light_operator(content, field, index, weights)
                parts.append(_prefix(_OPERATOR, body) + body)
            else:
                parts.append(content[field.begin : field.end])
            index += 1
        else:
            parts.append(content[field.begin : field.end])
    return b"".join(parts)


def _light_operator(content: bytes, operator: _Field, index: int, weights: Weights) -> bytes:
    parts: list[bytes] = []
    number = 0
    for field in _fields(content, operator.value, operator.end):
        if field.number == _ARGUMENT and field.wire == _LENGTH:
            floats = _floats(content, field) if field.end - field.value > _LARGE else None
            if floats is None:
                parts.append(content[field.begin : field.end])
            else:
                begin, weights[index, number] = floats
                head = content[field.value : begin]
                parts.append(_prefix(_ARGUMENT, head) + head)
            number += 1
        else:
            parts.append(content[field.begin : field.end])
    return b"".join(parts)


def _floats(content: bytes, argument: _Field) -> tuple[int, Array] | None:
    """Where the floats begin, and they; None if there is something behind them, or they are none."""
    for field in _fields(content, argument.value, argument.end):
        if field.number != _FLOATS:
            continue
        size = argument.end - field.begin
        if field.wire == _FOUR_BYTES and size % 5 == 0:
            rows: Array = np.frombuffer(content, np.uint8, size, field.begin).reshape(-1, 5)
            return (field.begin, rows) if bool((rows[:, 0] == _FLOAT_TAG).all()) else None
        if field.wire == _LENGTH and field.end == argument.end and (field.end - field.value) % 4 == 0:
            packed: Array = np.frombuffer(content, "<f4", (field.end - field.value) // 4, field.value)
            return field.begin, packed
        return None
    return None


def float_array(weights: Array) -> Array:
    """The numbers, as float32, of what was set aside."""
    if weights.ndim == 1:
        return weights
    numbers: Array = np.ascontiguousarray(weights[:, 1:]).view("<f4").reshape(-1)
    return numbers


def _fields(content: bytes, at: int, end: int) -> Iterator[_Field]:
    while at < end:
        begin = at
        tag, at = _read_varint(content, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, stop = _read_varint(content, at, end)
        elif wire == _EIGHT_BYTES:
            stop = at + 8
        elif wire == _FOUR_BYTES:
            stop = at + 4
        elif wire == _LENGTH:
            length, at = _read_varint(content, at, end)
            stop = at + length
        else:
            raise _UnexpectedError
        if stop > end or number == 0:
            raise _UnexpectedError
        yield _Field(number, wire, begin, at, stop)
        at = stop


def _read_varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _UnexpectedError


def _prefix(number: int, body: bytes) -> bytes:
    """The tag and the length of a field that is a message."""
    written = bytearray([number << 3 | _LENGTH])
    number = len(body)
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
