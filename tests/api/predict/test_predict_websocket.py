# SPDX-License-Identifier: Apache-2.0
"""The WebSocket beyond the seed's example: order, ids, binary, decoupled models, floods, stalls, faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from predict_server import Repeats, predict_served, streams_of, timing_out
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headrace.api.predict import ordered_responses, websocket
from headrace.api.predict.settings import InputChecks, PredictSettings, StreamSettings
from headrace.core.dtypes import BYTES, FP32, INT32
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import Gate, config_of
from support.serving import Serving
from support.waiting import eventually_async

WAIT = 30


def config(name: str = "m", dtype: Any = FP32, dims: Any = (2,), out: Any = None, **more: Any) -> Any:
    outputs = (OutputSpec("OUTPUT0", dtype, dims if out is None else out),)
    return config_of(name, inputs=(InputSpec("INPUT0", dtype, dims),), outputs=outputs, **more)


def same(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"]}


def open_socket(server: Serving, path: str = "/predict/stream", **more: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}", max_size=None, **more)


def send_json(socket: ClientConnection, document: Any) -> Any:
    socket.send(json.dumps(document))
    return json.loads(socket.recv(timeout=WAIT))


def close_of(socket: ClientConnection) -> tuple[int, str]:
    """Read until the server closes."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=WAIT)
    received = closed.value.rcvd
    assert received is not None
    return received.code, received.reason


def test_an_id_is_echoed() -> None:
    with predict_served([(config(), same)]) as server, open_socket(server) as socket:
        for given in ("a", 7, {"b": [None]}):
            assert send_json(socket, {"inputs": [1, 2], "id": given})["id"] == given
        assert send_json(socket, {"id": "x"}) == {"error": "Missing inputs", "id": "x"}
        assert send_json(socket, {"inputs": [1], "id": "y"})["id"] == "y"
        assert "id" not in send_json(socket, {"inputs": [1, 2]})


def test_cache_headers_of_a_browser_do_not_apply_to_messages() -> None:
    seen: list[Any] = []
    with predict_served([(config(), same)]) as server:
        plane = server.site.plane  # type: ignore[attr-defined]
        plane.answer = lambda request: seen.append(request.bypass_cache)
        with open_socket(server, additional_headers={"Cache-Control": "no-cache"}) as socket:
            assert send_json(socket, {"inputs": [1, 2]})["predictions"] == [1, 2]
    assert seen == [False]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("", "the request is empty"),
        ("{", "the request is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"inputs": [1, NaN]}', "NaN or infinity"),
        ('{"inputs": [1, null]}', "inputs[1] is null"),
        ('{"input": [1, 2]}', "did you mean 'inputs'?"),
        ('{"inputs": [1, 2], "model_version": "v9"}', "has no version 'v9'"),
        (b"\0\0\0", "3 bytes are not a multiple of 4, the size of FP32"),
        (b"\0" * 12, "inputs has 3 values, but model 'm' takes shape [2] of FP32"),
        (b"", "inputs has 0 values"),
        (struct.pack("<ff", 1.0, float("nan")), "NaN or infinity"),
    ],
)
def test_an_error_is_reported_and_the_connection_stays_open(message: str | bytes, text: str) -> None:
    with predict_served([(config(), same)]) as server, open_socket(server) as socket:
        socket.send(message)
        answer = json.loads(socket.recv(timeout=WAIT))
        assert set(answer) == {"error"}
        assert text in answer["error"] or "cannot be empty" in answer["error"]
        assert send_json(socket, {"inputs": [1, 2]})["predictions"] == [1, 2]


def test_a_batch_and_a_named_model() -> None:
    with predict_served([(config("one"), same), (config("other"), same)]) as server:
        with open_socket(server, "/predict/other/stream") as socket:
            assert send_json(socket, {"batch": [[1, 2], [3, 4]]})["predictions"] == [[1, 2], [3, 4]]
        for path, status in (("/predict/stream", 400), ("/predict/nobody/stream", 404)):
            with pytest.raises(InvalidStatus) as refused:
                open_socket(server, path)
            assert refused.value.response.status_code == status


def test_pages_of_other_hosts_may_not_connect() -> None:
    with predict_served([(config(), same)]) as server, pytest.raises(InvalidStatus) as refused:
        open_socket(server, origin="http://elsewhere.example")
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize(("dtype", "code"), [(FP32, "<2f"), (INT32, "<2i")])
def test_binary_in_binary_out(dtype: Any, code: str) -> None:
    model = (config(dtype=dtype), lambda inputs: {"OUTPUT0": inputs["INPUT0"] * 2})
    with predict_served([model]) as server, open_socket(server) as socket:
        socket.send(struct.pack(code, 3, -4))
        assert struct.unpack(code, socket.recv(timeout=WAIT)) == (6, -8)
        assert send_json(socket, {"inputs": [1, 2]})["predictions"] == [2, 4]


