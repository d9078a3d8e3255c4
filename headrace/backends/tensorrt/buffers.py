# SPDX-License-Identifier: Apache-2.0
"""Growing memory buffers: on the GPU, and pinned on the host for copies between numpy and the GPU."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np

from headrace.backends.contract import Array


class Memory(Protocol):
    """An allocator of one kind of memory."""

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes, at least 1, and return their address."""

    def free(self, address: int) -> None:
        """Free the memory."""


class Buffer:
    """Memory of the size that the largest batch so far needed, so that a usual batch allocates nothing."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.address = 0
        self.capacity = 0

    def reserve(self, size: int) -> int:
        """Return the address of at least `size` bytes; old content may be lost. Never 0, also for empty tensors."""
        if size > self.capacity or not self.address:
            # Free the old block first: a large tensor may not fit twice.
            self.close()
            wanted = rounded(size)
            self.address = self._memory.allocate(wanted)
            self.capacity = wanted
        return self.address

    def close(self) -> None:
        """Free the memory; `reserve` would allocate it again."""
        address, self.address, self.capacity = self.address, 0, 0
        if address:
            self._memory.free(address)


class Staging(Buffer):
    """A buffer in host memory."""

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return its first bytes as an array; valid until `reserve` grows it, or `close`."""
        count = 1
        for size in shape:
            count *= size
        address = self.reserve(count * dtype.itemsize)
        raw = memoryview((ctypes.c_ubyte * self.capacity).from_address(address))
        return np.frombuffer(raw, dtype, count).reshape(shape)


def rounded(size: int) -> int:
    """Return the capacity for `size` bytes: the next power of two, or from 1 MiB on the next MiB."""
    if size >= _LARGE:
        return -(-size // _LARGE) * _LARGE
    return max(ALIGNMENT, 1 << (size - 1).bit_length()) if size else ALIGNMENT


ALIGNMENT = 256
"""TensorRT's alignment of tensor addresses; CUDA's allocations always have it."""


_LARGE = 1 << 20
