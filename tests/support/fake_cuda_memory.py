# SPDX-License-Identifier: Apache-2.0
"""A fake of CUDA's virtual memory management, in the memory of this process.

As documented for the driver: sizes and addresses are multiples of the granularity, addresses without memory cannot be read
(the process gets SIGSEGV), new memory has any contents, and memory that does not fit is refused.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NO_ACCESS, _READ_AND_WRITE = 0, 3
_PRIVATE, _FIXED, _ANONYMOUS = 2, 16, 32
_GARBAGE = 0xAB


class FakeCudaDriver:
    """Implements `cuda_memory.Driver` for a device of `capacity` bytes."""

    granularity = 2 << 20

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.device = torch.device("cpu")
        self.capacity = capacity
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        """Size and handle by address."""
        self.handles = 0
        self.waited = 0

    @property
    def used(self) -> int:
        return sum(size for size, _ in self.mapped.values())

    def reserve(self, size: int) -> int:
        self._check(size)
        address = self._mmap(None, size, _NO_ACCESS, 0)
        self.reserved[address] = size
        return address

    def free_addresses(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= start < address + size for start in self.mapped), "there is memory behind them"
        assert _LIBC.munmap(address, size) == 0

    def map(self, address: int, size: int) -> int:
        self._check(size)
        assert any(first <= address and address + size <= first + length for first, length in self.reserved.items())
        assert not any(
            first < address + size and address < first + length for first, (length, _) in self.mapped.items()
        )
        if self.used + size > self.capacity:
            raise torch.OutOfMemoryError(f"no {size} bytes of memory are free")
        assert self._mmap(address, size, _READ_AND_WRITE, _FIXED) == address
        ctypes.memset(address, _GARBAGE, size)
        self.handles += 1
        self.mapped[address] = size, self.handles
        return self.handles

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.mapped.pop(address) == (size, handle)
        self._mmap(address, size, _NO_ACCESS, _FIXED)

    def wait(self) -> None:
        self.waited += 1

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        assert (
            sum(
                max(0, min(first + length, address + size) - max(first, address))
                for first, (length, _) in self.mapped.items()
            )
            == size
        ), "not mapped"
        memory: Any = (ctypes.c_ubyte * size).from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _check(self, size: int) -> None:
        assert size
        assert size % self.granularity == 0

    def _mmap(self, address: int | None, size: int, protection: int, flags: int) -> int:
        found: int | None = _LIBC.mmap(address, size, protection, flags | _PRIVATE | _ANONYMOUS, -1, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        assert isinstance(found, int)
        return found