def test_binary_takes_the_models_shape() -> None:
    shapes: list[Any] = []

    def note(inputs: Any) -> Any:
        shapes.append(inputs["INPUT0"].shape)
        return {"OUTPUT0": inputs["INPUT0"]}

    with predict_served([(config(dims=(-1, 3)), note)]) as server, open_socket(server) as socket:
        socket.send(np.arange(6, dtype="<f4").tobytes())
        assert np.frombuffer(socket.recv(timeout=WAIT), "<f4").tolist() == list(range(6))
    assert shapes == [(1, 2, 3)]


@pytest.mark.parametrize(
    ("model", "binary", "text"),
    [
        ((config(), same), False, "binary messages are disabled"),
        ((config(dtype=BYTES), same), True, "takes strings: send JSON"),
        (
            (config_of("m", inputs=(InputSpec("a", FP32, (1,)), InputSpec("b", FP32, (1,)))), same),
            True,
            "several inputs",
        ),
    ],
)
def test_binary_messages_are_refused(model: Any, binary: bool, text: str) -> None:
    settings = PredictSettings(stream=StreamSettings(binary=binary))
    with predict_served([model], settings) as server, open_socket(server) as socket:
        socket.send(b"\0" * 8)
        assert text in json.loads(socket.recv(timeout=WAIT))["error"]


def test_answers_keep_the_order_of_the_questions() -> None:
    gate = Gate()
    slow = config(instance_groups=(InstanceGroup("m", runs="thread"),), max_batch_size=1, scheduling=None)
    with predict_served([(slow, gate)]) as server, open_socket(server) as socket:
        socket.send(json.dumps({"inputs": [1, 2], "id": 1}))
        asyncio.run(gate.entered())
        socket.send(json.dumps({"id": 2}))
        socket.send(json.dumps({"inputs": [3, 4], "id": 3}))
        with pytest.raises(TimeoutError):  # the second has its answer, but not its turn
            socket.recv(timeout=0.1)
        gate.let(2)
        assert [json.loads(socket.recv(timeout=WAIT))["id"] for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("empty_last", [False, True])
def test_a_decoupled_model_answers_several_times(empty_last: bool) -> None:
    model = (config(dims=(-1,), out=(1,), decoupled=True), Repeats(empty_last=empty_last))
    with predict_served([model]) as server, open_socket(server) as socket:
        socket.send(json.dumps({"inputs": [1, 2, 3], "id": "x"}))
        answers = [json.loads(socket.recv(timeout=WAIT)) for _ in range(4 if empty_last else 3)]
        assert [answer["predictions"] for answer in answers] == [[1], [2], [3], []][: len(answers)]
        assert [answer["final"] for answer in answers] == [False] * (len(answers) - 1) + [True]
        assert {answer["id"] for answer in answers} == {"x"}
        assert "error" in send_json(socket, {"inputs": [None]})


def test_a_timeout_is_a_message() -> None:
    gate = Gate()
    slow = config(instance_groups=(InstanceGroup("m", runs="thread"),), max_batch_size=1, scheduling=None)
    with predict_served([(slow, gate)], PredictSettings(timeout_seconds=60)) as server, open_socket(server) as socket:
        with timing_out(server, gate):
            assert "no prediction within 60 seconds" in send_json(socket, {"inputs": [1, 2]})["error"]
        gate.let(2)
        assert send_json(socket, {"inputs": [1, 2]})["predictions"] == [1, 2]


def test_too_many_messages_are_refused_one_by_one() -> None:
    settings = PredictSettings(stream=StreamSettings(messages_per_second=5))
    with predict_served([(config(), same)], settings) as server, open_socket(server) as socket:
        for number in range(20):
            socket.send(json.dumps({"inputs": [1, 2], "id": number}))
        answers = [json.loads(socket.recv(timeout=WAIT)) for _ in range(20)]
        refused = [answer for answer in answers if "error" in answer]
        assert "predictions" in answers[0]
        assert 0 < len(refused) <= 15
        assert "at most 5 per second; send it again in 0." in refused[0]["error"]
        assert refused[0]["retry_after_seconds"] > 0


def test_who_floods_for_long_is_closed_with_1008(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "FLOODING_SECONDS", 0.0)
    settings = PredictSettings(stream=StreamSettings(messages_per_second=2))
    with predict_served([(config(), same)], settings) as server:
        with open_socket(server) as socket:
            with contextlib.suppress(ConnectionClosed):  # it may be closed before it has said all of it
                for _ in range(100):
                    socket.send('{"inputs": [1, 2]}')
            assert close_of(socket) == (1008, "more than 2 messages per second, for too long")
        with open_socket(server) as other:
            assert send_json(other, {"inputs": [1, 2]})["predictions"] == [1, 2]


def test_who_does_not_read_is_held_back() -> None:
    """The client sends all it can and reads nothing: the server stops reading, and goes on when the client reads."""
    settings = PredictSettings(
        checks=InputChecks(enabled=False), stream=StreamSettings(messages_per_second=0), timeout_seconds=0
    )
    count, size = 400, 100_000
    given = np.random.default_rng(1).random(size, np.float32).tobytes()
    computed: list[int] = []

    def note(inputs: Any) -> Any:
        computed.extend([1] * len(inputs["INPUT0"]))  # it may be several at once
        return {"OUTPUT0": inputs["INPUT0"]}

    def held_back(connection: Any) -> bool:
        """Its answers are not read, and so no more of its questions are."""
        return bool(getattr(connection, "_write_paused", False) and getattr(connection, "_paused", False))

    async def main(server: Serving) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"GET /predict/stream HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        frame = b"\x82\xff" + struct.pack(">Q", len(given)) + b"\0\0\0\0" + given
        sender = asyncio.create_task(_send_all(writer, frame, count))
        await eventually_async(lambda: all(map(held_back, server.site.connections)))
        held_at = len(computed)
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        left = count * (len(given) + 10)
        while left:
            piece = await reader.read(1 << 20)
            assert piece
            left -= len(piece)
        await sender
        writer.close()
        return held_at

    with predict_served([(config(dims=(-1,)), note)], settings) as server:
        held_at = asyncio.run(main(server))
    assert held_at < count / 2
    assert len(computed) == count


async def _send_all(writer: asyncio.StreamWriter, frame: bytes, count: int) -> None:
    for _ in range(count):
        writer.write(frame)
        await writer.drain()


def test_a_decoupled_model_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_responses, "MOST_UNREAD_BYTES", 50)
    gate = Gate()
    models = [
        (config("slow", instance_groups=(InstanceGroup("slow", runs="thread"),), scheduling=None), gate),
    ]
    with predict_served(models) as server, open_socket(server) as socket:
        socket.send(json.dumps({"inputs": [1, 2]}))
        asyncio.run(gate.entered())
        socket.send(json.dumps({"id": "an answer that has to wait for its turn and is larger than what may wait"}))
        code, reason = close_of(socket)
        assert code == 1008
        assert "are unread" in reason
        gate.let()


