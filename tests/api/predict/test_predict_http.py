# SPDX-License-Identifier: Apache-2.0
"""`POST /predict` beyond the seed's examples: shapes, types, names, batches, time, and health."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from predict_server import Repeats, ask, ask_raw, predict_served, timing_out

from headrace.api.predict.settings import PredictSettings
from headrace.core.dtypes import BF16, BOOL, BYTES, FP32, FP64, INT64
from headrace.core.requests import InferRequest
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import Gate, Recorder, config_of
from support.serving import Serving
from support.waiting import eventually


def config(name: str, dtype: Any, dims: Any, out: Any = None, **more: Any) -> Any:
    outputs = (OutputSpec("OUTPUT0", dtype, dims if out is None else out),)
    return config_of(name, inputs=(InputSpec("INPUT0", dtype, dims),), outputs=outputs, **more)


def same(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"]}


def double(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"] * 2}


def two_outputs(inputs: Any) -> Any:
    return {"sum": inputs["a"] + inputs["b"], "text": np.full((len(inputs["a"]), 1), b"hello", dtype=object)}


MODELS = [
    (config("floats", FP32, (4,)), double),
    (config("doubles", FP64, (2,)), same),
    (config("brains", BF16, (2,)), same),
    (config("whole", INT64, (2,)), same),
    (config("flags", BOOL, (2,)), same),
    (config("words", BYTES, (-1,)), same),
    (config("image", FP32, (1, 2, 2)), double),
    (config("one", FP32, (2,), (1,)), lambda inputs: {"OUTPUT0": inputs["INPUT0"].sum(axis=1, keepdims=True)}),
    (config("scalar", FP32, (1,)), double),
    (config("any_length", FP32, (-1, 1)), double),
    (config("alone", FP32, (1, 4), max_batch_size=0), double),
    (config("alone_any", FP32, (-1, 2), max_batch_size=0), double),
    (config("transposed", FP32, (2, 3), (3, 2)), lambda inputs: {"OUTPUT0": inputs["INPUT0"].transpose(0, 2, 1)}),
    (config_of("anything"), same),
    (
        config_of(
            "two",
            inputs=(InputSpec("a", FP32, (2,)), InputSpec("b", FP32, (2,)), InputSpec("c", FP32, (2,), optional=True)),
            outputs=(OutputSpec("sum", FP32, (2,)), OutputSpec("text", BYTES, (1,))),
        ),
        two_outputs,
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with predict_served(MODELS) as running:
        yield running


@pytest.mark.parametrize(
    ("model", "body", "predictions"),
    [
        ("floats", {"inputs": [1, 2.5, -3, 0]}, [2, 5, -6, 0]),
        ("floats", {"inputs": [[1, 2, 3, 4]]}, [2, 4, 6, 8]),
        ("floats", {"inputs": {"INPUT0": [1, 2, 3, 4]}}, [2, 4, 6, 8]),
        ("floats", {"inputs": [0.1, 0.2, 0.3, 0.4]}, [0.2, 0.4, 0.6, 0.8]),
        ("doubles", {"inputs": [0.1, 1e300]}, [0.1, 1e300]),
        ("brains", {"inputs": [1.5, -2]}, [1.5, -2]),
        ("whole", {"inputs": [1 << 60, 2.0]}, [1 << 60, 2]),
        ("flags", {"inputs": [True, False]}, [True, False]),
        ("words", {"inputs": ["Grüße", ""]}, ["Grüße", ""]),
        ("image", {"inputs": [[[1, 2], [3, 4]]]}, [[2, 4], [6, 8]]),
        ("image", {"inputs": [[[[1, 2], [3, 4]]]]}, [[2, 4], [6, 8]]),
        ("one", {"inputs": [1, 2]}, [3]),
        ("scalar", {"inputs": 5}, [10]),
        ("scalar", {"inputs": {"INPUT0": 5}}, [10]),
        ("any_length", {"inputs": [[1]]}, [2]),
        ("any_length", {"inputs": [[1], [2], [3]]}, [2, 4, 6]),
        ("alone", {"inputs": [1, 2, 3, 4]}, [2, 4, 6, 8]),
        ("alone", {"inputs": [[1, 2, 3, 4]]}, [2, 4, 6, 8]),
        ("alone_any", {"inputs": [1, 2]}, [2, 4]),
        ("alone_any", {"inputs": [[1, 2], [3, 4]]}, [[2, 4], [6, 8]]),
        ("transposed", {"inputs": [[1, 2, 3], [4, 5, 6]]}, [[1, 4], [2, 5], [3, 6]]),
        ("anything", {"inputs": [1, 2]}, [1, 2]),
        ("anything", {"inputs": [["a"], ["b"]]}, [["a"], ["b"]]),
        ("anything", {"inputs": [True]}, [True]),
        ("two", {"inputs": {"a": [1, 2], "b": [3, 4]}}, {"sum": [4, 6], "text": ["hello"]}),
        # Batches.
        ("floats", {"batch": [[1, 2, 3, 4]]}, [[2, 4, 6, 8]]),
        ("floats", {"batch": [[[1, 2, 3, 4]], [5, 6, 7, 8]]}, [[2, 4, 6, 8], [10, 12, 14, 16]]),
        ("image", {"batch": [[[[1, 2], [3, 4]]], [[[5, 6], [7, 8]]]]}, [[[2, 4], [6, 8]], [[10, 12], [14, 16]]]),
        ("one", {"batch": [[1, 2], [3, 4]]}, [[3], [7]]),
        ("any_length", {"batch": [[[1], [2]], [[3]], [[4]]]}, [[2, 4], [6], [8]]),
        ("alone", {"batch": [[1, 2, 3, 4], [5, 6, 7, 8]]}, [[2, 4, 6, 8], [10, 12, 14, 16]]),
        ("words", {"batch": [["a", "b"], ["c"]]}, [["a", "b"], ["c"]]),
        ("anything", {"batch": [[1, 2], [3]]}, [[1, 2], [3]]),
        (
            "two",
            {"batch": [{"a": [1, 2], "b": [3, 4]}, {"a": [0, 0], "b": [1, 1]}]},
            [{"sum": [4, 6], "text": ["hello"]}, {"sum": [1, 1], "text": ["hello"]}],
        ),
    ],
)
def test_shapes_types_and_names(server: Serving, model: str, body: Any, predictions: Any) -> None:
    status, answer = ask(server, f"/predict/{model}", body)
    assert (status, answer.get("predictions", answer)) == (200, predictions)
    assert answer["model_version"] == "1"


@pytest.mark.parametrize("note", [{"user": "ann"}, {"sid": 7}, {"id": "a", "session": "b", "beta": True}])
def test_notes_of_the_caller_pass(server: Serving, note: dict[str, Any]) -> None:
    """A split that chose by them may be gone; those who send them are not told to stop."""
    assert ask(server, "/predict/doubles", {"inputs": [1, 2], **note})[1]["predictions"] == [1, 2]


@pytest.mark.parametrize(("rows", "sizes"), [(3, [3]), (4, [4]), (10, [4, 4, 2])])
def test_a_batch_is_as_few_requests_as_the_model_allows(rows: int, sizes: list[int]) -> None:
    recorder = Recorder()
    with predict_served([(config("m", FP32, (2,), max_batch_size=4, scheduling=None), recorder)]) as server:
        batch = [[float(number), 0.0] for number in range(rows)]
        status, answer = ask(server, body={"batch": batch})
    assert (status, answer["predictions"]) == (200, batch)
    assert recorder.rows == sizes


def test_output_that_is_not_utf8_is_reported(server: Serving) -> None:
    binary = (config("bytes", BYTES, (1,)), lambda inputs: {"OUTPUT0": np.array([[b"\xff"]], dtype=object)})
    with predict_served([binary]) as other:
        status, answer = ask(other, body={"inputs": ["a"]})
    assert status == 400
    assert "not UTF-8" in answer["error"]


def test_get_is_answered_with_use_post(server: Serving) -> None:
    for path in ("/predict", "/predict/floats"):
        status, fields, content = ask_raw(server, path, method="GET")
        assert (status, fields["allow"]) == (405, "POST")
        assert "POST" in json.loads(content)["error"]


def asked_as(headers: dict[str, str], body: Any = None, **more: Any) -> InferRequest:
    """The request that reaches the data plane."""
    seen: list[InferRequest] = []
    with predict_served([(config("m", FP32, (1,)), same)], **more) as server:
        plane = server.site.plane  # type: ignore[attr-defined]
        infer = plane.infer

        def noting(request: InferRequest, done: Any) -> Any:
            seen.append(request)
            return infer(request, done)

        plane.infer = noting
        plane.answer = lambda request: None
        assert ask(server, body=body or {"inputs": [1.0]}, headers=headers)[0] == 200
    return seen[0]


@pytest.mark.parametrize(
    ("value", "fresh"), [("no-cache", True), ("No-Store, max-age=0", True), ("max-age=5", False), ("", False)]
)
def test_cache_control(value: str, fresh: bool) -> None:
    assert asked_as({"cache-control": value} if value else {}).bypass_cache is fresh


def test_the_key_of_a_request_is_passed_on() -> None:
    def key_of(model: str, head: Any, fields: Any) -> str:
        return f"{model}/{(head.get(b'x-user') or b'').decode()}/{fields.get('user')}"

    request = asked_as({"x-user": "ada"}, {"inputs": [1.0], "user": "byron"}, key_of=key_of, more_fields=("user",))
    assert request.sticky_key == "m/ada/byron"
    assert asked_as({}, key_of=lambda *_: "").sticky_key == ""


def slow_model() -> tuple[Any, Gate]:
    gate = Gate()
    group = (InstanceGroup("slow", runs="thread"),)
    return (config("slow", FP32, (1,), instance_groups=group, max_batch_size=1, scheduling=None), gate), gate


def test_timeout_handling_frees_the_queue() -> None:
    model, gate = slow_model()
    with predict_served([model], PredictSettings(timeout_seconds=60)) as server:
        # The second waits in the queue, behind the first that is computed: both are told, the queue is empty then.
        bodies = [json.dumps({"inputs": [float(number)]}).encode() for number in range(2)]
        sockets = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in bodies]
        with timing_out(server, gate, waiting=2):
            head = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            sockets[0].sendall(head % len(bodies[0]) + bodies[0])
            eventually(lambda: server.site.deadlines[0]._waiting)  # type: ignore[attr-defined]
            sockets[1].sendall(head % len(bodies[1]) + bodies[1])
        for sock in sockets:
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 504 ")
            assert b"no prediction within 60 seconds: try again later" in answer
            sock.close()
        gate.let()
        gate.let()
        assert ask(server, body={"inputs": [7.0]})[1]["predictions"] == [7.0]
        assert [float(call[0][0]) for call in gate.received] == [0.0, 7.0]


def test_a_batch_of_parts_times_out_as_a_whole() -> None:
    model, gate = slow_model()
    with predict_served([model], PredictSettings(timeout_seconds=60)) as server:
        with timing_out(server, gate):
            status, _ = ask(server, body={"batch": [[1.0], [2.0], [3.0]]})
        assert status == 504
        gate.let(2)
        assert ask(server, body={"inputs": [7.0]})[0] == 200
        assert len(gate.received) == 2


def test_a_client_that_disconnects_leaves_the_queue() -> None:
    model, gate = slow_model()
    with predict_served([model]) as server:
        sockets = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(2)]
        sockets[0].sendall(b'POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"inputs": [0]}')
        asyncio.run(gate.entered())
        sockets[1].sendall(b'POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n{"inputs": [1]}')
        plane = server.site.plane  # type: ignore[attr-defined]

        eventually(lambda: server.call(lambda: plane.find("slow").waiting) == 1)
        sockets[1].close()
        eventually(lambda: server.call(lambda: plane.find("slow").statistics.settled) == 1)
        gate.let(2)
        assert sockets[0].recv(65536).startswith(b"HTTP/1.1 200")
        sockets[0].close()
        assert ask(server, body={"inputs": [7.0]})[0] == 200
        assert [float(call[0][0]) for call in gate.received] == [0.0, 7.0]


@pytest.mark.parametrize("empty_last", [False, True])
def test_a_decoupled_model_answers_with_events(empty_last: bool) -> None:
    model = (config("m", FP32, (-1,), (1,), decoupled=True), Repeats(empty_last=empty_last))
    with predict_served([model]) as server:
        status, answer = ask(server, body={"inputs": [1, 2, 3]})
        assert status == 501
        assert "text/event-stream" in answer["error"]
        status, fields, content = ask_raw(
            server, "/predict", {"inputs": [1, 2, 3]}, headers={"accept": "text/event-stream"}
        )
        assert status == 200
        assert fields["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: ")]
        assert [event["predictions"] for event in events] == [[1.0], [2.0], [3.0]]
        assert [event["final"] for event in events] == [False, False, not empty_last]
        status, answer = ask(server, body={"inputs": []}, headers={"accept": "text/event-stream"})
        assert status == 400


def test_health_of_several_models(server: Serving) -> None:
    status, answer = ask(server, "/healthz", method="GET")
    assert (status, answer["status"], answer["models"]["floats"]) == (200, "healthy", "1")
    assert ask(server, "/livez", method="GET") == (200, {"status": "alive"})
    for path in ("/ready", "/readyz"):
        assert ask(server, path, method="GET") == (200, {"status": "ready"})
    status, answer = ask(server, "/health", method="GET")
    assert (status, answer["status"], answer["models"]["floats"]) == (200, "healthy", {"1": "READY"})


def test_health_of_a_server_that_stops() -> None:
    with predict_served([(config("m", FP32, (1,)), same)], PredictSettings(model="m")) as server:
        assert ask(server, "/healthz", method="GET") == (200, {"status": "healthy", "model_version": "1"})
        server.site.plane.accepting = False  # type: ignore[attr-defined]
        for path in ("/ready", "/readyz", "/healthz", "/health"):
            assert ask(server, path, method="GET")[0] == 503
        assert "stopping" in ask(server, "/readyz", method="GET")[1]["error"]
        assert ask(server, "/livez", method="GET")[0] == 200
