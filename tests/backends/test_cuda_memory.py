# SPDX-License-Identifier: Apache-2.0
"""Memory that is given back and taken again at the same address, on a fake of the driver."""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.backends import cuda_memory
from headrace.backends.cuda_memory import (
    MemoryBlock,
    PinnedMemory,
    StableMemory,
    across_chunks,
    open_driver,
    place_tensors,
)
from headrace.backends.sleeping_weights import PlacedWeights
from headrace.core.errors import FailedPrecondition
from support.fake_cuda_memory import FakeCudaDriver

MIB = 1 << 20


def test_a_block_keeps_its_address_and_loses_its_contents() -> None:
    driver = FakeCudaDriver()
    block = MemoryBlock(driver, 3 * MIB + 5)
    assert block.held_bytes == driver.used == 0
    block.map()
    assert block.held_bytes == driver.used == 4 * MIB
    tensor = block.tensor(MIB, 2 * MIB)
    assert tensor.data_ptr() == block.address + MIB
    tensor.fill_(7)
    waited = driver.waited
    block.unmap()
    assert driver.waited == waited + 1
    assert block.held_bytes == driver.used == 0
    block.map()
    assert tensor.data_ptr() == block.address + MIB
    assert tensor[0] != 7
    tensor.fill_(9)
    assert block.tensor(MIB, 1)[0] == 9
    block.close()
    block.close()
    assert driver.used == 0
    assert not driver.reserved
    with pytest.raises(RuntimeError, match="the block is closed"):
        block.map()


def test_memory_is_taken_in_parts_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_SEGMENT_BYTES", 4 * MIB)
    driver = FakeCudaDriver()
    block = MemoryBlock(driver, 11 * MIB)
    block.map(1)
    assert driver.used == 4 * MIB
    with pytest.raises(ValueError, match="are not mapped"):
        block.tensor(4 * MIB - 1, 2)
    block.map(5 * MIB)
    block.map(2 * MIB)
    assert driver.used == 8 * MIB
    block.map()
    assert driver.used == 12 * MIB
    assert len(driver.mapped) == 3
    block.tensor(0, 11 * MIB).fill_(1)  # over all parts


def test_too_little_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_SEGMENT_BYTES", 2 * MIB)
    driver = FakeCudaDriver(capacity=7 * MIB)
    block = MemoryBlock(driver, 8 * MIB)
    block.map(2 * MIB)
    block.tensor(0, 4).fill_(3)
    with pytest.raises(torch.OutOfMemoryError):
        block.map()
    assert driver.used == 2 * MIB
    assert block.tensor(0, 4).tolist() == [3] * 4
    driver.capacity = 8 * MIB
    block.map()
    assert driver.used == 8 * MIB


def test_an_unused_block_is_freed_after_its_tensors() -> None:
    driver = FakeCudaDriver()
    block = MemoryBlock(driver, MIB)
    block.map()
    tensor = block.tensor(0, 100)
    del block
    gc.collect()
    tensor.fill_(1)
    assert driver.used
    view = tensor[3:].view(torch.uint8)
    del tensor
    gc.collect()
    view.fill_(2)
    del view
    gc.collect()
    assert driver.used == 0
    assert not driver.reserved


def test_reading_memory_that_was_given_back_is_an_error() -> None:
    code = (
        "from support.fake_cuda_memory import FakeCudaDriver\n"
        "from headrace.backends.cuda_memory import MemoryBlock\n"
        "block = MemoryBlock(FakeCudaDriver(), 100)\n"
        "block.map()\n"
        "tensor = block.tensor(0, 100).fill_(5)\n"
        "block.unmap()\n"
        "print('asleep', flush=True)\n"
        "print(int(tensor[0]))\n"
    )
    tests = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tests, env={"PYTHONPATH": str(tests)}, capture_output=True, check=False
    )
    assert ended.stdout == b"asleep\n"
    assert ended.returncode == -signal.SIGSEGV


def test_tensors_are_aligned() -> None:
    assert place_tensors([1, 512, 513, 0, 3]) == ([0, 512, 1024, 2048, 2048], 2560)


def test_parts_across_chunks() -> None:
    whole, chunks = torch.arange(25, dtype=torch.uint8), [torch.zeros(10, dtype=torch.uint8) for _ in range(4)]
    for part, place in across_chunks(whole, chunks, 10, start=7):
        place.copy_(part)
    assert torch.cat(chunks).tolist() == [0] * 7 + list(range(25)) + [0] * 8


