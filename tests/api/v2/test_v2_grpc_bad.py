# SPDX-License-Identifier: Apache-2.0
"""Wrong requests over gRPC: INVALID_ARGUMENT or NOT_FOUND and a reason; never INTERNAL or UNKNOWN; the server goes on."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from support.properties import examples
from support.serving import Serving

CODE = grpc.StatusCode
PADDING = b"\xc2\x3e\xa8\x46" + bytes(9000)
"""An unknown field of 9,000 bytes: it sends a message down the road of large ones."""


@pytest.fixture(scope="module")
def infer(server: Serving) -> Iterator[Callable[[bytes], Any]]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def call(message: bytes) -> Any:
            return service_pb2.ModelInferResponse.FromString(method(message, timeout=30))

        yield call


@pytest.fixture(autouse=True)
def _still_alive(infer: Callable[[bytes], Any], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert infer(one().SerializeToString()).raw_output_contents == [struct.pack("<2i", 1, 2)]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def one(model: str = "identity", version: str = "", **changes: Any) -> Any:
    """A right request, changed."""
    raw = changes.pop("raw", struct.pack("<2i", 1, 2))
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2]} | changes
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    request.inputs.add(**tensor)
    if raw is not None:
        request.raw_input_contents.extend(raw if isinstance(raw, list) else [raw])
    return request


def contents(**values: Any) -> Any:
    return service_pb2.InferTensorContents(**values)


def refused(infer: Callable[[bytes], Any], message: bytes, code: grpc.StatusCode = CODE.INVALID_ARGUMENT) -> str:
    texts = []
    # Twice, since the codec learns from what it sees; and as a large message, which it takes apart by hand.
    for data in (message, message, PADDING + message):
        with pytest.raises(grpc.RpcError) as failure:
            infer(data)
        assert failure.value.code() is code
        text = failure.value.details()
        assert 0 < len(text) < 2000 or len(message) > 1000
        texts.append(text)
    assert len(set(texts)) == 1
    return texts[0]


REQUESTS: dict[str, tuple[Any, str]] = {
    "nothing": (service_pb2.ModelInferRequest(), "name"),
    "no inputs": (service_pb2.ModelInferRequest(model_name="identity"), "expected 1 inputs but got 0 inputs"),
    "another name": (one(name="INPUT1"), "INPUT0"),
    "an empty name": (one(name=""), "INPUT0"),
    "datatype unknown": (one(datatype="INT128"), "INT128"),
    "datatype empty": (one(datatype=""), "datatype"),
    "datatype in small letters": (one(datatype="int32"), "int32"),
    "shape negative": (one(shape=[1, -2]), "-2"),
    "shape with a minus one": (one(shape=[-1, 2]), "-1"),
    "shape huge": (one(shape=[1, 1 << 62]), "elements"),
    "shape whose product overflows": (
        one(shape=[1 << 32, 1 << 32]),
        "causes total element count to exceed maximum size of",
    ),
    "shape huge beside a zero": (one(shape=[0, 1 << 62], raw=b""), ""),
    "shape of 33 dimensions": (one(shape=[1] * 33), "32"),
    "no batch": (one(shape=[], raw=bytes(4)), "batch"),
    "a batch of none": (one(shape=[0, 2], raw=b""), "batch"),
    "a batch too large": (
        one(shape=[65, 1], raw=bytes(260)),
        "inference request batch-size must be <= 64 for 'identity'",
    ),
    "too few bytes": (one(raw=bytes(4)), "input byte size mismatch for input 'INPUT0'"),
    "too many bytes": (one(raw=bytes(12)), "Expected 8, got 12"),
    "no bytes": (one(raw=b""), "Expected 8, got 0"),
    "two raw tensors for one input": (one(raw=[bytes(8), bytes(8)]), "2 entries for 1 inputs"),
    "no data at all": (one(raw=None), "0 elements"),
    "raw and typed": (one(contents=contents(int_contents=[1, 2])), "contents field must not be specified"),
    "typed in another field": (one(raw=None, contents=contents(fp32_contents=[1, 2])), "0 elements"),
    "typed, too few": (one(raw=None, contents=contents(int_contents=[1])), "1 elements"),
    "typed, too many": (one(raw=None, contents=contents(int_contents=[1, 2, 3])), "3 elements"),
    "typed INT8 out of range": (one(datatype="INT8", raw=None, contents=contents(int_contents=[1, 128])), "do not fit"),
    "typed UINT8 out of range": (
        one(datatype="UINT8", raw=None, contents=contents(uint_contents=[1, 256])),
        "do not fit",
    ),
    "typed INT16 out of range": (
        one(datatype="INT16", raw=None, contents=contents(int_contents=[1, 32768])),
        "do not fit",
    ),
    "typed FP16": (one(datatype="FP16", raw=None, contents=contents(fp32_contents=[1, 2])), "raw_input_contents"),
    "typed BF16": (one(datatype="BF16", raw=None, contents=contents(fp32_contents=[1, 2])), "raw_input_contents"),
    "strings without a length": (one(datatype="BYTES", raw=b"\1\0\0"), "string"),
    "strings that are too long": (one(datatype="BYTES", raw=b"\5\0\0\0abcd"), "string"),
    "strings of the largest length": (one(datatype="BYTES", raw=b"\xff\xff\xff\xff" * 2), "string"),
    "too few strings": (one(datatype="BYTES", raw=b"\2\0\0\0abcd"), "string"),
    "too many strings": (one(datatype="BYTES", raw=b"\1\0\0\0a" * 3), "string"),
    "many strings that are not there": (
        one(datatype="BYTES", shape=[1, 1 << 40]),
        "incomplete string length indicator for inference input",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_wrong_request(infer: Callable[[bytes], Any], name: str) -> None:
    request, word = REQUESTS[name]
    assert word in refused(infer, request.SerializeToString())


def test_two_inputs(infer: Callable[[bytes], Any]) -> None:
    request = one(name="A", raw=[bytes(8), bytes(8)])
    request.inputs.add(name="B", datatype="INT32", shape=[1, 2])
    assert refused(infer, request.SerializeToString()) == (
        "[request id: <id_unknown>] expected 1 inputs but got 2 inputs for model 'identity'. Got input(s) ['A','B'], "
        "but missing required input(s) ['INPUT0']. Please provide all required input(s)."
    )


def test_too_many_inputs(infer: Callable[[bytes], Any]) -> None:
    request = one(raw=None)
    for _ in range(1025):
        request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 2])
    assert "1024" in refused(infer, request.SerializeToString())


def test_an_unknown_output(infer: Callable[[bytes], Any]) -> None:
    request = one()
    request.outputs.add(name="OUTPUT1")
    assert "OUTPUT0" in refused(infer, request.SerializeToString())


def test_an_output_requested_twice(infer: Callable[[bytes], Any]) -> None:
    request = one()
    request.outputs.add(name="OUTPUT0")
    request.outputs.add(name="OUTPUT0")
    text = refused(infer, request.SerializeToString())
    assert "output 'OUTPUT0' already exists in request" in text


@pytest.mark.parametrize("place", ["input", "output", "model", "version"])
def test_long_names_are_not_echoed(infer: Callable[[bytes], Any], place: str) -> None:
    long = "x" * 1_000_000
    request = one(
        model=long if place == "model" else "identity",
        version=long if place == "version" else "",
        name=long if place == "input" else "INPUT0",
        shape=[1, 3] if place == "input" else [1, 2],
    )
    if place == "output":
        request.outputs.add(name=long)
    code = CODE.NOT_FOUND if place == "version" else CODE.INVALID_ARGUMENT
    assert len(refused(infer, request.SerializeToString(), code)) < 5000


GARBAGE = {
    "one byte": b"\xff",
    "text": b"hello world",
    "a cut field": one().SerializeToString()[:-1],
    "a length past the end": b"\x3a\x20" + bytes(8),
    "a name that is not UTF-8": b"\x0a\x02\xff\xfe",
    "a number that does not end": b"\x0a" + b"\xff" * 20,
    "field zero": b"\x00\x00",
    "an unknown kind": b"\x0f\x00",
    "a group without an end": b"\x0b\x08\x01",
    "an end without a group": b"\x0c",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage(infer: Callable[[bytes], Any], name: str) -> None:
    assert refused(infer, GARBAGE[name]) == "the message is not a ModelInferRequest"


@pytest.mark.parametrize("name", ["nope", "Identity", "x" * 255])
def test_an_unknown_model(infer: Callable[[bytes], Any], name: str) -> None:
    text = refused(infer, one(model=name).SerializeToString(), CODE.NOT_FOUND)
    assert text == f"Request for unknown model: '{name}' is not found"


def test_an_unknown_version(infer: Callable[[bytes], Any]) -> None:
    text = refused(infer, one(version="99").SerializeToString(), CODE.NOT_FOUND)
    assert text == "Request for unknown model: 'identity' version 99 is not found"
    for version in ("..", "\0", "latest", "-1", "01", "🚰"):
        refused(infer, one(version=version).SerializeToString(), CODE.NOT_FOUND)


NAMES = ["", "..", ".", "../etc", "a/b", "a\\b", "\0", "a\0b", "🚰", "-rf", "a b", "\r\n", "x" * 256, "x" * 4096]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_model_has(infer: Callable[[bytes], Any], name: str) -> None:
    assert len(refused(infer, one(model=name).SerializeToString())) < 500


@pytest.mark.parametrize("name", ["", "..", "a/b", "\0", "x" * 4096])
def test_readiness_of_a_name_that_no_model_has(server: Serving, name: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelReady")
        request = service_pb2.ModelReadyRequest(name=name)
        try:
            answer = service_pb2.ModelReadyResponse.FromString(method(request.SerializeToString(), timeout=30))
        except grpc.RpcError as error:
            code = error.code()
        else:
            code = None if answer.ready else CODE.NOT_FOUND
        assert code in (CODE.NOT_FOUND, CODE.INVALID_ARGUMENT)
        with pytest.raises(grpc.RpcError) as failure:
            method(b"\xff", timeout=30)
        assert failure.value.code() is CODE.INVALID_ARGUMENT


def test_a_model_says_what_it_takes(infer: Callable[[bytes], Any]) -> None:
    text = refused(infer, one("first1000", datatype="FP32", shape=[1, 16], raw=bytes(64)).SerializeToString())
    assert "unexpected shape for input 'INPUT0' for model 'first1000'. Expected [-1,3,224,224], got [1,16]." in text
    image = np.zeros((1, 3, 224, 224), np.int8)
    text = refused(infer, one("first1000", datatype="INT8", shape=image.shape, raw=image.tobytes()).SerializeToString())
    assert (
        text
        == "[request id: <id_unknown>] inference input 'INPUT0' data-type is 'INT8', but model 'first1000' expects 'FP32'"
    )


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.binary(max_size=100), st.integers(0, 60), st.booleans())
def test_anything_is_answered_or_refused(infer: Callable[[bytes], Any], noise: bytes, at: int, large: bool) -> None:
    right = one().SerializeToString()
    message = right[:at] + noise + right[at + len(noise) // 2 :]
    try:
        infer(PADDING + message if large else message)
    except grpc.RpcError as error:
        code = error.code()
    else:
        code = CODE.OK
    assert code in (CODE.OK, CODE.INVALID_ARGUMENT, CODE.NOT_FOUND)
