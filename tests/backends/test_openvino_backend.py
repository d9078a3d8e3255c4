# SPDX-License-Identifier: Apache-2.0
"""The OpenVINO backend: every data type, settings by OpenVINO's names, damaged models, and no telemetry."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cases.openvino import mlp_expected, mlp_inputs, named, parameter, write_ir, write_mlp, write_onnx
from onnx_graphs import ALL_DTYPES, sample
from tabular_models import NO_SERVICES, completed_tensors, configured, in_a_process, open_instance, placed

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.openvino.backend import OpenVINOBackend
from headrace.backends.openvino.model import import_openvino, properties
from headrace.core.dtypes import FP32, INT64, DType
from headrace.core.errors import FailedPrecondition, Internal, InvalidArgument, Unimplemented
from headrace.models.config.types import InstanceGroup

OPENVINO_TYPES = {
    "BOOL": "boolean",
    "UINT8": "u8",
    "UINT16": "u16",
    "UINT32": "u32",
    "UINT64": "u64",
    "INT8": "i8",
    "INT16": "i16",
    "INT32": "i32",
    "INT64": "i64",
    "FP16": "f16",
    "FP32": "f32",
    "FP64": "f64",
    "BF16": "bf16",
    "BYTES": "string",
}
MLP = ({"X": (FP32, (16,))}, {"Y": (FP32, (3,))})


def mlp(tmp_path: Path, write: Any = write_mlp) -> ModelFiles:
    files = ModelFiles(tmp_path / "test", 1, tmp_path / "test" / "1")
    files.model_folder.mkdir(parents=True, exist_ok=True)
    write(files.model_folder)
    return files


def write_model(tmp_path: Path, results: list[Any], parameters: list[Any]) -> ModelFiles:
    return mlp(tmp_path, lambda folder: write_ir(folder, "", results, parameters))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda dtype: dtype.name)
def test_every_data_type_passes_through_unchanged(tmp_path: Path, dtype: DType) -> None:
    ops = import_openvino().opset13
    given = parameter("X", [-1, 4], OPENVINO_TYPES[dtype.name])
    files = write_model(tmp_path, [named(ops.result(given), "X")], [given])
    instance = open_instance(configured("openvino", {"X": (dtype, (4,))}, {"X": (dtype, (4,))}), files)
    for rows in (1, 3, 0):
        values = sample(dtype, (rows, 4))
        values.flags.writeable = False
        answer = instance.compute({"X": values}, ["X"])["X"]
        assert (answer.dtype, answer.shape) == (dtype.numpy, values.shape)
        assert answer.tolist() == values.tolist() if dtype.name == "BYTES" else answer.tobytes() == values.tobytes()
    turned = sample(dtype, (4, 2)).T
    answer = instance.compute({"X": turned}, ["X"])["X"]
    assert answer.tolist() == turned.tolist() if dtype.name == "BYTES" else answer.tobytes() == turned.tobytes()


def test_a_single_number_has_no_dimension(tmp_path: Path) -> None:
    ops = import_openvino().opset13
    given = parameter("X", [], "f32")
    files = write_model(tmp_path, [named(ops.multiply(given, ops.constant(np.float32(2))), "Y")], [given])
    instance = open_instance(configured("openvino", {"X": (FP32, ())}, {"Y": (FP32, ())}, batch=0), files)
    answer = instance.compute({"X": np.array(3, np.float32)}, ["Y"])["Y"]
    assert (answer.shape, float(answer)) == ((), 6.0)


@pytest.mark.parametrize(("write", "filename"), [(write_mlp, ""), (write_onnx, "model.onnx")])
def test_the_file_determines_the_configuration(tmp_path: Path, write: Any, filename: str) -> None:
    files = mlp(tmp_path, write)
    config = configured("openvino", batch=0, default_model_filename=filename)
    expected = {"input": {"X": (11, [16])}, "output": {"Y": (11, [3])}, "max_batch_size": 64}
    assert completed_tensors("openvino", files, config) == expected


def test_answers_outlive_the_next_batch_and_keep_their_digits(tmp_path: Path) -> None:
    instance = open_instance(configured("openvino", *MLP), mlp(tmp_path))
    first, second = mlp_inputs(2, 1), mlp_inputs(2, 2)
    answer = instance.compute(first, ["Y"])["Y"]
    instance.compute(second, ["Y"])
    instance.close()
    # f16, which OpenVINO would choose by itself on this and other CPUs, would be off by a thousandth.
    np.testing.assert_allclose(answer, mlp_expected(first)["Y"], rtol=1e-5, atol=1e-5)


def test_every_instance_has_a_stream_and_a_thread() -> None:
    groups = (InstanceGroup("a", count=3), InstanceGroup("b", count=1, passive=True))
    chosen = properties(configured("openvino", instance_groups=groups))
    assert chosen == {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "3",
        "INFERENCE_NUM_THREADS": "3",
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": "NO",
    }


def test_parameters_have_openvinos_names(tmp_path: Path) -> None:
    given = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": "2", "INFERENCE_NUM_THREADS": "2", "somebody_elses": "x"}
    config = configured("openvino", *MLP, parameters=given)
    model = OpenVINOBackend().load(config, mlp(tmp_path), NO_SERVICES)
    compiled = model._compiled
    assert compiled.get_property("NUM_STREAMS") == 2
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 2
    assert "THROUGHPUT" in str(compiled.get_property("PERFORMANCE_HINT"))
    assert properties(configured("openvino", parameters={"HINT_BF16": "YES"}))["INFERENCE_PRECISION_HINT"] == "bf16"


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"CPU_EXTENSION_PATH": "/tmp/x.so"}, Unimplemented, "would load a library into the server"),
        ({"ENABLE_BATCH_PADDING": "YES"}, Unimplemented, "export the model with a first dimension of any size"),
        ({"TARGET_DEVICE": "GPU"}, Unimplemented, "only CPU is served"),
        ({"HINT_BF16": "maybe"}, InvalidArgument, "parameter HINT_BF16 is 'MAYBE': use YES or NO"),
        ({"NUM_STREAMS": "many"}, InvalidArgument, "a parameter has a value that OpenVINO does not know"),
        ({"PERFORMANCE_HINT": "QUICK"}, InvalidArgument, "a parameter has a value that OpenVINO does not know"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, parameters: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        open_instance(configured("openvino", *MLP, parameters=parameters), mlp(tmp_path))


def test_inputs_take_the_configured_shape(tmp_path: Path) -> None:
    ops = import_openvino().opset13
    given = parameter("X", [1, 4], "f32")
    files = write_model(tmp_path, [named(ops.relu(given), "Y")], [given])
    ports = ({"X": (FP32, (4,))}, {"Y": (FP32, (4,))})
    with pytest.raises(InvalidArgument, match="does not support batching"):
        open_instance(configured("openvino", *ports), files)
    instance = open_instance(configured("openvino", *ports, parameters={"RESHAPE_IO_LAYERS": "YES"}), files)
    assert instance.compute({"X": np.ones((5, 4), np.float32)}, ["Y"])["Y"].shape == (5, 4)
    wrong = configured("openvino", {"Z": (FP32, (4,))}, ports[1], parameters={"RESHAPE_IO_LAYERS": "YES"})
    with pytest.raises(InvalidArgument, match="cannot have the inputs that its configuration declares"):
        open_instance(wrong, files)


def test_a_shape_the_model_refuses_is_the_callers_error(tmp_path: Path) -> None:
    instance = open_instance(configured("openvino", *MLP), mlp(tmp_path))
    for shape in ((1, 15), (16,), (1, 1, 16)):
        with pytest.raises(InvalidArgument, match="model 'test' does not accept inputs of these shapes: 'X'"):
            instance.compute({"X": np.zeros(shape, np.float32)}, ["Y"])
    given = mlp_inputs(1, 3)
    np.testing.assert_allclose(instance.compute(given, ["Y"])["Y"], mlp_expected(given)["Y"], rtol=1e-4)


def test_sizes_that_vary_must_still_fit_the_weights(tmp_path: Path) -> None:
    """OpenVINO computes with them on some CPUs, and with 4000 columns ends the process."""
    ops = import_openvino().opset13
    given = parameter("X", [-1, -1], "f32")
    weights = ops.constant(np.ones((4, 4), np.float32))
    files = write_model(tmp_path, [named(ops.matmul(given, weights, False, False), "Y")], [given])
    for batch, dims in ((8, (-1,)), (0, (-1, -1))):
        config = configured("openvino", {"X": (FP32, dims)}, {"Y": (FP32, (*dims[:-1], 4))}, batch=batch)
        instance = open_instance(config, files)
        for columns in (5, 3, 4000):
            with pytest.raises(InvalidArgument, match="sizes that may vary there may still have to fit each other"):
                instance.compute({"X": np.zeros((1, columns), np.float32)}, ["Y"])
        for rows in (3, 1, 0):
            answer = instance.compute({"X": np.ones((rows, 4), np.float32)}, ["Y"])["Y"]
            assert answer.tolist() == [[4] * 4] * rows


def test_a_failing_model_does_not_expose_its_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ops = import_openvino().opset13
    given, shape = parameter("X", [-1, 4], "f32"), parameter("SHAPE", [2], "i64")
    files = write_model(tmp_path, [named(ops.reshape(given, shape, False), "Y")], [given, shape])
    ports = ({"X": (FP32, (-1, 4)), "SHAPE": (INT64, (2,))}, {"Y": (FP32, (-1, -1))})
    instance = open_instance(configured("openvino", *ports, batch=0), files)
    rows = np.ones((1, 4), np.float32)
    assert instance.compute({"X": rows, "SHAPE": np.array([2, 2])}, ["Y"])["Y"].shape == (2, 2)
    # With one thread, OpenVINO's plain call returns without a word, and the answer is that of the batch before.
    with pytest.raises(Internal, match="the server's log has the details") as caught:
        instance.compute({"X": rows * 7, "SHAPE": np.array([3, 3])}, ["Y"])
    assert "Reshape" in caplog.text and "Reshape" not in str(caught.value)


def test_a_gpu_is_not_a_slow_cpu(tmp_path: Path) -> None:
    model = OpenVINOBackend().load(configured("openvino", *MLP), mlp(tmp_path), NO_SERVICES)
    with pytest.raises(FailedPrecondition, match="say KIND_CPU in instance_group"):
        model.open(Placement("test_0_gpu0", "gpu"))


def test_a_file_of_another_kind_or_none_is_named(tmp_path: Path) -> None:
    files = placed(tmp_path, b"x", "model.pdmodel")
    with pytest.raises(InvalidArgument, match=r"'model.pdmodel' is neither OpenVINO's .xml nor .onnx"):
        open_instance(configured("openvino", *MLP, default_model_filename="model.pdmodel"), files)
    with pytest.raises(FailedPrecondition, match=r"has no file 'test/1/model.xml' or 'test/1/model.onnx'"):
        open_instance(configured("openvino", *MLP), files)


def test_weights_that_change_on_the_disk_do_not_reach_the_model(tmp_path: Path) -> None:
    files = mlp(tmp_path)
    instance = open_instance(configured("openvino", *MLP), files)
    (files.version_folder / "model.bin").write_bytes(b"")
    given = mlp_inputs(3, 1)
    np.testing.assert_allclose(instance.compute(given, ["Y"])["Y"], mlp_expected(given)["Y"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # quick: test_backend_contract.py, test_unload_gives_everything_back
def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    ops = import_openvino().opset13
    side = 3000  # 36 MB of weights
    given = parameter("X", [-1, side], "f32")
    weights = ops.constant(np.ones((side, side), np.float32))
    files = write_model(tmp_path, [named(ops.matmul(given, weights, False, False), "Y")], [given])
    del given, weights
    config = configured("openvino", {"X": (FP32, (side,))}, {"Y": (FP32, (side,))})

    def once() -> int:
        model = OpenVINOBackend().load(config, files, NO_SERVICES)
        instance = model.open(Placement("a"))
        instance.compute({"X": np.ones((2, side), np.float32)}, ["Y"])
        instance.close()
        model.close()
        return int(psutil.Process().memory_info().rss)

    before = max(once() for _ in range(2))
    # One model kept each time would be 180 MB more at the end.
    assert min([once() for _ in range(5)][-2:]) - before < 60e6


DAMAGED = """
import re, sys
import logging; logging.disable()
import numpy as np
from pathlib import Path
from tabular_models import *
from headrace.core.errors import HeadraceError
from headrace.core.dtypes import FP32
folder = Path(sys.argv[1])
xml, weights = ((folder / name).read_bytes() for name in ("model.xml", "model.bin"))
config = configured("openvino", {"X": (FP32, (16,))}, {"Y": (FP32, (3,))})
pairs = [(copy, weights) for copy in damaged(xml, 60, 4)] + [(xml, copy) for copy in damaged(weights, 20, 4)]
for number in (b"99999999999", b"18446744073709551615", b"-8", b"1"):
    for name in (b"offset", b"size"):
        pairs.append((re.sub(name + b'="[0-9]+"', name + b'="' + number + b'"', xml), weights))