def test_pinned_memory_is_reused_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedMemory, "chunk_bytes", 1000)
    pinned = PinnedMemory(2500, pin=False)
    chunks = pinned.take(3001)
    assert len(chunks) == 4
    addresses = {chunk.data_ptr() for chunk in chunks}
    pinned.give_back(chunks)
    assert chunks == []
    assert pinned.idle_bytes == 2000
    again = pinned.take(2000)
    assert {chunk.data_ptr() for chunk in again} < addresses
    assert pinned.idle_bytes == 0

    def none() -> torch.Tensor:
        raise MemoryError

    pinned.give_back(again)
    monkeypatch.setattr(pinned, "_new", none)
    with pytest.raises(MemoryError):
        pinned.take(2001)
    assert pinned.idle_bytes == 2000


def tensors() -> list[torch.Tensor]:
    whole = torch.arange(24, dtype=torch.float32)
    return [whole, whole[4:12].view(2, 4), whole.view(4, 6).t(), torch.ones(3, dtype=torch.bfloat16)]


def placed(driver: FakeCudaDriver) -> tuple[list[torch.Tensor], PlacedWeights]:
    weights = tensors()
    return weights, PlacedWeights([*weights, weights[0]], StableMemory(driver, PinnedMemory(1 << 30, pin=False)))


def assert_same(weights: list[torch.Tensor]) -> None:
    for tensor, wanted in zip(weights, tensors(), strict=True):
        assert torch.equal(tensor, wanted)
        assert tensor.stride() == wanted.stride()


def test_weights_come_back_to_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedMemory, "chunk_bytes", 50)
    driver = FakeCudaDriver()
    weights, sleeping = placed(driver)
    assert_same(weights)
    addresses = [tensor.data_ptr() for tensor in weights]
    assert addresses[1] == addresses[0] + 16
    assert sleeping.bytes == {"host": 2 * MIB} == {"host": driver.used}
    for _ in range(3):
        sleeping.move_to_host()
        sleeping.move_to_host()
        assert driver.used == 0
        assert 512 < sleeping.bytes["host"] < 1100
        sleeping.move_back()
        assert_same(weights)
        sleeping.drop()
        assert sleeping.dropped
        assert sleeping.bytes == {}
        sleeping.put_back(tensors(), "model 'm'")
        assert not sleeping.dropped
        assert_same(weights)
    sleeping.move_to_host()
    sleeping.drop()
    assert sleeping.bytes == {}
    with pytest.raises(FailedPrecondition, match="the weights of model 'm' have other shapes than before it slept"):
        sleeping.put_back([torch.ones(1), *tensors()[1:]], "model 'm'")
    assert driver.used == 0
    sleeping.put_back(tensors(), "model 'm'")
    assert [tensor.data_ptr() for tensor in weights] == addresses
    assert_same(weights)
    weights[0][5] = 100
    assert weights[1][0, 1] == weights[2][5, 0] == 100
    sleeping.close()
    assert driver.used == 0
    assert not driver.reserved


def test_weights_that_find_no_memory_stay_in_host_memory() -> None:
    driver = FakeCudaDriver()
    weights, sleeping = placed(driver)
    sleeping.move_to_host()
    driver.capacity = 0
    with pytest.raises(torch.OutOfMemoryError):
        sleeping.move_back()
    driver.capacity = 2 * MIB
    sleeping.move_back()
    assert_same(weights)
    sleeping.drop()
    driver.capacity = 0
    with pytest.raises(torch.OutOfMemoryError):
        sleeping.put_back(tensors(), "model 'm'")
    assert sleeping.dropped
    driver.capacity = 2 * MIB
    sleeping.put_back(tensors(), "model 'm'")
    assert_same(weights)


def test_weights_stay_where_no_host_memory_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_pinned: PinnedMemory) -> torch.Tensor:
        raise MemoryError

    driver = FakeCudaDriver()
    weights, sleeping = placed(driver)
    monkeypatch.setattr(PinnedMemory, "_new", none)
    with pytest.raises(MemoryError):
        sleeping.move_to_host()
    assert_same(weights)


def test_the_structures_of_the_driver_have_their_sizes() -> None:
    # As the compiler lays out CUmemAllocationProp and CUmemAccessDesc of cuda.h.
    assert ctypes.sizeof(cuda_memory._AllocationProperties) == 32
    assert ctypes.sizeof(cuda_memory._Access) == 12


def test_a_cpu_has_no_such_memory() -> None:
    assert open_driver(torch.device("cpu")) is None
