# SPDX-License-Identifier: Apache-2.0
"""Which optimization profile takes a batch, and memory that grows. Without TensorRT, real or fake."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from headrace.backends.contract import Placement
from headrace.backends.tensorrt.buffers import Buffer, Staging, rounded
from headrace.backends.tensorrt.plan import (
    Binding,
    Plan,
    Profile,
    Range,
    chosen_profile,
    described,
    most_rows,
    usable_profiles,
)
from headrace.core.errors import InvalidArgument
from headrace.models.config.messages import new_config
from headrace.models.config.types import ModelConfig


def profile(index: int, lowest: int, optimum: int, highest: int, side: int = 4) -> Profile:
    return Profile(index, {"X": Range((lowest, side), (optimum, side), (highest, side))}, {})


SMALL, LARGE, WIDE = profile(0, 1, 2, 4), profile(1, 1, 16, 16), profile(2, 1, 8, 32, side=8)
ALL = (SMALL, LARGE, WIDE)


@pytest.mark.parametrize(
    ("shape", "active", "index"),
    [
        ((1, 4), 0, 0),
        ((4, 4), 1, 0),  # nearer to 2 than to 16
        ((5, 4), 0, 1),
        ((16, 4), 0, 1),
        ((8, 8), 0, 2),
        ((17, 4), 0, None),
        ((0, 4), 0, None),
        ((4, 5), 0, None),
        ((4,), 0, None),
        ((2, 4, 1), 0, None),
    ],
)
def test_the_profile_nearest_to_the_batch_is_chosen(shape: tuple[int, ...], active: int, index: int | None) -> None:
    chosen = chosen_profile(ALL, {"X": shape}, {}, active)
    assert (None if chosen is None else chosen.index) == index


def test_of_two_equally_near_the_active_one_stays() -> None:
    twins = (profile(0, 1, 2, 4), profile(1, 1, 4, 8))
    assert [chosen_profile(twins, {"X": (3, 4)}, {}, active).index for active in (0, 1, 5)] == [0, 1, 0]  # type: ignore[union-attr]


def test_every_input_and_every_value_must_fit() -> None:
    two = Profile(
        0,
        {"X": Range((1,), (1,), (9,)), "SHAPE": Range((2,), (2,), (2,))},
        {"SHAPE": Range((1, 1), (4, 4), (8, 8))},
    )
    assert chosen_profile([two], {"X": (9,), "SHAPE": (2,)}, {"SHAPE": (1, 8)}, 0) is two
    assert chosen_profile([two], {"X": (9,), "SHAPE": (2,)}, {"SHAPE": (1, 9)}, 0) is None
    assert chosen_profile([two], {"X": (10,), "SHAPE": (2,)}, {"SHAPE": (1, 8)}, 0) is None
    assert described([two], ["X", "SHAPE"]) == (
        "profile 0 takes 'X' [1] to [9], 'SHAPE' [2], values of 'SHAPE' [1, 1] to [8, 8]"
    )


def test_the_values_choose_between_profiles() -> None:
    shapes = {"SHAPE": Range((1,), (1,), (1,))}
    low, high = (Profile(index, shapes, {"SHAPE": Range((1,), (best,), (100,))}) for index, best in enumerate((10, 90)))
    assert chosen_profile((low, high), {"SHAPE": (1,)}, {"SHAPE": (80,)}, 0) is high
    assert chosen_profile((low, high), {"SHAPE": (1,)}, {"SHAPE": (20,)}, 1) is low


def test_the_smallest_of_the_inputs_limits_the_rows() -> None:
    two = Profile(0, {"A": Range((1, 2), (8, 2), (16, 2)), "B": Range((1,), (4,), (4,))}, {})
    assert most_rows(two, ["A", "B"]) == 4
    assert most_rows(two, ["A"]) == 16


def grouped(*groups: tuple[str, list[str]]) -> ModelConfig:
    proto = new_config(name="test")
    for name, profiles in groups:
        proto.instance_group.add(name=name, profile=profiles)
    return ModelConfig("test", "tensorrt", proto=proto)


PLAN = Plan((Binding("X", True, "FLOAT", (-1, 4)),), ALL)


def test_a_group_uses_the_profiles_it_names() -> None:
    config = grouped(("a", ["2", "0"]), ("a_1", ["1"]), ("b", []))
    assert usable_profiles(config, Placement("a_0_gpu0", "gpu"), PLAN) == (WIDE, SMALL)
    assert usable_profiles(config, Placement("a_1_gpu0", "gpu"), PLAN) == (WIDE, SMALL)
    assert usable_profiles(config, Placement("a_1_0_gpu0", "gpu"), PLAN) == (LARGE,)
    assert usable_profiles(config, Placement("b_0_gpu0", "gpu"), PLAN) == ALL
    assert usable_profiles(ModelConfig("test", "tensorrt"), Placement("b_0_gpu0", "gpu"), PLAN) == ALL


@pytest.mark.parametrize("named", ["3", "-1", "", "one", "9" * 20, "²"])
def test_a_profile_that_is_not_there_is_refused(named: str) -> None:
    with pytest.raises(InvalidArgument, match="the plan has profiles 0 to 2: name one of these"):
        usable_profiles(grouped(("a", [named])), Placement("a_0_gpu0", "gpu"), PLAN)


@pytest.mark.parametrize(
    ("size", "taken"),
    [(0, 256), (1, 256), (256, 256), (257, 512), (1000, 1024), (1 << 20, 1 << 20), ((1 << 20) + 1, 2 << 20)],
)
def test_memory_is_allocated_in_steps(size: int, taken: int) -> None:
    assert rounded(size) == taken


class Heap:
    """Memory of this process."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.taken: list[int] = []

    def allocate(self, size: int) -> int:
        block = ctypes.create_string_buffer(size)
        address = ctypes.addressof(block)
        self.blocks[address] = block
        self.taken.append(size)
        return address

    def free(self, address: int) -> None:
        del self.blocks[address]


