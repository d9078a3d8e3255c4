# SPDX-License-Identifier: Apache-2.0
"""`headrace models init`: create a model folder from a file, atomically."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.backends import table
from headrace.cli import init
from headrace.cli.init import init_model
from headrace.core.errors import InvalidArgument
from headrace.core.extras import MissingExtra
from headrace.engine.repository.check import check_repository
from headrace.models.config.drafts import read_draft
from support.programs import run

PREDICT = """
import numpy as np
def predict(x: np.ndarray) -> np.ndarray:
    return x * 2
"""
TOLD_MODEL = """
class TritonPythonModel:
    def execute(self, requests): ...
"""


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["n", 4])],
        [onnx.helper.make_tensor_value_info("y", 1, ["n", 4])],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "in" / "relu.onnx"
    path.parent.mkdir()
    onnx.save_model(model, str(path))
    return path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_becomes_a_model_that_passes_the_check(tmp_path: Path, onnx_file: Path) -> None:
    models = tmp_path / "out" / "models"
    done = run("models", "init", onnx_file, "--repository", models)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1][:5] == ["relu.onnx", "an", "ONNX", "model", "onnxruntime"]
    assert ["input", "x", "FP32", "[4]"] in lines and ["output", "y", "FP32", "[4]"] in lines
    assert files(models) == ["relu/1/model.onnx", "relu/config.pbtxt"] and onnx_file.exists()
    message = read_draft(models / "relu").message
    assert (message.backend, message.max_batch_size, list(message.input[0].dims)) == ("onnxruntime", 64, [4])
    # What depends on the machine is not written down.
    assert not message.instance_group
    assert check_repository(models).problems == ()


def test_json_and_a_second_version(tmp_path: Path, onnx_file: Path) -> None:
    models = tmp_path / "models"
    document = json.loads(run("models", "init", onnx_file, "--repository", models, "--name", "m", "--json").stdout)
    assert (document["name"], document["version"], document["backend"]) == ("m", 1, "onnxruntime")
    assert document["wrote"] == [str(models / "m/config.pbtxt"), str(models / "m/1/model.onnx")]
    done = run("models", "init", onnx_file, "--repository", models, "--name", "m")
    assert done.returncode == 2 and "has a version 1 already" in done.stderr
    config = (models / "m" / "config.pbtxt").read_text()
    second = init_model(onnx_file, models, "m", "2", move=True)
    assert second.wrote == (models / "m/2/model.onnx",) and not onnx_file.exists()
    assert (models / "m" / "config.pbtxt").read_text() == config


def test_a_python_function_without_a_configuration(tmp_path: Path) -> None:
    source = tmp_path / "double" / "model.py"
    source.parent.mkdir()
    source.write_text(PREDICT)
    written = init_model(source, tmp_path / "models", "", "1", move=False)
    assert written.folder.name == "double" and [tensor.name for tensor in written.config.input] == ["x"]
    assert not written.remarks
    text = (written.folder / "config.pbtxt").read_text()
    assert 'backend: "python"' in text and "input {" not in text
    assert check_repository(tmp_path / "models").problems == ()


def test_a_class_for_triton_gets_a_configuration_to_fill_in(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TOLD_MODEL)
    written = init_model(tmp_path / "model.py", tmp_path / "models", "m", "1", move=False)
    assert any("has no inputs" in note for note in written.notes)
    assert "# input [" in (written.folder / "config.pbtxt").read_text()


def test_a_model_without_a_configuration_gets_one(tmp_path: Path, onnx_file: Path) -> None:
    folder = tmp_path / "models" / "m"
    (folder / "3").mkdir(parents=True)
    onnx_file.rename(folder / "3" / "best.onnx")
    written = init_model(folder, tmp_path / "unused", "", "1", move=False)
    assert written.version == 3 and written.wrote == (folder / "config.pbtxt",)
    assert files(folder) == ["3/best.onnx", "config.pbtxt"] and not (tmp_path / "unused").exists()
    assert read_draft(folder).message.default_model_filename == "best.onnx"
    assert check_repository(tmp_path / "models").problems == ()
    with pytest.raises(InvalidArgument, match=r"has a config\.pbtxt already"):
        init_model(folder, tmp_path / "unused", "", "1", move=False)
    with pytest.raises(InvalidArgument, match="is a model repository already"):
        init_model(folder.parent, tmp_path / "unused", "", "1", move=False)


def test_a_file_in_its_place_is_not_copied(tmp_path: Path, onnx_file: Path) -> None:
    models = tmp_path / "models"
    (models / "m" / "1").mkdir(parents=True)
    onnx_file.rename(models / "m" / "1" / "model.onnx")
    written = init_model(models / "m" / "1" / "model.onnx", models, "", "1", move=True)
    assert written.wrote == (models / "m" / "config.pbtxt",) and files(models) == ["m/1/model.onnx", "m/config.pbtxt"]


def test_a_broken_file_leaves_nothing_behind(tmp_path: Path, onnx_file: Path) -> None:
    onnx_file.write_bytes(onnx_file.read_bytes()[:-20])
    with pytest.raises(InvalidArgument):
        init_model(onnx_file, tmp_path / "models", "", "1", move=True)
    assert not (tmp_path / "models").exists() and onnx_file.exists()
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / "model.onnx").write_bytes(onnx_file.read_bytes())
    with pytest.raises(InvalidArgument):
        init_model(tmp_path / "models" / "m", tmp_path, "", "1", move=False)
    assert files(tmp_path / "models") == ["m/1/model.onnx"]


def test_a_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "m.pkl").write_bytes(b"\x80\x04.")
    done = run("models", "init", tmp_path / "m.pkl", "--repository", tmp_path / "models")
    assert done.returncode == 2 and "is a pickle" in done.stderr and "skops.io.dump" in done.stderr
    assert not (tmp_path / "models").exists()


def test_without_its_package_a_model_is_laid_out_all_the_same(
    tmp_path: Path, onnx_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise MissingExtra(f"backend '{name}'", table.EXTRAS[name])

    monkeypatch.setattr(init, "backend_named", missing)
    written = init_model(onnx_file, tmp_path / "models", "", "1", move=False)
    assert "pip install 'headrace[onnx]'" in written.notes[0]
    text = (written.folder / "config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in text and "input" not in text


def test_torchscript_does_not_report_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Untelling:
        def complete(self, config: Any, files: Any) -> None:
            raise InvalidArgument("write input and output")

    monkeypatch.setattr(init, "backend_named", lambda name: Untelling())
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        for name in ("n/data.pkl", "n/code/__torch__.py", "n/constants.pkl"):
            archive.writestr(name, b"")
    written = init_model(tmp_path / "net.pt", tmp_path / "models", "", "1", move=False)
    assert written.notes == ("write input and output",)
    text = (written.folder / "config.pbtxt").read_text()
    assert 'name: "net"' in text and '# input [ { name: "INPUT__0"' in text
    draft = read_draft(written.folder)
    assert draft.backend == "pytorch"


def test_names(tmp_path: Path, onnx_file: Path) -> None:
    odd = onnx_file.rename(onnx_file.with_name("résumé v2.onnx"))
    assert init_model(odd, tmp_path / "models", "", "1", move=False).folder.name == "r_sum__v2"
    plain = odd.rename(odd.with_name("model.onnx"))
    assert init_model(plain, tmp_path / "models", "", "1", move=False).folder.name == "in"
    for name, version, text in (("a/b", "1", "model name"), ("m", "x", "model version 'x'")):
        with pytest.raises(InvalidArgument, match=text):
            init_model(plain, tmp_path / "models", name, version, move=False)


def test_a_tensorflow_serving_layout_gets_advice(tmp_path: Path) -> None:
    version = tmp_path / "resnet" / "1563"
    version.mkdir(parents=True)
    (version / "saved_model.pb").write_bytes(b"\x08\x01\x12\x01x")
    with pytest.raises(InvalidArgument, match=r"resnet/1563 --repository DIR --name resnet` copies it"):
        init_model(version.parent, tmp_path / "models", "", "1", move=False)
    assert init._name_of(version) == "resnet"


def test_another_backend_needs_another_name(tmp_path: Path, onnx_file: Path) -> None:
    models = tmp_path / "models"
    (models / "m" / "1").mkdir(parents=True)
    (models / "m" / "config.pbtxt").write_text('backend: "identity"')
    with pytest.raises(InvalidArgument, match="is a model of backend 'identity'"):
        init_model(onnx_file, models, "m", "2", move=False)
    assert files(models) == ["m/config.pbtxt"]
