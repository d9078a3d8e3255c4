# SPDX-License-Identifier: Apache-2.0
"""Every example of the seed that is on `/predict`, against a real TorchScript model.

Each test is named after its example.
"""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
import pytest
from predict_server import ask, expected, predict_served, streams_of, torch_served
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from support.seed_stubs import seed_stubs
from support.serving import Serving


def test_fastapi_inference_server_predict(production: Serving) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{production.port}/predict", json.dumps({"inputs": [1.0, 2.0, 3.0, 4.0]}).encode()
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.headers["content-type"] == "application/json"
        answer = json.load(response)
    assert answer["predictions"] == pytest.approx(expected([1, 2, 3, 4]))
    assert answer["model_version"] == "v1.0.0"
    assert 0 < answer["latency_ms"] < 30_000
    assert list(answer) == ["predictions", "model_version", "latency_ms"]


def test_fastapi_inference_server_validate_inputs(production: Serving) -> None:
    status, answer = ask(production, body={"inputs": []})
    assert (status, answer) == (400, {"error": "inputs cannot be empty"})
    status, answer = ask(production, body={"inputs": [1.0] * 10_001})
    assert status == 413
    assert "exceeds the maximum of 10000" in answer["error"]


def test_fastapi_inference_server_model_version(tmp_path: Path) -> None:
    row = [1.0, 2.0, 3.0, 4.0]
    with torch_served(tmp_path, {1: 1.0, 2: 10.0}) as server:
        for wanted, label, scale in (
            (None, "v1.2.0", 10.0),
            ("latest", "v1.2.0", 10.0),
            ("v1.2.0", "v1.2.0", 10.0),
            ("v1.0.0", "v1.0.0", 1.0),
            ("1", "v1.0.0", 1.0),
            (2, "v1.2.0", 10.0),
        ):
            status, answer = ask(server, body={"inputs": row, "model_version": wanted})
            assert (status, answer["model_version"]) == (200, label)
            assert answer["predictions"] == pytest.approx(expected(row, scale))
        status, answer = ask(server, body={"inputs": row, "model_version": "v9"})
        assert status == 404
        assert answer["error"].startswith("model 'production' has no version 'v9': it has v1.0.0, v1.2.0")


def test_healthz(production: Serving) -> None:
    assert ask(production, "/healthz", method="GET") == (200, {"status": "healthy", "model_version": "v1.0.0"})


def test_healthz_model_not_loaded() -> None:
    with predict_served([]) as server:
        status, answer = ask(server, "/healthz", method="GET")
        assert status == 503
        assert answer["error"].startswith("Model not loaded")
        status, answer = ask(server, body={"inputs": [1.0]})
        assert status == 503
        assert answer["error"].startswith("Model not loaded")


def test_example_2_make_predictions(production: Serving) -> None:
    rows = [[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 0.0, 0.0], [5.0, 6.0, -1.0, 0.5]]
    status, answer = ask(production, body={"batch": rows})
    assert status == 200
    assert [pytest.approx(expected(row)) for row in rows] == answer["predictions"]
    assert answer["model_version"] == "v1.0.0"


def test_batch_inference_larger_than_max_batch_size(production: Serving) -> None:
    rows = [[float(number), 1.0, 2.0, 3.0] for number in range(21)]
    status, answer = ask(production, body={"batch": rows})
    assert status == 200
    assert [pytest.approx(expected(row)) for row in rows] == answer["predictions"]


class Alternating:
    """A split between two versions that sends every request to the other one."""

    express = None

    def __init__(self, versions: Any) -> None:
        self._versions = itertools.cycle(versions.values())

    def infer(self, request: Any, done: Any) -> Any:
        return next(self._versions).infer(request, done)


