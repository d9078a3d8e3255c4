# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow backend computes: every data type, both formats, errors that say what to do, memory that comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tensorflow_models import (
    ALL_DTYPES,
    NO_SERVICES,
    TensorFlowBackend,
    configured,
    graph,
    identity,
    open_instance,
    placed,
    sample,
    saved,
    simple,
    tf,
    tf_type,
    v1,
)

from headrace.backends.contract import Placement
from headrace.core.dtypes import BF16, BYTES, FP32, INT32, INT64, DType
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument
from support.late_imports import late

pytestmark = pytest.mark.worker("frameworks")
settings = late("headrace.backends.tensorflow.session")


def same_bits(ours: Any, theirs: Any) -> bool:
    if ours.dtype == object:
        return bool(ours.tolist() == theirs.tolist())
    return ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
def test_every_data_type_passes_through_a_graph_unchanged(tmp_path: Path, dtype: DType) -> None:
    config = configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))})
    instance = open_instance(config, placed(tmp_path, identity(dtype.name)))
    for rows in (1, 3, 0):
        given = sample(dtype, (rows, 4))
        answer = instance.compute({"X": given}, ["Y"])["Y"]
        assert answer.dtype == dtype.numpy
        assert answer.shape == given.shape
        assert same_bits(answer, given)
    turned = sample(dtype, (4, 2)).T
    assert same_bits(instance.compute({"X": turned}, ["Y"])["Y"], turned.copy())
    instance.close()


def test_every_data_type_passes_through_a_saved_model_unchanged(tmp_path: Path) -> None:
    specs = {f"x_{dtype.name.lower()}": (dtype, (4,)) for dtype in ALL_DTYPES}
    shown = {name: tf.TensorSpec([None, 4], tf_type(dtype.name), name=name) for name, (dtype, _) in specs.items()}
    files = saved(
        tmp_path, lambda given: {"same_" + name: tf.identity(tensor) for name, tensor in given.items()}, shown
    )
    instance = open_instance(configured(specs, {"same_" + name: spec for name, spec in specs.items()}), files)
    given = {name: sample(dtype, (3, 4)) for name, (dtype, _) in specs.items()}
    answer = instance.compute(given, ["same_" + name for name in specs])
    assert all(same_bits(answer["same_" + name], array) for name, array in given.items())
    instance.close()


@pytest.mark.parametrize("dtype", [FP32, BF16, BYTES], ids=lambda dtype: dtype.name)
def test_a_single_number_has_no_dimension(tmp_path: Path, dtype: DType) -> None:
    config = configured({"X": (dtype, ())}, {"Y": (dtype, ())}, max_batch_size=0)
    instance = open_instance(config, placed(tmp_path, identity(dtype.name, [])))
    given = sample(dtype, ())
    answer = instance.compute({"X": given}, ["Y"])["Y"]
    assert answer.shape == ()
    assert same_bits(answer, given)


