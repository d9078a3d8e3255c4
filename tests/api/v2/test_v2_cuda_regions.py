# SPDX-License-Identifier: Apache-2.0
"""The table of CUDA regions over a GPU that is played by a dictionary: bounds, handles, closing, failures."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from headrace.api.shared_memory import HANDLE_BYTES, CudaFailure, SharedMemory
from headrace.core.errors import AlreadyExists, Internal, InvalidArgument, NotFound

HANDLE = b"h" * HANDLE_BYTES


class FakeCudaDevice:
    """Memory of 64 bytes at address 1000."""

    def __init__(self) -> None:
        self.memory = bytearray(64)
        self.closed: list[tuple[int, int]] = []
        self.broken = False

    def open(self, handle: bytes, device_id: int) -> int:
        if handle != HANDLE or device_id:
            raise CudaFailure("cudaErrorInvalidValue")
        return 1000

    def size(self, address: int) -> int:
        return 1064 - address

    def read(self, device_id: int, address: int, target: Any) -> None:
        if self.broken:
            raise CudaFailure("cudaErrorIllegalAddress")
        target[:] = self.memory[address - 1000 : address - 1000 + len(target)]

    def write(self, device_id: int, address: int, data: Any) -> None:
        self.memory[address - 1000 : address - 1000 + len(data)] = data

    def close(self, device_id: int, address: int) -> None:
        self.closed.append((device_id, address))


@pytest.fixture
def device() -> FakeCudaDevice:
    return FakeCudaDevice()


@pytest.fixture
def memory(device: FakeCudaDevice) -> SharedMemory:
    return SharedMemory(allowed=True, device=device)


def test_read_and_write(memory: SharedMemory, device: FakeCudaDevice) -> None:
    memory.register_cuda("r", HANDLE, 0, 64)
    memory.placement("r", 8, 16).write("OUTPUT0", b"0123456789")
    assert device.memory[8:18] == b"0123456789"
    assert bytes(memory.reader().read("r", 10, 4)) == b"2345"
    (region,) = memory.cuda_regions("r")
    assert (region.name, region.device_id, region.byte_size) == ("r", 0, 64)
    with pytest.raises(NotFound, match="registered as CUDA shared memory"):
        memory.system_regions("r")
    for offset, size in ((0, 65), (64, 1), (60, 8), (-1, 4), (0, -1)):
        with pytest.raises(InvalidArgument, match="Invalid offset"):
            memory.reader().read("r", offset, size)


def test_closed_when_the_last_request_is_done(memory: SharedMemory, device: FakeCudaDevice) -> None:
    memory.register_cuda("r", HANDLE, 0, 64)
    with pytest.raises(AlreadyExists):
        memory.register_cuda("r", HANDLE, 0, 64)
    in_flight = memory.placement("r", 0, 8)
    memory.unregister_cuda("r")
    gc.collect()
    assert device.closed == []
    in_flight.write("OUTPUT0", b"late")
    assert device.memory[:4] == b"late"
    del in_flight
    assert device.closed == [(0, 1000)]
    memory.unregister_cuda()


@pytest.mark.parametrize(
    ("handle", "device_id", "size"),
    [(b"short", 0, 8), (HANDLE, 1, 8), (HANDLE, -1, 8), (HANDLE, 0, 0), (HANDLE, 0, 65)],
)
def test_what_cannot_be_registered(memory: SharedMemory, handle: bytes, device_id: int, size: int) -> None:
    with pytest.raises(InvalidArgument, match="failed to register shared memory region 'r'"):
        memory.register_cuda("r", handle, device_id, size)
    assert memory.cuda_regions() == []


def test_a_device_failure_is_reported_without_its_text(memory: SharedMemory, device: FakeCudaDevice) -> None:
    memory.register_cuda("r", HANDLE, 0, 64)
    device.broken = True
    with pytest.raises(Internal, match="cannot copy") as failure:
        memory.reader().read("r", 0, 8)
    assert "cudaError" not in failure.value.message
