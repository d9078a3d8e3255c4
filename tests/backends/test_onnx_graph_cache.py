# SPDX-License-Identifier: Apache-2.0
"""The optimised graph that is kept beside an ONNX model: found again, made anew, never in the way."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx_graphs import NO_SERVICES, configured, graph, open_instance, placed

from headrace.backends.contract import ModelFiles
from headrace.backends.onnx import backend as onnx_backend
from headrace.backends.onnx.backend import OnnxBackend
from headrace.core.errors import InvalidArgument
from headrace.engine.repository.scan import scan

CACHED = configured(parameters={"optimized_model_cache": "1"})
ROWS = {"X": np.array([[1, -2, 3, 4]], np.float32)}


def model(factor: float) -> bytes:
    """X times a number that is worked out of two when the graph is optimised."""
    row = (TensorProto.FLOAT, ["n", 4])
    nodes = [helper.make_node("Add", ["A", "B"], ["C"]), helper.make_node("Mul", ["X", "C"], ["Y"])]
    return graph(nodes, {"X": row}, {"Y": row}, {"A": np.float32([factor]), "B": np.float32([1])})


def cached_files(files: ModelFiles) -> list[Path]:
    return sorted(path for path in files.version_folder.iterdir() if path.name.startswith("."))


def answer(files: ModelFiles, config: Any = CACHED) -> list[float]:
    instance = open_instance(config, files)
    values: list[float] = instance.compute(ROWS, ["Y"])["Y"][0].tolist()
    instance.close()
    return values


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of which sessions are opened, by their names."""
    names: list[str] = []
    real = onnx_backend.new_session

    def noted(source: str, options: Any, chosen: Any) -> Any:
        names.append(Path(source).name)
        return real(source, options, chosen)

    monkeypatch.setattr(onnx_backend, "new_session", noted)
    return names


def test_the_graph_is_kept_and_opened_the_next_time(tmp_path: Path, sources: list[str]) -> None:
    files = placed(tmp_path, model(2))
    assert answer(files) == [3, -6, 9, 12]
    (path,) = cached_files(files)
    assert path.name.startswith(".model.onnx.") and path.suffix == ".optimized"
    # Optimised it is: two constants have become one.
    assert [node.op_type for node in onnx.load(str(path), format="protobuf").graph.node] == ["Mul"]
    before = path.stat()
    assert answer(files) == [3, -6, 9, 12]
    assert sources == ["model.onnx", path.name]
    assert [entry.stat() for entry in cached_files(files)] == [before]


def test_nothing_is_cached_unless_configured(tmp_path: Path) -> None:
    files = placed(tmp_path, model(2))
    assert answer(files, configured()) == [3, -6, 9, 12]
    assert answer(files, configured(parameters={"optimized_model_cache": "false"})) == [3, -6, 9, 12]
    assert cached_files(files) == []
    with pytest.raises(InvalidArgument, match="optimized_model_cache is 'maybe': use true or false"):
        OnnxBackend().load(configured(parameters={"optimized_model_cache": "maybe"}), files, NO_SERVICES)


def test_another_model_file_is_not_served_from_the_old_graph(tmp_path: Path) -> None:
    """Of the same size and the same times, as a container image has them."""
    files = placed(tmp_path, model(2))
    file = files.version_folder / "model.onnx"
    stat = file.stat()
    answer(files)
    (old,) = cached_files(files)
    file.write_bytes(model(4))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert answer(files) == [5, -10, 15, 20]
    (new,) = cached_files(files)
    assert new != old


def test_other_settings_have_a_graph_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = placed(tmp_path, model(2))
    answer(files)
    basic = configured(parameters={"optimized_model_cache": "1", "graph_optimization_level": "-1"})
    assert answer(files, basic) == [3, -6, 9, 12]
    assert len(cached_files(files)) == 2
    monkeypatch.setattr(ort, "__version__", "9.9.9")
    assert answer(files) == [3, -6, 9, 12]
    assert len(cached_files(files)) == 3


@pytest.mark.parametrize("damage", [b"", b"no graph", None], ids=["empty", "text", "one bit"])
def test_a_damaged_graph_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | None) -> None:
    files = placed(tmp_path, model(2))
    answer(files)
    (path,) = cached_files(files)
    whole = path.read_bytes()
    place = whole.index(np.float32(3).tobytes())
    path.write_bytes(whole[:place] + b"\1" + whole[place + 1 :] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert answer(files) == [3, -6, 9, 12]
    assert ": it is damaged; optimising again" in caplog.text
    assert [entry.read_bytes() for entry in cached_files(files)] == [whole]


def test_a_graph_that_does_not_open_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = placed(tmp_path, model(2))
    answer(files)
    real = onnx_backend.new_session

    def refusing(source: str, options: Any, chosen: Any) -> Any:
        if source.endswith(".optimized"):
            raise RuntimeError("an operator of another machine\nand more")
        return real(source, options, chosen)

    monkeypatch.setattr(onnx_backend, "new_session", refusing)
    assert answer(files) == [3, -6, 9, 12]
    assert ": an operator of another machine and more; optimising again" in caplog.text
    assert len(cached_files(files)) == 1


def test_an_unwritable_folder_does_not_prevent_loading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    files = placed(tmp_path, model(2))
    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr("tempfile.mkstemp", denied)
    assert answer(files) == [3, -6, 9, 12]
    assert "cannot cache its graph in" in caplog.text and "Permission denied" in caplog.text
    assert cached_files(files) == []


def test_a_graph_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = placed(tmp_path, model(2))

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert answer(files) == [3, -6, 9, 12]
    assert "cannot cache its graph" in caplog.text
    assert cached_files(files) == []


def test_instances_share_the_kept_graph(tmp_path: Path, sources: list[str]) -> None:
    files = placed(tmp_path, model(2))
    loaded = OnnxBackend().load(CACHED, files, NO_SERVICES)
    for _ in range(3):
        loaded.open(onnx_backend.Placement("test_0_cpu")).close()
    assert [name.startswith(".") for name in sources] == [False, True, True]


def test_caching_a_graph_does_not_change_the_model(tmp_path: Path) -> None:
    files = placed(tmp_path, model(2))
    before = scan([tmp_path]).models["test"]
    answer(files)
    assert cached_files(files)
    assert scan([tmp_path]).models["test"] == before


def test_weights_in_another_file_count(tmp_path: Path) -> None:
    files = placed(tmp_path, None)
    file = files.version_folder / "model.onnx"
    parts: dict[str, Any] = {"save_as_external_data": True, "location": "weights", "size_threshold": 0}
    onnx.save_model(onnx.load_from_string(model(2)), file, **parts)
    assert answer(files) == [3, -6, 9, 12]
    weights = files.version_folder / "weights"
    weights.write_bytes(weights.read_bytes().replace(np.float32(2).tobytes(), np.float32(4).tobytes()))
    assert answer(files) == [5, -10, 15, 20]
    assert len(cached_files(files)) == 1
