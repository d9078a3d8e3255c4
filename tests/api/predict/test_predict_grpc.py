# SPDX-License-Identifier: Apache-2.0
"""`InferenceService` beyond the seed's example: other types, other forms of the message, errors, time, order, drain."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from predict_server import Calls, calls_to, predict_served, timing_out

from headrace.api.predict.grpc import PredictCodec, predict_schema
from headrace.api.predict.settings import PredictSettings
from headrace.core.dtypes import BF16, BOOL, BYTES, FP16, FP32, FP64, INT8, INT32
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Tensor
from headrace.models.config.types import InputSpec, InstanceGroup, OutputSpec
from support.engines import Gate, config_of
from support.serving import Serving
from support.waiting import eventually

WAIT = 30


def config(name: str, dtype: Any = FP32, dims: Any = (2,), **more: Any) -> Any:
    return config_of(
        name, inputs=(InputSpec("INPUT0", dtype, dims),), outputs=(OutputSpec("OUTPUT0", dtype, dims),), **more
    )


def same(inputs: Any) -> Any:
    return {"OUTPUT0": inputs["INPUT0"]}


MODELS: list[tuple[Any, Any]] = [
    (config(name, dtype), same)
    for name, dtype in (
        ("FP32", FP32),
        ("FP64", FP64),
        ("FP16", FP16),
        ("BF16", BF16),
        ("INT32", INT32),
        ("INT8", INT8),
        ("BOOL", BOOL),
        ("BYTES", BYTES),
    )
]
MODELS.append((config("image", dims=(1, 2, 2)), same))
MODELS.append((config("alone", dims=(1, 2), max_batch_size=0), same))
MODELS.append((config_of("two", inputs=(InputSpec("a", FP32, (1,)), InputSpec("b", FP32, (1,)))), same))
MODELS.append(
    (
        config_of(
            "parts",
            inputs=(InputSpec("INPUT0", FP32, (2,)),),
            outputs=(OutputSpec("a", FP32, (2,)), OutputSpec("b", FP32, (2,))),
        ),
        lambda inputs: {"a": inputs["INPUT0"], "b": inputs["INPUT0"]},
    )
)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with predict_served(MODELS, PredictSettings(model="FP32")) as running:
        yield running


@pytest.fixture
def calls(server: Serving) -> Iterator[Calls]:
    with calls_to(server) as made:
        yield made


def predict(calls: Calls, inputs: Any, model: str = "", **more: Any) -> Any:
    metadata = [("model", model)] if model else []
    return calls.predict(calls.request(inputs=inputs, **more), timeout=WAIT, metadata=metadata)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        ("", [1.5, -2.0]),
        ("FP64", [1.5, -2.0]),
        ("FP16", [1.5, -2.0]),
        ("BF16", [1.5, -2.0]),
        ("INT32", [15.0, -2.0]),
        ("INT8", [15.0, -2.0]),
        ("image", [1.0, 2.0, 3.0, 4.0]),
        ("alone", [1.0, 2.0]),
    ],
)
def test_floats_are_given_as_the_model_wants_them(calls: Calls, model: str, inputs: list[float]) -> None:
    answer = predict(calls, inputs, model)
    assert list(answer.predictions) == inputs
    assert answer.model_version == "1"
    assert answer.latency_ms > 0


def test_a_version_can_be_requested(calls: Calls) -> None:
    assert predict(calls, [1.0, 2.0], model_version="1").model_version == "1"
    assert predict(calls, [1.0, 2.0], model_version="latest").model_version == "1"


@pytest.mark.parametrize(
    ("model", "inputs", "more", "status", "text"),
    [
        ("", [], {}, grpc.StatusCode.INVALID_ARGUMENT, "inputs cannot be empty"),
        ("", [1.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "inputs has 1 values, but model 'FP32' takes shape [2]"),
        ("", [1.0] * 10_001, {}, grpc.StatusCode.RESOURCE_EXHAUSTED, "max_inputs"),
        ("", [1.0, float("nan")], {}, grpc.StatusCode.INVALID_ARGUMENT, "NaN or infinity"),
        ("", [1.0, float("-inf")], {}, grpc.StatusCode.INVALID_ARGUMENT, "NaN or infinity"),
        ("", [1.0, 2.0], {"model_version": "v3"}, grpc.StatusCode.NOT_FOUND, "has no version 'v3'"),
        ("nobody", [1.0, 2.0], {}, grpc.StatusCode.NOT_FOUND, "unknown model"),
        ("INT32", [1.5, 2.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "send integers"),
        ("INT8", [300.0, 2.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "send integers that fit"),
        ("FP16", [1e6, 2.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "do not fit FP16"),
        ("BOOL", [1.0, 0.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "takes BOOL, not numbers"),
        ("BYTES", [1.0, 0.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "takes BYTES, not numbers"),
        ("two", [1.0, 0.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "has several inputs, 'a', 'b'"),
        ("parts", [1.0, 0.0], {}, grpc.StatusCode.INVALID_ARGUMENT, "has several outputs, 'a', 'b'"),
    ],
)
def test_bad_calls(calls: Calls, model: str, inputs: Any, more: Any, status: Any, text: str) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        predict(calls, inputs, model, **more)
    assert failed.value.code() is status
    assert text in failed.value.details()
    assert list(predict(calls, [1.0, 2.0]).predictions) == [1.0, 2.0]


def test_numbers_whose_squares_overflow_are_finite(calls: Calls) -> None:
    assert list(predict(calls, [3e38, 1.0]).predictions) == pytest.approx([3e38, 1.0])


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a\x08" + np.array([1, 2], "<f4").tobytes(),
        b"\x0d" + np.array([1], "<f4").tobytes() + b"\x0d" + np.array([2], "<f4").tobytes(),
        b"\x0a\x04" + np.array([1], "<f4").tobytes() + b"\x0a\x04" + np.array([2], "<f4").tobytes(),
        b"\x12\x00\x0a\x88\x00" + np.array([1, 2], "<f4").tobytes(),
    ],
)
def test_every_form_of_the_message_is_read(message: bytes) -> None:
    numbers, version = PredictCodec().decode(message)
    assert (numbers.tolist(), version) == ([1.0, 2.0], "")


@pytest.mark.parametrize("message", [b"\x0a\x05abcde", b"\x0a\x08abc", b"\x0a" + b"\xff" * 12, b"\xff", b"\x0a"])
def test_bytes_that_are_not_a_message_are_refused(message: bytes) -> None:
    with pytest.raises(InvalidArgument, match="not a PredictRequest"):
        PredictCodec().decode(message)


@pytest.mark.parametrize("count", [0, 1, 31, 32, 5000])
def test_what_is_written_protobuf_reads(count: int) -> None:
    array = np.arange(count, dtype=np.float32).reshape(1, count)
    written = b"".join(map(bytes, PredictCodec().encode(Tensor("x", FP32, array), "v1.0.0", 5.25)))
    read = predict_schema().message("PredictResponse").FromString(written)
    assert (list(read.predictions), read.model_version, read.latency_ms) == (list(range(count)), "v1.0.0", 5.25)
    decoded, version = PredictCodec().decode(
        predict_schema().message("PredictRequest")(inputs=array.ravel(), model_version="x").SerializeToString()
    )
    assert (decoded.tolist(), version) == (list(range(count)), "x")


def test_the_schema_is_the_seeds(tmp_path_factory: pytest.TempPathFactory) -> None:
    from support.seed_stubs import SEEDS_PROTO, run_protoc  # the one text of it

    folder = tmp_path_factory.mktemp("seed")
    (folder / "seed.proto").write_text(SEEDS_PROTO)
    run_protoc(f"-I{folder}", f"--descriptor_set_out={folder / 'set'}", "seed.proto")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    (seed,) = FileDescriptorSet.FromString((folder / "set").read_bytes()).file
    ours = FileDescriptorProto()
    predict_schema().files[0].CopyToProto(ours)
    assert (ours.package, ours.message_type, ours.service) == ("", seed.message_type, seed.service)


# Streams.


def test_an_error_ends_a_stream_after_the_answers_before_it(calls: Calls) -> None:
    request = iter([calls.request(inputs=[1, 2]), calls.request(inputs=[1, 2, 3]), calls.request(inputs=[4, 5])])
    stream = calls.predict_stream(request, timeout=WAIT)
    assert list(next(stream).predictions) == [1, 2]
    with pytest.raises(grpc.RpcError) as failed:
        next(stream)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs has 3 values" in failed.value.details()


def test_a_stream_is_a_conversation(calls: Calls) -> None:
    request: queue.Queue[Any] = queue.Queue()
    stream = calls.predict_stream(iter(request.get, None), timeout=WAIT)
    for number in range(5):
        request.put(calls.request(inputs=[number, 0]))
        assert list(next(stream).predictions) == [number, 0]
    request.put(None)
    assert list(stream) == []


def slow() -> tuple[Any, Gate]:
    gate = Gate()
    group = (InstanceGroup("slow", runs="thread"),)
    return (config("slow", instance_groups=group, max_batch_size=1, scheduling=None), gate), gate


def test_a_call_that_takes_too_long_gets_deadline_exceeded() -> None:
    model, gate = slow()
    with predict_served([model], PredictSettings(timeout_seconds=60)) as server, calls_to(server) as calls:
        with timing_out(server, gate), pytest.raises(grpc.RpcError) as failed:
            predict(calls, [1.0, 2.0])
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no prediction within 60 seconds" in failed.value.details()
        gate.let(2)
        assert list(predict(calls, [3.0, 4.0]).predictions) == [3.0, 4.0]


def test_a_cancelled_stream_gives_up_its_questions() -> None:
    model, gate = slow()
    with predict_served([model]) as server, calls_to(server) as calls:
        request: queue.Queue[Any] = queue.Queue()
        stream = calls.predict_stream(iter(request.get, None), timeout=WAIT)
        for number in range(3):
            request.put(calls.request(inputs=[number, 0]))
        asyncio.run(gate.entered())
        plane = server.site.plane  # type: ignore[attr-defined]
        eventually(lambda: server.call(lambda: plane.find("slow").waiting) == 2)
        stream.cancel()
        eventually(lambda: server.call(lambda: plane.find("slow").statistics.settled) == 3)
        request.put(None)
        gate.let(2)
        assert list(predict(calls, [7.0, 0.0]).predictions) == [7.0, 0.0]
        assert [float(call[0][0]) for call in gate.received] == [0.0, 7.0]


def test_a_client_that_does_not_stop_sending_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stands still: of endless questions, only some are taken."""
    model, gate = slow()
    sent = itertools.count()
    with predict_served([model], PredictSettings(timeout_seconds=0)) as server, calls_to(server) as calls:
        big = calls.request(inputs=[1, 2], model_version="1")
        rows = (big for _ in iter(sent.__next__, 200_000))
        stream = calls.predict_stream(rows)
        asyncio.run(gate.entered())
        plane = server.site.plane  # type: ignore[attr-defined]
        eventually(lambda: server.call(lambda: plane.find("slow").waiting) >= 63)
        server.call(asyncio.sleep, 0.1)
        assert server.call(lambda: plane.find("slow").waiting) == 63
        stream.cancel()
        gate.let(2)


def test_a_server_that_drains_ends_its_streams(calls: Calls) -> None:
    with predict_served([(config("m"), same)]) as server, calls_to(server) as own:
        request: queue.Queue[Any] = queue.Queue()
        stream = own.predict_stream(iter(request.get, None), timeout=WAIT)
        request.put(own.request(inputs=[1, 2]))
        assert list(next(stream).predictions) == [1, 2]
        server.call(server.site.calls.drain)  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as failed:
            next(stream)
        request.put(None)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
