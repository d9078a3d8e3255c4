# SPDX-License-Identifier: Apache-2.0
"""Bad input to `/predict`: each has a clear error, and nothing else is disturbed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from predict_server import ask, ask_raw, predict_served

from headrace.api.predict.settings import InputChecks, PredictSettings
from headrace.core.dtypes import BOOL, BYTES, FP16, FP32, INT8, INT32
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import config_of
from support.serving import Serving

ROW = [1.0, 2.0, 3.0, 4.0]


def same(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"]}


def model(name: str, dtype: Any, dims: Any, **more: Any) -> tuple[Any, Any]:
    config = config_of(
        name, inputs=(InputSpec("INPUT0", dtype, dims),), outputs=(OutputSpec("OUTPUT0", dtype, dims),), **more
    )
    return config, same


def broken(inputs: Any) -> Any:
    raise RuntimeError("a secret of the model")


MODELS = [
    model("floats", FP32, (4,)),
    model("halves", FP16, (4,)),
    model("whole", INT32, (4,)),
    model("small", INT8, (4,)),
    model("flags", BOOL, (4,)),
    model("words", BYTES, (2,)),
    model("image", FP32, (2, 2)),
    model("any_length", FP32, (-1,)),
    model("alone", FP32, (1, 4), max_batch_size=0),
    (config_of("two", inputs=(InputSpec("a", FP32, (2,)), InputSpec("b", FP32, (2,)))), same),
    (config_of("broken", inputs=(InputSpec("INPUT0", FP32, (4,)),)), broken),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with predict_served(MODELS, PredictSettings(model="floats")) as running:
        yield running


CORPUS: list[tuple[str, Any, int, str]] = [
    # The document.
    ("", b"", 400, "the request is empty"),
    ("", b"  ", 400, "the request is empty"),
    ("", b"{", 400, "the request is not JSON"),
    ("", b"\xff\xfe", 400, "the request is not JSON"),
    ("", b'{"inputs": [1.0, 2.0', 400, "the request is not JSON"),
    ("", b"[" * 5000 + b"]" * 5000, 400, "the request is not JSON"),
    ("", b"[" * 5000 + b"NaN" + b"]" * 5000, 400, "the request is not JSON"),
    ("", [1, 2], 400, "must be a JSON object"),
    ("", "inputs", 400, "must be a JSON object"),
    ("", {}, 400, "Missing inputs"),
    ("", {"model_version": "1"}, 400, "Missing inputs"),
    ("", {"input": ROW}, 400, "no field 'input': did you mean 'inputs'?"),
    ("", {"inputs": ROW, "version": "1"}, 400, "did you mean 'model_version'?"),
    ("", {"inputs": ROW, "zzz": [1]}, 400, "the fields are batch, inputs, model_version"),
    ("", {"inputs": ROW, "batch": [ROW]}, 400, "not both"),
    ("", {"inputs": ROW, "id": [1]}, 400, "no field 'id'"),
    ("", {"inputs": ROW, "model": "other"}, 400, "did you mean 'model_version'?"),
    # Versions and models.
    ("", {"inputs": ROW, "model_version": "v7"}, 404, "has no version 'v7': it has 1"),
    ("", {"inputs": ROW, "model_version": -1}, 404, "has no version '-1'"),
    ("", {"inputs": ROW, "model_version": 1.5}, 400, "'model_version' must be a string"),
    ("", {"inputs": ROW, "model_version": True}, 400, "'model_version' must be a string"),
    ("", {"inputs": ROW, "model_version": ["1"]}, 400, "'model_version' must be a string"),
    ("/nobody", {"inputs": ROW}, 404, "unknown model: 'nobody'"),
    ("/..", {"inputs": ROW}, 400, "not allowed"),
    # Numbers.
    ("", {"inputs": None}, 400, "inputs must be a list"),
    ("", {"inputs": "1,2,3,4"}, 400, "inputs must be a list"),
    ("", {"inputs": 5}, 400, "inputs has shape []"),
    ("", {"inputs": []}, 400, "inputs cannot be empty"),
    ("", {"inputs": [[]]}, 400, "inputs cannot be empty"),
    ("", {"inputs": [1, 2, 3]}, 400, "inputs has shape [3], but model 'floats' takes shape [4] of FP32"),
    ("", {"inputs": [*ROW, 5]}, 400, "inputs has shape [5]"),
    ("", {"inputs": [ROW, ROW]}, 400, 'send several rows as {"batch": [...]}'),
    ("", {"inputs": [1, 2, 3, None]}, 400, "inputs[3] is null"),
    ("", {"inputs": [1, 2, 3, "4"]}, 400, "inputs[3] is the string '4'"),
    ("", {"inputs": [1, 2, 3, "NaN"]}, 400, "inputs[3] is the string 'NaN'"),
    ("", {"inputs": [1, True, 3, 4]}, 400, "inputs[1] is true"),
    ("", {"inputs": [1, {}, 3, 4]}, 400, "inputs[1] is an object"),
    ("", {"inputs": [1, [2], 3, 4]}, 400, "ragged"),
    ("", {"inputs": [[1, 2, 3, 4, [5]]]}, 400, "inputs is ragged"),
    ("", {"inputs": [1e39, 1, 1, 1]}, 400, "do not fit FP32"),
    ("", b'{"inputs": [1, 2, 3, 1e999]}', 400, "NaN or infinity"),
    ("", b'{"inputs": [1, 2, 3, NaN]}', 400, "NaN or infinity"),
    ("", b'{"inputs": [1, 2, 3, -Infinity]}', 400, "NaN or infinity"),
    ("/halves", {"inputs": [70000, 1, 1, 1]}, 400, "do not fit FP16"),
    ("/whole", {"inputs": [1, 2, 3, 1.5]}, 400, "inputs[3] is 1.5, but the model takes INT32: send an integer"),
    ("/whole", {"inputs": [1, 2, 3, 1 << 40]}, 400, "do not fit INT32"),
    ("/small", {"inputs": [1, 2, 3, 300]}, 400, "do not fit INT8"),
    ("/flags", {"inputs": [1, 0, 1, 0]}, 400, "inputs[0] is 1, but the model takes BOOL: send true or false"),
    ("/words", {"inputs": ["a", 2]}, 400, "inputs[1] is 2, but the model takes BYTES: send a string"),
    ("/image", {"inputs": [[1, 2], [3]]}, 400, "inputs is ragged"),
    ("", {"inputs": [[1, 2], [3]]}, 400, "inputs is ragged"),
    ("/image", {"inputs": [1, 2, 3, 4]}, 400, "inputs has shape [4], but model 'image' takes shape [2, 2]"),
    ("/image", b'{"inputs": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}", 400, "shape"),
    ("/any_length", {"inputs": []}, 400, "inputs cannot be empty"),
    ("/any_length", {"inputs": [0.5] * 10_001}, 413, "max_inputs"),
    ("/alone", {"inputs": [1, 2, 3]}, 400, "takes shape [1, 4]"),
    ("/whole", b'{"inputs": [1, 2.0, 3, ' + b"[" * 900 + b"1" + b"]" * 900 + b"]}", 400, "ragged"),
    ("/whole", b'{"batch": [[1, 2, 3, 4], ' + b"[" * 900 + b"1.0" + b"]" * 900 + b"]}", 400, "batch[1] has shape"),
    ("/image", {"inputs": [[1, 2], [3, "x"]]}, 400, "inputs[1][1] is the string 'x'"),
    ("/image", {"inputs": [[1, 2], [3, [4]]]}, 400, "inputs[1] is ragged"),
    ("/image", {"inputs": [[1, 2], [[3], [4]]]}, 400, "inputs[1][0] is a list where the values before it are not"),
    # Names.
    ("/two", {"inputs": [1, 2]}, 400, "several inputs: send inputs as an object with 'a', 'b'"),
    ("/two", {"inputs": {"a": [1, 2]}}, 400, "inputs lacks 'b'"),
    ("/two", {"inputs": {"a": [1, 2], "B": [1, 2]}}, 400, "no input 'B'"),
    ("/two", {"inputs": {}}, 400, "lacks 'a', 'b'"),
    ("", {"inputs": {"INPUT": ROW}}, 400, "no input 'INPUT': did you mean 'INPUT0'?"),
    # Batches.
    ("", {"batch": []}, 400, "'batch' cannot be empty"),
    ("", {"batch": "x"}, 400, "'batch' must be a list"),
    ("", {"batch": ROW}, 400, "batch[0] has shape []"),
    ("", {"batch": [ROW, [1, 2]]}, 400, "batch[1] has shape [2]"),
    ("", {"batch": [ROW, [1, 2, 3, None]]}, 400, "batch[1][3] is null"),
    ("", {"batch": [ROW, None]}, 400, "batch[1] must be a list"),
    ("", {"batch": [ROW] * 1001}, 413, "max_rows"),
]


@pytest.mark.parametrize(("path", "body", "status", "text"), CORPUS)
def test_a_bad_request_has_a_clear_error(server: Serving, path: str, body: Any, status: int, text: str) -> None:
    got, answer = ask(server, f"/predict{path}", body)
    assert text in answer["error"]
    assert got == status
    assert set(answer) == {"error"}
    assert ask(server, body={"inputs": ROW})[1]["predictions"] == ROW


def test_a_models_fault_does_not_leak_its_text(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    status, answer = ask(server, "/predict/broken", {"inputs": ROW})
    assert status == 500
    assert "secret" not in json.dumps(answer)


def test_a_request_without_a_model_where_there_are_several() -> None:
    with predict_served([model("one", FP32, (4,)), model("other", FP32, (4,))]) as server:
        status, answer = ask(server, body={"inputs": ROW})
        assert status == 400
        assert answer["error"].endswith("send the request to /predict/NAME. The models: one, other")


@pytest.mark.parametrize(
    ("inputs", "status", "text"),
    [
        ([0.0, 1.0, 0.5], 200, ""),
        ([0.0, -0.5], 400, "inputs has -0.5; the smallest allowed value is 0"),
        ([0.0, 1.5], 400, "inputs has 1.5; the largest allowed value is 1"),
        ([0.5] * 6, 413, "max_sequence_length, 5"),
    ],
)
def test_bounds_and_sequences(inputs: list[float], status: int, text: str) -> None:
    checks = InputChecks(least=0.0, most=1.0, longest_sequence=5)
    with predict_served([model("m", FP32, (-1,))], PredictSettings(checks=checks)) as server:
        got, answer = ask(server, body={"inputs": inputs})
        assert got == status
        assert text in answer.get("error", "")
        got, answer = ask(server, body={"batch": [[0.5], inputs]})
        assert got == status


def test_what_a_fixed_shape_allows_is_not_too_long() -> None:
    checks = InputChecks(most_numbers=3, longest_sequence=3)
    with predict_served([model("m", FP32, (4,))], PredictSettings(checks=checks)) as server:
        assert ask(server, body={"inputs": ROW})[0] == 200
        assert ask(server, body={"inputs": [*ROW, 5]})[0] == 413


def test_nan_is_let_in_where_it_is_allowed() -> None:
    seen: list[Any] = []

    def note(inputs: Any) -> Any:
        seen.append(inputs["INPUT0"])
        return {"OUTPUT0": inputs["INPUT0"]}

    config, _ = model("m", FP32, (3,))
    for checks in (InputChecks(allow_nan=True), InputChecks(enabled=False)):
        with predict_served([(config, note)], PredictSettings(checks=checks)) as server:
            status, _, content = ask_raw(server, "/predict", b'{"inputs": [NaN, 1e999, 1]}')
        # JSON has no word for them.
        assert (status, json.loads(content)["predictions"]) == (200, [None, None, 1.0])
        assert np.isnan(seen[-1][0][0])
        assert np.isposinf(seen[-1][0][1])


def test_checks_can_be_switched_off() -> None:
    checks = InputChecks(enabled=False, most_numbers=1, most_rows=1, most=0.0)
    group = (InstanceGroup("m", runs="inline"),)
    with predict_served([model("m", FP32, (-1,), instance_groups=group)], PredictSettings(checks=checks)) as server:
        assert ask(server, body={"batch": [[1.0, 2.0], [3.0, 4.0]]})[0] == 200
