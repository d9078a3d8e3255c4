# SPDX-License-Identifier: Apache-2.0
"""The NetDef backend: what it asks of a configuration, what it tells, and models served by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from netdef_models import ResNet50, randomise
from netdef_nets import Nets, config_of, files_of, open_instance, rows

from headrace.backends.netdef.backend import NetDefBackend
from headrace.core.dtypes import BYTES, FP32, FP64, INT64, UINT32, UINT64
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.messages import new_config
from headrace.models.config.types import (
    ControlInput,
    InputSpec,
    ModelConfig,
    OutputSpec,
    SequenceBatching,
    StateSpec,
)


def simple(folder: Path, filename: str = "model.netdef") -> Nets:
    """y = relu(data) + w, with 4 numbers a row."""
    net = Nets()
    net.weight("w", np.full(4, 10, np.float32))
    net.op("Relu", ["data"], ["hidden"])
    net.op("Add", ["hidden", "w"], ["y"], broadcast=1)
    net.net.external_output.append("y")
    net.write(folder / "test" / "1", filename)
    return net


ROWS = np.array([[-1, 2, -3, 4]], np.float32)
ANSWER = [[10, 12, 10, 14]]


def test_a_model_is_served(tmp_path: Path) -> None:
    simple(tmp_path)
    instance = open_instance(config_of(), tmp_path)
    assert instance.compute({"data": ROWS}, ["y"])["y"].tolist() == ANSWER
    assert instance.compute({"data": np.repeat(ROWS, 8, axis=0)}, ["y"])["y"].tolist() == ANSWER * 8
    with pytest.raises(InvalidArgument, match=r"does not accept inputs of these shapes: 'data' \[1, 5\]"):
        instance.compute({"data": np.zeros((1, 5), np.float32)}, ["y"])
    instance.close()


def test_any_blob_that_is_made_may_be_an_output(tmp_path: Path) -> None:
    simple(tmp_path)
    config = config_of(outputs={"hidden": (FP32, (4,)), "y": (FP32, (4,))})
    answer = open_instance(config, tmp_path).compute({"data": ROWS}, ["hidden", "y"])
    assert answer["hidden"].tolist() == [[0, 2, 0, 4]]
    assert answer["y"].tolist() == ANSWER


def test_a_blob_that_is_written_again_has_its_last_value(tmp_path: Path) -> None:
    net = Nets()
    net.weight("x", np.full(4, 100, np.float32))
    net.op("Copy", ["x"], ["before"])
    net.op("Relu", ["data"], ["x"])
    net.op("Negative", ["x"], ["x"])
    net.op("Add", ["x", "before"], ["y"])
    answers = net.run({"data": ROWS}, ["x", "y", "before"])
    assert answers["x"].tolist() == [[0, -2, 0, -4]]
    assert answers["y"].tolist() == [[100, 98, 100, 96]]
    assert answers["before"].tolist() == [100] * 4
    second = Nets()
    second.op("Relu", ["data"], ["data"])
    second.op("Copy", ["data"], ["y"])
    assert second.run({"data": ROWS}, ["y"])["y"].tolist() == [[0, 2, 0, 4]]
    with pytest.raises(InvalidArgument, match="has 'data' as both an input and an output"):
        second.run({"data": ROWS}, ["data"])


def test_the_weights_are_beside_a_file_of_another_name(tmp_path: Path) -> None:
    simple(tmp_path, "net.v3")
    config = config_of(default_model_filename="net.v3")
    assert open_instance(config, tmp_path).compute({"data": ROWS}, ["y"])["y"].tolist() == ANSWER
    (tmp_path / "test" / "1" / "init_net.v3").unlink()
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/init_net\.v3': a Caffe2 model is two files"):
        open_instance(config, tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/model\.netdef'"):
        open_instance(config_of(), tmp_path)
    with pytest.raises(InvalidArgument, match="name a file inside it"):
        open_instance(config_of(default_model_filename="../model.netdef"), tmp_path)
    simple(tmp_path)
    (tmp_path / "test" / "1" / "init_model.netdef").unlink()
    with pytest.raises(FailedPrecondition, match="no 'init_model.netdef' beside it"):
        NetDefBackend().complete(config_of(outputs={}), files_of(tmp_path))
    (tmp_path / "test" / "1" / "init_model.netdef").mkdir()
    with pytest.raises(FailedPrecondition, match=r"'init_model\.netdef' cannot be read"):
        open_instance(config_of(), tmp_path)


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ({"A": (FP32, (4,))}, None, "unexpected inference input 'A', allowed inputs are: data$"),
        (None, {"B": (FP32, (4,))}, "unexpected inference output 'B', allowed outputs are: y$"),
        ({}, None, "nor the configuration declares as an input"),
        ({"data": (UINT32, (4,))}, None, "input 'data' is UINT32, which Caffe2 does not have"),
        ({"data": (UINT64, (4,))}, None, "input 'data' is UINT64, which Caffe2 does not have"),
        (None, {"y": (INT64, (4,))}, "output 'y' of model 'test' is INT64 in the configuration and FP32 in the model"),
        (None, {"y": (FP32, (5,))}, r"output 'y' .* has shape \[-1, 5\]"),
        (
            {"data": (FP32, (3,))},
            None,
            r"operator 1 \(Add\) .* does not fit what it reads: 'hidden' float \[-1, 3\], 'w' float \[4\]",
        ),
        ({"data": (FP64, (4,))}, None, r"does not fit what it reads: 'hidden' double \[-1, 4\], 'w' float \[4\]"),
    ],
)
def test_a_configuration_for_another_model_is_refused(
    tmp_path: Path, inputs: dict[str, Any] | None, outputs: dict[str, Any] | None, text: str
) -> None:
    simple(tmp_path)
    with pytest.raises(InvalidArgument, match=text) as caught:
        open_instance(config_of(inputs, outputs), tmp_path)
    assert "model 'test'" in str(caught.value)


def test_a_net_of_one_shape_cannot_batch(tmp_path: Path) -> None:
    net = Nets()
    net.op("Reshape", ["data"], ["y", "old"], shape=[1, 4])
    net.net.external_output.append("y")
    net.write(tmp_path / "test" / "1")
    with pytest.raises(InvalidArgument, match=r"does not support batching: tensor 'y' has shape \[1, 4\]"):
        open_instance(config_of(), tmp_path)
    instance = open_instance(config_of({"data": (FP32, (1, 4))}, {"y": (FP32, (1, 4))}, max_batch_size=0), tmp_path)
    assert instance.compute({"data": ROWS}, ["y"])["y"].tolist() == ROWS.tolist()


def test_outputs_are_derived_once_the_inputs_are_declared(tmp_path: Path) -> None:
    simple(tmp_path)
    files = files_of(tmp_path)
    assert NetDefBackend().complete(config_of(), files) is None
    reported = NetDefBackend().complete(config_of(outputs={}), files)
    assert reported is not None
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in reported.output] == [("y", 11, [4])]
    for inputs in ({}, {"data": (None, ())}):
        with pytest.raises(
            InvalidArgument, match="model 'test': a NetDef does not contain .* declare 'data' in `input`"
        ):
            NetDefBackend().complete(config_of(inputs, {}), files)  # type: ignore[arg-type]


def test_a_reshape_is_the_shape_that_the_net_gets(tmp_path: Path) -> None:
    simple(tmp_path)
    config = ModelConfig(
        "test",
        "netdef",
        max_batch_size=8,
        inputs=(InputSpec("data", FP32, (2, 2), reshape=(4,)),),
        outputs=(OutputSpec("y", FP32, (2, 2), reshape=(4,)),),
        proto=new_config(name="test"),
    )
    assert open_instance(config, tmp_path).compute({"data": ROWS}, ["y"])["y"].tolist() == ANSWER


def test_sequences_have_their_own_control_inputs(tmp_path: Path) -> None:
    net = Nets("data", "START", "STATE_IN")
    net.op("Add", ["data", "STATE_IN"], ["STATE_OUT"])
    net.op("Cast", ["START"], ["started"], to=1)
    net.op("Add", ["STATE_OUT", "started"], ["y"])
    net.net.external_output.append("y")
    net.write(tmp_path / "test" / "1")
    scheduling = SequenceBatching(
        controls=(ControlInput("START", "start", FP32),), states=(StateSpec("STATE_IN", "STATE_OUT", FP32, (4,)),)
    )
    instance = open_instance(config_of(scheduling=scheduling), tmp_path)
    given = {"data": ROWS, "STATE_IN": ROWS, "START": np.ones((1, 1), np.float32)}
    answer = instance.compute(given, ["y", "STATE_OUT"])
    assert answer["y"].tolist() == (2 * ROWS + 1).tolist()
    assert answer["STATE_OUT"].tolist() == (2 * ROWS).tolist()


def test_strings_pass_through(tmp_path: Path) -> None:
    net = Nets()
    net.op("Copy", ["data"], ["y"])
    net.net.external_output.append("y")
    net.write(tmp_path / "test" / "1")
    instance = open_instance(config_of({"data": (BYTES, (2,))}, {"y": (BYTES, (2,))}), tmp_path)
    words = np.array([[b"a", "zwölf".encode()]], object)
    assert instance.compute({"data": words}, ["y"])["y"].tolist() == words.tolist()


def test_settings_of_onnx_runtime_are_possible(tmp_path: Path) -> None:
    simple(tmp_path)
    assert open_instance(config_of(parameters={"intra_op_thread_count": "2"}), tmp_path)
    with pytest.raises(InvalidArgument, match="parameter intra_op_thread_count is 'many'"):
        open_instance(config_of(parameters={"intra_op_thread_count": "many"}), tmp_path)


def test_the_resnet50_of_the_old_examples(tmp_path: Path) -> None:
    """3x224x224 into `gpu_0/data`, 1000 out of `gpu_0/softmax`: its shapes, with an eighth of its channels."""
    module = ResNet50(width=8)
    randomise(module)
    module.write().write(tmp_path / "test" / "1")
    config = config_of({"gpu_0/data": (FP32, (3, 224, 224))}, {"gpu_0/softmax": (FP32, (1000,))}, 128)
    image = rows(2, 3, 224, 224)
    answer = open_instance(config, tmp_path).compute({"gpu_0/data": image}, ["gpu_0/softmax"])["gpu_0/softmax"]
    np.testing.assert_allclose(answer, module(torch.from_numpy(image)).detach().numpy(), rtol=5e-3, atol=1e-6)
