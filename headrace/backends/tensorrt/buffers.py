# SPDX-License-Identifier: Apache-2.0
"""Memory that grows: on the GPU, and pinned on the host as the staging place between numpy and the GPU.

Called by `instance`, one pair to each tensor. Where memory comes from is a `Memory`; `device` has the two of CUDA.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from headrace.backends.contract import Array

ALIGNMENT = 256
"""TensorRT's, for the address of a tensor. CUDA's allocations have it by themselves."""
_LARGE = 1 << 20


class Memory(Protocol):
    """One kind of memory."""

    def allocate(self, size: int) -> int:
        """The address of so many bytes, at least 1."""

    def free(self, address: int) -> None:
        """Give them back."""


class Buffer:
    """Takes what the largest batch so far needed, so that a batch of usual size allocates nothing."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.address = 0
        self.capacity = 0

    def reserve(self, size: int) -> int:
        """The address of room for so many bytes, what was in it may be lost. Never 0: empty tensors need one too."""
        if size > self.capacity or not self.address:
            # The old one first: a large tensor may not fit twice.
            self.close()
            wanted = rounded(size)
            self.address = self._memory.allocate(wanted)
            self.capacity = wanted
        return self.address

    def close(self) -> None:
        """Give it back; `reserve` would take it again."""
        address, self.address, self.capacity = self.address, 0, 0
        if address:
            self._memory.free(address)


class Staging(Buffer):
    """A buffer on the host."""

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Its first bytes as an array; valid until the next `reserve` of more, or `close`."""
        count = 1
        for size in shape:
            count *= size
        address = self.reserve(count * dtype.itemsize)
        raw = memoryview((ctypes.c_ubyte * self.capacity).from_address(address))
        return np.frombuffer(raw, dtype, count).reshape(shape)


def rounded(size: int) -> int:
    """How much to take for `size` bytes: the next power of two, or from 1 MiB on the next MiB."""
    if size >= _LARGE:
        return -(-size // _LARGE) * _LARGE
    return max(ALIGNMENT, 1 << (size - 1).bit_length()) if size else ALIGNMENT