def test_one_answer_is_of_one_version(tmp_path: Path) -> None:
    rows = [[float(number), 1.0, 2.0, 3.0] for number in range(21)]
    with torch_served(tmp_path, {1: 1.0, 2: 10.0}, most=4) as server:
        model = server.site.plane.directory.models["production"]  # type: ignore[attr-defined]
        model.default = Alternating(model.versions)
        answers = [ask(server, body={"batch": rows})[1] for _ in range(2)]
    assert {answer["model_version"] for answer in answers} == {"v1.0.0", "v1.2.0"}
    for answer in answers:
        scale = {"v1.0.0": 1.0, "v1.2.0": 10.0}[answer["model_version"]]
        assert answer["predictions"] == [pytest.approx(expected(row, scale)) for row in rows]


@pytest.fixture(scope="module")
def generated() -> Any:
    """`inference_pb2` and `inference_pb2_grpc`, made of the seed's proto as its reader would."""
    return seed_stubs()


def test_example_3_grpc_inference(production: Serving, generated: Any) -> None:
    inference_pb2, inference_pb2_grpc = generated
    with grpc.insecure_channel(f"127.0.0.1:{production.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = stub.Predict(inference_pb2.PredictRequest(inputs=[1.0, 2.0, 3.0, 4.0]), timeout=30)
        assert list(answer.predictions) == pytest.approx(expected([1, 2, 3, 4]))
        assert answer.model_version == "v1.0.0"
        assert answer.latency_ms > 0


def test_example_3_grpc_inference_stream(production: Serving, generated: Any) -> None:
    inference_pb2, inference_pb2_grpc = generated
    rows = [[float(number), 0.5, -1.0, 2.0] for number in range(200)]
    with grpc.insecure_channel(f"127.0.0.1:{production.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        requests = (inference_pb2.PredictRequest(inputs=row) for row in rows)
        answers = list(stub.PredictStream(requests, timeout=30))
    assert [list(answer.predictions) for answer in answers] == [pytest.approx(expected(row)) for row in rows]
    assert {answer.model_version for answer in answers} == {"v1.0.0"}


def test_example_4_streaming_inference(production: Serving) -> None:
    with connect(f"ws://127.0.0.1:{production.port}/predict/stream") as socket:
        for number in range(3):
            socket.send(json.dumps({"inputs": [1.0, 2.0, 3.0, float(number)]}))
            answer = json.loads(socket.recv(timeout=30))
            assert answer["predictions"] == pytest.approx(expected([1, 2, 3, number]))
            assert answer["model_version"] == "v1.0.0"
        socket.send(json.dumps({"wrong": 1}))
        assert "error" in json.loads(socket.recv(timeout=30))


def test_example_4_streaming_inference_missing_inputs(production: Serving) -> None:
    with connect(f"ws://127.0.0.1:{production.port}/predict/stream") as socket:
        socket.send("{}")
        assert json.loads(socket.recv(timeout=30)) == {"error": "Missing inputs"}
        socket.send(json.dumps({"inputs": [1.0, 2.0, 3.0, 4.0]}))
        assert "predictions" in json.loads(socket.recv(timeout=30))


def test_example_4_streaming_inference_timeout(production: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(f"ws://127.0.0.1:{production.port}/predict/stream") as socket:
        socket.send(json.dumps({"inputs": [1.0, 2.0, 3.0, 4.0]}))
        assert "predictions" in json.loads(socket.recv(timeout=30))
        # The seed's 60 seconds pass.
        monkeypatch.setattr("headrace.api.predict.websocket.perf_counter", lambda: perf_counter() + 60)
        production.call(lambda: [stream._check_idle() for stream in streams_of(production)])
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=30)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "Timeout")


@pytest.mark.parametrize(
    ("inputs", "status", "text"),
    [
        ([], 400, "inputs cannot be empty"),
        ([1.0] * 20_000, 413, "exceeds the maximum"),
        ([1.0, 2.0, 3.0, "four"], 400, "inputs[3] is the string 'four'"),
        ([1.0, 2.0, 3.0, float("nan")], 400, "NaN or infinity"),
        ([1.0, 2.0, 3.0, float("inf")], 400, "NaN or infinity"),
    ],
)
def test_safeguards_input_validation(production: Serving, inputs: list[Any], status: int, text: str) -> None:
    got, answer = ask(production, body={"inputs": inputs})
    assert got == status
    assert text in answer["error"]
