# SPDX-License-Identifier: Apache-2.0
"""The example models do what their configurations say."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import onnx
import pytest

from headrace.backends.contract import ComputeInstance, EngineServices, ModelFiles, Placement
from headrace.backends.python.child import pb_utils
from headrace.backends.table import backend_named
from headrace.core.dtypes import DTYPES
from headrace.models.config.completion import complete
from headrace.models.config.drafts import read_draft
from headrace.models.config.types import DynamicBatching, EnsembleScheduling, ModelConfig

IDENTITIES = [f"identity_{name.lower()}" for name in DTYPES]
ONNX_MODELS = ["accumulator", "digits", "mlp", "simple"]
PYTHON_MODELS = ["pixels", "repeat", "strings"]
ALL = sorted([*IDENTITIES, *ONNX_MODELS, *PYTHON_MODELS, "digits_ensemble"])
BACKENDS_OF = (
    dict.fromkeys(IDENTITIES, "identity")
    | dict.fromkeys(ONNX_MODELS, "onnxruntime")
    | dict.fromkeys(PYTHON_MODELS, "python")
)

Array = np.ndarray[Any, Any]


def config_of(repository: Path, name: str) -> ModelConfig:
    """As the server would have it: read, completed by the backend, checked."""
    draft = read_draft(repository / name)
    reported = None
    if draft.backend in ("onnxruntime", "identity"):
        files = ModelFiles(repository / name, 1, repository / name / "1")
        reported = backend_named(draft.backend).complete(draft.typed(), files)
    return complete(draft, reported)


def opened(repository: Path, name: str) -> ComputeInstance:
    """An instance, by the backend and the configuration that the folder names."""
    config = config_of(repository, name)
    files = ModelFiles(repository / name, 1, repository / name / "1")
    backend = backend_named(config.backend)
    return cast("ComputeInstance", backend.load(config, files, cast("EngineServices", None)).open(Placement(name)))


def test_all_are_there(repository: Path) -> None:
    assert sorted(path.name for path in repository.iterdir() if path.is_dir()) == ALL


@pytest.mark.parametrize("name", ALL)
def test_configurations_pass_every_check(repository: Path, name: str) -> None:
    config = config_of(repository, name)
    assert config.name == name
    assert config.backend == ("ensemble" if name == "digits_ensemble" else BACKENDS_OF[name])
    assert (repository / name / "1").is_dir()


@pytest.mark.parametrize("name", ONNX_MODELS)
def test_graphs_are_sound(repository: Path, name: str) -> None:
    onnx.checker.check_model(str(repository / name / "1" / "model.onnx"), full_check=True)
    opened(repository, name).close()


@pytest.mark.parametrize("name", IDENTITIES)
def test_identities_are_of_their_type(repository: Path, name: str) -> None:
    config = config_of(repository, name)
    dtype = DTYPES[name.removeprefix("identity_").upper()]
    assert [spec.dtype for spec in config.inputs] == [dtype] == [spec.dtype for spec in config.outputs]
    given = np.zeros((2, 3), dtype.numpy)
    assert opened(repository, name).compute({"INPUT0": given}, ["OUTPUT0"])["OUTPUT0"] is given


def test_simple_adds_and_subtracts(repository: Path) -> None:
    first, second = np.arange(32, dtype=np.int32).reshape(2, 16), np.full((2, 16), 3, np.int32)
    answer = opened(repository, "simple").compute({"INPUT0": first, "INPUT1": second}, ["OUTPUT0", "OUTPUT1"])
    assert np.array_equal(answer["OUTPUT0"], first + second)
    assert np.array_equal(answer["OUTPUT1"], first - second)


def test_mlp_computes(repository: Path) -> None:
    rows = np.ones((64, 16), np.float32)
    answer = opened(repository, "mlp").compute({"INPUT0": rows}, ["OUTPUT0"])["OUTPUT0"]
    assert answer.shape == (64, 16)
    assert np.allclose(answer, answer[0], atol=1e-5)
    assert 0.1 < np.abs(answer[0]).mean() < 10


def test_accumulator_sums_from_the_start_of_a_sequence(repository: Path) -> None:
    instance = opened(repository, "accumulator")
    state = np.full((2, 1), np.nan, np.float32)
    totals = []
    for start, number in [(1, 1), (0, 2), (0, 3), (1, 10)]:
        inputs = {
            "INPUT": np.array([[number], [number * 100]], np.float32),
            "START": np.full((2, 1), start, np.int32),
            "STATE_IN": state,
        }
        answer = instance.compute(inputs, ["OUTPUT", "STATE_OUT"])
        state = answer["STATE_OUT"]
        totals.append(answer["OUTPUT"].ravel().tolist())
    assert totals == [[1, 100], [3, 300], [6, 600], [10, 1000]]


def test_digits_recognises_unseen_digits(repository: Path, make_models: ModuleType) -> None:
    _, _, images, digits = make_models.digits_data()
    answer = opened(repository, "digits").compute({"PIXELS": images}, ["PROBABILITIES"])["PROBABILITIES"]
    assert np.allclose(answer.sum(axis=1), 1, atol=1e-4)
    assert (answer.argmax(axis=1) == digits).mean() > make_models.LEAST_ACCURACY
    output = config_of(repository, "digits").outputs[0]
    labels = (repository / "digits" / output.label_filename).read_text().split()
    assert labels == ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.mark.parametrize("name", ["digits", "mlp", "simple"])
def test_graphs_match_their_configurations(repository: Path, tmp_path: Path, name: str) -> None:
    written = config_of(repository, name)
    shutil.copytree(repository / name / "1", tmp_path / name / "1")
    reported = config_of(tmp_path, name)
    assert [(spec.name, spec.dtype, spec.dims) for spec in reported.inputs] == [
        (spec.name, spec.dtype, spec.dims) for spec in written.inputs
    ]
    assert [(spec.name, spec.dtype, spec.dims) for spec in reported.outputs] == [
        (spec.name, spec.dtype, spec.dims) for spec in written.outputs
    ]
    assert reported.scheduling == DynamicBatching() == written.scheduling


def test_the_ensemble_fits_its_models(repository: Path) -> None:
    config = config_of(repository, "digits_ensemble")
    steps = cast("EnsembleScheduling", config.scheduling).steps
    kinds: dict[str, Any] = {spec.name: (spec.dtype, spec.dims) for spec in config.inputs}
    for step in steps:
        model = config_of(repository, step.model_name)
        assert model.max_batch_size >= config.max_batch_size
        for spec in model.inputs:
            assert kinds[step.input_map[spec.name]] == (spec.dtype, spec.dims)
        kinds |= {step.output_map[spec.name]: (spec.dtype, spec.dims) for spec in model.outputs}
    assert [kinds[spec.name] for spec in config.outputs] == [(spec.dtype, spec.dims) for spec in config.outputs]


class Sender:
    """Keeps what a decoupled model sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int]] = []

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.append((response, flags))


