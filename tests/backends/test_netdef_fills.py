# SPDX-License-Identifier: Apache-2.0
"""Fills make the tensors that they say, and those that cannot be are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from netdef_nets import Nets, rows

from headrace.core.errors import InvalidArgument

X = rows(3, 4, 5)


def close(ours: Any, theirs: Any) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.tobytes() == theirs.tobytes()


FILLS: list[tuple[str, dict[str, Any], Any]] = [
    ("ConstantFill", {"shape": [2, 3]}, np.zeros((2, 3), np.float32)),
    ("ConstantFill", {"shape": [2, 3], "value": 0.5}, np.full((2, 3), 0.5, np.float32)),
    ("ConstantFill", {"shape": [2], "value": 3}, np.array([3, 3])),
    ("ConstantFill", {"shape": [2], "value": 3, "dtype": 1}, np.array([3, 3], np.float32)),
    ("ConstantFill", {"shape": [2], "value": 1, "dtype": 5}, np.array([True, True])),
    ("ConstantFill", {"shape": [2], "value": 3, "dtype": "int32"}, np.array([3, 3], np.int32)),
    ("GivenTensorFill", {"shape": [2], "values": [1.5, 2.5], "dtype": 13}, np.array([1.5, 2.5])),
    ("GivenTensorByteStringToUInt8Fill", {"shape": [3], "values": [b"\x01\xff\x00"]}, np.array([1, 255, 0], np.uint8)),
]


@pytest.mark.parametrize(("kind", "arguments", "expected"), FILLS, ids=lambda value: str(value)[:32])
def test_fills(kind: str, arguments: dict[str, Any], expected: Any) -> None:
    net = Nets()
    net.fill(kind, "w", **arguments)
    net.op("Copy", ["w"], ["y"])
    close(net.run({"data": X}, ["y"])["y"], expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.int16, np.bool_])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (40, 50)])
def test_given_tensors(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.round(rows(*shape) * 5)).astype(dtype)
    net = Nets()
    net.weight("w", array)
    net.op("Copy", ["w"], ["y"])
    close(net.run({"data": X}, ["y"])["y"], array)


def test_given_strings() -> None:
    words = np.array([[b"a", "zwölf".encode()], [b"", b"x" * 99]], object)
    net = Nets()
    net.weight("w", words)
    net.op("Copy", ["w"], ["y"])
    assert [item.encode() for item in net.run({"data": X}, ["y"])["y"].ravel()] == words.ravel().tolist()


def test_weights_may_be_packed_or_follow_other_fields() -> None:
    """Protobuf allows both ways to write many numbers, and an argument may have a single number as well."""
    array = rows(600)
    net = Nets()
    created = net.fill("GivenTensorFill", "w", shape=[600])
    values = created.arg.add(name="values", f=3.5, i=2, s=b"-----")
    values.floats.extend(array.tolist())
    net.op("Copy", ["w"], ["y"])
    close(net.run({"data": X}, ["y"])["y"], array)
    packed = b"\x0a\x06values\x2a" + bytes([0xE0, 0x12]) + array.tobytes()
    created.arg[1].ParseFromString(packed)
    assert list(created.arg[1].floats[:2]) == array[:2].tolist()
    close(net.run({"data": X}, ["y"])["y"], array)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("GivenTensorFill", {"shape": [3], "values": [1.0]}, r"declares shape \[3\] for 'w', and has 1 values"),
        ("GivenTensorFill", {"shape": [2**30, 2**30, 2**30], "values": [1.0]}, "and has 1 values"),
        ("GivenTensorFill", {"shape": [-1], "values": [1.0]}, "and has 1 values"),
        ("GivenTensorIntFill", {"shape": [1], "values": [2**40]}, "has values that are no int32"),
        ("GivenTensorStringFill", {"shape": [1], "values": [b"\xff"]}, "has a string that is not UTF-8"),
        ("ConstantFill", {"shape": [2**20, 2**20]}, "asks for a tensor of shape"),
        ("ConstantFill", {"shape": [-3]}, "asks for a tensor of shape"),
        ("ConstantFill", {"shape": [1], "dtype": 99}, "has dtype '99', which is not a Caffe2 data type"),
        ("ConstantFill", {"shape": [1], "dtype": 7, "value": 1000}, "has a value of 1000, which is no int8"),
        ("XavierFill", {"shape": [3, 4]}, "fills 'w' with random numbers: the net was saved before it was trained"),
        ("MSRAFill", {"shape": [3, 4]}, "fills 'w' with random numbers"),
        ("UniformFill", {"shape": [3, 4]}, "fills 'w' with random numbers"),
        ("GaussianFill", {"shape": [3, 4]}, "fills 'w' with random numbers"),
    ],
)
def test_fills_that_cannot_be_are_refused(kind: str, arguments: dict[str, Any], text: str) -> None:
    net = Nets()
    net.fill(kind, "w", **arguments)
    net.op("Copy", ["w"], ["y"])
    with pytest.raises(InvalidArgument, match=text) as caught:
        net.run({"data": X}, ["y"])
    assert str(caught.value).startswith(f"operator 0 ({kind}) of 'init_model.netdef' ")
