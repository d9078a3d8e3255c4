# SPDX-License-Identifier: Apache-2.0
"""Blocks of GPU memory whose address stays while their memory is given back and taken again.

CUDA's virtual memory management reserves addresses apart from memory. A `MemoryBlock` reserves its addresses once; `map`
puts memory behind them and `unmap` gives it back to the device. Tensors that `tensor` returns are valid whenever their part
of the block is mapped, and so is what was captured or compiled with their addresses. Reading one while it is not mapped is
an error that ends the process's use of the GPU, as any invalid address is.

    driver = open_driver(device)          # None where the device or its driver cannot do this
    block = MemoryBlock(driver, size)
    block.map()
    weights = block.tensor(0, size)
    block.unmap()                         # the memory is free for others
    block.map()                           # at the same address, with undefined contents
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.backends.torch_import import torch

log = logging.getLogger("headrace.backends")

ALIGNMENT = 512
"""Of tensors in a block, as PyTorch's allocator aligns them."""
_SEGMENT_BYTES = 128 << 20
"""Memory is taken in parts of this size, so that a block can fill while what is copied into it is freed."""
_COPY_BYTES = 32 << 20
"""Weights are copied in parts of this size, so that the small copies of other models' steps get their turn."""
_COPIES_AHEAD = 2


