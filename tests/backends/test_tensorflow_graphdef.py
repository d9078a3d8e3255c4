# SPDX-License-Identifier: Apache-2.0
"""Frozen graphs: what their nodes tell, what a configuration may name of them, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorflow_models import (
    NO_SERVICES,
    TensorFlowBackend,
    configured,
    graph,
    identity,
    open_instance,
    placed,
    simple,
    tf,
    v1,
)

from headrace.backends.signature import DEFAULT_MAX_BATCH_SIZE
from headrace.core.dtypes import BOOL, FP32, FP64, INT32
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ControlInput, SequenceBatching, StateSpec

pytestmark = pytest.mark.worker("frameworks")

ROWS = {"X": np.array([[1, 5, 2, 4]], np.float32)}
SILENT = configured({}, {}, max_batch_size=0)


def completed(config: Any, files: Any) -> Any:
    message = TensorFlowBackend().complete(config, files)
    assert message is not None
    return message


def test_the_placeholders_and_the_ends_of_a_graph_are_its_signature(tmp_path: Path) -> None:
    message = completed(SILENT, placed(tmp_path, simple()))
    assert message.max_batch_size == DEFAULT_MAX_BATCH_SIZE
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in message.input] == [
        ("INPUT0", 8, [16]),
        ("INPUT1", 8, [16]),
    ]
    assert [tensor.name for tensor in message.output] == ["OUTPUT0", "OUTPUT1"]


def test_a_graph_without_shapes_needs_a_configuration(tmp_path: Path) -> None:
    files = placed(tmp_path, identity("FP32", None))
    with pytest.raises(InvalidArgument, match="does not declare the shape of 'X': write it with its dims"):
        TensorFlowBackend().complete(SILENT, files)
    assert open_instance(configured(), files).compute(ROWS, ["Y"])["Y"].shape == (1, 4)


def test_what_is_declared_in_full_is_not_completed(tmp_path: Path) -> None:
    assert TensorFlowBackend().complete(configured(), placed(tmp_path, b"not read")) is None


def test_outputs_may_be_any_node_and_any_of_its_tensors(tmp_path: Path) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], name="X")
        middle = tf.negative(x, name="inner/middle")
        tf.math.top_k(middle, k=2, name="BEST")

    files = placed(tmp_path, graph(build))
    outputs = {"inner/middle": (FP32, (4,)), "BEST": (FP32, (2,)), "BEST:1": (INT32, (2,))}
    answer = open_instance(configured(outputs=outputs), files).compute(ROWS, list(outputs))
    assert answer["inner/middle"].tolist() == [[-1, -5, -2, -4]]
    assert answer["BEST"].tolist() == [[-1, -2]]
    assert answer["BEST:1"].tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "max_batch_size", "text"),
    [
        ({"A": (FP32, (4,))}, None, 8, "unexpected inference input 'A', allowed inputs are: X "),
        ({"X:0": (FP32, (4,))}, None, 8, "unexpected inference input 'X:0', allowed inputs are: X "),
        ({"Y": (FP32, (4,))}, None, 8, "unexpected inference input 'Y', allowed inputs are: X "),
        (None, {"B": (FP32, (4,))}, 8, "unexpected inference output 'B', allowed outputs are: Y "),
        (None, {"X": (FP32, (4,))}, 8, "unexpected inference output 'X', allowed outputs are: Y "),
        ({}, None, 8, "needs inputs that its configuration does not name: 'X'"),
        ({"X": (FP64, (4,))}, None, 8, "FP64 in the configuration and FP32 in the model: write data_type: TYPE_FP32"),
        ({"X": (FP32, (5,))}, None, 8, r"shape \[-1, 5\] by the configuration .*batch.* and \[-1, 4\] in the model"),
        ({"X": (FP32, (4,))}, None, 0, r"shape \[4\] by the configuration and \[-1, 4\] in the model"),
    ],
)
def test_a_configuration_for_another_model_is_refused(
    tmp_path: Path, inputs: Any, outputs: Any, max_batch_size: int, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        open_instance(configured(inputs, outputs, max_batch_size), placed(tmp_path, identity()))


@pytest.mark.parametrize("content", [b"", b"hello", b"\x0a\xff\xff\xff\x7f", "a graph that was cut"])
def test_a_file_that_is_not_a_graph_is_named(tmp_path: Path, content: bytes | str) -> None:
    content = content if isinstance(content, bytes) else identity()[:-9]
    with pytest.raises(InvalidArgument, match=r"cannot (read|use the graph of) 'model\.graphdef'"):
        open_instance(configured(), placed(tmp_path, content))
    with pytest.raises(InvalidArgument, match=r"cannot (read|use the graph of) 'model\.graphdef'"):
        TensorFlowBackend().complete(SILENT, placed(tmp_path, content))


def test_a_graph_without_placeholders_or_with_strange_operators_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidArgument, match="has no Placeholder node"):
        open_instance(configured(), placed(tmp_path, graph(lambda: tf.constant(1.0, name="Y"))))
    foreign = tf.compat.v1.GraphDef.FromString(identity())
    foreign.node[1].op = "SomebodysOwnOperator"
    with pytest.raises(InvalidArgument, match="has operators of another library") as caught:
        open_instance(configured(), placed(tmp_path, foreign.SerializeToString()))
    assert "SomebodysOwnOperator" not in str(caught.value)
    assert "SomebodysOwnOperator" in caplog.text


def test_a_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    files = placed(tmp_path, None)
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/model\.graphdef'"):
        TensorFlowBackend().load(configured(platform="tensorflow_graphdef"), files, NO_SERVICES)
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/model\.savedmodel' or 'test/1/model\.graphdef'"):
        TensorFlowBackend().load(configured(), files, NO_SERVICES)
    named = configured(default_model_filename="../1/model.graphdef")
    with pytest.raises(InvalidArgument, match="name a file inside it"):
        TensorFlowBackend().load(named, files, NO_SERVICES)


def test_the_platform_decides_what_a_file_is(tmp_path: Path) -> None:
    config = configured(default_model_filename="net.pb", platform="tensorflow_graphdef")
    assert open_instance(config, placed(tmp_path, identity(), "net.pb")).compute(ROWS, ["Y"])["Y"].tolist() == [
        [1, 5, 2, 4]
    ]
    with pytest.raises(InvalidArgument, match="is a file, and a tensorflow_savedmodel is a folder"):
        config = configured(default_model_filename="net.pb", platform="tensorflow_savedmodel")
        open_instance(config, placed(tmp_path, identity(), "net.pb"))


def test_operations_may_be_run_before_the_first_batch(tmp_path: Path) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], name="X")
        bias = v1.get_variable("bias", initializer=np.full(4, 2, np.float32), use_resource=True)
        tf.add(x, bias.read_value(), name="Y")
        tf.group(v1.global_variables_initializer(), name="init")

    files = placed(tmp_path, graph(build))
    config = configured(parameters={"TF_INIT_OPS_FILE": "init_ops.json"})
    with pytest.raises(FailedPrecondition, match=r"has no file 'init_ops\.json'"):
        open_instance(config, files)
    (files.model_folder / "init_ops.json").write_text(json.dumps({"init_ops": ["init"]}))
    assert open_instance(config, files).compute(ROWS, ["Y"])["Y"].tolist() == [[3, 7, 4, 6]]
    # The one beside the graph goes before.
    for text, said in (
        ('{"init_ops": "init"}', "is not what"),
        ("[", "is not what"),
        ('{"init_ops": ["no"]}', "no operation 'no'"),
    ):
        (files.version_folder / "init_ops.json").write_text(text)
        with pytest.raises(InvalidArgument, match=said):
            open_instance(config, files)
    with pytest.raises(InvalidArgument, match="a file without folders"):
        open_instance(configured(parameters={"TF_INIT_OPS_FILE": "../init_ops.json"}), files)


def test_state_and_controls_are_fed_too(tmp_path: Path) -> None:
    def build() -> None:
        x, state = (v1.placeholder(tf.float32, [None, 1], name=name) for name in ("X", "STATE_IN"))
        start = v1.placeholder(tf.bool, [None, 1], name="START")
        total = tf.add(x, tf.where(start, tf.zeros_like(state), state), name="Y")
        tf.identity(total, name="STATE_OUT")

    sequences = SequenceBatching(
        controls=(ControlInput("START", "start", BOOL),), states=(StateSpec("STATE_IN", "STATE_OUT", FP32, (1,)),)
    )
    files = placed(tmp_path, graph(build))
    config = configured({"X": (FP32, (1,))}, {"Y": (FP32, (1,))}, scheduling=sequences)
    one = np.ones((2, 1), np.float32)
    given = {"X": one, "STATE_IN": one * 4, "START": np.array([[True], [False]])}
    answer = open_instance(config, files).compute(given, ["Y", "STATE_OUT"])
    assert answer["STATE_OUT"].tolist() == [[1], [5]]
