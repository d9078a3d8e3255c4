# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N801, N802, N803, N815, N816
"""The fake of `cuda.bindings.runtime`: memory, streams and events of GPUs that are not there.

Calls give a tuple with the status first, as the real ones do. Work of a stream is done when somebody waits for it, at the
last possible moment, so that whoever does not wait reads what was there before. Memory of a GPU has addresses that no
array can be made of.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

cudaStreamNonBlocking = 1
cudaEventBlockingSync = 1
cudaEventDisableTiming = 2


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorInvalidResourceHandle = 400
    cudaErrorIllegalAddress = 700


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaDeviceAttr(IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


class cudaStream_t:
    def __init__(self, handle: int, gpu: int) -> None:
        self.handle = handle
        self.gpu = gpu
        self.work: list[Callable[[], None] | None] = []
        self.done = 0


class cudaEvent_t:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.stream: cudaStream_t | None = None
        self.position = 0


class Block:
    """One allocation."""

    def __init__(self, address: int, size: int, gpu: int | None, content: Any) -> None:
        self.address = address
        self.size = size
        self.gpu = gpu
        self.content = content


class FakeDriver:
    """What is behind the calls; tests look at it and break it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.threads = threading.local()
        self.reset()

    def reset(self) -> None:
        self.capabilities = ["8.6"]
        self.gpu_bytes = 1 << 30
        self.blocks: dict[int, Block] = {}
        self.streams: dict[int, cudaStream_t] = {}
        self.events: dict[int, cudaEvent_t] = {}
        self.next_gpu_address = 0x7F_0000_0000_0000
        self.next_handle = 0x5000
        self.broken: cudaError_t | None = None
        """An error that stays, as after a kernel that wrote where it must not."""
        self.copies: list[tuple[str, int]] = []

    @property
    def current(self) -> int:
        return int(getattr(self.threads, "gpu", 0))

    def used(self, gpu: int | None) -> int:
        return sum(block.size for block in self.blocks.values() if block.gpu == gpu)

    def handle(self) -> int:
        self.next_handle += 16
        return self.next_handle

    def find(self, address: int, size: int) -> Block | None:
        for block in self.blocks.values():
            if block.address <= address and address + size <= block.address + block.size:
                return block
        return None

    def view(self, address: int, size: int) -> Any:
        block = self.find(address, size)
        if block is None:
            raise MemoryError(f"no allocation has {size} bytes at {address:#x}")
        start = address - block.address
        return block.content[start : start + size]

    def run(self, stream: cudaStream_t, until: int) -> cudaError_t:
        while stream.done < until and self.broken is None:
            work, stream.work[stream.done] = stream.work[stream.done], None
            stream.done += 1
            try:
                if work is not None:
                    work()
            except Exception:
                self.broken = cudaError_t.cudaErrorIllegalAddress
        return self.broken or cudaError_t.cudaSuccess

    def enqueue(self, handle: int, work: Callable[[], None]) -> None:
        self.streams[handle].work.append(work)


FAKE = FakeDriver()
OK = cudaError_t.cudaSuccess


def cudaGetDeviceCount() -> tuple[Any, ...]:
    count = len(FAKE.capabilities)
    return (OK, count) if count else (cudaError_t.cudaErrorNoDevice, 0)


def cudaGetDevice() -> tuple[Any, ...]:
    return OK, FAKE.current


def cudaSetDevice(device: int) -> tuple[Any, ...]:
    if not 0 <= device < len(FAKE.capabilities):
        return (cudaError_t.cudaErrorInvalidDevice,)
    FAKE.threads.gpu = device
    return (FAKE.broken or OK,)


def cudaDeviceGetAttribute(attr: cudaDeviceAttr, device: int) -> tuple[Any, ...]:
    major, minor = FAKE.capabilities[device].split(".")
    return OK, int(major if attr is cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor else minor)


