# SPDX-License-Identifier: Apache-2.0
"""The ONNX backend computes: every data type, errors that say what to do, memory that comes back."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import psutil
import pytest
from onnx import TensorProto, helper
from onnx_graphs import ALL_DTYPES, NO_SERVICES, configured, graph, identity, open_instance, placed, sample

from headrace.backends.contract import Placement
from headrace.backends.onnx.backend import OnnxBackend, OnnxInstance
from headrace.backends.onnx.session import signature_of
from headrace.core.dtypes import BF16, BYTES, FP32, INT64, DType
from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument, Unimplemented


def same_bits(ours: Any, theirs: Any) -> bool:
    if ours.dtype == object:
        return bool(ours.tolist() == theirs.tolist())
    return ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("bound", [False, True], ids=["run", "io-binding"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
def test_every_data_type_passes_through_unchanged(tmp_path: Path, dtype: DType, bound: bool) -> None:
    session = ort.InferenceSession(identity(dtype.name), providers=["CPUExecutionProvider"])
    config = configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))})
    instance = OnnxInstance(config, session, signature_of(session), bound=bound)
    for rows in (1, 3, 0):
        given = sample(dtype, (rows, 4))
        answer = instance.compute({"X": given}, ["Y"])["Y"]
        assert answer.dtype == dtype.numpy
        assert answer.shape == given.shape
        assert same_bits(answer, given)
    turned = sample(dtype, (4, 2)).T
    assert same_bits(instance.compute({"X": turned}, ["Y"])["Y"], turned.copy())
    instance.close()


@pytest.mark.parametrize("dtype", [FP32, BF16, BYTES], ids=lambda dtype: dtype.name)
def test_a_single_number_has_no_dimension(tmp_path: Path, dtype: DType) -> None:
    config = configured({"X": (dtype, ())}, {"Y": (dtype, ())}, max_batch_size=0)
    instance = open_instance(config, placed(tmp_path, identity(dtype.name, [])))
    given = sample(dtype, ())
    answer = instance.compute({"X": given}, ["Y"])["Y"]
    assert answer.shape == ()
    assert same_bits(answer, given)


def test_answers_outlive_the_next_batch_and_the_session(tmp_path: Path) -> None:
    for dtype in (FP32, BF16):
        config = configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))})
        instance = open_instance(config, placed(tmp_path, identity(dtype.name)))
        first = np.full((2, 4), 3, dtype.numpy)
        answer = instance.compute({"X": first}, ["Y"])["Y"]
        instance.compute({"X": np.full((2, 4), 9, dtype.numpy)}, ["Y"])
        instance.close()
        assert answer.tolist() == [[3] * 4] * 2


def test_only_what_is_wanted_is_computed(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["X"], ["Y"]), helper.make_node("Abs", ["X"], ["Z"])]
    row = (TensorProto.FLOAT, ["n", 4])
    files = placed(tmp_path, graph(nodes, {"X": row}, {"Y": row, "Z": row}))
    instance = open_instance(configured(outputs={"Y": (FP32, (4,)), "Z": (FP32, (4,))}), files)
    rows = np.array([[-1, 2, -3, 4]], np.float32)
    assert {name: array.tolist() for name, array in instance.compute({"X": rows}, ["Z"]).items()} == {
        "Z": [[1, 2, 3, 4]]
    }
    both = instance.compute({"X": rows}, ("Z", "Y"))
    assert both["Y"].tolist() == [[1, -2, 3, -4]]
    assert both["Z"].tolist() == [[1, 2, 3, 4]]


def test_text_beside_bf16_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Identity", ["X"], ["Y"]), helper.make_node("Identity", ["T"], ["U"])]
    number, text = (TensorProto.BFLOAT16, ["n", 4]), (TensorProto.STRING, ["n", 4])
    files = placed(tmp_path, graph(nodes, {"X": number, "T": text}, {"Y": number, "U": text}))
    config = configured({"X": (BF16, (4,)), "T": (BYTES, (4,))}, {"Y": (BF16, (4,)), "U": (BYTES, (4,))})
    with pytest.raises(Unimplemented, match="both BF16 and string tensors"):
        open_instance(config, files)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    config = configured({"X": (BYTES, (4,))}, {"Y": (BYTES, (4,))})
    instance = open_instance(config, placed(tmp_path, identity("BYTES")))
    with pytest.raises(InvalidArgument, match="input 'X' has an element that is not UTF-8"):
        instance.compute({"X": np.array([[b"a", b"\xff", b"", b""]], dtype=object)}, ["Y"])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["run", "io-binding"])
def test_a_shape_the_model_refuses_is_the_callers_error(
    tmp_path: Path, dtype: DType, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured({"X": (dtype, (4,))}, {"Y": (dtype, (4,))})
    instance = open_instance(config, placed(tmp_path, identity(dtype.name)))
    with pytest.raises(InvalidArgument, match=r"model 'test' does not accept .*'X' \[1, 5\]") as caught:
        instance.compute({"X": np.zeros((1, 5), dtype.numpy)}, ["Y"])
    assert "Expected: 4" not in str(caught.value)
    assert "Expected: 4" in caplog.text


def test_a_failing_model_is_logged_and_its_text_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [helper.make_node("Reshape", ["X", "SHAPE"], ["Y"])]
    inputs = {"X": (TensorProto.FLOAT, ["n", 4]), "SHAPE": (TensorProto.INT64, [2])}
    files = placed(tmp_path, graph(nodes, inputs, {"Y": (TensorProto.FLOAT, None)}))
    config = configured({"X": (FP32, (-1, 4)), "SHAPE": (INT64, (2,))}, {"Y": (FP32, (-1, -1))}, max_batch_size=0)
    instance = open_instance(config, files)
    with caplog.at_level(logging.ERROR), pytest.raises(Internal, match="the server's log has the details") as caught:
        instance.compute({"X": np.zeros((1, 4), np.float32), "SHAPE": np.array([3, 3])}, ["Y"])
    assert "Reshape" not in str(caught.value)
    assert "Reshape" in caplog.text


def test_a_file_that_is_not_a_model_is_named(tmp_path: Path) -> None:
    for content in (b"hello", b"", identity()[:-9]):
        with pytest.raises(InvalidArgument, match=r"test/1/model\.onnx is not a valid ONNX file"):
            open_instance(configured(), placed(tmp_path, content))
        with pytest.raises(InvalidArgument, match=r"test/1/model\.onnx is not a valid ONNX file"):
            OnnxBackend().complete(configured({}, {}), placed(tmp_path, content))


def test_a_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    files = placed(tmp_path, None)
    with pytest.raises(FailedPrecondition, match=r"version 1 has no file 'test/1/model\.onnx'"):
        OnnxBackend().load(configured(), files, NO_SERVICES)
    with pytest.raises(FailedPrecondition, match=r"no file 'test/1/other\.onnx'"):
        OnnxBackend().complete(configured({}, {}, default_model_filename="other.onnx"), files)


@pytest.mark.parametrize("filename", ["../1/model.onnx", "/etc/passwd", "a/../../1/model.onnx"])
def test_a_file_outside_the_version_is_not_read(tmp_path: Path, filename: str) -> None:
    with pytest.raises(InvalidArgument, match="name a file inside it"):
        OnnxBackend().load(configured(default_model_filename=filename), placed(tmp_path, identity()), NO_SERVICES)


def test_the_file_may_have_another_name(tmp_path: Path) -> None:
    rows = np.ones((1, 4), np.float32)
    named = configured(default_model_filename="net.onnx")
    files = placed(tmp_path / "a", identity(), "net.onnx")
    assert open_instance(named, files).compute({"X": rows}, ["Y"])["Y"].tolist() == [[1] * 4]


def test_a_folder_may_hold_the_graph_and_its_external_data(tmp_path: Path) -> None:
    row = (TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("Add", ["X", "W"], ["Y"])]
    model = onnx.load_from_string(graph(nodes, {"X": row}, {"Y": row}, {"W": np.full(4, 5, np.float32)}))
    files = placed(tmp_path, None)
    folder = files.version_folder / "model.onnx"
    folder.mkdir()
    onnx.save_model(model, folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (folder / "weights.bin").stat().st_size >= 16
    rows = np.ones((1, 4), np.float32)
    assert open_instance(configured(), files).compute({"X": rows}, ["Y"])["Y"].tolist() == [[6] * 4]
    (folder / "weights.bin").unlink()
    with pytest.raises(FailedPrecondition, match=r"keeps weights in 'weights\.bin', which is not there: put"):
        open_instance(configured(), files)


def test_a_gpu_that_is_not_there_is_an_error_and_not_a_slow_cpu(tmp_path: Path) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    model = OnnxBackend().load(configured(), placed(tmp_path, identity()), NO_SERVICES)
    with pytest.raises(
        FailedPrecondition, match=r"needs CUDAExecutionProvider.*it has .*CPUExecutionProvider"
    ) as caught:
        model.open(Placement("test_0_gpu0", "gpu", 0))
    assert isinstance(caught.value, HeadraceError)


def test_a_device_that_does_not_start_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime goes on with the next provider by itself, with a warning that nobody sees."""
    monkeypatch.setattr(ort, "get_available_providers", ort.get_all_providers)
    model = OnnxBackend().load(configured(), placed(tmp_path, identity()), NO_SERVICES)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(FailedPrecondition, match="CUDAExecutionProvider on device 3, which did not start"),
    ):
        model.open(Placement("test_0_gpu3", "gpu", 3))


