# SPDX-License-Identifier: Apache-2.0
"""Format detection by content. Files of frameworks are imitated as far as they are read; ONNX files are real."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
import zlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.core.errors import InvalidArgument
from headrace.models.config.detection import Detected, detect

PICKLE = b"\x80\x04\x95\x03\x02\0\0\0\0\0\0\x8c\x1esklearn.linear_model"


def field(number: int, content: bytes | int) -> bytes:
    """A field of a protobuf message, small enough for one byte of length."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    return bytes([number << 3 | 2, len(content)]) + content


def graphdef() -> bytes:
    node = field(1, b"scope/x") + field(2, b"Placeholder")
    return field(1, node) + field(1, field(1, b"y") + field(2, b"Relu") + field(3, b"scope/x")) + field(4, field(1, 21))


def netdef(*types: bytes) -> bytes:
    operators = [field(1, b"data") + field(2, b"out") + field(4, type_name) for type_name in types]
    return field(1, b"squeezenet") + b"".join(field(2, operator) for operator in operators) + field(7, b"data")


def archive(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, b"content")
    return path


def onnx_model(path: Path, *, external: bool = False, in_branch: bool = False) -> Path:
    weights = numpy_helper.from_array(np.ones((4, 2), np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    if in_branch:
        branch = helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("y", 1, None)], [weights])
        yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("c", TensorProto.BOOL, [], [True]))
        choice = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
        nodes, initializers = [yes, choice], []
    else:
        nodes, initializers = [node], [weights]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if external:
        onnx.save_model(
            model,
            str(path),
            save_as_external_data=True,
            location="weights.bin",
            size_threshold=0,
            convert_attribute=True,
        )
    else:
        onnx.save_model(model, str(path))
    return path


def backend_and_parts(detected: Detected) -> tuple[str, list[tuple[str, str]]]:
    return detected.backend, [(part.source.name, part.name) for part in detected.parts]


@pytest.mark.parametrize(
    ("content", "backend", "name"),
    [
        (graphdef(), "tensorflow", "model.graphdef"),
        (graphdef()[:-3], "tensorflow", "model.graphdef"),
        (b'{"learner":{"attributes":{}},"version":[3,2,0]}', "xgboost", "model.json"),
        (b'{ "version": [1, 0, 0],\n "learner": {}}', "xgboost", "model.json"),
        (b"{L\0\0\0\0\0\0\0\x07learner{L", "xgboost", "model.ubj"),
        (b"tree\nversion=v4\nnum_class=1\n", "lightgbm", "model.txt"),
        (b"ftrt\x01\0\0\0" + bytes(30), "tensorrt", "model.plan"),
    ],
)
def test_a_file_is_what_it_contains_whatever_it_is_called(
    tmp_path: Path, content: bytes, backend: str, name: str
) -> None:
    (tmp_path / "file.onnx").write_bytes(content)
    assert backend_and_parts(detect(tmp_path / "file.onnx")) == (backend, [("file.onnx", name)])


def test_archives_of_torch_and_skops(tmp_path: Path) -> None:
    script = archive(tmp_path / "a.pt", "a/data.pkl", "a/code/__torch__.py", "a/constants.pkl", "a/version")
    program = archive(tmp_path / "b.zip", "b/models/model.json", "b/archive_format", "b/data/sample_inputs/model.pt")
    compiled = archive(tmp_path / "c.pt2", "c/data/aotinductor/model/x.so", "c/archive_format")
    skops = archive(tmp_path / "d.bin", "123.npy", "schema.json")
    assert backend_and_parts(detect(script)) == ("pytorch", [("a.pt", "model.pt")])
    assert backend_and_parts(detect(program)) == ("pytorch", [("b.zip", "model.pt2")])
    assert "machine code" in detect(compiled).what and detect(compiled).parts[0].name == "model.pt2"
    assert backend_and_parts(detect(skops)) == ("sklearn", [("d.bin", "model.skops")])
    assert [detect(path).has_signature for path in (script, program, compiled, skops)] == [False, True, False, True]


def test_onnx_includes_the_files_with_its_weights(tmp_path: Path) -> None:
    assert backend_and_parts(detect(onnx_model(tmp_path / "plain.bin"))) == (
        "onnxruntime",
        [("plain.bin", "model.onnx")],
    )
    for name, in_branch in (("large.onnx", False), ("branch.onnx", True)):
        path = onnx_model(tmp_path / name, external=True, in_branch=in_branch)
        assert backend_and_parts(detect(path))[1] == [(name, "model.onnx"), ("weights.bin", "weights.bin")]
        (tmp_path / "weights.bin").unlink()
        with pytest.raises(InvalidArgument, match="keeps its weights in 'weights.bin', which is not there"):
            detect(path)


def test_onnx_that_wants_files_from_elsewhere_is_refused(tmp_path: Path) -> None:
    path = onnx_model(tmp_path / "m.onnx", external=True)
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"../../x.bin"))
    with pytest.raises(InvalidArgument, match=r"wants its weights from '\.\./\.\./x\.bin'"):
        detect(path)