def cudaMalloc(size: int) -> tuple[Any, ...]:
    with FAKE.lock:
        if FAKE.broken:
            return FAKE.broken, None
        if FAKE.used(FAKE.current) + size > FAKE.gpu_bytes:
            return cudaError_t.cudaErrorMemoryAllocation, None
        address = FAKE.next_gpu_address
        FAKE.next_gpu_address += -(-size // 256) * 256 + 256
        # What was in it before is anybody's guess; zeros would hide that.
        FAKE.blocks[address] = Block(address, size, FAKE.current, np.full(size, 0xA5, np.uint8))
        return OK, address


def cudaMallocHost(size: int) -> tuple[Any, ...]:
    with FAKE.lock:
        if FAKE.broken:
            return FAKE.broken, None
        whole = np.full(size + 256, 0xA5, np.uint8)
        content = whole[-whole.ctypes.data % 256 :][:size]
        FAKE.blocks[content.ctypes.data] = Block(content.ctypes.data, size, None, content)
        return OK, content.ctypes.data


def cudaFree(devPtr: int) -> tuple[Any, ...]:
    return _free(devPtr, on_gpu=True)


def cudaFreeHost(ptr: int) -> tuple[Any, ...]:
    return _free(ptr, on_gpu=False)


def _free(address: int, *, on_gpu: bool) -> tuple[Any, ...]:
    with FAKE.lock:
        block = FAKE.blocks.get(address)
        if block is None or (block.gpu is not None) is not on_gpu:
            return (cudaError_t.cudaErrorInvalidValue,)
        # Freeing waits for the GPU, as `cudaFree` does.
        for stream in FAKE.streams.values():
            FAKE.run(stream, len(stream.work))
        del FAKE.blocks[address]
        return (FAKE.broken or OK,)


def cudaStreamCreateWithFlags(flags: int) -> tuple[Any, ...]:
    with FAKE.lock:
        if FAKE.broken:
            return FAKE.broken, None
        stream = cudaStream_t(FAKE.handle(), FAKE.current)
        FAKE.streams[stream.handle] = stream
        return OK, stream


def cudaStreamDestroy(stream: cudaStream_t) -> tuple[Any, ...]:
    with FAKE.lock:
        if FAKE.streams.pop(stream.handle, None) is None:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        return (FAKE.broken or OK,)


def cudaStreamSynchronize(stream: cudaStream_t) -> tuple[Any, ...]:
    with FAKE.lock:
        if stream.handle not in FAKE.streams:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        return (FAKE.run(stream, len(stream.work)),)


def cudaEventCreateWithFlags(flags: int) -> tuple[Any, ...]:
    with FAKE.lock:
        event = cudaEvent_t(FAKE.handle())
        FAKE.events[event.handle] = event
        return OK, event


def cudaEventRecord(event: cudaEvent_t, stream: cudaStream_t) -> tuple[Any, ...]:
    with FAKE.lock:
        if stream.handle not in FAKE.streams:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        event.stream, event.position = stream, len(stream.work)
        return (FAKE.broken or OK,)


def cudaEventSynchronize(event: cudaEvent_t) -> tuple[Any, ...]:
    with FAKE.lock:
        return (OK if event.stream is None else FAKE.run(event.stream, event.position),)


def cudaEventDestroy(event: cudaEvent_t) -> tuple[Any, ...]:
    with FAKE.lock:
        if FAKE.events.pop(event.handle, None) is None:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        return (FAKE.broken or OK,)


def cudaMemcpyAsync(dst: int, src: int, count: int, kind: cudaMemcpyKind, stream: cudaStream_t) -> tuple[Any, ...]:
    with FAKE.lock:
        if stream.handle not in FAKE.streams:
            return (cudaError_t.cudaErrorInvalidResourceHandle,)
        target, source = FAKE.find(dst, count), FAKE.find(src, count)
        wanted = {
            cudaMemcpyKind.cudaMemcpyHostToDevice: (True, False),
            cudaMemcpyKind.cudaMemcpyDeviceToHost: (False, True),
        }[kind]
        if target is None or source is None or (target.gpu is not None, source.gpu is not None) != wanted:
            return (cudaError_t.cudaErrorInvalidValue,)
        FAKE.copies.append((kind.name, count))

        def copy() -> None:
            FAKE.view(dst, count)[:] = FAKE.view(src, count)

        stream.work.append(copy)
        return (FAKE.broken or OK,)


def cudaMemcpy(dst: int, src: int, count: int, kind: cudaMemcpyKind) -> tuple[Any, ...]:
    """At once, from or to any memory of this process."""
    if kind is cudaMemcpyKind.cudaMemcpyDeviceToHost:
        content = FAKE.view(src, count).tobytes()
        ctypes.memmove(dst, content, count)
    else:
        FAKE.view(dst, count)[:] = np.frombuffer(ctypes.string_at(src, count), np.uint8)
    return (OK,)
