# SPDX-License-Identifier: Apache-2.0
"""Writes plans that the fake TensorRT can read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FIRST_LINE = "a plan for the fake TensorRT\n"
Shape = Sequence[int]


def tensor(name: str, mode: str, shape: Shape, dtype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    """One binding."""
    usual = {"location": "DEVICE", "shape_tensor": False, "format": ["LINEAR"] * 9}
    return {"name": name, "mode": mode, "shape": list(shape), "dtype": dtype} | usual | more


def takes(name: str, shape: Shape, dtype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    return tensor(name, "INPUT", shape, dtype, **more)


def gives(name: str, shape: Shape, dtype: str = "FLOAT", **more: Any) -> dict[str, Any]:
    return tensor(name, "OUTPUT", shape, dtype, **more)


def profile(shapes: Mapping[str, Sequence[Shape]], values: Mapping[str, Sequence[Shape]] | None = None) -> Any:
    """Name -> (lowest, optimum, highest)."""
    return {"shapes": shapes, "values": values or {}}


def plan(
    network: str,
    tensors: Sequence[Any],
    profiles: Sequence[Any] = ({"shapes": {}, "values": {}},),
    *,
    capability: str = "any",
    tensorrt: str = "10.13.0",
    **more: Any,
) -> bytes:
    """A plan's file."""
    described = {
        "tensorrt": tensorrt,
        "capability": capability,
        "network": network,
        "tensors": list(tensors),
        "profiles": list(profiles),
    }
    return (FIRST_LINE + json.dumps(described | more)).encode()


def batched(
    network: str, inputs: Sequence[str], outputs: Sequence[str], dims: Shape, most: int = 8, **more: Any
) -> bytes:
    """A plan with a batch in front of every tensor, and one profile for 1 to `most` rows."""
    dtype = more.pop("dtype", "FLOAT")
    shape = [-1, *dims]
    ranges = {name: ([1, *dims], [most, *dims], [most, *dims]) for name in inputs}
    tensors = [takes(name, shape, dtype) for name in inputs] + [gives(name, shape, dtype) for name in outputs]
    return plan(network, tensors, [profile(ranges)], **more)
