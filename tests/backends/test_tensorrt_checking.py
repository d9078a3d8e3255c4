# SPDX-License-Identifier: Apache-2.0
"""A configuration against a TensorRT plan: refused, or filled in. On the fake TensorRT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt.plans import batched, gives, plan, profile, takes
from tensorrt_setup import (
    TensorRTBackend,
    configured,
    fresh_driver,  # noqa: F401
    open_instance,
    placed,
)

from headrace.core.dtypes import FP16, FP32, INT32, INT64
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec, SequenceBatching, StateSpec

IDENTITY = batched("identity", ["X"], ["Y"], [4])


@pytest.mark.parametrize(
    ("inputs", "outputs", "max_batch_size", "text"),
    [
        ({"A": (FP32, (4,))}, None, 8, "unexpected inference input 'A', allowed inputs are: X "),
        (None, {"B": (FP32, (4,))}, 8, "unexpected inference output 'B', allowed outputs are: Y "),
        ({}, None, 8, "needs inputs that its configuration does not name: 'X'"),
        (None, {}, 8, "gives outputs that its configuration does not name: 'Y'. Add them to `output`"),
        ({"X": (FP16, (4,))}, None, 8, "FP16 in the configuration and FP32 in the model: write data_type: TYPE_FP32"),
        ({"X": (FP32, (5,))}, None, 8, r"has shape \[-1, 5\] by the configuration .* and \[-1, 4\] in the model"),
        ({"X": (FP32, (-1,))}, None, 8, r"shape \[-1, -1\] by the configuration"),
        ({"X": (FP32, (4,))}, None, 0, r"shape \[4\] by the configuration and \[-1, 4\] in the model"),
        (
            None,
            None,
            9,
            "max_batch_size of model 'test' is 9, and the plan was built for batches of at most 8: lower it",
        ),
    ],
)
def test_a_configuration_for_another_plan_is_refused(
    tmp_path: Path, inputs: Any, outputs: Any, max_batch_size: int, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        open_instance(configured(inputs, outputs, max_batch_size), placed(tmp_path, IDENTITY))


@pytest.mark.parametrize("kind", ["FP8", "INT4", "FP4"])
def test_types_that_no_request_can_carry_are_refused(tmp_path: Path, kind: str) -> None:
    files = placed(tmp_path, batched("identity", ["X"], ["Y"], [4], dtype=kind))
    with pytest.raises(InvalidArgument, match=f"input 'X' of model 'test' is {kind}, which no request can carry"):
        open_instance(configured(), files)
    with pytest.raises(InvalidArgument, match="build the plan with one of FLOAT, HALF"):
        TensorRTBackend().complete(configured({}, {}, 0), files)


def test_a_layout_that_numpy_does_not_have_is_refused(tmp_path: Path) -> None:
    shapes = {"X": ([1, 4], [8, 4], [8, 4])}
    foreign = gives("Y", [-1, 4], format=["LINEAR", "CHW32"])
    files = placed(tmp_path, plan("identity", [takes("X", [-1, 4]), foreign], [profile(shapes)] * 2))
    with pytest.raises(InvalidArgument, match="output 'Y' of model 'test' has the layout CHW32: build the plan"):
        open_instance(configured(), files)


def test_fixed_dims_must_be_in_a_profile(tmp_path: Path) -> None:
    ranges = [{"X": ([1, 32], [4, 32], [4, 64])}, {"X": ([1, 128], [16, 128], [16, 128])}]
    files = placed(
        tmp_path, plan("identity", [takes("X", [-1, -1]), gives("Y", [-1, -1])], [profile(item) for item in ranges])
    )
    out: Any = {"Y": (FP32, (-1,))}
    for side, most in ((32, 4), (128, 16)):
        open_instance(configured({"X": (FP32, (side,))}, out, most), files)
        # The batch of one profile with the dims of the other is nothing the plan can do.
        with pytest.raises(InvalidArgument, match=f"built for batches of at most {most}"):
            open_instance(configured({"X": (FP32, (side,))}, out, 17), files)
    with pytest.raises(
        InvalidArgument,
        match=r"is to take 'X' \[100\] and a batch in front, and no profile of the plan does: profile 0 takes 'X' "
        r"\[1, 32\] to \[4, 64\]; profile 1 takes 'X' \[1, 128\] to \[16, 128\]",
    ):
        open_instance(configured({"X": (FP32, (100,))}, out, 4), files)


def test_a_scalar_is_not_a_list_of_one(tmp_path: Path) -> None:
    files = placed(tmp_path, plan("identity", [takes("X", []), gives("Y", [])]))
    out = (OutputSpec("Y", FP32, (1,), reshape=()),)
    open_instance(
        configured(max_batch_size=0, input_specs=(InputSpec("X", FP32, (1,), reshape=()),), output_specs=out), files
    )
    for most in (0, 4):
        with pytest.raises(InvalidArgument, match=r"no profile of the plan does: profile 0 takes 'X' \[\]"):
            open_instance(configured({"X": (FP32, (1,))}, max_batch_size=most, output_specs=out), files)


def test_a_reshape_is_the_shape_that_the_plan_gets(tmp_path: Path) -> None:
    config = configured(
        input_specs=(InputSpec("X", FP32, (2, 2), reshape=(4,)),),
        output_specs=(OutputSpec("Y", FP32, (2, 2), reshape=(4,)),),
    )
    open_instance(config, placed(tmp_path, IDENTITY))


def test_state_is_named_with_the_sequences(tmp_path: Path) -> None:
    files = placed(tmp_path, batched("add_sub", ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"], [1]))
    sequences = SequenceBatching(states=(StateSpec("INPUT1", "OUTPUT1", FP32, (1,)),))
    row: Any = (FP32, (1,))
    open_instance(configured({"INPUT0": row}, {"OUTPUT0": row}, scheduling=sequences), files)


def shape_plan(size: list[int], kind: str = "INT32") -> bytes:
    more = {"location": "HOST", "shape_tensor": True}
    tensors = [takes("X", [-1, -1]), takes("SHAPE", size, kind, **more), gives("Y", [-1, -1])]
    tensors.append(gives("SHAPE_OUT", size, kind, **more))
    return plan(
        "reshape",
        tensors,
        [profile({"X": ([1, 1], [8, 8], [8, 8])}, {"SHAPE": ([1] * sum(size), [2] * sum(size), [9] * sum(size))})],
    )


def shaped(dims: tuple[int, ...], max_batch_size: int, marked: bool = True) -> ModelConfig:
    wide = (-1,) if max_batch_size else (-1, -1)
    return configured(
        max_batch_size=max_batch_size,
        input_specs=(InputSpec("X", FP32, wide), InputSpec("SHAPE", INT32, dims, is_shape_tensor=marked)),
        output_specs=(
            OutputSpec("Y", FP32, wide),
            OutputSpec("SHAPE_OUT", INT32, dims, is_shape_tensor=True),
        ),
    )


def test_shape_tensors_are_marked_and_leave_the_rows_out(tmp_path: Path) -> None:
    files = placed(tmp_path, shape_plan([2]))
    open_instance(shaped((2,), 0), files)
    open_instance(shaped((1,), 8), files)
    with pytest.raises(
        InvalidArgument, match=r"write dims: \[1\] \(the number of rows is its first value, and not sent"
    ):
        open_instance(shaped((2,), 8), files)
    with pytest.raises(InvalidArgument, match=r"is a shape tensor of \[2\] in the plan: write dims: \[2\]$"):
        open_instance(shaped((1,), 0), files)
    with pytest.raises(InvalidArgument, match="'SHAPE' of model 'test' is a shape tensor in the plan: write is_shape_"):
        open_instance(shaped((2,), 0, marked=False), files)
    plain = configured(input_specs=(InputSpec("X", FP32, (4,), is_shape_tensor=True),))
    with pytest.raises(InvalidArgument, match="is not a shape tensor in the plan: write is_shape_tensor: false"):
        open_instance(plain, placed(tmp_path / "b", IDENTITY))
    with pytest.raises(InvalidArgument, match="leaves no value for requests beside the number of rows"):
        open_instance(shaped((1,), 8), placed(tmp_path / "c", shape_plan([1])))


def described(tensors: Any) -> Mapping[str, tuple[str, list[int], bool]]:
    names = type(tensors[0]).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    return {
        tensor.name: (names[tensor.data_type].name, list(tensor.dims), tensor.is_shape_tensor) for tensor in tensors
    }


SILENT = configured({}, {}, max_batch_size=0)


def completed(config: ModelConfig, folder: Path, content: bytes) -> Any:
    message = TensorRTBackend().complete(config, placed(folder, content))
    assert message is not None
    return message


def test_a_plan_reports_its_tensors_and_its_largest_batch(tmp_path: Path) -> None:
    ranges = [{"X": ([1, 4], [4, 4], [4, 4])}, {"X": ([1, 4], [96, 4], [96, 4])}]
    content = plan(
        "identity", [takes("X", [-1, 4], "BF16"), gives("Y", [-1, 4], "BF16")], [profile(item) for item in ranges]
    )
    message = completed(SILENT, tmp_path, content)
    assert message.max_batch_size == 96
    assert message.HasField("dynamic_batching")
    assert described(message.input) == {"X": ("TYPE_BF16", [4], False)}
    assert described(message.output) == {"Y": ("TYPE_BF16", [4], False)}


def test_a_plan_without_a_free_first_dimension_has_no_batch(tmp_path: Path) -> None:
    message = completed(SILENT, tmp_path, plan("identity", [takes("X", [1, 4]), gives("Y", [1, 4])]))
    assert message.max_batch_size == 0
    assert described(message.input) == {"X": ("TYPE_FP32", [1, 4], False)}


def test_single_numbers_and_batch_sizes_that_are_given(tmp_path: Path) -> None:
    message = completed(SILENT, tmp_path, plan("identity", [takes("X", []), gives("Y", [])]))
    assert list(message.input[0].dims) == [1]
    assert message.input[0].HasField("reshape")
    kept = completed(configured({}, {}, 5), tmp_path / "b", IDENTITY)
    assert kept.max_batch_size == 0
    assert described(kept.output) == {"Y": ("TYPE_FP32", [4], False)}
    with pytest.raises(InvalidArgument, match=r"tensor 'X' has shape \[2, 4\].*Set max_batch_size: 0"):
        completed(configured({}, {}, 5), tmp_path / "c", plan("identity", [takes("X", [2, 4]), gives("Y", [2, 4])]))


def test_shape_tensors_are_reported_too(tmp_path: Path) -> None:
    alone = completed(SILENT, tmp_path, shape_plan([2], "INT64"))
    assert alone.max_batch_size == 0
    assert described(alone.input) == {"X": ("TYPE_FP32", [-1, -1], False), "SHAPE": ("TYPE_INT64", [2], True)}
    assert described(alone.output)["SHAPE_OUT"] == ("TYPE_INT64", [2], True)
    rows = completed(configured({}, {}, 8), tmp_path, shape_plan([2], "INT64"))
    assert described(rows.input) == {"X": ("TYPE_FP32", [-1], False), "SHAPE": ("TYPE_INT64", [1], True)}
    assert described(rows.output)["SHAPE_OUT"] == ("TYPE_INT64", [1], True)
    with pytest.raises(InvalidArgument, match="leaves no value for requests"):
        completed(configured({}, {}, 8), tmp_path / "b", shape_plan([1]))


def test_what_is_declared_in_full_is_not_read(tmp_path: Path) -> None:
    assert TensorRTBackend().complete(configured(), placed(tmp_path, b"not a plan")) is None
    half = configured({"X": (INT64, (4,))}, {})
    with pytest.raises(InvalidArgument, match="INT64 in the configuration"):
        open_instance(configured({"X": (INT64, (4,))}), placed(tmp_path, IDENTITY))
    assert TensorRTBackend().complete(half, placed(tmp_path, IDENTITY)) is not None