served = 0
for copy, beside in pairs:
    files = placed(folder, copy, "model.xml")
    (files.version_folder / "model.bin").write_bytes(beside)
    try:
        open_instance(config, files).compute({"X": np.zeros((3, 16), np.float32)}, ["Y"])
        served += 1
    except HeadraceError:
        pass
print("served", served)
"""


@pytest.mark.slow  # quick: test_backend_contract.py, files that are no model
def test_damaged_files_do_not_end_the_process(tmp_path: Path) -> None:
    files = mlp(tmp_path / "whole")
    ended = in_a_process(DAMAGED, str(files.version_folder))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert 0 < int(ended.stdout.split()[-1]) < 80


def test_entities_are_not_expanded(tmp_path: Path) -> None:
    files = mlp(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("16")
    xml = (files.version_folder / "model.xml").read_text()
    bomb = f'<!DOCTYPE net [<!ENTITY a "aaaaaaaaaa"><!ENTITY b SYSTEM "file://{secret}">]>'
    for entity in ("&a;", "&b;"):
        changed = xml.replace("<net ", bomb + "<net ", 1).replace("?,16", f"?,{entity}", 1)
        assert entity in changed
        (files.version_folder / "model.xml").write_text(changed)
        with pytest.raises(InvalidArgument, match="OpenVINO cannot read 'model.xml'"):
            open_instance(configured("openvino", *MLP), files)


SILENT = """
import socket, subprocess, sys, multiprocessing
heard = []
def never(*arguments, **words):
    heard.append(arguments)
    raise OSError("no")