class Request:
    """A request, as far as the examples look at it."""

    def __init__(self, inputs: Mapping[str, Array], cancelled: bool = False) -> None:
        self._inputs = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
        self.sender = Sender()
        self.is_cancelled = lambda: cancelled

    def inputs(self) -> list[Any]:
        return self._inputs

    def get_response_sender(self) -> Sender:
        return self.sender


def python_model(repository: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    spec = importlib.util.spec_from_file_location(f"example_{name}", repository / name / "1" / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TritonPythonModel()


def outputs(response: Any) -> dict[str, Any]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def test_strings_makes_capitals(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = python_model(repository, "strings", monkeypatch)
    words = np.array([[b"ab", "grün".encode()], [b"", b"C"]], dtype=object)
    good, bad = model.execute([Request({"TEXT": words}), Request({"TEXT": np.array([[b"\xff"]], dtype=object)})])
    assert outputs(good) == {"CAPITALS": [[b"AB", "GRÜN".encode()], [b"", b"C"]]}
    assert "not UTF-8" in str(bad.error())


def test_pixels_makes_rows(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = python_model(repository, "pixels", monkeypatch)
    image = np.arange(128, dtype=np.uint8).reshape(2, 8, 8)
    (response,) = model.execute([Request({"IMAGE": image})])
    (tensor,) = response.output_tensors()
    assert tensor.as_numpy().dtype == np.float32
    assert tensor.as_numpy().tolist() == image.reshape(2, 64).tolist()


def test_repeat_answers_number_by_number(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = python_model(repository, "repeat", monkeypatch)
    model.initialize({})
    numbers = np.array([7, 5, 9], np.int32)
    asked = Request({"IN": numbers, "DELAY": np.array([1, 0, 2], np.uint32)})
    without_delays = Request({"IN": numbers[:1]})
    nothing = Request({"IN": numbers[:0]})
    wrong = Request({"IN": numbers, "DELAY": np.array([1], np.uint32)})
    cancelled = Request({"IN": numbers}, cancelled=True)
    requests = [asked, without_delays, nothing, wrong, cancelled]
    assert model.execute(requests) is None
    model.finalize()
    final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
    *answers, last = asked.sender.sent
    assert last == (None, final)
    assert [outputs(response) for response, flags in answers if not flags] == [
        {"OUT": [7], "INDEX": [0]},
        {"OUT": [5], "INDEX": [1]},
        {"OUT": [9], "INDEX": [2]},
    ]
    assert [len(request.sender.sent) for request in requests] == [4, 2, 1, 1, 1]
    assert all(request.sender.sent[-1][1] == final for request in requests)
    assert "send as many" in str(wrong.sender.sent[0][0].error())
