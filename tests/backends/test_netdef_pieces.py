# SPDX-License-Identifier: Apache-2.0
"""Operators that put tensors together, take them apart or look into them give what PyTorch or numpy give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from netdef_nets import Nets, computed, rows

X = rows(3, 4, 5)
T = torch.from_numpy(X)


def close(ours: Any, theirs: Any) -> None:
    expected = np.asarray(theirs)
    assert ours.shape == expected.shape
    assert ours.dtype == expected.dtype
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_concat() -> None:
    a, b = rows(2, 3, 4, 5), rows(2, 6, 4, 5, seed=2)
    for arguments in ({}, {"axis": 1}, {"order": "NCHW"}, {"axis": -3}):
        joined, sizes = computed("Concat", a, b, outputs=2, **arguments)
        close(joined, np.concatenate([a, b], 1))
        close(sizes, np.array([3, 6], np.int32))
    wide, sizes = computed("DepthConcat", a, a, outputs=2, order="NHWC")
    close(wide, np.concatenate([a, a], 3))
    close(sizes, np.array([5, 5], np.int32))
    stacked, sizes = computed("Concat", a, a, outputs=2, axis=1, add_axis=1)
    close(stacked, np.stack([a, a], 1))
    close(sizes, np.array([1, 1], np.int32))
    close(computed("Concat", a, a, axis=0), np.concatenate([a, a]))


def test_split() -> None:
    image = rows(2, 6, 4, 5)
    for ours, theirs in zip(computed("Split", image, outputs=3), np.split(image, 3, 1), strict=True):
        close(ours, theirs)
    for ours, theirs in zip(
        computed("Split", image, outputs=3, split=[1, 2, 3], axis=1), np.split(image, [1, 3], 1), strict=True
    ):
        close(ours, theirs)
    sizes = np.array([4, 1], np.int32)
    for ours, theirs in zip(
        computed("Split", image, weights=[sizes], outputs=2, order="NHWC"), np.split(image, [4], 3), strict=True
    ):
        close(ours, theirs)
    for number, ours in enumerate(computed("Split", image, outputs=4, axis=2, add_axis=1)):
        close(ours, image[:, :, number])


def test_what_was_joined_is_split_by_its_sizes() -> None:
    net = Nets("a", "b")
    net.op("Concat", ["a", "b"], ["joined", "sizes"], axis=1)
    net.op("Split", ["joined", "sizes"], ["c", "d"], axis=1)
    a, b = rows(2, 3), rows(2, 5, seed=2)
    answers = net.run({"a": a, "b": b}, ["c", "d"])
    close(answers["c"], a)
    close(answers["d"], b)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_reshape_by_a_tensor_and_back(dtype: Any) -> None:
    net = Nets()
    net.weight("shape", np.array([0, -1], dtype))
    net.op("Reshape", ["data", "shape"], ["flat", "old"])
    net.op("Relu", ["flat"], ["flat"])
    net.op("Reshape", ["flat", "old"], ["y", "unused"])
    answers = net.run({"data": X}, ["y", "old"])
    close(answers["y"], np.maximum(X, 0))
    close(answers["old"], np.array([3, 4, 5], dtype))


def test_slices_may_be_defined_by_the_init_net() -> None:
    bounds = [np.array([0, 1], np.int32), np.array([-1, 3], np.int32)]
    close(computed("Slice", X, weights=bounds), X[:, 1:3])


def test_top_k() -> None:
    values, places = computed("TopK", X, outputs=2, k=3)
    expected = torch.topk(T, 3)
    close(values, expected.values)
    close(places, expected.indices)
    values, places = computed("TopK", X, outputs=2, k=2, axis=1)
    expected = torch.topk(T, 2, dim=1)
    close(values, expected.values)
    close(places, expected.indices)


def test_gather() -> None:
    table, places = rows(7, 3), np.array([[0, 6], [2, 2], [1, 0]])
    net = Nets("places")
    net.weight("table", table)
    net.op("Gather", ["table", "places"], ["y"])
    close(net.run({"places": places}, ["y"])["y"], table[places])
