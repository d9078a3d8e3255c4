# SPDX-License-Identifier: Apache-2.0
"""A tensor in a GPU's memory, as the engine carries it from one step of an ensemble to the next.

Made by `instance`, which finishes the tensor before it hands it out. The engine treats it as an array: see
`backends.contract.DeviceComputing` for what it may do with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.backends.contract import Array
from headrace.backends.pytorch.dtypes import DTYPES


class DeviceArray:
    """One tensor. What numpy has no type for has the numpy form of `core.dtypes`: the 16 bits of BF16."""

    __slots__ = ("dtype", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.dtype = DTYPES[tensor.dtype].numpy

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        return tuple(self.tensor.shape)

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Some rows, in the same memory."""
        return DeviceArray(self.tensor[rows])

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """The same elements otherwise laid out; in the same memory, because rows lie one behind the other."""
        return DeviceArray(self.tensor.reshape(tuple(shape)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """A copy on the host: `np.asarray` asks for it."""
        host = self.tensor.cpu()
        array: Array = host.view(torch.uint16).numpy() if host.dtype is torch.bfloat16 else host.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Join rows on the device: what `np.concatenate` calls when one of its arrays is ours."""
        if function is not np.concatenate or len(args) != 1 or kwargs:
            return NotImplemented
        joined = torch.cat([self._beside(part) for part in args[0]])
        # Whoever computes with it does so on another stream, which does not wait for this one.
        torch.cuda.current_stream(joined.device).synchronize()
        return DeviceArray(joined)

    def _beside(self, part: DeviceArray | Array) -> Any:
        """Another part of a batch, on our device and of our type."""
        if isinstance(part, DeviceArray):
            return part.tensor.to(self.tensor.device)
        tensor = torch.from_numpy(np.ascontiguousarray(part))
        return (tensor.view(torch.bfloat16) if self.tensor.dtype is torch.bfloat16 else tensor).to(self.tensor.device)
