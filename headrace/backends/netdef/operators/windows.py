# SPDX-License-Identifier: Apache-2.0
"""The arguments of operators that slide a window over an image: convolutions and pooling.

Caffe2 has three ways to write each: `kernels`, `kernel`, or `kernel_h` and `kernel_w`. Called by `convolution`,
`pooling` and `image`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.backends.netdef.operator import Operator

NOTSET, VALID, SAME, CAFFE_LEGACY_POOLING = range(4)
"""`legacy_pad`: Caffe2's enum LegacyPadding."""

_LARGEST = 2**20


@dataclass(frozen=True, slots=True)
class Window:
    """Sizes for each dimension of the image. Pads are those at the beginnings, then those at the ends."""

    kernel: tuple[int, ...]
    """Empty when the operator does not say."""
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    legacy_pad: int

    def padding(self) -> dict[str, Any]:
        """ONNX's attributes for the pads."""
        if self.legacy_pad == SAME:
            # The pixel that is left over goes to the end, in both.
            return {"auto_pad": "SAME_UPPER"}
        if self.legacy_pad == VALID:
            return {"pads": [0] * len(self.pads)}
        return {"pads": list(self.pads)}


def read_window(operator: Operator, dimensions: int = 2) -> Window:
    """Read them all; `dimensions` is how many there are if none of the arguments tells."""
    kernel = _sizes(operator, "kernel", 1, dimensions)
    strides = _sizes(operator, "stride", 1, dimensions)
    dilations = _sizes(operator, "dilation", 1, dimensions)
    pads = _pads(operator)
    count = len(kernel) or len(strides) or len(dilations) or len(pads) // 2 or dimensions
    strides = strides or (1,) * count
    dilations = dilations or (1,) * count
    pads = pads or (0,) * (2 * count)
    if not len(strides) == len(dilations) == count or len(pads) != 2 * count:
        raise operator.fault(f"has a kernel, strides, dilations and pads that are not all for {count} dimensions")
    legacy_pad = operator.integer("legacy_pad", NOTSET)
    if legacy_pad not in (NOTSET, VALID, SAME, CAFFE_LEGACY_POOLING):
        raise operator.fault(f"has legacy_pad {legacy_pad}, which is not known: Caffe2 has 0 to 3")
    if legacy_pad == SAME:
        if set(dilations) != {1}:
            raise operator.fault("has both legacy_pad SAME and a dilation, which Caffe2 cannot compute either")
        if any(stride > size + 1 for stride, size in zip(strides, kernel, strict=False)):
            raise operator.fault("has legacy_pad SAME and strides that skip over pixels, which is not translated")
    return Window(kernel, strides, dilations, pads, legacy_pad)


def _sizes(operator: Operator, name: str, least: int, dimensions: int) -> tuple[int, ...]:
    sizes = operator.integers(f"{name}s")
    if operator.has(name):
        sizes = (operator.integer(name, 0),) * dimensions
    elif operator.has(f"{name}_h", f"{name}_w"):
        sizes = (operator.integer(f"{name}_h", 0), operator.integer(f"{name}_w", 0))
    _check(operator, name, sizes, least)
    return sizes


def _pads(operator: Operator) -> tuple[int, ...]:
    pads = operator.integers("pads")
    if operator.has("pad"):
        pads = (operator.integer("pad", 0),) * 4
    elif operator.has("pad_t", "pad_l", "pad_b", "pad_r"):
        pads = tuple(operator.integer(f"pad_{side}", 0) for side in "tlbr")
    _check(operator, "pad", pads, 0)
    return pads


def _check(operator: Operator, name: str, sizes: tuple[int, ...], least: int) -> None:
    if not all(least <= size <= _LARGEST for size in sizes):
        raise operator.fault(f"has {name} {list(sizes)}: sizes from {least} to {_LARGEST} are possible")