def test_instances_have_sessions_of_their_own(tmp_path: Path) -> None:
    model = OnnxBackend().load(configured(), placed(tmp_path, identity()), NO_SERVICES)
    first, second = model.open(Placement("a")), model.open(Placement("b"))
    first.close()
    model.close()
    assert second.compute({"X": np.ones((1, 4), np.float32)}, ["Y"])["Y"].shape == (1, 4)


@pytest.mark.slow  # quick: test_backend_contract.py, test_unload_gives_everything_back
def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    side = 3600  # 52 MB of weights
    nodes = [helper.make_node("MatMul", ["X", "W"], ["Y"])]
    row = (TensorProto.FLOAT, ["n", side])
    weights = {"W": np.ones((side, side), np.float32)}
    files = placed(tmp_path, graph(nodes, {"X": row}, {"Y": row}, weights))
    config = configured({"X": (FP32, (side,))}, {"Y": (FP32, (side,))})
    rows = np.ones((2, side), np.float32)

    def once() -> int:
        instance = open_instance(config, files)
        instance.compute({"X": rows}, ["Y"])
        instance.close()
        return int(psutil.Process().memory_info().rss)

    before = max(once() for _ in range(2))
    after = [once() for _ in range(5)]
    # One model kept each time would be 250 MB more at the end.
    assert min(after[-2:]) - before < 60e6