def test_a_fault_of_ours_closes_with_1011(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("a secret")

    with predict_served([(config(), same)]) as server, open_socket(server) as socket:
        monkeypatch.setattr("headrace.api.predict.websocket.parse_json", fails)
        caplog.set_level(logging.CRITICAL)
        socket.send('{"inputs": [1, 2]}')
        code, reason = close_of(socket)
    assert code == 1011
    assert "secret" not in reason


def test_a_draining_server_closes_with_1001() -> None:
    with predict_served([(config(), same)]) as server, open_socket(server) as socket:
        assert "predictions" in send_json(socket, {"inputs": [1, 2]})
        server.call(lambda: [connection.drain() for connection in list(server.site.connections)])
        assert close_of(socket)[0] == 1001


def test_a_client_that_waits_for_us_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    slow = config(instance_groups=(InstanceGroup("m", runs="thread"),), max_batch_size=1, scheduling=None)
    settings = PredictSettings(stream=StreamSettings(idle_seconds=600.0))
    passed = 0.0
    monkeypatch.setattr(websocket, "perf_counter", lambda: perf_counter() + passed)

    def advance(seconds: float) -> None:
        """Time passes, and the stream's timer rings."""
        nonlocal passed
        passed += seconds
        (stream,) = streams_of(server)
        server.call(stream._check_idle)

    with predict_served([(slow, gate)], settings) as server, open_socket(server) as socket:
        socket.send(json.dumps({"inputs": [1, 2]}))
        asyncio.run(gate.entered())
        advance(1000.0)
        gate.let()
        assert json.loads(socket.recv(timeout=WAIT))["predictions"] == [1, 2]
        advance(500.0)
        gate.let()
        assert send_json(socket, {"inputs": [3, 4]})["predictions"] == [3, 4]
        advance(1000.0)
        assert close_of(socket) == (1000, "Timeout")


def test_an_idle_client_is_closed_by_the_stream_s_own_timer() -> None:
    settings = PredictSettings(stream=StreamSettings(idle_seconds=0.05))
    with predict_served([(config(), same)], settings) as server, open_socket(server) as socket:
        assert close_of(socket) == (1000, "Timeout")
