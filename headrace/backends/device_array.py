# SPDX-License-Identifier: Apache-2.0
"""Tensors in GPU memory that one model of an ensemble passes to the next, and PyTorch's names of our data types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headrace.backends.contract import Array
from headrace.backends.torch_import import torch
from headrace.core import dtypes
from headrace.core.dtypes import DType

TORCH_TYPES: dict[DType, Any] = {
    dtypes.BOOL: torch.bool,
    dtypes.UINT8: torch.uint8,
    dtypes.UINT16: torch.uint16,
    dtypes.UINT32: torch.uint32,
    dtypes.UINT64: torch.uint64,
    dtypes.INT8: torch.int8,
    dtypes.INT16: torch.int16,
    dtypes.INT32: torch.int32,
    dtypes.INT64: torch.int64,
    dtypes.FP16: torch.float16,
    dtypes.FP32: torch.float32,
    dtypes.FP64: torch.float64,
    dtypes.BF16: torch.bfloat16,
}
"""The torch type of each data type except BYTES, which PyTorch has no tensors for."""
DTYPES: dict[Any, DType] = {theirs: ours for ours, theirs in TORCH_TYPES.items()}


class DeviceArray:
    """A tensor in device memory. A type that numpy lacks has the numpy form of `core.dtypes`: the 16 bits of BF16."""

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.dtype = DTYPES[tensor.dtype].numpy

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the dimensions, outermost first."""
        return tuple(self.tensor.shape)

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Return some rows, in the same memory."""
        return DeviceArray(self.tensor[rows])

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """Return the elements in another shape, in the same memory, because rows are contiguous."""
        return DeviceArray(self.tensor.reshape(tuple(shape)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return a copy on the host; called by `np.asarray`."""
        host = self.tensor.cpu()
        array: Array = host.view(torch.uint16).numpy() if host.dtype is torch.bfloat16 else host.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Concatenate rows on the device; called by `np.concatenate` if one of its arrays is a `DeviceArray`."""
        if function is not np.concatenate or len(args) != 1 or kwargs:
            return NotImplemented
        joined = torch.cat([self._on_this_device(part) for part in args[0]])
        # Its consumer runs on another stream, which does not wait for this one.
        torch.cuda.current_stream(joined.device).synchronize()
        return DeviceArray(joined)

    def _on_this_device(self, part: DeviceArray | Array) -> Any:
        """Return another part of a batch on this device, with this type."""
        if isinstance(part, DeviceArray):
            return part.tensor.to(self.tensor.device)
        tensor = torch.from_numpy(np.ascontiguousarray(part))
        return (tensor.view(torch.bfloat16) if self.tensor.dtype is torch.bfloat16 else tensor).to(self.tensor.device)


class _Memory:
    """Memory of another library, in the form that PyTorch reads without copying. Keeps its owner alive."""

    def __init__(self, owner: Any, address: int, shape: Sequence[int], item_bytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": f"<i{item_bytes}" if item_bytes > 1 else "|i1",
            "data": (address, False),
            "version": 3,
        }


def wrap_memory(owner: Any, address: int, shape: Sequence[int], dtype: DType, device: int) -> DeviceArray:
    """Return an array in the GPU memory of another library, which `owner` keeps. Nothing is copied."""
    place, torch_type = torch.device("cuda", device), TORCH_TYPES[dtype]
    if 0 in shape:
        return DeviceArray(torch.empty(tuple(shape), dtype=torch_type, device=place))
    integers = torch.as_tensor(_Memory(owner, address, shape, torch_type.itemsize), device=place)
    return DeviceArray(integers.view(torch_type))
