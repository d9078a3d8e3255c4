# SPDX-License-Identifier: Apache-2.0
"""`headrace models convert`: convert Caffe2 files to an ONNX file, atomically."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from typer.testing import CliRunner

from headrace.backends.netdef.files import caffe2_message
from headrace.cli.convert import convert_netdef, find_net
from headrace.cli.models import models
from headrace.core.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from headrace.core.telemetry.progress import ProgressEvent

WEIGHTS = np.arange(12, dtype=np.float32).reshape(3, 4)


def write_net(folder: Path, net: str = "model.netdef", init: str = "init_model.netdef") -> None:
    """softmax(data W^T + b), of 4 numbers a row."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = caffe2_message("NetDef")()
    for name, array in (("w", WEIGHTS), ("b", np.ones(3, np.float32))):
        created = weights.op.add(type="GivenTensorFill", output=[name])
        created.arg.add(name="shape", ints=list(array.shape))
        created.arg.add(name="values", floats=array.ravel().tolist())
    message = caffe2_message("NetDef")(external_input=["data", "w", "b"], external_output=["y"])
    message.op.add(type="FC", input=["data", "w", "b"], output=["fc"])
    message.op.add(type="Softmax", input=["fc"], output=["y"])
    (folder / net).write_bytes(message.SerializeToString())
    (folder / init).write_bytes(weights.SerializeToString())


CONFIG = """
platform: "caffe2_netdef"
max_batch_size: 8
input { name: "data" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }
"""


def check(path: Path) -> Any:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = np.array([[1, 0, 0, 0], [0, 0, 0.5, 0]], np.float32)
    powers = np.exp(given @ WEIGHTS.T + 1)
    np.testing.assert_allclose(
        session.run(["y"], {"data": given})[0], powers / powers.sum(axis=1, keepdims=True), rtol=1e-5
    )
    return session


def test_a_folder_with_its_configuration(tmp_path: Path) -> None:
    write_net(tmp_path / "model" / "2")
    (tmp_path / "model" / "config.pbtxt").write_text(CONFIG)
    events: list[ProgressEvent] = []
    for source in (tmp_path / "model", tmp_path / "model" / "2", tmp_path / "model" / "2" / "model.netdef"):
        model = convert_netdef(source, tmp_path, overwrite=True, progress=events.append)
        assert model.target == tmp_path / "model.onnx"
        assert (model.inputs, model.outputs) == (("data",), ("y",))
        assert model.size_bytes == model.target.stat().st_size
        session = check(model.target)
        assert session.get_inputs()[0].shape == ["batch", 4]
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    assert {event.task for event in events} == {"convert model.netdef"}
    assert events[-1].state == "finished"
    assert [event.message for event in events if event.message][0] == "reading"
    assert "writing" in {event.message for event in events}


def test_json_for_programs(tmp_path: Path) -> None:
    write_net(tmp_path / "model")
    (tmp_path / "model" / "config.pbtxt").write_text(CONFIG)
    arguments = ("convert", str(tmp_path / "model"), str(tmp_path / "net.onnx"))
    result = CliRunner().invoke(models, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == {
        "source": str(tmp_path / "model" / "model.netdef"),
        "target": str(tmp_path / "net.onnx"),
        "inputs": ["data"],
        "outputs": ["y"],
        "nodes": document["nodes"],
        "size_bytes": (tmp_path / "net.onnx").stat().st_size,
    }
    output = CliRunner().invoke(models, [*arguments, "--overwrite"]).output
    assert (
        output == f"wrote {document['target']}: {document['nodes']} nodes, data -> y, {document['size_bytes']} bytes\n"
    )


def test_the_files_of_the_model_zoo(tmp_path: Path) -> None:
    write_net(tmp_path, "predict_net.pb", "init_net.pb")
    model = convert_netdef(tmp_path, tmp_path / "net.onnx", inputs=["data=-1,4"])
    check(model.target)
    assert list(tmp_path.glob(".*")) == []


def test_inputs_may_be_given_as_options(tmp_path: Path) -> None:
    write_net(tmp_path)
    model = convert_netdef(tmp_path, tmp_path / "a.onnx", inputs=["data=FP32:2,4"], outputs=["fc", "y"])
    assert model.outputs == ("fc", "y")
    assert check(model.target).get_inputs()[0].shape == [2, 4]
    with pytest.raises(InvalidArgument, match="reads .* which do not fit"):
        convert_netdef(tmp_path, tmp_path / "b.onnx", inputs=["data=-1,5"])
    for text in ("data", "=1,2", "data=", "data=a,b", "data=-2", "data=99999999999"):
        with pytest.raises(InvalidArgument, match=": write NAME=SIZES"):
            convert_netdef(tmp_path, tmp_path / "b.onnx", inputs=[text])
    with pytest.raises(InvalidArgument, match="cannot load the result|does not fit"):
        convert_netdef(tmp_path, tmp_path / "b.onnx", inputs=["data=INT64:-1,4"])
    assert not (tmp_path / "b.onnx").exists()


def test_without_shapes_it_converts_as_far_as_it_can(tmp_path: Path) -> None:
    write_net(tmp_path)
    model = convert_netdef(tmp_path, tmp_path / "a.onnx")
    check(model.target)
    message = caffe2_message("NetDef")(external_input=["gpu_0/data"], external_output=["y"])
    message.op.add(type="Softmax", input=["gpu_0/data"], output=["y"])
    (tmp_path / "model.netdef").write_bytes(message.SerializeToString())
    with pytest.raises(InvalidArgument, match=r"needs the shape.*--input gpu_0/data=-1,3,224,224"):
        convert_netdef(tmp_path, tmp_path / "b.onnx")


def test_what_is_there_is_not_lost(tmp_path: Path) -> None:
    write_net(tmp_path)
    target = tmp_path / "a.onnx"
    target.write_bytes(b"precious")
    with pytest.raises(AlreadyExists, match="exists already"):
        convert_netdef(tmp_path, target)
    (tmp_path / "model.netdef").write_bytes(b"damaged")
    events: list[ProgressEvent] = []
    with pytest.raises(InvalidArgument):
        convert_netdef(tmp_path, target, overwrite=True, progress=events.append)
    assert target.read_bytes() == b"precious"
    assert events[-1].state == "failed"


def test_nothing_is_left_behind_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_net(tmp_path)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(FailedPrecondition, match="cannot be written .No space left"):
        convert_netdef(tmp_path, tmp_path / "a.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_places_that_cannot_be_are_named(tmp_path: Path) -> None:
    write_net(tmp_path)
    with pytest.raises(InvalidArgument, match=r"use the extension \.onnx"):
        convert_netdef(tmp_path, tmp_path / "a.pb")
    with pytest.raises(NotFound, match="there is no folder"):
        convert_netdef(tmp_path, tmp_path / "nowhere" / "a.onnx")
    with pytest.raises(NotFound, match="there is no "):
        find_net(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(NotFound, match="has neither 'model.netdef' nor 'predict_net.pb'"):
        find_net(empty)
    (tmp_path / "init_model.netdef").unlink()
    with pytest.raises(FailedPrecondition, match="has no 'init_model.netdef' beside it"):
        convert_netdef(tmp_path, tmp_path / "a.onnx")