def test_the_first_servers_example(tmp_path: Path) -> None:
    row = (INT32, (16,))
    config = configured(
        {"INPUT0": row, "INPUT1": row}, {"OUTPUT0": row, "OUTPUT1": row}, platform="tensorflow_graphdef"
    )
    instance = open_instance(config, placed(tmp_path, simple()))
    first = np.arange(32, dtype=np.int32).reshape(2, 16)
    answer = instance.compute({"INPUT1": np.ones((2, 16), np.int32), "INPUT0": first}, ["OUTPUT1", "OUTPUT0"])
    assert (answer["OUTPUT0"] == first + 1).all()
    assert (answer["OUTPUT1"] == first - 1).all()


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array in memory that TensorFlow takes as it is."""
    room = np.zeros(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    laid = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    laid[...] = array
    return laid


def test_answers_are_not_the_callers_memory_nor_the_models(tmp_path: Path) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], name="X")
        tf.identity(x, name="Y")
        tf.nn.relu(x, name="RELU")
        tf.constant(np.full((1, 4), 7, np.float32), name="C")

    outputs = {"Y": (FP32, (-1, 4)), "RELU": (FP32, (-1, 4)), "C": (FP32, (1, 4))}
    config = configured({"X": (FP32, (-1, 4))}, outputs, max_batch_size=0)
    instance = open_instance(config, placed(tmp_path, graph(build)))
    given = aligned(np.full((1, 4), -3, np.float32))
    answer = instance.compute({"X": given}, list(outputs))
    assert given.tolist() == [[-3] * 4]
    given[:] = 99
    assert answer["Y"].tolist() == [[-3] * 4]
    assert not answer["C"].flags.writeable
    instance.close()
    assert answer["C"].tolist() == [[7] * 4]


def test_a_shape_the_model_refuses_is_the_callers_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instance = open_instance(configured(), placed(tmp_path / "a", identity()))
    with pytest.raises(InvalidArgument, match=r"model 'test' does not accept .*'X' \[1, 5\]"):
        instance.compute({"X": np.zeros((1, 5), np.float32)}, ["Y"])
    # What the graph leaves open, its operators find out.
    matrix = (FP32, (-1, -1))

    def build() -> None:
        first, second = (v1.placeholder(tf.float32, [None, None], name=name) for name in "AB")
        tf.matmul(first, second, name="Y")

    config = configured({"A": matrix, "B": matrix}, {"Y": matrix}, max_batch_size=0)
    instance = open_instance(config, placed(tmp_path / "b", graph(build)))
    with pytest.raises(InvalidArgument, match=r"'A' \[2, 3\], 'B' \[4, 2\]") as caught:
        instance.compute({"A": np.zeros((2, 3), np.float32), "B": np.zeros((4, 2), np.float32)}, ["Y"])
    assert "MatMul" not in str(caught.value)
    assert "Matrix size-incompatible" in caplog.text
    assert instance.compute({name: np.eye(2, dtype=np.float32) for name in "AB"}, ["Y"])["Y"].tolist() == [
        [1, 0],
        [0, 1],
    ]


def test_a_value_the_model_refuses_is_too(tmp_path: Path) -> None:
    def build() -> None:
        index = v1.placeholder(tf.int64, [None], name="X")
        tf.gather(tf.constant([5.0, 6.0]), index, name="Y")

    instance = open_instance(
        configured({"X": (INT64, (-1,))}, {"Y": (FP32, (-1,))}, max_batch_size=0), placed(tmp_path, graph(build))
    )
    assert instance.compute({"X": np.array([1, 0])}, ["Y"])["Y"].tolist() == [6, 5]
    with pytest.raises(InvalidArgument, match="by their shapes or values"):
        instance.compute({"X": np.array([2])}, ["Y"])


def test_a_failing_model_is_logged_and_its_text_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A variable that nothing has filled."""

    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], name="X")
        tf.add(x, v1.get_variable("secret", [4], use_resource=True).read_value(), name="Y")

    instance = open_instance(configured(), placed(tmp_path, graph(build)))
    with pytest.raises(Internal, match="the server's log has the details") as caught:
        instance.compute({"X": np.zeros((1, 4), np.float32)}, ["Y"])
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text


def test_an_input_may_have_a_default_value(tmp_path: Path) -> None:
    def build() -> None:
        x = v1.placeholder(tf.float32, [None, 4], name="X")
        bias = v1.placeholder_with_default(np.float32(2), [], name="BIAS")
        v1.placeholder(tf.float32, [], name="UNUSED")
        tf.add(x, bias, name="Y")

    files = placed(tmp_path, graph(build))
    rows = np.ones((1, 4), np.float32)
    assert open_instance(configured(), files).compute({"X": rows}, ["Y"])["Y"].tolist() == [[3] * 4]
    reported = configured({"X": (FP32, (4,)), "BIAS": (FP32, ())}, max_batch_size=8)
    instance = open_instance(reported, files)
    assert instance.compute({"X": rows}, ["Y"])["Y"].tolist() == [[3] * 4]
    assert instance.compute({"X": rows, "BIAS": np.array(5, np.float32)}, ["Y"])["Y"].tolist() == [[6] * 4]
    with pytest.raises(InvalidArgument, match="needs the input 'X'"):
        instance.compute({"BIAS": np.array(5, np.float32)}, ["Y"])