class Driver(Protocol):
    """The virtual memory management of one device."""

    device: torch.device
    granularity: int
    """Sizes and addresses are multiples of it."""

    def reserve(self, size: int) -> int:
        """Reserve addresses; return the first."""

    def free_addresses(self, address: int, size: int) -> None:
        """Give back reserved addresses, behind which there is no memory."""

    def map(self, address: int, size: int) -> int:
        """Put new memory behind reserved addresses; return its handle. Raises torch.OutOfMemoryError if there is none."""

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Free the memory behind addresses that were mapped with one call."""

    def wait(self) -> None:
        """Wait until the device has done what was queued on its default stream, which all models compute on."""

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """Return mapped memory as a tensor of bytes, which keeps `owner` alive."""


class MemoryBlock:
    """Some addresses of a device, and the memory behind them.

    `unmap` and `close` wait for the device's default stream; callers that use another stream wait for it before.
    """

    def __init__(self, driver: Driver, size: int) -> None:
        """Reserve addresses for `size` bytes, without memory."""
        self.device = driver.device
        self._driver = driver
        self._size = rounded_up(max(size, 1), driver.granularity)
        self.address = driver.reserve(self._size)
        self._segments: list[tuple[int, int, int]] = []
        """Address, size and handle of the parts that are mapped, from the first on."""
        # For a block that was never closed: its tensors keep it alive.
        self._finalizer = weakref.finalize(self, _free, driver, self.address, self._size, self._segments)
        self._finalizer.atexit = False  # the driver may be gone before

    @property
    def held_bytes(self) -> int:
        """The memory that it takes now."""
        return sum(size for _, size, _ in self._segments)

    def map(self, end: int | None = None) -> None:
        """Take memory for the first `end` bytes, or for all. Raises torch.OutOfMemoryError, and then changes nothing."""
        if not self._finalizer.alive:
            raise RuntimeError("the block is closed")
        before = len(self._segments)
        end = self._size if end is None else min(rounded_up(end, self._driver.granularity), self._size)
        segment = rounded_up(_SEGMENT_BYTES, self._driver.granularity)
        try:
            while (held := self.held_bytes) < end:
                size = min(segment, self._size - held)
                address = self.address + held
                self._segments.append((address, size, self._driver.map(address, size)))
        except BaseException:
            _unmap(self._driver, self._segments, before)
            raise

    def unmap(self) -> None:
        """Give the memory back. What it contained is lost."""
        _unmap(self._driver, self._segments, 0)

    def tensor(self, offset: int, size: int) -> torch.Tensor:
        """Return a part as a tensor of bytes, with a storage of its own. The part is mapped."""
        if not 0 <= offset <= offset + size <= self.held_bytes:
            raise ValueError(f"bytes {offset} to {offset + size} are not mapped")
        return self._driver.tensor(self.address + offset, size, self)

    def close(self) -> None:
        """Free memory and addresses. Tensors of the block are invalid then. Idempotent."""
        self._finalizer()


def _unmap(driver: Driver, segments: list[tuple[int, int, int]], keep: int) -> None:
    if len(segments) > keep:
        driver.wait()
    while len(segments) > keep:
        driver.unmap(*segments[-1])
        segments.pop()


def _free(driver: Driver, address: int, size: int, segments: list[tuple[int, int, int]]) -> None:
    _unmap(driver, segments, 0)
    driver.free_addresses(address, size)


def rounded_up(size: int, unit: int) -> int:
    """Return the next multiple of `unit`."""
    return -(-size // unit) * unit


def place_tensors(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors in a block, and the size of the block."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += rounded_up(size, ALIGNMENT)
    return offsets, at


class PinnedMemory:
    """Pinned host memory in chunks of one size. Those that are given back are kept for the next use, within a bound.

    Registering memory with CUDA takes much longer than copying to it.
    """

    chunk_bytes = 64 << 20

    def __init__(self, max_idle_bytes: int, *, pin: bool = True) -> None:
        """`max_idle_bytes`: what is kept while it is not used. `pin`: false where there is no CUDA."""
        self._pin = pin
        self._max_idle = max_idle_bytes // self.chunk_bytes
        self._idle: deque[torch.Tensor] = deque()
        self._registered: dict[int, torch.Tensor] = {}
        """Chunks by address, also those in use: memory must not be unmapped while it is registered."""
        self._finalizer = weakref.finalize(self, _unregister, self._registered)
        self._finalizer.atexit = False  # the driver may be gone before

    @property
    def idle_bytes(self) -> int:
        """What is kept for the next use."""
        return len(self._idle) * self.chunk_bytes

    def take(self, size: int) -> list[torch.Tensor]:
        """Return chunks for `size` bytes. Raises MemoryError or RuntimeError if they cannot be had."""
        chunks: list[torch.Tensor] = []
        try:
            while len(chunks) * self.chunk_bytes < size:
                try:
                    chunks.append(self._idle.pop())
                except IndexError:
                    chunks.append(self._new())
        except BaseException:
            self.give_back(chunks)
            raise
        return chunks

    def give_back(self, chunks: list[torch.Tensor]) -> None:
        """Take chunks back, and empty the list."""
        while chunks:
            chunk = chunks.pop()
            if len(self._idle) < self._max_idle:
                self._idle.append(chunk)
            else:
                self._free(chunk)

    def _new(self) -> torch.Tensor:
        chunk = huge_pages(self.chunk_bytes)
        if self._pin:
            register(chunk)
            self._registered[chunk.data_ptr()] = chunk
        return chunk

    def _free(self, chunk: torch.Tensor) -> None:
        if self._registered.pop(chunk.data_ptr(), None) is not None:
            unregister(chunk)


def _unregister(chunks: dict[int, torch.Tensor]) -> None:
    while chunks:
        unregister(chunks.popitem()[1])


def huge_pages(size: int) -> torch.Tensor:
    """Return host memory in huge pages, where the system has them: registering it is several times as fast.

    Raises MemoryError.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {size} bytes of host memory: {error}") from None
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def register(memory: torch.Tensor) -> None:
    """Pin host memory, so that the GPU copies it itself. PyTorch's own pinned memory is never given back to the system."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def unregister(memory: torch.Tensor) -> None:
    """Undo `register`, before the memory is freed."""
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))


def copy_tensors(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Copy tensors of bytes, `(to, from)`, beside what the device computes, and wait for it."""
    if device.type != "cuda":
        for target, source in pairs:
            target.copy_(source)
        return
    stream = torch.cuda.Stream(device)
    ahead: deque[Any] = deque()
    with torch.cuda.stream(stream):
        for target, source in pairs:
            for first in range(0, len(target), _COPY_BYTES):
                part = slice(first, first + _COPY_BYTES)
                target[part].copy_(source[part], non_blocking=True)
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                ahead.append(event)
                if len(ahead) > _COPIES_AHEAD:
                    ahead.popleft().synchronize()
    stream.synchronize()


