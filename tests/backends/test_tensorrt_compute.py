# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend computes, on the fake TensorRT: buffers, streams, profiles, shape tensors, failures."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_tensorrt.plans import batched, gives, plan, profile, takes
from tensorrt_setup import (
    DRIVER,
    FAKE_TENSORRT,
    GPU,
    NO_SERVICES,
    TensorRTBackend,
    configured,
    fresh_driver,  # noqa: F401
    needs_fake_cuda,
    open_instance,
    placed,
)

from headrace.backends.contract import Placement
from headrace.core.dtypes import BF16, BOOL, FP16, FP32, INT8, INT32, INT64, UINT8, DType
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument
from headrace.models.config.messages import new_config
from headrace.models.config.types import InputSpec, OutputSpec

TYPES = {
    "FLOAT": FP32,
    "HALF": FP16,
    "BF16": BF16,
    "INT8": INT8,
    "UINT8": UINT8,
    "INT32": INT32,
    "INT64": INT64,
    "BOOL": BOOL,
}
IDENTITY = batched("identity", ["X"], ["Y"], [4])


def sample(dtype: DType, shape: tuple[int, ...]) -> Any:
    if dtype is BOOL:
        return np.random.default_rng(3).integers(0, 2, shape).astype(bool)
    count = int(np.prod(shape)) * dtype.item_bytes
    return np.random.default_rng(3).integers(0, 256, count, dtype=np.uint8).view(dtype.numpy).reshape(shape)


@pytest.mark.parametrize("kind", TYPES)
def test_every_data_type_passes_through_unchanged(tmp_path: Path, kind: str) -> None:
    dtype = TYPES[kind]
    files = placed(tmp_path, batched("identity", ["X"], ["Y"], [4], dtype=kind))
    instance = open_instance(configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))}), files)
    for rows in (1, 8, 3):
        given = sample(dtype, (rows, 4))
        answer = instance.compute({"X": given}, ["Y"])["Y"]
        assert answer.dtype == dtype.numpy
        assert answer.shape == given.shape
        assert answer.tobytes() == given.tobytes()
    turned = sample(dtype, (4, 2)).T
    assert instance.compute({"X": turned}, ["Y"])["Y"].tobytes() == turned.tobytes()
    instance.close()


