# SPDX-License-Identifier: Apache-2.0
"""The seed's FastAPI server, its examples 2 to 4, its safeguards and its cache, against a server over a folder of models."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from seed_models import SECRET, expected
from seed_programs import ROW, Server, serve
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from headrace.api.predict import websocket
from support.seed_stubs import seed_stubs

CONFIG = """
predict: {model: production}
stream: {idle_timeout_s: 240, messages_per_second: 10}
cache: {ttl_s: 1}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, seed_models: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "inference.yaml").write_text(CONFIG)
    with serve(seed_models / "repository", "--config", folder / "inference.yaml") as running:
        yield running


def socket_to(server: Server, path: str = "/predict/stream") -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}")


def test_single_prediction(server: Server) -> None:
    answer = server.ask(body={"inputs": ROW, "model_version": "v1.0.0"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.document) == ["predictions", "model_version", "latency_ms"]
    assert answer.document["predictions"] == pytest.approx([0.5, 0.3])
    assert answer.document["model_version"] == "v1.0.0"
    assert 0 < answer.document["latency_ms"] < 30_000


def test_batch_predictions(server: Server) -> None:
    answer = server.ask("/predict/pair", {"batch": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]})
    assert answer.status == 200
    assert answer.document["predictions"] == [[0.5, 1.0], [1.5, 2.0], [2.5, 3.0]]


def test_a_batch_larger_than_max_batch_size(server: Server) -> None:
    rows = [[float(number), 1.0, 2.0, 3.0] for number in range(100)]
    answer = server.ask(body={"batch": rows, "model_version": "v1.0.0"})
    assert answer.status == 200
    assert answer.document["predictions"] == [pytest.approx(expected(row)) for row in rows]
    assert server.counted("production")["largest"] <= 8


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b'{"inputs": []}', 400, "inputs cannot be empty"),
        (b'{"batch": []}', 400, "empty"),
        (json.dumps({"inputs": [1.0] * 10_001}).encode(), 413, "exceeds the maximum of 10000"),
        (b'{"inputs": [1.0, 2.0, 3.0, NaN]}', 400, "NaN or infinity"),
        (b'{"inputs": [1.0, 2.0, 3.0, Infinity]}', 400, "NaN or infinity"),
        (b'{"inputs": [1.0, 2.0, 3.0, -Infinity]}', 400, "NaN or infinity"),
        (b'{"inputs": [1.0, 2.0, 3.0, 1e999]}', 400, "NaN or infinity"),
        (b'{"inputs": [1.0, 2.0, 3.0, "4"]}', 400, "inputs[3] is the string '4'"),
        (b'{"inputs": [1.0, 2.0, 3.0, null]}', 400, "inputs[3] is null"),
        (b'{"inputs": [1.0, 2.0, 3.0, true]}', 400, "inputs[3]"),
        (b'{"inputs": "1234"}', 400, "inputs"),
        (b'{"inputs": [[1.0, 2.0], [3.0]]}', 400, "inputs"),
        (b'{"batch": [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0]]}', 400, "batch[1]"),
        (b'{"inputs": [1.0, 2.0, 3.0]}', 400, "takes shape [4]"),
        (b"{}", 400, "inputs"),
        (b"[1, 2, 3, 4]", 400, "object"),
        (b'{"inputs": [1.0, 2.0', 400, "JSON"),
        (b'{"inputs": [1.0, 2.0, 3.0, 4.0], "model_version": "v9"}', 404, "no version 'v9': it has v1.0.0, v1.2.0"),
    ],
)
def test_wrong_inputs_are_refused(server: Server, body: bytes, status: int, text: str) -> None:
    answer = server.ask(body=body)
    assert (answer.status, text in answer.error) == (status, True), answer.content
    assert server.ask(body={"inputs": ROW}).status == 200


def test_internal_errors_do_not_leak(server: Server) -> None:
    answer = server.ask("/predict/candidate", {"inputs": ROW, "model_version": "v1.2.0"})
    assert answer.status == 500
    assert SECRET not in answer.content.decode() and "Traceback" not in answer.content.decode()
    assert SECRET in server.log


@pytest.fixture(scope="module")
def stubs() -> tuple[Any, Any]:
    return seed_stubs()


def test_grpc_inference(server: Server, stubs: tuple[Any, Any]) -> None:
    messages, services = stubs
    for port in (server.grpc_port, server.port):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = services.InferenceServiceStub(channel)
            answer = stub.Predict(messages.PredictRequest(inputs=ROW, model_version="v1.0.0"), timeout=120)
            assert list(answer.predictions) == pytest.approx([0.5, 0.3])
            assert answer.model_version == "v1.0.0"
            assert answer.latency_ms > 0
            rows = [[float(number), 0.5, -1.0, 2.0] for number in range(50)]
            requests = (messages.PredictRequest(inputs=row) for row in rows)
            answers = list(stub.PredictStream(requests, timeout=120))
            assert [list(answer.predictions) for answer in answers] == [
                pytest.approx(expected(row, "v1.2.0")) for row in rows
            ]
            assert {answer.model_version for answer in answers} == {"v1.2.0"}


