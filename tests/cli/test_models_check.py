# SPDX-License-Identifier: Apache-2.0
"""`headrace models check`: lines that an editor can jump to, and an exit code that CI can use."""

from __future__ import annotations

import json
from pathlib import Path

from onnx import TensorProto, helper

from support.programs import run
from support.tiny_models import BROKEN, CONFIG, make_models


def test_every_mistake_on_a_separate_line(tmp_path: Path) -> None:
    make_models(tmp_path, fine=CONFIG, broken=BROKEN, wrong=CONFIG.replace("max_batch_size: 8", "max_batch_size: -1"))
    done = run("models", "check", tmp_path)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("broken/config.pbtxt:3: input: 'dimms' is not a field") for line in lines)
    assert any(line.startswith("wrong/config.pbtxt:2: max_batch_size: -1 is negative") for line in lines)
    results = {line.split()[0]: line.split()[1] for line in lines if len(line.split()) == 3}
    assert results == {"MODEL": "RESULT", "fine": "fine", "broken": "wrong", "wrong": "wrong"}


def test_nothing_wrong(tmp_path: Path) -> None:
    make_models(tmp_path, fine=CONFIG)
    done = run("models", "check", tmp_path)
    assert done.returncode == 0 and done.stdout.splitlines()[1].split() == ["fine", "fine", "0"]


def test_json(tmp_path: Path) -> None:
    make_models(tmp_path / "a", broken=BROKEN)
    make_models(tmp_path / "b", fine=CONFIG)
    done = run("models", "check", tmp_path / "a", tmp_path / "b", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1 and report["models"] == ["broken", "fine"]
    (problem,) = report["problems"]
    assert (problem["path"], problem["line"], problem["field"]) == ("broken/config.pbtxt", 3, "input")


def test_nothing_there(tmp_path: Path) -> None:
    assert "no models found" in run("models", "check", tmp_path).stdout
    done = run("models", "check", tmp_path / "none")
    assert done.returncode == 2 and "does not exist" in done.stderr


def test_what_only_loading_finds_is_found(tmp_path: Path) -> None:
    config = CONFIG.replace('"identity"', '"onnxruntime"')
    make_models(tmp_path, renamed=config.replace("INPUT0", "other"), damaged=config, sound=config, code="")
    for name in ("renamed", "damaged", "sound"):
        (tmp_path / name / "1/model.onnx").write_bytes(doubling_model())
    (tmp_path / "damaged/1/model.onnx").write_bytes(b"no model")
    (tmp_path / "code/1/model.py").write_text("def predict(x):\n    return x\n\n\nraise KeyError('weights')\n")
    done = run("models", "check", tmp_path)
    assert done.returncode == 1
    assert (
        "renamed/config.pbtxt:3: input.name: unexpected inference input 'other', allowed inputs are: INPUT0"
        in done.stdout
    )
    assert "damaged/1/model.onnx is not a valid ONNX file" in done.stdout
    assert "\ndamaged/1: " in "\n" + done.stdout and "KeyError: 'weights'" in done.stdout
    results = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines() if len(line.split()) == 3}
    assert results.items() >= {"sound": "fine", "renamed": "wrong", "damaged": "wrong", "code": "wrong"}.items()


def test_without_loading_only_configurations_are_checked(tmp_path: Path) -> None:
    make_models(tmp_path, renamed=CONFIG.replace('"identity"', '"onnxruntime"').replace("INPUT0", "other"))
    (tmp_path / "renamed/1/model.onnx").write_bytes(doubling_model())
    assert run("models", "check", tmp_path, "--no-load").returncode == 0


def test_a_gpu_that_is_not_here_is_a_warning(tmp_path: Path) -> None:
    make_models(tmp_path, far=CONFIG + "instance_group { kind: KIND_GPU gpus: [ 7 ] }\n")
    done = run("models", "check", tmp_path, "--gpus", "8")
    assert done.returncode == 0 and "far/1: was not loaded: this machine has no GPU 7" in done.stdout


def doubling_model() -> bytes:
    """INPUT0 plus itself is OUTPUT0."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("INPUT0", "OUTPUT0")]
    node = helper.make_node("Add", ["INPUT0", "INPUT0"], ["OUTPUT0"])
    graph = helper.make_graph([node], "double", tensors[:1], tensors[1:])
    return bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8).SerializeToString()
    )


def test_a_misnamed_file_is_reported_with_the_expected_name(tmp_path: Path) -> None:
    make_models(tmp_path, named=CONFIG.replace('"identity"', '"onnxruntime"'), bare="")
    for name in ("named", "bare"):
        (tmp_path / name / "1/net.onnx").write_bytes(doubling_model())
    (tmp_path / "bare/config.pbtxt").unlink(missing_ok=True)
    lines = run("models", "check", tmp_path).stdout.splitlines()
    remedy = "found net.onnx, expected model.onnx; rename it or set default_model_filename"
    assert [line for line in lines if "net.onnx" in line] == [
        f"bare/config.pbtxt: backend: version 1 of model 'bare' has no model file: {remedy}",
        f"named/1: {remedy}",
    ]
