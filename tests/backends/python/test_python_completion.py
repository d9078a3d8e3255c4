# SPDX-License-Identifier: Apache-2.0
"""`auto_complete_config`, and the configuration models see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backends.python.harness import ECHO, BackendFixture, python_backend

from headrace.backends.python.backend import PythonBackend, may_complete
from headrace.backends.python.process import config_json
from headrace.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from headrace.models.config.messages import new_config
from headrace.models.config.types import ModelConfig


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[BackendFixture]:
    with python_backend(tmp_path) as backend:
        yield backend


def complete(backend: BackendFixture, body: str, **fields: Any) -> Any:
    source = "import time, os, triton_python_backend_utils as pb_utils\nclass TritonPythonModel:\n"
    source += "    @staticmethod\n    def auto_complete_config(auto_complete_model_config):\n"
    source += "".join(f"        {line}\n" for line in body.splitlines())
    source += "    def execute(self, requests): pass\n"
    parameters = fields.pop("typed_parameters", {})
    proto = new_config(name="m", backend="python", **fields)
    config = ModelConfig("m", "python", proto=proto, parameters=parameters)
    return PythonBackend().complete(config, backend.files(source))


COMPLETING = """
config = auto_complete_model_config
given = config.as_dict()
config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1, 4], "optional": True})
config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [1]})
config.set_max_batch_size(8)
config.set_dynamic_batching()
config.set_model_transaction_policy({"decoupled": True})
pb_utils.Logger.log_info("completing")
return config
"""


def test_a_model_completes_its_configuration(backend: BackendFixture) -> None:
    message = complete(backend, COMPLETING)
    assert [(t.name, t.data_type, list(t.dims), t.optional) for t in message.input] == [("IN", 11, [-1, 4], True)]
    assert [(t.name, t.data_type, list(t.dims)) for t in message.output] == [("OUT", 13, [1])]
    assert message.max_batch_size == 8
    assert message.HasField("dynamic_batching")
    assert message.model_transaction_policy.decoupled


def test_what_is_given_and_agrees_stays(backend: BackendFixture) -> None:
    message = complete(backend, COMPLETING, input=[{"name": "IN", "dims": [-1, 4]}], max_batch_size=4)
    assert len(message.input) == 1
    assert message.input[0].data_type == 11


@pytest.mark.parametrize(
    ("body", "fields", "text"),
    [
        (COMPLETING, {"input": [{"name": "IN", "data_type": 9}]}, "configuration expects datatype TYPE_INT64"),
        (COMPLETING, {"output": [{"name": "OUT", "dims": [2]}]}, "the model configuration specifies dims [2]"),
        (COMPLETING, {"max_batch_size": 16}, "configuration specified max_batch_size 16"),
        (COMPLETING, {"sequence_batching": {}}, "scheduling_choice as 'sequence_batching'"),
        ("auto_complete_model_config.add_input({'name': 'X'})", {}, "is missing 'data_type' property"),
        ("return 1", {}, "must return the pb_utils.ModelConfig"),
        (
            (
                "auto_complete_model_config.add_input({'name': 'X', 'data_type': 'TYPE_NONSENSE', 'dims': [1]})\n"
                "return auto_complete_model_config"
            ),
            {},
            "TYPE_NONSENSE",
        ),
    ],
)
def test_contradictions_are_reported(backend: BackendFixture, body: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        complete(backend, body, **fields)
    assert text in caught.value.message


def test_a_completion_that_dies_or_hangs_is_ended(backend: BackendFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FailedPrecondition, match="died"):
        complete(backend, "os._exit(1)")
    monkeypatch.setattr("headrace.backends.python.backend._END_SECONDS", 0.1)
    with pytest.raises(DeadlineExceeded, match="INIT_TIMEOUT_SECONDS"):
        complete(backend, "time.sleep(100)", typed_parameters={"INIT_TIMEOUT_SECONDS": "0.5"})


def test_a_model_without_it_needs_no_process(backend: BackendFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(launch: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("headrace.backends.python.backend.completed_config", refuse)
    config = ModelConfig("m", "python", proto=new_config(name="m"))
    assert PythonBackend().complete(config, backend.files(ECHO)) is None


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        ("class TritonPythonModel: pass", False),
        ("class TritonPythonModel:\n    def auto_complete_config(c): pass", True),
        ("from base import TritonPythonModel", True),
        ("class TritonPythonModel(Base): pass", True),
        ("class TritonPythonModel: pass\nTritonPythonModel.auto_complete_config = f", True),
        ("def broken(", True),
    ],
)
def test_when_completion_asks_the_model(tmp_path: Path, source: str, answer: bool) -> None:
    (tmp_path / "model.py").write_text(source)
    assert may_complete(tmp_path / "model.py") is answer


def test_an_inherited_class_without_it_completes_nothing(backend: BackendFixture) -> None:
    config = ModelConfig("m", "python", proto=new_config(name="m"))
    assert (
        PythonBackend().complete(config, backend.files("class TritonPythonModel(object):\n    execute = None\n"))
        is None
    )


def test_models_see_numbers_and_defaults() -> None:
    proto = new_config(name="m", input=[{"name": "IN", "data_type": 11, "dims": [-1, 3]}])
    proto.parameters["key"].string_value = "value"
    seen = json.loads(config_json(ModelConfig("m", "python", proto=proto)))
    assert seen["input"][0]["dims"] == [-1, 3]
    assert seen["input"][0]["data_type"] == "TYPE_FP32"
    assert seen["parameters"] == {"key": {"string_value": "value"}}
    assert seen["max_batch_size"] == 0
    assert seen["output"] == []