def test_a_gpu_that_is_not_there_is_an_error_and_not_a_slow_cpu(tmp_path: Path) -> None:
    missing = len(tf.config.list_physical_devices("GPU"))
    model = TensorFlowBackend().load(configured(), placed(tmp_path, identity()), NO_SERVICES)
    with pytest.raises(FailedPrecondition, match=rf"asks for GPU {missing}, .* can use {missing} .*KIND_CPU"):
        model.open(Placement("test_0_gpu", "gpu", missing))
    assert TensorFlowBackend().usable_gpus(0) == 0


def test_the_placement_decides_on_the_device_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: TensorFlow computes on the CPU what it was told to put on one."""

    def build() -> None:
        with tf.device("/job:trainer/task:7/device:GPU:3"):
            tf.identity(v1.placeholder(tf.float32, [None, 4], name="X"), name="Y")

    monkeypatch.setattr("headrace.backends.tensorflow.session.gpus", lambda: 2)
    model = TensorFlowBackend().load(configured(), placed(tmp_path, graph(build)), NO_SERVICES)
    for kind, device, expected in (("cpu", 0, "/device:CPU:0"), ("gpu", 1, "/device:GPU:1")):
        instance = model.open(Placement("a", kind, device))
        assert instance._shared is not None
        placed_on = {operation.device for operation in instance._shared.session._graph.get_operations()}
        assert placed_on == {expected}
        assert instance.compute({"X": np.ones((1, 4), np.float32)}, ["Y"])["Y"].tolist() == [[1] * 4]
        instance.close()
    assert settings.device_name(configured(), Placement("a", "model")) is None
    assert TensorFlowBackend().usable_gpus(1) == 1


def test_instances_have_sessions_of_their_own_unless_they_share(tmp_path: Path) -> None:
    rows = {"X": np.ones((1, 4), np.float32)}
    for share, sessions in ((None, 3), ("2", 2), ("9", 1)):
        parameters = {} if share is None else {"MAX_SESSION_SHARE_COUNT": share}
        model = TensorFlowBackend().load(configured(parameters=parameters), placed(tmp_path, identity()), NO_SERVICES)
        instances = [model.open(Placement(name)) for name in "abc"]
        assert len({id(instance._shared.session) for instance in instances if instance._shared}) == sessions
        for closing in instances[:2]:
            closing.close()
        assert instances[2].compute(rows, ["Y"])["Y"].shape == (1, 4)
        instances[2].close()
        second = model.open(Placement("d"))
        assert second.compute(rows, ["Y"])["Y"].shape == (1, 4)
        second.close()
        model.close()


@pytest.mark.slow  # quick: test_backend_contract.py, test_unload_gives_everything_back
def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    side = 2600  # 27 MB of weights
    weights = np.ones((side, side), np.float32)
    files = placed(
        tmp_path, graph(lambda: tf.matmul(v1.placeholder(tf.float32, [None, side], name="X"), weights, name="Y"))
    )
    config = configured({"X": (FP32, (side,))}, {"Y": (FP32, (side,))})
    rows = np.ones((2, side), np.float32)

    def once() -> int:
        instance = open_instance(config, files)
        instance.compute({"X": rows}, ["Y"])
        instance.close()
        return int(psutil.Process().memory_info().rss)

    before = max(once() for _ in range(2))
    after = [once() for _ in range(3)]
    # One model kept each time would be 81 MB more at the end.
    assert min(after[-2:]) - before < 40e6