socket.socket.connect = socket.getaddrinfo = never
subprocess.Popen.__init__ = never
multiprocessing.process.BaseProcess.start = never
from pathlib import Path
from tabular_models import *
from headrace.core.dtypes import FP32
files = ModelFiles(Path(sys.argv[1]).parent, 1, Path(sys.argv[1]))
open_instance(configured("openvino", {"X": (FP32, (16,))}, {"Y": (FP32, (3,))}), files)
print(heard, [name for name in sys.modules if name.startswith("openvino_telemetry")], list(Path.home().iterdir()))
"""


def test_openvino_telemetry_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = mlp(tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ended = in_a_process(SILENT, str(files.version_folder))
    assert ended.stdout.strip() == "[] [] []", ended.stderr[-2000:]


def test_a_model_without_names_has_those_of_its_nodes(tmp_path: Path) -> None:
    ov = import_openvino()
    given = ov.opset13.parameter(ov.PartialShape([-1, 4]), ov.Type.f32, name="first")
    doubled = ov.opset13.add(given, given, name="sum")
    files = write_model(tmp_path, [doubled], [given])
    xml = (files.version_folder / "model.xml").read_text()
    (files.version_folder / "model.xml").write_text(re.sub(r' (output_)?names="[^"]*"', "", xml))
    answer = completed_tensors("openvino", files)
    assert list(answer["input"]) == ["first"]
    (output,) = answer["output"]
    config = configured("openvino", {"first": (FP32, (4,))}, {output: (FP32, (4,))})
    rows = np.ones((2, 4), np.float32)
    assert open_instance(config, files).compute({"first": rows}, [output])[output].tolist() == [[2] * 4] * 2