def test_a_buffer_grows_and_never_shrinks() -> None:
    heap = Heap()
    buffer = Buffer(heap)
    for size in (100, 256, 10, 300, 400, 0):
        assert buffer.reserve(size) in heap.blocks
    assert heap.taken == [256, 512]
    assert len(heap.blocks) == 1
    buffer.close()
    buffer.close()
    assert not heap.blocks
    assert buffer.reserve(0) != 0


def test_a_buffer_that_cannot_grow_is_empty_and_can_be_tried_again() -> None:
    class Full(Heap):
        def allocate(self, size: int) -> int:
            if size > 512:
                raise MemoryError
            return super().allocate(size)

    heap = Full()
    buffer = Buffer(heap)
    buffer.reserve(256)
    with pytest.raises(MemoryError):
        buffer.reserve(1000)
    assert not heap.blocks
    assert buffer.reserve(10) in heap.blocks


def test_staging_is_an_array_over_the_memory() -> None:
    heap = Heap()
    staging = Staging(heap)
    staging.array(np.dtype("<i2"), (2, 3))[:] = [[1, 2, 3], [4, 5, -6]]
    assert ctypes.string_at(staging.address, 12) == np.array([1, 2, 3, 4, 5, -6], "<i2").tobytes()
    assert staging.array(np.dtype("<f4"), ()).shape == ()
    assert staging.array(np.dtype("<f4"), (0, 7)).shape == (0, 7)


def test_without_tensorrt_the_backend_says_what_to_install() -> None:
    code = """
import sys
for name in ("tensorrt", "cuda"):
    sys.modules[name] = None
import headrace.backends.tensorrt.plan, headrace.backends.tensorrt.buffers
from headrace.backends.table import backend_named
try:
    backend_named("tensorrt")
except Exception as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.startswith("FailedPrecondition backend 'tensorrt' needs a package that is not installed")
    assert "install TensorRT 10 or newer" in ran.stdout
