# SPDX-License-Identifier: Apache-2.0
"""Weights are taken out of a file's bytes: the same numbers as protobuf reads, however the file is laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from netdef_nets import Nets, rows

from headrace.backends.netdef.files import caffe2_message, extract_weights, parse_net
from headrace.backends.netdef.operator import Operator
from headrace.core.errors import InvalidArgument
from support.properties import examples


def filled(*arrays: Any) -> Any:
    net = Nets()
    for number, array in enumerate(arrays):
        net.weight(f"w{number}", array)
    return net.init


def read(content: bytes) -> tuple[Operator, ...]:
    return parse_net(content, "init_model.netdef").operators


def test_large_weights_are_set_aside_and_small_ones_are_not() -> None:
    large, small = rows(70, 80), rows(5)
    content = filled(small, large, small).SerializeToString()
    light, weights = extract_weights(content)
    assert list(weights) == [(1, 1)]
    assert len(light) < 500
    first, second, third = read(content)
    assert second.floats("values").tolist() == large.ravel().tolist()
    assert second.floats("values").dtype == np.float32
    assert second.integers("shape") == (70, 80)
    assert first.floats("values").tolist() == third.floats("values").tolist() == small.tolist()
    assert not first.weights


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 1e-45])
def test_every_bit_stays(value: float) -> None:
    array = np.full(2000, value, np.float32)
    assert read(filled(array).SerializeToString())[0].floats("values").tobytes() == array.tobytes()


def length(number: int) -> bytes:
    return bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])


def test_numbers_may_be_packed_or_have_something_behind_them() -> None:
    array = rows(3000)
    packed = b"\x0a\x06values\x2a" + length(array.nbytes) + array.tobytes()
    item = b"".join(b"\x2d" + number.tobytes() for number in array)
    apart = b"\x0a\x06values" + item + b"\x18\x07"  # i = 7 behind the numbers
    ahead = b"\x15\x00\x00\x80\x3f\x22\x02--" + item + b"\x0a\x06values"  # the name at the end
    for argument, aside in ((packed, True), (apart, False), (ahead, False), (b"\x0a\x06values" + item, True)):
        body = b"\x22\x0fGivenTensorFill\x2a" + length(len(argument)) + argument
        for tag in (b"\x12", b"\x92\x00"):  # the second is a longer way to write the first
            content = tag + length(len(body)) + body
            _, weights = extract_weights(content)
            assert bool(weights) is aside
            (operator,) = read(content)
            assert operator.type == "GivenTensorFill"
            assert operator.floats("values").tobytes() == array.tobytes()


def test_a_cut_anywhere_is_an_error() -> None:
    content = filled(rows(1500), rows(1200)).SerializeToString()
    end = content.rindex(b"GivenTensorFill")
    for cut in (*range(1, 60), *range(7400, 7700, 7), end - 9, len(content) - 1):
        try:
            operators = read(content[:cut])
        except InvalidArgument as error:
            assert "init_model.netdef" in error.message  # noqa: PT017  # most cuts are errors here
        else:
            assert len(operators) == 1


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), max_size=4), st.integers(900, 1100))
def test_it_reads_what_protobuf_reads(changes: list[tuple[int, int]], count: int) -> None:
    content = bytearray(filled(rows(count), rows(3), rows(count)).SerializeToString())
    for place, value in changes:
        # Near an end of the weights, where the structure is.
        content[place % 40 if place % 2 else -1 - place % 60] = value
    try:
        expected = caffe2_message("NetDef").FromString(bytes(content))
    except Exception:
        expected = None
    try:
        operators = read(bytes(content))
    except InvalidArgument:
        return
    assert expected is not None
    assert [operator.type for operator in operators] == [operator.type for operator in expected.op]
    for ours, theirs in zip(operators, expected.op, strict=True):
        for argument in theirs.arg:
            numbers = ours.floats(argument.name)
            last = [item for item in theirs.arg if item.name == argument.name][-1]
            # By value: a NaN that has passed through protobuf's Python floats has other bits.
            np.testing.assert_array_equal(numbers, np.array(last.floats, np.float32))