def test_both_halves_of_a_caffe2_model_are_found(tmp_path: Path) -> None:
    (tmp_path / "predict_net.pb").write_bytes(netdef(b"Conv", b"Relu"))
    with pytest.raises(InvalidArgument, match=r"its weights \(init_net.pb\) is not beside it"):
        detect(tmp_path / "predict_net.pb")
    (tmp_path / "init_net.pb").write_bytes(netdef(b"GivenTensorFill", b"ConstantFill"))
    for given in ("predict_net.pb", "init_net.pb", "."):
        parts = [("predict_net.pb", "model.netdef"), ("init_net.pb", "init_model.netdef")]
        assert backend_and_parts(detect(tmp_path / given)) == ("netdef", parts)


def test_openvino_has_two_files(tmp_path: Path) -> None:
    (tmp_path / "ir.xml").write_text('<?xml version="1.0"?>\n<net name="m" version="11"></net>')
    with pytest.raises(InvalidArgument, match=r"put ir\.bin beside it"):
        detect(tmp_path / "ir.xml")
    (tmp_path / "ir.bin").write_bytes(b"\0\1")
    assert backend_and_parts(detect(tmp_path / "ir.xml")) == (
        "openvino",
        [("ir.xml", "model.xml"), ("ir.bin", "model.bin")],
    )


def test_folders(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (saved / "variables").mkdir(parents=True)
    (saved / "saved_model.pb").write_bytes(field(1, 1) + field(2, b"x"))
    detected = detect(saved)
    assert backend_and_parts(detected) == ("tensorflow", [("saved", "model.savedmodel")])
    assert detected.platform == "tensorflow_savedmodel"
    with pytest.raises(InvalidArgument, match="give the folder it is in"):
        detect(saved / "saved_model.pb")
    code = tmp_path / "code"
    (code / "weights").mkdir(parents=True)
    for name in ("model.py", "helper.py", "config.pbtxt"):
        (code / name).write_text("")
    assert [part.name for part in detect(code).parts] == ["model.py", "helper.py", "weights"]
    one = tmp_path / "one"
    one.mkdir()
    onnx_model(one / "net.onnx", external=True)
    (one / "README.md").write_text("A model.")
    assert detect(one).parts[0].source == one / "net.onnx"
    onnx_model(one / "other.onnx")
    with pytest.raises(InvalidArgument, match=r"has several models, net\.onnx, other\.onnx: give one of them"):
        detect(one)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InvalidArgument, match="optimum-cli export onnx"):
        detect(tmp_path / "hub")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("m.onnx", PICKLE, "is a pickle"),
        ("m.pt", b"\x80\x02\x8a\nl\xfc\x9cF", "is a pickle made by torch.save"),
        ("m.z", zlib.compress(PICKLE * 50), "is a pickle"),
        ("m.gz", gzip.compress(PICKLE, mtime=0), "is a pickle"),
        ("m.bz2", bz2.compress(PICKLE), "is a pickle"),
        ("m.xz", lzma.compress(PICKLE), "is a pickle"),
        ("m.lzma", lzma.compress(PICKLE, lzma.FORMAT_ALONE), "is a pickle"),
        ("m.pkl", b"(lp0\n.", "is a pickle"),
        ("m.h5", b"\x89HDF\r\n\x1a\n", r"model\.export"),
        ("m.safetensors", b"\x40\0\0\0\0\0\0\0" + b'{"a":{}}', "weights without a model"),
        ("m.gguf", b"GGUF\3\0", "llama.cpp"),
        ("m.tflite", b"\x1c\0\0\0TFL3", "TensorFlow Lite"),
        ("m.onnx", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("m.onnx", b"", "is empty"),
        ("m.plan", b"some text", "is not a valid TensorRT file"),
        ("m.onnx", b"some text", r"m\.onnx is not a valid ONNX file"),
        ("m.py", b"def broken(", r"m\.py:1: this is not Python"),
        ("m.xml", b"<PMML version='4'>", "PMML"),
        ("m.json", b'{"version": 1}', "has an unknown format. Known are: ONNX"),
        ("m.bin", bytes(range(256)), "has an unknown format"),
        ("m.zip", b"PK\x03\x04 and no end", "cut off or damaged"),
    ],
)
def test_what_is_not_served_is_named_with_a_remedy(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgument, match=text):
        detect(tmp_path / name)


def test_archives_that_are_not_served(tmp_path: Path) -> None:
    for names, text in (
        (("m/data.pkl", "m/data/0"), "torch.save"),
        (("config.json", "metadata.json", "model.weights.h5"), "Keras"),
        (("saved/saved_model.pb",), "unpack it"),
        (("a.txt",), r"zip archive of an unknown format \(a\.txt\)"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            detect(archive(tmp_path / "m.zip", *names))
    with pytest.raises(InvalidArgument, match="is not there"):
        detect(tmp_path / "none")
