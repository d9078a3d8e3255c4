# SPDX-License-Identifier: Apache-2.0
"""The gRPC codec against protobuf itself: whatever it takes apart or puts together by hand must be the same."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from headrace.api.v2.grpc_codec import GrpcCodec, encode_response, split_raw_inputs
from headrace.core.dtypes import DTYPES
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from support.properties import examples

# Random messages.

NAMES = st.text(max_size=12)
PARAMETERS = st.dictionaries(
    NAMES,
    st.one_of(
        st.booleans().map(lambda value: service_pb2.InferParameter(bool_param=value)),
        st.integers(-(1 << 63), (1 << 63) - 1).map(lambda value: service_pb2.InferParameter(int64_param=value)),
        NAMES.map(lambda value: service_pb2.InferParameter(string_param=value)),
        st.floats(allow_nan=False).map(lambda value: service_pb2.InferParameter(double_param=value)),
    ),
    max_size=3,
)
CONTENTS = st.builds(
    service_pb2.InferTensorContents,
    int_contents=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=3),
    fp64_contents=st.lists(st.floats(allow_nan=False), max_size=3),
    bytes_contents=st.lists(st.binary(max_size=5), max_size=3),
)
INPUTS = st.builds(
    service_pb2.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=st.sampled_from([*DTYPES, "", "NOPE"]),
    shape=st.lists(st.integers(-2, 5), max_size=4),
    parameters=PARAMETERS,
    contents=st.none() | CONTENTS,
)
OUTPUTS = st.builds(service_pb2.ModelInferRequest.InferRequestedOutputTensor, name=NAMES, parameters=PARAMETERS)
REQUESTS = st.builds(
    service_pb2.ModelInferRequest,
    model_name=NAMES,
    model_version=NAMES,
    id=NAMES,
    parameters=PARAMETERS,
    inputs=st.lists(INPUTS, max_size=3),
    outputs=st.lists(OUTPUTS, max_size=3),
    raw_input_contents=st.lists(st.binary(max_size=300), max_size=4),
)


def varint(value: int) -> bytes:
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*pieces, value])


def tagged(number: int, kind: int, payload: bytes) -> bytes:
    return varint(number << 3 | kind) + payload


NUMBERS = st.integers(100, (1 << 29) - 1)
GROUPED = st.sampled_from([b"", tagged(1, 0, b"\7"), tagged(7, 2, b"\3abc"), tagged(7, 3, b"") + tagged(7, 4, b"")])
"""What a group may hold: number 7 means nothing there."""

UNKNOWN = st.one_of(
    st.builds(lambda number, value: tagged(number, 0, varint(value)), NUMBERS, st.integers(0, (1 << 64) - 1)),
    st.builds(lambda number, data: tagged(number, 1, data), NUMBERS, st.binary(min_size=8, max_size=8)),
    st.builds(lambda number, data: tagged(number, 2, varint(len(data)) + data), NUMBERS, st.binary(max_size=200)),
    st.builds(lambda number, data: tagged(number, 5, data), NUMBERS, st.binary(min_size=4, max_size=4)),
    st.builds(lambda number, inside: tagged(number, 3, inside) + tagged(number, 4, b""), NUMBERS, GROUPED),
)
"""Fields of another generation of the protocol, groups among them."""


def fields_of(message: Any) -> list[bytes]:
    """An encoded request, cut at its top-level fields."""
    pieces = []
    for field, value in message.ListFields():
        one = type(message)()
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            one.MergeFrom(type(message)(parameters=value))
            pieces.append(one.SerializeToString())
        elif isinstance(value, str):
            setattr(one, field.name, value)
            pieces.append(one.SerializeToString())
        else:
            for item in value:
                single = type(message)()
                if field.message_type is not None:
                    getattr(single, field.name).add().CopyFrom(item)
                else:
                    getattr(single, field.name).append(item)
                pieces.append(single.SerializeToString())
    return pieces


@st.composite
def shuffled(draw: st.DrawFn) -> bytes:
    """An encoded request with its fields in any order, unknown ones among them: raw contents first, last, in between."""
    pieces = fields_of(draw(REQUESTS)) + draw(st.lists(UNKNOWN, max_size=3))
    return b"".join(draw(st.permutations(pieces)))


def understood(rest: bytes, raw: list[memoryview]) -> Any:
    parsed = service_pb2.ModelInferRequest.FromString(bytes(rest))
    assert not parsed.raw_input_contents
    parsed.raw_input_contents.extend(bytes(piece) for piece in raw)
    return parsed


@settings(max_examples=examples(100))
@given(shuffled())
@example(b"\xa3\x06\x3a\x03abc\xa4\x06")  # a group with a field of the same number as the raw contents
@example(b"\x3a\x03abc\xa3\x06\xab\x06\xac\x06\xa4\x06\x3a\x03def")  # a group in a group, raw contents around it
def test_splitting_is_what_protobuf_would_do(encoded: bytes) -> None:
    expected = service_pb2.ModelInferRequest.FromString(encoded)
    rest, raw = split_raw_inputs(encoded)
    assert [bytes(piece) for piece in raw] == list(expected.raw_input_contents)
    result = understood(rest, raw)
    assert result == expected


@given(st.binary(max_size=200) | shuffled().flatmap(lambda data: st.integers(0, len(data)).map(lambda n: data[:n])))
def test_splitting_refuses_only_what_protobuf_refuses(encoded: bytes) -> None:
    try:
        expected = service_pb2.ModelInferRequest.FromString(encoded)
    except Exception:
        expected = None
    codec = GrpcCodec()
    padding = tagged(1000, 2, varint(9000) + bytes(9000))
    outcomes = []
    for data in (encoded, padding + encoded):
        try:
            outcomes.append(described(codec.decode_request(data)))
        except HeadraceError as error:
            outcomes.append(error.message)
    if expected is None:
        assert outcomes == ["the message is not a ModelInferRequest"] * 2
    else:
        # A small message is protobuf's, a large one is split: the outcome is one.
        assert outcomes[0] == outcomes[1]


def described(request: InferRequest) -> list[Any]:
    return [
        request.model_name,
        request.model_version,
        request.id,
        [(t.name, t.dtype.name, t.shape, bytes(t.to_buffer())) for t in request.inputs],
        [(output.name, dict(output.parameters)) for output in request.outputs],
        dict(request.parameters),
    ]


def valid(array: Any, datatype: str, **more: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="m", **more)
    request.inputs.add(name="x", datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return request


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_large_tensor_is_a_view_of_the_message(size: int) -> None:
    """Also when the request has been seen before, which takes another road."""
    codec = GrpcCodec()
    for number in range(3):
        array = np.full((1, size), number, np.float32)
        message = valid(array, "FP32").SerializeToString()
        (tensor,) = codec.decode_request(message).inputs
        assert np.array_equal(tensor.array, array)
        received = np.frombuffer(message, np.uint8)
        assert np.shares_memory(received, tensor.array) or size == 10
    message = memoryview(bytearray(message))
    (tensor,) = codec.decode_request(message).inputs
    assert np.shares_memory(np.frombuffer(message, np.uint8), tensor.array)


def test_several_large_tensors_are_views_of_the_message() -> None:
    request = valid(np.zeros((1, 5000), np.float32), "FP32")
    request.inputs.add(name="y", datatype="INT8", shape=(9000,))
    request.raw_input_contents.append(bytes(9000))
    message = request.SerializeToString()
    tensors = GrpcCodec().decode_request(message).inputs
    assert [tensor.shape for tensor in tensors] == [(1, 5000), (9000,)]
    for tensor in tensors:
        assert np.shares_memory(np.frombuffer(message, np.uint8), tensor.array)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["INT32", "FP32", "INT8", "BF16"]),
            st.sampled_from([(1, 4), (4, 1), (2, 2), (1, 3), (3000,)]),
            st.sampled_from(["m", "n"]),
            st.sampled_from(["", "1"]),
            st.sampled_from(["", "", "id"]),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_what_was_learnt_changes_nothing(plans: list[tuple[str, tuple[int, ...], str, str, str, bool]]) -> None:
    """One codec that sees many requests decodes each as a new codec does."""
    codec = GrpcCodec()
    for number, (datatype, shape, model, version, request_id, options) in enumerate(plans):
        count = int(np.prod(shape)) * DTYPES[datatype].item_bytes
        request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=request_id)
        request.inputs.add(name="x", datatype=datatype, shape=shape)
        request.raw_input_contents.append(bytes((number + index) % 256 for index in range(count)))
        if options:
            request.outputs.add(name="y").parameters["classification"].int64_param = number % 2
            request.parameters["p"].bool_param = True
        message = request.SerializeToString()
        for _ in range(2):
            assert described(codec.decode_request(message)) == described(GrpcCodec().decode_request(message))


def test_raw_contents_before_the_rest_are_not_learnt_wrongly() -> None:
    """The last bytes of this message look like a raw tensor, and are the value of a parameter."""
    array = np.arange(4, dtype=np.int32)
    request = valid(array.reshape(1, 4), "INT32")
    inner = tagged(7, 2, varint(16)) + b"sixteen letters!"
    parameter = service_pb2.ModelInferRequest()
    parameter.parameters["p"].string_param = inner.decode("latin-1")
    message = request.SerializeToString() + parameter.SerializeToString()
    assert message.endswith(inner)
    codec = GrpcCodec()
    for letters in (b"sixteen letters!", b"SIXTEEN LETTERS!"):
        decoded = codec.decode_request(message[:-16] + letters)
        assert decoded.inputs[0].array.tolist() == [[0, 1, 2, 3]]
        assert decoded.parameters["p"] == inner[:-16].decode() + letters.decode()


def test_what_is_learnt_is_bounded() -> None:
    """A client may write megabytes around a number: they must not stay when the request has gone."""
    codec = GrpcCodec()
    for extra in range(20):
        request = valid(np.zeros((1, 1), np.int32), "INT32")
        request.parameters["p"].string_param = "x" * (100_000 + extra)
        codec.decode_request(request.SerializeToString())
    assert sum(len(prefix) for prefix, _ in codec._layouts.values()) < 100_000
    for number in range(3000):
        codec.decode_request(valid(np.zeros((1, 1 + number), np.int8), "INT8").SerializeToString())
    assert len(codec._layouts) <= 1024


@pytest.mark.parametrize(
    "field", [tagged(7, 2, b"\0"), tagged(5, 2, b"\0"), tagged(6, 2, b"\0"), tagged(4, 2, b"\0"), tagged(99, 0, b"\1")]
)
def test_millions_of_fields_are_refused_early(field: bytes) -> None:
    """Each would become an object: 64 MiB of two-byte fields would take gigabytes and half a minute."""
    message = valid(np.zeros((1, 1), np.int32), "INT32").SerializeToString() + field * 200_000
    with pytest.raises(InvalidArgument, match="fields|inputs|outputs|parameters"):
        GrpcCodec().decode_request(message)


# Responses.


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = DTYPES[draw(st.sampled_from([*DTYPES]))]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape))
    if dtype.name == "BYTES":
        array = np.empty(count, object)
        array[:] = draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count))
    else:
        data = draw(st.binary(min_size=count * dtype.item_bytes, max_size=count * dtype.item_bytes))
        array = np.frombuffer(data, dtype.numpy)
    return Tensor(draw(NAMES), dtype, array.reshape(shape))


@given(NAMES, NAMES, NAMES, st.lists(tensors(), max_size=3))
def test_a_response_is_what_protobuf_would_read(
    model: str, version: str, request_id: str, outputs: list[Tensor]
) -> None:
    written = b"".join(encode_response(InferResponse(model, version, outputs, id=request_id)))
    string = service_pb2.ModelInferResponse.FromString(written)
    expected = service_pb2.ModelInferResponse(model_name=model, model_version=version, id=request_id)
    for tensor in outputs:
        expected.outputs.add(name=tensor.name, datatype=tensor.dtype.name, shape=tensor.shape)
        expected.raw_output_contents.append(bytes(tensor.to_buffer()))
    assert string == expected


def test_a_response_does_not_copy_its_tensors() -> None:
    array = np.zeros((2, 1000), np.float32)
    pieces = encode_response(InferResponse("m", "1", [Tensor("y", DTYPES["FP32"], array)]))
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in pieces if len(piece) > 100)


def test_a_response_of_part_of_an_array() -> None:
    """A batcher gives each caller a slice; a model may give a transposed one."""
    array = np.arange(24, dtype="<i4").reshape(4, 6)
    for part in (array[1:3], array[:, ::2], array.T, array[::-1]):
        message = b"".join(encode_response(InferResponse("m", "1", [Tensor("y", DTYPES["INT32"], part)])))
        string = service_pb2.ModelInferResponse.FromString(message)
        assert string.raw_output_contents[0] == struct.pack(f"<{part.size}i", *part.ravel().tolist())
