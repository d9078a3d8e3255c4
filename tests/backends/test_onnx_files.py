# SPDX-License-Identifier: Apache-2.0
"""What the ONNX backend reads of a model's files: the outline without weights, and weights in files of their own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import NO_SERVICES, configured, graph, identity, open_instance, placed

from headrace.backends.contract import ModelFiles
from headrace.backends.onnx import session as onnx_session
from headrace.backends.onnx.backend import OnnxBackend
from headrace.backends.onnx.model_file import read_outline
from headrace.backends.onnx.session import read_signature
from headrace.core.dtypes import FP32, INT64
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument

SIDE = 64
ROW = (TensorProto.FLOAT, ["n", SIDE])
SILENT = configured({}, {}, max_batch_size=0)
WEIGHTS = {"W": np.eye(SIDE, dtype=np.float32) * 3, "SHAPE": np.array([-1, 2, SIDE // 2])}


def network(**more: Any) -> bytes:
    """X times W, reshaped: the shape of Y follows from a small constant, and nothing from the large one."""
    nodes = [helper.make_node("MatMul", ["X", "W"], ["a"]), helper.make_node("Reshape", ["a", "SHAPE"], ["Y"])]
    return graph(nodes, {"X": ROW, **more}, {"Y": (TensorProto.FLOAT, ["n", "i", "j"])}, WEIGHTS)


def test_the_signature_is_read_without_the_weights(tmp_path: Path) -> None:
    files = placed(tmp_path, network())
    file = files.version_folder / "model.onnx"
    outline = read_outline(file)
    assert outline is not None
    assert outline.weights == {"W"} and outline.optional == frozenset() and outline.is_complete
    assert len(outline.model) < 1000 < file.stat().st_size
    reported = read_signature(SILENT, file, outline)
    assert reported == read_signature(SILENT, file, None)
    assert list(reported.inputs) == ["X"] and reported.outputs["Y"].shape == (-1, 2, SIDE // 2)


def test_completing_opens_no_session_of_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[Any] = []
    real = onnx_session.new_session

    def noted(source: Any, options: Any, chosen: Any) -> Any:
        sources.append(source)
        return real(source, options, chosen)

    monkeypatch.setattr(onnx_session, "new_session", noted)
    files = placed(tmp_path, network())
    message = OnnxBackend().complete(SILENT, files)
    assert message is not None and list(message.output[0].dims) == [2, SIDE // 2]
    assert [type(source) for source in sources] == [bytes]
    declared = configured({"X": (FP32, (SIDE,))}, {"Y": (FP32, (2, SIDE // 2))})
    assert OnnxBackend().complete(declared, files) is None
    assert len(sources) == 1
    assert open_instance(declared, files).compute({"X": np.ones((1, SIDE), np.float32)}, ["Y"])["Y"].sum() == 3 * SIDE


def test_weights_that_callers_may_give(tmp_path: Path) -> None:
    """An initialiser that is also an input is for when none is given; before version 4 of the format it was fixed."""
    model = onnx.load_from_string(network(W=(TensorProto.FLOAT, [SIDE, SIDE])))
    for version, optional in ((8, ["W"]), (3, [])):
        model.ir_version = version
        files = placed(tmp_path / str(version), model.SerializeToString())
        file = files.version_folder / "model.onnx"
        reported = read_signature(SILENT, file, read_outline(file))
        assert (list(reported.inputs), list(reported.optional)) == (["X"], optional)
        assert reported == read_signature(SILENT, file, None)
    files = placed(tmp_path, network(W=(TensorProto.FLOAT, [SIDE, SIDE])))
    config = configured(
        {"X": (FP32, (-1, SIDE)), "W": (FP32, (SIDE, SIDE))}, {"Y": (FP32, (-1, 2, SIDE // 2))}, max_batch_size=0
    )
    rows = np.ones((1, SIDE), np.float32)
    instance = open_instance(config, files)
    assert instance.compute({"X": rows}, ["Y"])["Y"].sum() == 3 * SIDE
    assert instance.compute({"X": rows, "W": np.eye(SIDE, dtype=np.float32)}, ["Y"])["Y"].sum() == SIDE


def test_an_operator_is_checked_together_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = placed(tmp_path, network())
    real = onnx_session.new_session

    def only_files(source: Any, options: Any, chosen: Any) -> Any:
        if isinstance(source, bytes):
            raise RuntimeError("W must be a constant")
        return real(source, options, chosen)

    monkeypatch.setattr(onnx_session, "new_session", only_files)
    message = OnnxBackend().complete(SILENT, files)
    assert message is not None and [tensor.name for tensor in message.input] == ["X"]


def test_a_file_that_is_not_a_model_has_no_outline(tmp_path: Path) -> None:
    whole = network()
    file = tmp_path / "model.onnx"
    broken = [b"", b"\0", b"hello", b"\xff" * 40, whole[:-1], whole[: len(whole) // 2], whole + b"\x3a", b"\x3a\x7f"]
    for content in broken:
        file.write_bytes(content)
        assert read_outline(file) is None, content[:20]
    assert read_outline(tmp_path / "none") is None
    # Two graphs: protobuf would merge them.
    file.write_bytes(whole + whole)
    assert read_outline(file) is None


def test_any_byte_may_be_wrong(tmp_path: Path) -> None:
    """Whatever is in a file, it is read, left to ONNX Runtime, or refused in our words."""
    whole = bytearray(external(tmp_path, "w.bin").read_bytes())
    files = ModelFiles(tmp_path / "test", 1, tmp_path / "test" / "1")
    random = np.random.default_rng(3)
    logging.getLogger("headrace.backends").setLevel(logging.CRITICAL)
    try:
        for _ in range(150):
            damaged = bytearray(whole)
            for place in random.integers(0, len(whole), 3):
                damaged[place] = random.integers(0, 256)
            (files.version_folder / "model.onnx").write_bytes(damaged)
            try:
                OnnxBackend().complete(SILENT, files)
                OnnxBackend().load(configured(), files, NO_SERVICES)
            except HeadraceError:
                pass
    finally:
        logging.getLogger("headrace.backends").setLevel(logging.NOTSET)


def external(folder: Path, location: str, *, offset: int = 0, length: int = 16) -> Path:
    """Version 1 of `test` as X + W, with W (four times 5) in another file."""
    row = (TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("Add", ["X", "W"], ["Y"])]
    model = onnx.load_from_string(graph(nodes, {"X": row}, {"Y": row}, {"W": np.full(4, 5, np.float32)}))
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(value))
    files = placed(folder, model.SerializeToString())
    (files.version_folder / "w.bin").write_bytes(bytes(offset) + np.full(4, 5, np.float32).tobytes())
    return files.version_folder / "model.onnx"


def files_of(file: Path) -> ModelFiles:
    return ModelFiles(file.parent.parent, 1, file.parent)


def test_weights_beside_the_model(tmp_path: Path) -> None:
    files = files_of(external(tmp_path, "w.bin", offset=4096))
    rows = np.ones((2, 4), np.float32)
    assert open_instance(configured(), files).compute({"X": rows}, ["Y"])["Y"].tolist() == [[6] * 4] * 2
    assert OnnxBackend().complete(SILENT, files) is not None


@pytest.mark.parametrize(
    "location", ["../secret.bin", "/etc/hostname", "a/../../../secret.bin", "", "link.bin", "*/x/*"]
)
def test_weights_outside_the_folder_are_not_read(tmp_path: Path, location: str) -> None:
    file = external(tmp_path, location)
    (tmp_path / "test" / "secret.bin").write_bytes(bytes(16))
    (file.parent / "link.bin").symlink_to("../secret.bin")
    for work in (OnnxBackend().complete, lambda config, files: open_instance(config, files)):
        with pytest.raises(HeadraceError, match="keeps weights in .*: put that file beside it"):
            work(configured(), files_of(file))


def test_weights_that_are_missing_or_cut_short_are_named(tmp_path: Path) -> None:
    file = external(tmp_path, "w.bin")
    (file.parent / "w.bin").write_bytes(bytes(15))
    with pytest.raises(
        InvalidArgument, match=r"'w\.bin' has 15 bytes, and 'model\.onnx' keeps .* byte 16: .*replace it"
    ):
        OnnxBackend().load(configured(), files_of(file), NO_SERVICES)
    (file.parent / "w.bin").unlink()
    with pytest.raises(FailedPrecondition, match=r"keeps weights in 'w\.bin', which is not there: put that file"):
        OnnxBackend().load(configured(), files_of(file), NO_SERVICES)


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4"])
def test_types_without_a_protocol_name_are_refused_as_inputs_and_left_out_as_outputs(tmp_path: Path, kind: str) -> None:
    small = (TensorProto.DataType.Value(kind), ["n", 4])
    wide = (TensorProto.FLOAT, ["n", 4])

    def cast(taken: Any, given: Any, to: int) -> ModelFiles:
        model = onnx.load_from_string(
            graph([helper.make_node("Cast", ["X"], ["Y"], to=to)], {"X": taken}, {"Y": given})
        )
        model.graph.node.append(helper.make_node("Neg", ["Z"], ["N"]))
        model.graph.input.append(helper.make_tensor_value_info("Z", *wide))
        model.graph.output.append(helper.make_tensor_value_info("N", *wide))
        model.opset_import[0].version = 21
        model.ir_version = 10
        return placed(tmp_path, model.SerializeToString())

    files = cast(small, wide, TensorProto.FLOAT)
    both = configured({"X": (FP32, (4,)), "Z": (FP32, (4,))})
    for work in (lambda: OnnxBackend().complete(SILENT, files), lambda: open_instance(both, files)):
        with pytest.raises(
            InvalidArgument, match=rf"input 'X' .* type {kind.lower()}, which requests cannot carry: export"
        ):
            work()
    files = cast(wide, small, small[0])
    message = OnnxBackend().complete(SILENT, files)
    assert message is not None and [tensor.name for tensor in message.output] == ["N"]


def test_a_value_out_of_range_is_not_reported_as_a_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = [helper.make_node("Gather", ["TABLE", "X"], ["Y"])]
    table = {"TABLE": np.arange(3, dtype=np.float32)}
    model = graph(nodes, {"X": (TensorProto.INT64, ["n", 2])}, {"Y": (TensorProto.FLOAT, ["n", 2])}, table)
    instance = open_instance(configured({"X": (INT64, (2,))}, {"Y": (FP32, (2,))}), placed(tmp_path, model))
    with pytest.raises(
        InvalidArgument, match=r"a value is outside the range .*'X' \[1, 2\]|shapes 'X' \[1, 2\]: a value"
    ) as told:
        instance.compute({"X": np.array([[0, 7]])}, ["Y"])
    assert "does not accept inputs of these shapes" not in str(told.value)
    assert "idx=7" not in str(told.value) and "idx=7" in caplog.text
    assert instance.compute({"X": np.array([[0, 2]])}, ["Y"])["Y"].tolist() == [[0, 2]]


def test_a_model_that_does_not_open_is_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Commands that look at models have no log of their own: what is logged is printed beside their answer."""
    with caplog.at_level(logging.INFO), pytest.raises(InvalidArgument, match="is not a valid ONNX file"):
        OnnxBackend().complete(SILENT, placed(tmp_path, identity()[:-9]))
    (record,) = caplog.records
    assert record.exc_info is None and "\n" not in record.getMessage()
    assert "INVALID_PROTOBUF" in record.getMessage()


def test_constants_of_many_numbers_but_few_bytes_stay(tmp_path: Path) -> None:
    """The bound is by bytes in the file."""
    tensor = numpy_helper.from_array(np.zeros(900, np.float32), "W")
    model = onnx.load_from_string(identity("FP32", ["n", 900]))
    model.graph.initializer.append(tensor)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1100, np.float32), "V"))
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString())
    outline = read_outline(file)
    assert outline is not None and outline.weights == {"V"}