@pytest.mark.parametrize(
    ("inputs", "version", "code", "text"),
    [
        ([], "", grpc.StatusCode.INVALID_ARGUMENT, "inputs cannot be empty"),
        ([1.0, 2.0, 3.0, float("nan")], "", grpc.StatusCode.INVALID_ARGUMENT, "NaN or infinity"),
        (ROW, "v9", grpc.StatusCode.NOT_FOUND, "no version 'v9'"),
    ],
)
def test_grpc_refuses_too(
    server: Server, stubs: tuple[Any, Any], inputs: list[float], version: str, code: grpc.StatusCode, text: str
) -> None:
    messages, services = stubs
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = services.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Predict(messages.PredictRequest(inputs=inputs, model_version=version), timeout=120)
    error: Any = refused.value
    assert error.code() is code
    assert text in error.details()


def test_websocket(server: Server) -> None:
    with socket_to(server) as stream:
        stream.send(json.dumps({"inputs": ROW}))
        answer = json.loads(stream.recv(timeout=120))
        assert answer["predictions"] == pytest.approx(expected(ROW, "v1.2.0"))
        assert answer["model_version"] == "v1.2.0"
        stream.send("{}")
        assert json.loads(stream.recv(timeout=120)) == {"error": "Missing inputs"}
        stream.send('{"inputs": [1')
        assert "JSON" in json.loads(stream.recv(timeout=120))["error"]
        stream.send(json.dumps({"inputs": [1.0, "two", 3.0, 4.0]}))
        assert "inputs[1]" in json.loads(stream.recv(timeout=120))["error"]
        stream.send(struct.pack("<4f", *ROW))
        binary = stream.recv(timeout=120)
        assert isinstance(binary, bytes)
        assert struct.unpack("<2f", binary) == pytest.approx(expected(ROW, "v1.2.0"))


def test_websocket_idle_timeout(tmp_path: Path) -> None:
    config = tmp_path / "inference.yaml"
    config.write_text("predict: {model: identity}\nstream: {idle_timeout_s: 0.2}\n")
    with serve("--config", config) as server:
        began = time.monotonic()  # before the server begins to count
        with socket_to(server) as stream, pytest.raises(ConnectionClosed) as closed:
            stream.recv(timeout=120)
        assert time.monotonic() - began >= 0.18
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1000, "Timeout")


def test_websocket_internal_errors_do_not_leak(server: Server) -> None:
    with socket_to(server, "/predict/candidate/stream") as stream:
        stream.send(json.dumps({"inputs": ROW}))
        assert SECRET not in str(stream.recv(timeout=120))


@pytest.mark.parametrize(
    ("flooding_seconds", "at_least"), [(0.5, 5), pytest.param(websocket.FLOODING_SECONDS, 50, marks=pytest.mark.slow)]
)
def test_websocket_flood(
    server: Server, monkeypatch: pytest.MonkeyPatch, flooding_seconds: float, at_least: int
) -> None:
    """Those over the limit are refused, then the connection is closed; other clients do not feel it.

    One at a time, so that nothing is on its way when the server closes: the kernel would take the close back for it.
    """
    monkeypatch.setattr(websocket, "FLOODING_SECONDS", flooding_seconds)
    refused = answered = 0
    message = json.dumps({"inputs": ROW})
    with socket_to(server) as flood, socket_to(server) as quiet, pytest.raises(ConnectionClosed) as closed:
        second = 0.0
        while True:
            flood.send(message)
            answer = json.loads(flood.recv(timeout=120))
            answered += "predictions" in answer
            if "error" in answer:
                refused += 1
                assert answer["retry_after_seconds"] > 0
            if time.monotonic() > second:  # below the limit
                second = time.monotonic() + 0.2
                quiet.send(message)
                assert "predictions" in json.loads(quiet.recv(timeout=120))
    assert refused > 0 and answered >= at_least
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    assert server.ask(body={"inputs": ROW}).status == 200


def test_websocket_client_that_does_not_read(server: Server) -> None:
    """It is not read from either once its answers pile up, and nobody else notices."""
    frame = b"\x81\x82\x00\x00\x00\x00{}"
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.sendall(
            b"GET /predict/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        assert stalled.recv(12) == b"HTTP/1.1 101"
        stalled.settimeout(0.3)
        sent = 0
        with pytest.raises((TimeoutError, ConnectionError)):  # it is held back, or cut
            while sent < 500_000_000:
                sent += stalled.send(frame * 1000)
        for _ in range(20):
            answer = server.ask(body={"inputs": ROW})
            assert answer.status == 200


def test_cache(server: Server) -> None:
    def hits() -> float:
        return server.metric("nv_cache_num_hits_per_model", model="pair")

    def misses() -> float:
        return server.metric("nv_cache_num_misses_per_model", model="pair")

    body = {"inputs": [7.0, 8.0]}
    first = server.ask("/predict/pair", body)
    had = hits()
    while hits() == had:  # once, where a second is not over before it is asked again
        lacked = misses()
        assert lacked >= 1
        second = server.ask("/predict/pair", body)
        assert second.document["predictions"] == first.document["predictions"] == [3.5, 4.0]
    assert (hits(), misses()) == (had + 1, lacked)
    computed = server.counted("pair")["rows"]
    assert server.ask("/predict/pair", body, cache_control="no-cache").document["predictions"] == [3.5, 4.0]
    assert hits() == had + 1
    assert server.counted("pair")["rows"] == computed + 1
    # After a second it is too old, however often it was asked for.
    while server.counted("pair")["rows"] == computed + 1:
        assert server.ask("/predict/pair", body).status == 200
        time.sleep(0.05)
    assert misses() > lacked
