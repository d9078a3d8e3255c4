# SPDX-License-Identifier: Apache-2.0
"""What the fake engines compute: for each, the shapes of its outputs, and the outputs themselves by numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
MNIST_WEIGHTS = np.random.default_rng(28).standard_normal((784, 10)).astype(np.float32)


@dataclass(frozen=True)
class Network:
    shapes: Callable[[Shapes, Arrays], Shapes]
    """From the inputs' shapes and the values of shape tensors; -1 where only the data tells. Raises for what cannot be."""
    compute: Callable[[Arrays], Arrays]


def mnist(data: Any) -> Any:
    scores = data.reshape(len(data), 784) @ MNIST_WEIGHTS
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (powers / powers.sum(axis=1, keepdims=True)).reshape(-1, 10, 1, 1)


def _same(shapes: Shapes, values: Arrays) -> Shapes:
    if shapes["INPUT0"] != shapes["INPUT1"]:
        raise ValueError("the shapes differ")
    return {"OUTPUT0": shapes["INPUT0"], "OUTPUT1": shapes["INPUT0"]}


def _reshaped(shapes: Shapes, values: Arrays) -> Shapes:
    wanted = tuple(int(size) for size in values["SHAPE"])
    if np.prod(wanted) != np.prod(shapes["X"]):
        raise ValueError("another number of elements")
    return {"Y": wanted, "SHAPE_OUT": (len(wanted),)}


def _failing(arrays: Arrays) -> Arrays:
    raise RuntimeError("a kernel wrote where it must not")


NETWORKS = {
    "identity": Network(lambda shapes, values: {"Y": shapes["X"]}, lambda arrays: {"Y": arrays["X"]}),
    "add_sub": Network(
        _same,
        lambda arrays: {
            "OUTPUT0": arrays["INPUT0"] + arrays["INPUT1"],
            "OUTPUT1": arrays["INPUT0"] - arrays["INPUT1"],
        },
    ),
    "mnist": Network(
        lambda shapes, values: {"prob": (shapes["data"][0], 10, 1, 1)}, lambda arrays: {"prob": mnist(arrays["data"])}
    ),
    "positive": Network(lambda shapes, values: {"Y": (-1,)}, lambda arrays: {"Y": arrays["X"][arrays["X"] > 0]}),
    "reshape": Network(
        _reshaped,
        lambda arrays: {"Y": arrays["X"].reshape(tuple(arrays["SHAPE"])), "SHAPE_OUT": arrays["SHAPE"]},
    ),
    "failing": Network(lambda shapes, values: {"Y": shapes["X"]}, _failing),
}