def across_chunks(
    whole: torch.Tensor, chunks: Sequence[torch.Tensor], chunk_bytes: int, start: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the parts of a tensor of bytes with the parts of chunks that hold it from byte `start` on."""
    pairs, at = [], 0
    while at < len(whole):
        number, offset = divmod(start + at, chunk_bytes)
        count = min(chunk_bytes - offset, len(whole) - at)
        pairs.append((whole[at : at + count], chunks[number][offset : offset + count]))
        at += count
    return pairs


@dataclass(frozen=True, slots=True)
class StableMemory:
    """What models need to keep their addresses while they sleep."""

    driver: Driver
    pinned: PinnedMemory


# The driver. Structures and numbers are those of cuda.h, the same since CUDA 10.2.

_OUT_OF_MEMORY = 2
_SUPPORTS_VIRTUAL_MEMORY = 102
_PINNED_ALLOCATION = 1
_DEVICE_LOCATION = 1
_READ_AND_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_POINTER, _SIZE, _HANDLE, _FLAGS = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(_AllocationProperties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_POINTER), _SIZE, _SIZE, _POINTER, _FLAGS),
    "cuMemAddressFree": (_POINTER, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_HANDLE), _SIZE, ctypes.POINTER(_AllocationProperties), _FLAGS),
    "cuMemMap": (_POINTER, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_POINTER, _SIZE, ctypes.POINTER(_Access), _SIZE),
    "cuMemUnmap": (_POINTER, _SIZE),
    "cuMemRelease": (_HANDLE,),
}


class CudaError(RuntimeError):
    """A function of the driver has failed."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function}: {text or f'error {code}'}")
        self.code = code


class CudaDriver:
    """Implements `Driver` with libcuda."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError, AttributeError or CudaError where the driver cannot do it."""
        self.device = torch.device("cuda", device.index or 0)
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        torch.cuda.init()
        number, supported, granularity = ctypes.c_int(), ctypes.c_int(), _SIZE()
        self._call("cuDeviceGet", ctypes.byref(number), self.device.index)
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), _SUPPORTS_VIRTUAL_MEMORY, number)
        if not supported.value:
            raise CudaError("cuDeviceGetAttribute", 0, "the device has no virtual memory management")
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)  # the one that PyTorch uses
        location = _Location(_DEVICE_LOCATION, number.value)
        self._properties = _AllocationProperties(_PINNED_ALLOCATION, 0, location)
        self._access = _Access(location, _READ_AND_WRITE)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value

    def reserve(self, size: int) -> int:
        """See `Driver`."""
        address = _POINTER()
        with self._current_context():
            self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def free_addresses(self, address: int, size: int) -> None:
        """See `Driver`."""
        with self._current_context():
            self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> int:
        """See `Driver`."""
        with self._current_context():
            handle = self._create(size)
            try:
                self._call("cuMemMap", address, size, 0, handle, 0)
                try:
                    self._call("cuMemSetAccess", address, size, ctypes.byref(self._access), 1)
                except BaseException:
                    self._call("cuMemUnmap", address, size)
                    raise
            except BaseException:
                self._call("cuMemRelease", handle)
                raise
        return handle

    def _create(self, size: int) -> int:
        handle = _HANDLE()
        for again in (False, True):
            try:
                self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
                break
            except CudaError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                if again:
                    raise torch.OutOfMemoryError(
                        f"no {size} bytes of memory are free on GPU {self.device.index}"
                    ) from None
                torch.cuda.empty_cache()  # what PyTorch keeps of freed tensors
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        """See `Driver`."""
        with self._current_context():
            self._call("cuMemUnmap", address, size)
            self._call("cuMemRelease", handle)

    def wait(self) -> None:
        """See `Driver`."""
        # Not the whole device: another thread may be capturing a graph, which would fail.
        torch.cuda.default_stream(self.device).synchronize()

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """See `Driver`."""
        found = torch.as_tensor(_Memory(address, size, owner), device=self.device)
        if found.data_ptr() != address or found.nbytes != size:
            raise RuntimeError("PyTorch has copied the memory instead of using it")
        return found

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        """Make the device's context that of this thread, as the driver's functions need it."""
        previous = ctypes.c_void_p()
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(previous))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(function, code, (text.value or b"").decode(errors="replace"))


class _Memory:
    """Bytes of a device, as PyTorch takes them over without a copy."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def open_driver(device: torch.device) -> Driver | None:
    """Return the virtual memory management of a device; None where there is none."""
    if device.type != "cuda":
        return None
    try:
        return CudaDriver(device)
    except (OSError, AttributeError, RuntimeError) as error:
        log.warning(
            "Memory of %s cannot be given back at fixed addresses (%s): CUDA graphs do not outlast sleep.",
            device,
            error,
        )
        return None
