# SPDX-License-Identifier: Apache-2.0
"""Classification through an ensemble: its own label file, or the labels of the step that makes the output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from v2_servers import ask, models_served, write_model

from support.serving import Serving

IDENTITY = """
backend: "identity"
max_batch_size: 4
input {{ name: "IN" data_type: TYPE_FP32 dims: [ 3 ] }}
output {{ name: "SCORES" data_type: TYPE_FP32 dims: [ 3 ] {labels} }}
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input {{ name: "IN" data_type: TYPE_FP32 dims: [ 3 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] {labels} }}
ensemble_scheduling {{
  step {{ model_name: "{model}" model_version: -1
    input_map {{ key: "IN" value: "IN" }} output_map {{ key: "{output}" value: "OUT" }} }}
}}
"""
LABELLED = 'label_filename: "labels.txt"'


def _words(folder: Path, *labels: str) -> None:
    (folder / "labels.txt").write_text("\n".join(labels))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _words(write_model(tmp_path, "animals", IDENTITY.format(labels=LABELLED)), "cat", "dog", "fish")
    write_model(tmp_path, "plain", IDENTITY.format(labels=""))
    write_model(tmp_path, "through", ENSEMBLE.format(labels="", model="animals", output="SCORES"))
    write_model(tmp_path, "deeper", ENSEMBLE.format(labels="", model="through", output="OUT"))
    write_model(tmp_path, "nameless", ENSEMBLE.format(labels="", model="plain", output="SCORES"))
    _words(
        write_model(tmp_path, "own", ENSEMBLE.format(labels=LABELLED, model="animals", output="SCORES")), "a", "b", "c"
    )
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Serving]:
    with models_served(folder, mode="explicit", load_models=("*",)) as running:
        yield running


def _class(server: Serving, model: str, output: str = "OUT") -> Any:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 3], "data": [0.5, 2.0, 1.0]}
    wanted = {"name": output, "parameters": {"classification": 1}}
    status, answer = ask(server, "POST", f"/v2/models/{model}/infer", {"inputs": [tensor], "outputs": [wanted]})
    assert status == 200, answer
    return answer["outputs"][0]["data"][0]


def test_labels_come_from_the_step_unless_there_are_own_ones(server: Serving) -> None:
    assert _class(server, "animals", "SCORES") == "2.000000:1:dog"
    assert _class(server, "through") == "2.000000:1:dog"
    assert _class(server, "deeper") == "2.000000:1:dog"
    assert _class(server, "own") == "2.000000:1:b"
    assert _class(server, "nameless") == "2.000000:1"


def test_labels_are_those_of_the_step_s_model_as_it_is_now(server: Serving, folder: Path) -> None:
    _words(folder / "animals", "Katze", "Hund", "Fisch")
    assert ask(server, "POST", "/v2/repository/models/animals/load", {})[0] == 200
    assert _class(server, "deeper") == "2.000000:1:Hund"