def test_only_what_is_wanted_is_copied_back(tmp_path: Path) -> None:
    pair: Any = {"INPUT0": (FP32, (4,)), "INPUT1": (FP32, (4,))}
    both: Any = {"OUTPUT0": (FP32, (4,)), "OUTPUT1": (FP32, (4,))}
    files = placed(tmp_path, batched("add_sub", ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"], [4]))
    instance = open_instance(configured(pair, both), files)
    rows = {"INPUT0": np.full((2, 4), 5, np.float32), "INPUT1": np.full((2, 4), 3, np.float32)}
    answer = instance.compute(rows, ["OUTPUT1"])
    assert {name: array.tolist() for name, array in answer.items()} == {"OUTPUT1": [[2] * 4] * 2}
    answer = instance.compute(rows, ("OUTPUT1", "OUTPUT0"))
    assert answer["OUTPUT0"].tolist() == [[8] * 4] * 2
    if DRIVER is not None:
        assert [name for name, _ in DRIVER.copies].count("cudaMemcpyDeviceToHost") == 3


def test_answers_outlive_the_next_batch_and_the_instance(tmp_path: Path) -> None:
    instance = open_instance(configured(), placed(tmp_path, IDENTITY))
    first = instance.compute({"X": np.full((2, 4), 3, np.float32)}, ["Y"])["Y"]
    instance.compute({"X": np.full((8, 4), 9, np.float32)}, ["Y"])
    instance.close()
    assert first.tolist() == [[3] * 4] * 2


@needs_fake_cuda
def test_a_batch_of_usual_size_takes_no_memory(tmp_path: Path) -> None:
    dims = (1000,)
    files = placed(tmp_path, batched("identity", ["X"], ["Y"], dims))
    instance = open_instance(configured({"X": (FP32, dims)}, {"Y": (FP32, dims)}), files)
    instance.compute({"X": np.ones((8, 1000), np.float32)}, ["Y"])
    blocks = set(DRIVER.blocks)
    for rows in (8, 1, 5):
        instance.compute({"X": np.ones((rows, 1000), np.float32)}, ["Y"])
    assert set(DRIVER.blocks) == blocks
    assert DRIVER.used(None) == 2 * 32768


@needs_fake_cuda
def test_instances_of_a_gpu_share_its_engine_and_closing_frees_all(tmp_path: Path) -> None:
    model = TensorRTBackend().load(configured(), placed(tmp_path, IDENTITY), NO_SERVICES)
    first, second = model.open(GPU), model.open(Placement("test_1_gpu0", "gpu", 0))
    assert DRIVER.used(0) == FAKE_TENSORRT.WEIGHT_BYTES + 2 * FAKE_TENSORRT.CONTEXT_BYTES
    assert len(DRIVER.streams) == 2
    row = {"X": np.ones((1, 4), np.float32)}
    first.compute(row, ["Y"])
    first.close()
    assert second.compute(row, ["Y"])["Y"].tolist() == [[1] * 4]
    second.close()
    model.close()
    gc.collect()
    assert (DRIVER.blocks, DRIVER.streams, DRIVER.events) == ({}, {}, {})


def test_instances_compute_side_by_side(tmp_path: Path) -> None:
    model = TensorRTBackend().load(configured(), placed(tmp_path, IDENTITY), NO_SERVICES)
    instances = [model.open(Placement(f"test_{index}_gpu0", "gpu", 0)) for index in range(3)]
    wrong: list[Any] = []

    def work(index: int) -> None:
        for turn in range(30):
            given = np.full((1 + turn % 8, 4), index * 100 + turn, np.float32)
            answer = instances[index].compute({"X": given}, ["Y"])["Y"]
            if not np.array_equal(answer, given):
                wrong.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@needs_fake_cuda
def test_an_instance_works_from_any_thread_on_its_own_gpu(tmp_path: Path) -> None:
    DRIVER.capabilities = ["8.6", "9.0"]
    model = TensorRTBackend().load(configured(), placed(tmp_path, IDENTITY), NO_SERVICES)
    on_second = model.open(Placement("test_0_gpu1", "gpu", 1))
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(on_second.compute({"X": np.ones((1, 4), np.float32)}, ["Y"]))
    )
    thread.start()
    thread.join(60)
    assert answers[0]["Y"].tolist() == [[1] * 4]
    assert DRIVER.used(0) == 0
    assert DRIVER.used(1) > 0


def two_profiles() -> bytes:
    ranges = [{"X": ([1, 4], [1, 4], [2, 4])}, {"X": ([2, 4], [16, 4], [16, 4])}]
    return plan(
        "identity", [takes("X", [-1, 4]), gives("Y", [-1, 4])], [profile(item) for item in ranges], capability="any"
    )


def test_the_profile_changes_with_the_batch(tmp_path: Path) -> None:
    instance = open_instance(configured(max_batch_size=16), placed(tmp_path, two_profiles()))
    used = []
    for rows in (1, 16, 2, 5, 1):
        given = np.full((rows, 4), rows, np.float32)
        assert instance.compute({"X": given}, ["Y"])["Y"].tolist() == given.tolist()
        used.append(instance._context.active_optimization_profile)
    assert used == [0, 1, 0, 1, 0]


def test_an_instance_keeps_to_the_profiles_of_its_group(tmp_path: Path) -> None:
    proto = new_config(name="test")
    proto.instance_group.add(name="test", profile=["1"])
    instance = open_instance(configured(max_batch_size=16, proto=proto), placed(tmp_path, two_profiles()))
    instance.compute({"X": np.ones((2, 4), np.float32)}, ["Y"])
    assert instance._context.active_optimization_profile == 1
    with pytest.raises(
        InvalidArgument,
        match=r"does not accept inputs of these shapes: 'X' \[1, 4\]. profile 1 takes 'X' \[2, 4\] to \[16, 4\]",
    ):
        instance.compute({"X": np.ones((1, 4), np.float32)}, ["Y"])


def test_sizes_that_requests_decide_are_held_against_the_profiles(tmp_path: Path) -> None:
    shapes = {"X": ([1, 3, 32], [1, 3, 64], [4, 3, 64])}
    files = placed(tmp_path, plan("identity", [takes("X", [-1, 3, -1]), gives("Y", [-1, 3, -1])], [profile(shapes)]))
    instance = open_instance(configured({"X": (FP32, (3, -1))}, {"Y": (FP32, (3, -1))}, 4), files)
    for side in (32, 50, 64):
        assert instance.compute({"X": np.ones((2, 3, side), np.float32)}, ["Y"])["Y"].shape == (2, 3, side)
    with pytest.raises(InvalidArgument, match=r"'X' \[2, 3, 65\]. profile 0 takes 'X' \[1, 3, 32\] to \[4, 3, 64\]"):
        instance.compute({"X": np.ones((2, 3, 65), np.float32)}, ["Y"])


def test_a_plan_of_fixed_shape_needs_no_profile_and_no_batch(tmp_path: Path) -> None:
    files = placed(tmp_path, plan("identity", [takes("X", [2, 3]), gives("Y", [2, 3])]))
    instance = open_instance(configured({"X": (FP32, (2, 3))}, {"Y": (FP32, (2, 3))}, 0), files)
    assert instance.compute({"X": np.ones((2, 3), np.float32)}, ["Y"])["Y"].shape == (2, 3)


def test_a_plan_for_one_row_serves_batches_of_one(tmp_path: Path) -> None:
    files = placed(tmp_path, plan("identity", [takes("X", [1, 4]), gives("Y", [1, 4])]))
    instance = open_instance(configured(max_batch_size=1), files)
    assert instance.compute({"X": np.ones((1, 4), np.float32)}, ["Y"])["Y"].shape == (1, 4)
    with pytest.raises(InvalidArgument, match=r"does not support batching: tensor 'X' has shape \[1, 4\]"):
        open_instance(configured(max_batch_size=2), files)


def test_outputs_with_data_dependent_shapes_get_memory_as_needed(tmp_path: Path) -> None:
    shapes = {"X": ([1], [1000], [100_000])}
    files = placed(tmp_path, plan("positive", [takes("X", [-1]), gives("Y", [-1])], [profile(shapes)]))
    instance = open_instance(configured({"X": (FP32, (-1,))}, {"Y": (FP32, (-1,))}, 0), files)
    for given in ([1, -2, 3], [-1], list(range(1, 50_000)), [7], [5, 6]):
        array = np.array(given, np.float32)
        assert instance.compute({"X": array}, ["Y"])["Y"].tolist() == array[array > 0].tolist()


@needs_fake_cuda
def test_no_memory_for_such_an_output_is_an_error_and_not_a_crash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = {"X": ([1], [1000], [100_000])}
    files = placed(tmp_path, plan("positive", [takes("X", [-1]), gives("Y", [-1])], [profile(shapes)]))
    instance = open_instance(configured({"X": (FP32, (-1,))}, {"Y": (FP32, (-1,))}, 0), files)
    instance.compute({"X": np.ones(8, np.float32)}, ["Y"])
    DRIVER.gpu_bytes = DRIVER.used(0) + 300_000
    with pytest.raises(Internal, match="the server's log has the details"):
        instance.compute({"X": np.ones(50_000, np.float32)}, ["Y"])
    assert "no room for 200000 bytes of output Y" in caplog.text
    DRIVER.gpu_bytes = 1 << 30
    assert instance.compute({"X": np.ones(8, np.float32)}, ["Y"])["Y"].shape == (8,)


def reshaping(values: Any, size: int, rank: int, shape: list[int]) -> bytes:
    return plan(
        "reshape",
        [
            takes("X", shape),
            takes("SHAPE", [rank], "INT32", location="HOST", shape_tensor=True),
            gives("Y", [-1] * rank),
            gives("SHAPE_OUT", [rank], "INT32", location="HOST", shape_tensor=True),
        ],
        [profile({"X": ([1] * len(shape), [size] * len(shape), [size] * len(shape))}, {"SHAPE": values})],
    )


def test_the_values_of_a_shape_tensor_decide_the_shape(tmp_path: Path) -> None:
    files = placed(tmp_path, reshaping(([1, 1], [2, 8], [64, 64]), 64, 2, [-1]))
    config = configured(
        max_batch_size=0,
        input_specs=(InputSpec("X", FP32, (-1,)), InputSpec("SHAPE", INT32, (2,), is_shape_tensor=True)),
        output_specs=(OutputSpec("Y", FP32, (-1, -1)), OutputSpec("SHAPE_OUT", INT32, (2,), is_shape_tensor=True)),
    )
    instance = open_instance(config, files)
    given = np.arange(16, dtype=np.float32)
    for shape in ([2, 8], [16, 1], [4, 4]):
        answer = instance.compute({"X": given, "SHAPE": np.array(shape, np.int32)}, ["Y", "SHAPE_OUT"])
        assert answer["Y"].tolist() == given.reshape(shape).tolist()
        assert answer["SHAPE_OUT"].tolist() == shape
    with pytest.raises(
        InvalidArgument, match=r"values of 'SHAPE' \[1, 65\]. profile 0 takes .* \[1, 1\] to \[64, 64\]"
    ):
        instance.compute({"X": given, "SHAPE": np.array([1, 65], np.int32)}, ["Y"])
    with pytest.raises(InvalidArgument, match=r"does not accept inputs of these shapes: 'X' \[16\], 'SHAPE' \[2\]\."):
        instance.compute({"X": given, "SHAPE": np.array([3, 5], np.int32)}, ["Y"])
    answer = instance.compute({"X": given, "SHAPE": np.array([8, 2], np.int32)}, ["Y"])
    assert answer["Y"].shape == (8, 2)


def test_in_a_batch_the_first_value_of_a_shape_tensor_is_the_number_of_rows(tmp_path: Path) -> None:
    files = placed(tmp_path, reshaping(([1, 1, 1], [2, 2, 2], [64, 64, 64]), 64, 3, [-1, -1]))
    config = configured(
        input_specs=(InputSpec("X", FP32, (-1,)), InputSpec("SHAPE", INT32, (2,), is_shape_tensor=True)),
        output_specs=(OutputSpec("Y", FP32, (-1, -1)), OutputSpec("SHAPE_OUT", INT32, (2,), is_shape_tensor=True)),
    )
    instance = open_instance(config, files)
    given = np.arange(18, dtype=np.float32).reshape(3, 6)
    answer = instance.compute({"X": given, "SHAPE": np.array([[2, 3]] * 3, np.int32)}, ["Y", "SHAPE_OUT"])
    assert answer["Y"].tolist() == given.reshape(3, 2, 3).tolist()
    assert answer["SHAPE_OUT"].tolist() == [[2, 3]] * 3
    alone = instance.compute({"X": given, "SHAPE": np.array([6, 1], np.int32)}, ["Y"])
    assert alone["Y"].shape == (3, 6, 1)
    with pytest.raises(InvalidArgument, match="must have the same values in all rows of a batch"):
        instance.compute({"X": given, "SHAPE": np.array([[2, 3], [3, 2], [2, 3]], np.int32)}, ["Y"])


def test_inconsistent_inputs_are_the_callers_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranges = {name: ([1, 1], [4, 4], [8, 8]) for name in ("INPUT0", "INPUT1")}
    names = [takes("INPUT0", [-1, -1]), takes("INPUT1", [-1, -1])]
    files = placed(
        tmp_path, plan("add_sub", [*names, gives("OUTPUT0", [-1, -1]), gives("OUTPUT1", [-1, -1])], [profile(ranges)])
    )
    row: Any = (FP32, (-1,))
    instance = open_instance(configured({"INPUT0": row, "INPUT1": row}, {"OUTPUT0": row, "OUTPUT1": row}), files)
    with pytest.raises(InvalidArgument, match=r"'INPUT0' \[1, 2\], 'INPUT1' \[1, 3\]. Compare them") as caught:
        instance.compute({"INPUT0": np.ones((1, 2), np.float32), "INPUT1": np.ones((1, 3), np.float32)}, ["OUTPUT0"])
    assert "the shapes differ" in caplog.text
    assert "the shapes differ" not in str(caught.value)


def test_an_input_that_is_missing_is_named(tmp_path: Path) -> None:
    instance = open_instance(configured(), placed(tmp_path, IDENTITY))
    with pytest.raises(InvalidArgument, match="needs its input 'X': a TensorRT plan has no optional inputs"):
        instance.compute({}, ["Y"])


@needs_fake_cuda
def test_a_failing_engine_is_logged_and_its_text_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = placed(tmp_path, batched("failing", ["X"], ["Y"], [4]))
    model = TensorRTBackend().load(configured(), files, NO_SERVICES)
    instance = model.open(GPU)
    with caplog.at_level(logging.ERROR), pytest.raises(Internal, match="the server's log has the details") as caught:
        instance.compute({"X": np.ones((1, 4), np.float32)}, ["Y"])
    assert "cudaErrorIllegalAddress" in caplog.text
    assert "cudaError" not in str(caught.value)
    # The GPU does not recover; closing must not raise all the same.
    instance.close()
    model.close()


@needs_fake_cuda
def test_a_gpu_without_memory_for_an_instance_is_reported(tmp_path: Path) -> None:
    DRIVER.gpu_bytes = FAKE_TENSORRT.WEIGHT_BYTES + 100
    with pytest.raises(FailedPrecondition, match="could not create an instance on GPU 0. Its memory is used up"):
        open_instance(configured(), placed(tmp_path, IDENTITY))


@needs_fake_cuda
def test_a_batch_that_fits_no_memory_leaves_the_instance_working(tmp_path: Path) -> None:
    dims = (10_000,)
    files = placed(tmp_path, batched("identity", ["X"], ["Y"], dims))
    instance = open_instance(configured({"X": (FP32, dims)}, {"Y": (FP32, dims)}), files)
    small = np.ones((1, 10_000), np.float32)
    instance.compute({"X": small}, ["Y"])
    DRIVER.gpu_bytes = DRIVER.used(0) + 10
    with pytest.raises(Internal):
        instance.compute({"X": np.ones((8, 10_000), np.float32)}, ["Y"])
    assert instance.compute({"X": small}, ["Y"])["Y"].tolist() == small.tolist()
