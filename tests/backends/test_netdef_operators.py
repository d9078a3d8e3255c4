# SPDX-License-Identifier: Apache-2.0
"""Caffe2's other operators give what PyTorch or numpy give: matrices, arithmetic, shapes, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as torch_functions
from netdef_nets import Nets, computed, rows

from headrace.backends.netdef.operators.table import OPERATORS
from headrace.core.errors import InvalidArgument


def close(ours: Any, theirs: Any) -> None:
    expected = np.asarray(theirs)
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    if expected.dtype == object:
        assert ours.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)


def linear(x: Any, weights: Any, bias: Any) -> Any:
    return torch_functions.linear(*(torch.from_numpy(tensor) for tensor in (x, weights, bias)))


def test_fc() -> None:
    weights, bias = rows(5, 12, seed=2), rows(5, seed=3)
    close(computed("FC", rows(3, 12), weights=[weights, bias]), linear(rows(3, 12), weights, bias))
    image = rows(3, 2, 3, 2)
    expected = linear(image.reshape(3, 12), weights, bias)
    close(computed("FC", image, weights=[weights, bias]), expected)
    close(computed("FC", image, weights=[weights.reshape(5, 2, 3, 2), bias]), expected)
    close(computed("FCTransposed", image, weights=[np.ascontiguousarray(weights.T), bias]), expected)


def test_fc_along_other_axes() -> None:
    weights, bias = rows(5, 4, seed=2), rows(5, seed=3)
    close(computed("FC", rows(2, 3, 4), weights=[weights, bias], axis=2), linear(rows(2, 3, 4), weights, bias))
    close(computed("FC", rows(2, 3, 4), weights=[weights, bias], axis=-1), linear(rows(2, 3, 4), weights, bias))
    wide = rows(2, 3, 4, seed=4)
    expected = linear(rows(7, 4), wide.reshape(6, 4), np.arange(6, dtype=np.float32))
    close(computed("FC", rows(7, 4), weights=[wide, np.arange(6, dtype=np.float32)], axis_w=2), expected)


def test_matmul() -> None:
    left, right = rows(3, 4), rows(4, 5, seed=2)
    close(computed("MatMul", left, weights=[right]), left @ right)
    close(computed("MatMul", left, weights=[right.T.copy()], trans_b=1), left @ right)
    close(computed("MatMul", left.T.copy(), right, trans_a=1), left @ right)
    deep = rows(3, 2, 2)
    close(computed("MatMul", deep, weights=[right]), deep.reshape(3, 4) @ right)
    close(computed("MatMul", rows(2, 3, 4), weights=[right], axis_a=2), rows(2, 3, 4).reshape(6, 4) @ right)


def test_batch_matmul() -> None:
    left, right = rows(2, 3, 4), rows(2, 4, 5, seed=2)
    close(computed("BatchMatMul", left, right), left @ right)
    turned = right.transpose(0, 2, 1).copy()
    close(computed("BatchMatMul", left, turned, trans_b=1), left @ right)


X = rows(3, 4, 5)
POSITIVE = np.abs(X) + 0.1
T = torch.from_numpy(X)

UNARY: list[tuple[str, Any, dict[str, Any], Any]] = [
    ("Relu", X, {}, torch.relu(T)),
    ("Sigmoid", X, {}, torch.sigmoid(T)),
    ("Tanh", X, {}, torch.tanh(T)),
    ("LeakyRelu", X, {}, torch_functions.leaky_relu(T, 0.01)),
    ("LeakyRelu", X, {"alpha": 0.3}, torch_functions.leaky_relu(T, 0.3)),
    ("Elu", X, {}, torch_functions.elu(T)),
    ("Elu", X, {"alpha": 0.5}, torch_functions.elu(T, 0.5)),
    ("Selu", X, {}, torch_functions.selu(T)),
    ("Softplus", X, {}, torch_functions.softplus(T)),
    ("Softsign", X, {}, torch_functions.softsign(T)),
    ("Swish", X, {}, torch_functions.silu(T)),
    ("Clip", X, {"min": -0.5, "max": 0.7}, torch.clip(T, -0.5, 0.7)),
    ("Clip", X, {"max": 0.1}, torch.clip(T, max=0.1)),
    ("Clip", X, {}, T),
    ("Sqr", X, {}, X * X),
    ("Cube", X, {}, X**3),
    ("Sqrt", POSITIVE, {}, np.sqrt(POSITIVE)),
    ("Rsqrt", POSITIVE, {}, 1 / np.sqrt(POSITIVE)),
    ("Reciprocal", POSITIVE, {}, 1 / POSITIVE),
    ("Exp", X, {}, np.exp(X)),
    ("Log", POSITIVE, {}, np.log(POSITIVE)),
    ("Abs", X, {}, np.abs(X)),
    ("Negative", X, {}, -X),
    ("Sign", X, {}, np.sign(X)),
    ("Floor", X, {}, np.floor(X)),
    ("Ceil", X, {}, np.ceil(X)),
    ("Sin", X, {}, np.sin(X)),
    ("Cos", X, {}, np.cos(X)),
    ("Not", X > 0, {}, X <= 0),
    ("Scale", X, {"scale": 2.5}, X * np.float32(2.5)),
    ("Pow", POSITIVE, {"exponent": 1.5}, POSITIVE ** np.float32(1.5)),
    ("Softmax", X[:, :, 0], {}, torch.softmax(T[:, :, 0], 1)),
    ("Softmax", X, {}, torch.softmax(T.reshape(3, 20), 1).reshape(3, 4, 5)),
    ("Softmax", X, {"axis": 2}, torch.softmax(T, 2)),
    ("Softmax", X, {"axis": -1}, torch.softmax(T, 2)),
    ("Copy", X, {}, X),
    ("StopGradient", X, {}, X),
    ("EnsureCPUOutput", X, {}, X),
    ("CopyCPUToGPU", X, {}, X),
    ("Dropout", X, {"ratio": 0.5, "is_test": 1}, X),
    ("Flatten", X, {}, X.reshape(3, 20)),
    ("Flatten", X, {"axis": 2}, X.reshape(12, 5)),
    ("FlattenToVec", X, {}, X.ravel()),
    ("Transpose", X, {}, X.T),
    ("Transpose", X, {"axes": [0, 2, 1]}, X.transpose(0, 2, 1)),
    ("ExpandDims", X, {"dims": [1, 3]}, X[:, None, :, None]),
    ("Squeeze", X[:, :1], {"dims": [1]}, X[:, 0]),
    ("Reshape", X, {"shape": [0, 2, -1]}, X.reshape(3, 2, 10)),
    ("Reshape", X, {"shape": [-1, 5]}, X.reshape(12, 5)),
    ("Shape", X, {}, np.array([3, 4, 5])),
    ("Shape", X, {"axes": [2, 0]}, np.array([5, 3])),
    ("Tile", X, {"tiles": 3, "axis": 1}, np.tile(X, (1, 3, 1))),
    ("Slice", X, {"starts": [0, 1, 0], "ends": [-1, 3, -1]}, X[:, 1:3]),
    ("Slice", X, {"starts": [0, 0, -4], "ends": [-1, -1, -2]}, X[:, :, 2:4]),
    ("Slice", X, {"starts": [0, 2], "ends": [-1, 99]}, X[:, 2:]),
    ("ReduceMean", X, {}, X.mean(keepdims=True)),
    ("ReduceMean", X, {"axes": [1, 2]}, X.mean((1, 2), keepdims=True)),
    ("ReduceMean", X, {"axes": [-1], "keepdims": 0}, X.mean(-1)),
    ("ReduceSum", X, {"axes": [1], "keepdims": 0}, X.sum(1)),
    ("ReduceSum", X, {}, X.sum(keepdims=True)),
    ("ReduceMax", X, {"axes": [1]}, X.max(1, keepdims=True)),
    ("ReduceMin", X, {"axes": [1]}, X.min(1, keepdims=True)),
    ("ReduceL1", X, {"axes": [1]}, np.abs(X).sum(1, keepdims=True)),
    ("ReduceL2", X, {"axes": [1]}, np.sqrt((X * X).sum(1, keepdims=True))),
    ("ReduceFrontMean", X, {}, X.mean(0)),
    ("ReduceFrontMean", X, {"num_reduce_dim": 2}, X.mean((0, 1))),
    ("ReduceBackMean", X, {}, X.mean(2)),
    ("ReduceBackMean", X, {"num_reduce_dim": 2}, X.mean((1, 2))),
    ("ReduceFrontSum", X, {}, X.sum(0)),
    ("ReduceBackSum", X, {"num_reduce_dim": 2}, X.sum((1, 2))),
    ("ReduceBackMax", X, {}, X.max(2)),
    ("ReduceFrontMax", X, {}, X.max(0)),
    ("ArgMax", X, {"axis": 1}, X.argmax(1)[:, None]),
    ("ArgMin", X, {"keepdims": 0}, X.argmin(2)),
    ("Cast", X, {"to": 2}, X.astype(np.int32)),
    ("Cast", X, {"to": 10}, X.astype(np.int64)),
    ("Cast", X, {"to": "double"}, X.astype(np.float64)),
    ("Cast", X, {"to": "FLOAT16"}, X.astype(np.float16)),
    ("Cast", X > 0, {"to": 1}, (X > 0).astype(np.float32)),
    ("FloatToHalf", X, {}, X.astype(np.float16)),
    ("HalfToFloat", X.astype(np.float16), {}, X.astype(np.float16).astype(np.float32)),
    ("ConstantFill", X, {"value": 2.5}, np.full((3, 4, 5), 2.5, np.float32)),
    ("ConstantFill", X, {"value": 7, "dtype": 2}, np.full((3, 4, 5), 7, np.int32)),
    ("ConstantFill", X, {"value": 1.0, "extra_shape": [2]}, np.ones((3, 4, 5, 2), np.float32)),
]


@pytest.mark.parametrize(("kind", "given", "arguments", "expected"), UNARY, ids=lambda value: str(value)[:24])
def test_operators_of_one_tensor(kind: str, given: Any, arguments: dict[str, Any], expected: Any) -> None:
    close(computed(kind, given, **arguments), expected)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_prelu(order: str) -> None:
    image, slopes = rows(2, 4, 3, 5), np.array([0.1, 0.2, -0.3, 2], np.float32)
    expected = torch.prelu(torch.from_numpy(image), torch.from_numpy(slopes)).numpy()
    if order == "NCHW":
        close(computed("PRelu", image, weights=[slopes]), expected)
    else:
        turned = np.ascontiguousarray(image.transpose(0, 2, 3, 1))
        close(computed("PRelu", turned, weights=[slopes], order=order), expected.transpose(0, 2, 3, 1))
    one = np.array([0.25], np.float32)
    close(
        computed("PRelu", image, weights=[one], order=order), torch_functions.leaky_relu(torch.from_numpy(image), 0.25)
    )
    close(
        computed("PRelu", rows(3, 4), weights=[slopes]),
        torch.prelu(torch.from_numpy(rows(3, 4)), torch.from_numpy(slopes)),
    )


def test_affine_channel() -> None:
    image, scale, bias = rows(2, 4, 3, 5), rows(4, seed=2), rows(4, seed=3)
    expected = image * scale[:, None, None] + bias[:, None, None]
    close(computed("AffineChannel", image, weights=[scale, bias]), expected)


BINARY = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide}


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize(
    ("shape", "arguments", "seen_as"),
    [
        ((2, 3, 4, 5), {}, (2, 3, 4, 5)),
        ((2, 3, 4, 5), {"broadcast": 1}, (2, 3, 4, 5)),
        ((4, 5), {"broadcast": 1}, (4, 5)),
        ((5,), {"broadcast": 1}, (5,)),
        ((3,), {"broadcast": 1, "axis": 1}, (3, 1, 1)),
        ((3, 4), {"broadcast": 1, "axis": 1}, (3, 4, 1)),
        ((2,), {"broadcast": 1, "axis": 0}, (2, 1, 1, 1)),
        ((3,), {"broadcast": 1, "axis_str": "C"}, (3, 1, 1)),
        ((5,), {"broadcast": 1, "axis_str": "C", "order": "NHWC"}, (5,)),
        ((1,), {"broadcast": 1}, (1,)),
        ((1, 1), {"broadcast": 1, "axis": 0}, (1,)),
        ((), {"broadcast": 1}, (1,)),
        ((3, 1, 5), {}, (3, 1, 5)),
    ],
    ids=str,
)
def test_arithmetic_and_its_old_broadcast(
    kind: str, shape: tuple[int, ...], arguments: dict[str, Any], seen_as: tuple[int, ...]
) -> None:
    left, right = rows(2, 3, 4, 5), np.asarray(np.abs(rows(*shape, seed=2)) + 0.5, np.float32)
    expected = BINARY[kind](left, right.reshape(seen_as))
    close(computed(kind, left, weights=[right], **arguments), expected)
    if shape:
        net = Nets("a", "b")
        net.op("Copy", ["b"], ["c"])  # a value that is not known when the net is read
        net.op(kind, ["a", "c"], ["a"], **arguments)
        net.op("Copy", ["a"], ["y"])
        if shape[0] == 2:
            close(net.run({"a": left, "b": right}, ["y"])["y"], expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_arithmetic_has_other_types_too(dtype: Any) -> None:
    left, right = np.arange(12, dtype=dtype).reshape(3, 4), np.arange(1, 13, dtype=dtype).reshape(3, 4)
    for kind in ("Add", "Sub", "Mul"):
        close(computed(kind, left, right), BINARY[kind](left, right))
    close(computed("Sum", left, right, left), left + right + left)


def test_operators_of_many_tensors() -> None:
    a, b, c = (rows(3, 4, seed=seed) for seed in (1, 2, 3))
    close(computed("Sum", a, b, c), a + b + c)
    close(computed("Sum", a), a)
    close(computed("Mean", a, b, c), np.mean([a, b, c], axis=0))
    close(computed("Max", a, b, c), np.max([a, b, c], axis=0))
    close(computed("Min", a, b), np.minimum(a, b))
    close(computed("Pow", np.abs(a), b), np.abs(a) ** b)
    for kind, theirs in (("EQ", np.equal), ("NE", np.not_equal), ("LT", np.less), ("GE", np.greater_equal)):
        close(computed(kind, np.round(a), np.round(b)), theirs(np.round(a), np.round(b)))
    for kind, theirs in (("LE", np.less_equal), ("GT", np.greater)):
        close(computed(kind, a, b), theirs(a, b))
    for kind, theirs in (("And", np.logical_and), ("Or", np.logical_or), ("Xor", np.logical_xor)):
        close(computed(kind, a > 0, b > 0), theirs(a > 0, b > 0))


ALIASES = {
    "Alias": "Copy",
    "EnsureDense": "Copy",
    "CopyGPUToCPU": "Copy",
    "CopyFromCPUInput": "Copy",
    "CopyOnDeviceLike": "Copy",
    "DepthSplit": "Split",
    "Conv1D": "Conv",
    "Conv2D": "Conv",
    "MaxPool2D": "MaxPool",
    "AveragePool2D": "AveragePool",
    "UniformIntFill": "UniformFill",
}


def test_some_operators_have_several_names() -> None:
    assert all(OPERATORS[name] is OPERATORS[other] for name, other in ALIASES.items())


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("Cast", {}, "does not say what it casts to"),
        ("Cast", {"to": "complex"}, "not a Caffe2 data type"),
        ("Cast", {"to": 4}, "casts to strings"),
        ("Reshape", {}, "has no shape"),
        ("Reshape", {"shape": [-1, -1]}, "does not fit what it reads: 'x0' float \\[-1, 4, 5\\]"),
        ("Transpose", {"axes": [0, 0, 1]}, "does not fit"),
        ("Slice", {}, r"has starts \[\] and ends \[\]"),
        ("Slice", {"starts": [1], "ends": [1, 2]}, "has starts"),
        ("TopK", {}, "has k -1"),
        ("Softmax", {"axis": 3}, "has axis 3, and what it reads has 3 dimensions"),
        ("ReduceBackMean", {"num_reduce_dim": 4}, "has num_reduce_dim 4"),
        ("Tile", {"axis": 7}, "has tiles 1 and axis 7"),
        ("Conv", {"kernel": 3}, "has 1 inputs and needs 2 to 3"),
        ("LeakyRelu", {"alpha": float("nan")}, "is not a finite number"),
        ("LeakyRelu", {"alpha": "much"}, "is not a number"),
    ],
)
def test_arguments_that_cannot_be_are_refused_here_too(kind: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        computed(kind, X, **arguments)
    assert str(caught.value).startswith(f"operator 0 ({kind}) of 'model.netdef' ")


@pytest.mark.parametrize("arguments", [{"axis": 3}, {"axis": -2}, {"axis_str": "Q"}, {"axis_str": "NC"}])
def test_a_broadcast_that_does_not_fit_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"operator 0 \(Add\) .* has axis"):
        computed("Add", rows(2, 3, 4), weights=[rows(3, 4)], broadcast=1, **arguments)
