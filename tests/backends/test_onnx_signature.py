# SPDX-License-Identifier: Apache-2.0
"""An ONNX model and its configuration: what must agree, and what the model tells when the configuration is silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx_graphs import ONNX_TYPES, Shape, configured, graph, identity, open_instance, placed

from headrace.backends.contract import ModelFiles
from headrace.backends.onnx.backend import OnnxBackend
from headrace.backends.signature import DEFAULT_MAX_BATCH_SIZE
from headrace.core.dtypes import BOOL, FP32, FP64, INT32, INT64
from headrace.core.errors import InvalidArgument
from headrace.models.config.types import (
    BatchInput,
    ControlInput,
    DynamicBatching,
    InputSpec,
    ModelConfig,
    OutputSpec,
    SequenceBatching,
    StateSpec,
)

SUM = [helper.make_node("Add", ["X", "STATE_IN"], ["Y"]), helper.make_node("Identity", ["Y"], ["STATE_OUT"])]


def stateful(folder: Path) -> ModelFiles:
    row = (TensorProto.FLOAT, ["n", 1])
    inputs = {"X": row, "STATE_IN": row, "START": (TensorProto.BOOL, ["n", 1])}
    nodes = [*SUM, helper.make_node("Not", ["START"], ["unused"])]
    return placed(folder, graph(nodes, inputs, {"Y": row, "STATE_OUT": row}))


SEQUENCES = SequenceBatching(
    controls=(ControlInput("START", "start", BOOL),), states=(StateSpec("STATE_IN", "STATE_OUT", FP32, (1,)),)
)


def completed(config: ModelConfig, files: ModelFiles) -> Any:
    message = OnnxBackend().complete(config, files)
    assert message is not None
    return message


def described(tensors: Any) -> Mapping[str, tuple[int, list[int]]]:
    return {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in tensors}


SILENT = configured({}, {}, max_batch_size=0)
TYPE_FP32, TYPE_STRING, TYPE_BF16 = 11, 13, 14


def test_a_model_with_a_free_first_dimension_is_batched(tmp_path: Path) -> None:
    message = completed(SILENT, placed(tmp_path, identity("FP32", ["n", 3, "width"])))
    assert message.max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert message.HasField("dynamic_batching")
    assert described(message.input) == {"X": (TYPE_FP32, [3, -1])}
    assert described(message.output) == {"Y": (TYPE_FP32, [3, -1])}
    assert not message.input[0].HasField("reshape")


@pytest.mark.parametrize("shape", [[1, 3], [3]])
def test_a_model_without_is_not(tmp_path: Path, shape: list[int]) -> None:
    message = completed(SILENT, placed(tmp_path, identity("BYTES", shape)))
    assert message.max_batch_size == 0
    assert not message.HasField("dynamic_batching")
    assert described(message.input) == {"X": (TYPE_STRING, shape)}
    assert described(message.output) == {"Y": (TYPE_STRING, shape)}


def test_all_tensors_must_have_it(tmp_path: Path) -> None:
    message = completed(SILENT, placed(tmp_path, identity("FP32", ["n", 3], [5, 3])))
    assert message.max_batch_size == 0
    assert described(message.input) == {"X": (TYPE_FP32, [-1, 3])}
    assert described(message.output) == {"Y": (TYPE_FP32, [5, 3])}


def test_a_batch_size_that_is_given_is_kept(tmp_path: Path) -> None:
    message = completed(configured({}, {}, max_batch_size=5), placed(tmp_path, identity("BF16", ["n", 3])))
    assert message.max_batch_size == 0
    assert not message.HasField("dynamic_batching")
    assert described(message.input) == {"X": (TYPE_BF16, [3])}


def test_a_batch_size_that_the_model_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tensor 'X' has shape \[1, 3\].*Set max_batch_size: 0"):
        OnnxBackend().complete(configured({}, {}, max_batch_size=5), placed(tmp_path, identity("FP32", [1, 3])))


@pytest.mark.parametrize(("shape", "batched"), [([], False), (["n"], True)])
def test_a_single_number_is_one_that_is_reshaped(tmp_path: Path, shape: Shape, batched: bool) -> None:
    message = completed(SILENT, placed(tmp_path, identity("FP32", shape)))
    assert bool(message.max_batch_size) is batched
    for tensor in (message.input[0], message.output[0]):
        assert list(tensor.dims) == [1]
        assert tensor.HasField("reshape")
        assert list(tensor.reshape.shape) == []


def test_what_is_declared_in_full_is_not_completed(tmp_path: Path) -> None:
    # Not even read: a large file would take its time.
    assert OnnxBackend().complete(configured(), placed(tmp_path, b"not a model")) is None


def test_a_partial_declaration_shows_whether_there_is_a_batch(tmp_path: Path) -> None:
    files = placed(tmp_path, identity("FP32", ["n", 4]))
    with_all = completed(configured({"X": (FP32, (-1, 4))}, {}, max_batch_size=0), files)
    assert with_all.max_batch_size == 0
    assert described(with_all.output) == {"Y": (TYPE_FP32, [-1, 4])}
    without = completed(configured({"X": (FP32, (4,))}, {}, max_batch_size=0), files)
    assert without.max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert described(without.output) == {"Y": (TYPE_FP32, [4])}


def test_the_scheduler_that_is_given_is_kept(tmp_path: Path) -> None:
    config = configured({}, {}, max_batch_size=0, scheduling=DynamicBatching(max_queue_delay_microseconds=5))
    message = completed(config, placed(tmp_path, identity()))
    assert message.max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert not message.HasField("dynamic_batching")


def test_state_and_controls_are_not_what_clients_send(tmp_path: Path) -> None:
    message = completed(configured({}, {}, max_batch_size=4, scheduling=SEQUENCES), stateful(tmp_path))
    assert described(message.input) == {"X": (TYPE_FP32, [1])}
    assert described(message.output) == {"Y": (TYPE_FP32, [1])}


def test_a_stateful_model_opens_and_computes(tmp_path: Path) -> None:
    config = configured({"X": (FP32, (1,))}, {"Y": (FP32, (1,))}, scheduling=SEQUENCES)
    instance = open_instance(config, stateful(tmp_path))
    one = np.ones((2, 1), np.float32)
    answer = instance.compute({"X": one, "STATE_IN": one * 4, "START": np.zeros((2, 1), bool)}, ["Y", "STATE_OUT"])
    assert answer["STATE_OUT"].tolist() == [[5], [5]]


def test_a_control_of_another_type_is_refused(tmp_path: Path) -> None:
    wrong = SequenceBatching(controls=(ControlInput("START", "start", INT32),), states=SEQUENCES.states)
    config = configured({"X": (FP32, (1,))}, {"Y": (FP32, (1,))}, scheduling=wrong)
    with pytest.raises(InvalidArgument, match="input 'START' .* is INT32 in the configuration and BOOL in the model"):
        open_instance(config, stateful(tmp_path))


Tensors = dict[str, tuple[Any, tuple[int, ...]]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "max_batch_size", "text"),
    [
        ({"A": (FP32, (4,))}, None, 8, "unexpected inference input 'A', allowed inputs are: X "),
        (None, {"B": (FP32, (4,))}, 8, "unexpected inference output 'B', allowed outputs are: Y "),
        ({}, None, 8, "needs inputs that its configuration does not name: 'X'"),
        ({"X": (FP64, (4,))}, None, 8, "FP64 in the configuration and FP32 in the model: write data_type: TYPE_FP32"),
        (None, {"Y": (INT64, (4,))}, 8, "output 'Y' of model 'test' is INT64 in the configuration"),
        ({"X": (FP32, (5,))}, None, 8, r"shape \[-1, 5\] by the configuration .*batch.* and \[-1, 4\] in the model"),
        ({"X": (FP32, (-1,))}, None, 8, r"shape \[-1, -1\] by the configuration"),
        ({"X": (FP32, (4, 1))}, None, 8, r"shape \[-1, 4, 1\] by"),
        ({"X": (FP32, (4,))}, None, 0, r"shape \[4\] by the configuration and \[-1, 4\] in the model"),
        (None, {"Y": (FP32, (5,))}, 8, r"output 'Y' .* has shape \[-1, 5\]"),
    ],
)
def test_a_configuration_for_another_model_is_refused(
    tmp_path: Path, inputs: Tensors | None, outputs: Tensors | None, max_batch_size: int, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        open_instance(configured(inputs, outputs, max_batch_size), placed(tmp_path, identity()))


def test_batching_needs_a_free_first_dimension(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"does not support batching: tensor 'X' has shape \[1, 4\].*batch_size: 0"
    ):
        open_instance(configured(), placed(tmp_path, identity("FP32", [1, 4])))


def test_an_open_output_and_a_reshape_fit(tmp_path: Path) -> None:
    rows = {"X": np.ones((1, 4), np.float32)}
    instance = open_instance(configured(outputs={"Y": (FP32, (-1,))}), placed(tmp_path, identity()))
    assert instance.compute(rows, ["Y"])["Y"].shape == (1, 4)
    reshaped = ModelConfig(
        "test",
        "onnxruntime",
        max_batch_size=8,
        inputs=(InputSpec("X", FP32, (2, 2), reshape=(4,)),),
        outputs=(OutputSpec("Y", FP32, (2, 2), reshape=(4,)),),
    )
    assert open_instance(reshaped, placed(tmp_path, identity())).compute(rows, ["Y"])["Y"].shape == (1, 4)


def test_ragged_inputs_have_the_shape_of_all_requests_together(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["X"], ["Y"]), helper.make_node("Identity", ["COUNTS"], ["Z"])]
    row, counts = (TensorProto.FLOAT, ["all"]), (TensorProto.FLOAT, ["n", 1])
    config = ModelConfig(
        "test",
        "onnxruntime",
        max_batch_size=8,
        inputs=(InputSpec("X", FP32, (-1,), allow_ragged_batch=True),),
        outputs=(OutputSpec("Z", FP32, (1,)),),
        batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("COUNTS",), FP32, "X"),),
    )
    files = placed(tmp_path, graph(nodes, {"X": row, "COUNTS": counts}, {"Y": row, "Z": counts}))
    inputs = {"X": np.ones(5, np.float32), "COUNTS": np.array([[2], [3]], np.float32)}
    assert open_instance(config, files).compute(inputs, ["Z"])["Z"].tolist() == [[2], [3]]


def test_outputs_that_no_request_can_carry_are_left_out(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["X"], ["Y"]), helper.make_node("SequenceConstruct", ["X"], ["S"])]
    row = helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 4])
    sequence = helper.make_tensor_sequence_value_info("S", TensorProto.FLOAT, None)
    given = [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", 4]), sequence]
    model = helper.make_model(
        helper.make_graph(nodes, "test", [row], given), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    files = placed(tmp_path, model.SerializeToString())
    assert list(described(completed(SILENT, files).output)) == ["Y"]
    assert open_instance(configured(), files).compute({"X": np.ones((1, 4), np.float32)}, ["Y"])["Y"].shape == (1, 4)
    with pytest.raises(InvalidArgument, match=r"output 'S' .* is a seq\(tensor\(float\)\), which no request can carry"):
        open_instance(configured(outputs={"S": (FP32, (4,))}), files)


def test_inputs_with_a_value_of_their_own_need_not_be_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["X", "BIAS"], ["Y"])]
    row, bias = (ONNX_TYPES["FP32"], ["n", 4]), (ONNX_TYPES["FP32"], [4])
    model = graph(nodes, {"X": row, "BIAS": bias}, {"Y": row}, {"BIAS": np.full(4, 2, np.float32)})
    files = placed(tmp_path, model)
    assert open_instance(configured(), files).compute({"X": np.ones((1, 4), np.float32)}, ["Y"])["Y"].tolist() == [
        [3] * 4
    ]
    assert list(described(completed(SILENT, files).input)) == ["X"]
