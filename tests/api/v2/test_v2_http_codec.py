# SPDX-License-Identifier: Apache-2.0
"""The JSON codec alone: what it reads, what it writes, and what it keeps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.v2.http_codec import HttpCodec, encode_response
from headrace.core.dtypes import DTYPES
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput
from headrace.core.tensors import Tensor


def binary_request(array: Any, datatype: str, **more: Any) -> tuple[bytes, bytes]:
    size = {"binary_data_size": array.nbytes}
    document = {"inputs": [{"name": "x", "datatype": datatype, "shape": list(array.shape), "parameters": size}], **more}
    text = json.dumps(document).encode()
    return text + array.tobytes(), b"%d" % len(text)


def described(request: InferRequest) -> list[Any]:
    return [
        request.model_name,
        request.model_version,
        request.id,
        [(t.name, t.dtype.name, t.shape, bytes(t.to_buffer())) for t in request.inputs],
        [(output.name, dict(output.parameters)) for output in request.outputs],
        dict(request.parameters),
    ]


def test_a_binary_tensor_is_a_view_of_the_body() -> None:
    codec = HttpCodec()
    for number in range(3):
        array = np.full((1, 1000), number, np.float32)
        body, length = binary_request(array, "FP32")
        (tensor,) = codec.decode_request("m", "", body, length).inputs
        assert np.array_equal(tensor.array, array)
        assert np.shares_memory(np.frombuffer(body, np.uint8), tensor.array)


def test_several_binary_tensors_are_views_in_order() -> None:
    first, second = np.arange(4, dtype=np.int32), np.arange(3, dtype=np.int16)
    inputs = [
        {"name": "a", "datatype": "INT32", "shape": [4], "parameters": {"binary_data_size": 16}},
        {"name": "j", "datatype": "INT8", "shape": [2], "data": [1, 2]},
        {"name": "b", "datatype": "INT16", "shape": [3], "parameters": {"binary_data_size": 6}},
        {"name": "z", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}},
    ]
    text = json.dumps({"inputs": inputs}).encode()
    request = HttpCodec().decode_request("m", "", text + first.tobytes() + second.tobytes(), b"%d" % len(text))
    assert [tensor.array.tolist() for tensor in request.inputs] == [[0, 1, 2, 3], [1, 2], [0, 1, 2], []]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["INT32", "FP32", "INT8", "BF16"]),
            st.sampled_from([(1, 4), (4, 1), (2, 2), (1, 3)]),
            st.sampled_from(["m", "n"]),
            st.sampled_from(["", "1"]),
            st.sampled_from(
                [{}, {"id": "i"}, {"outputs": [{"name": "y"}]}, {"parameters": {"binary_data_output": True}}]
            ),
        ),
        max_size=12,
    )
)
def test_what_was_learnt_changes_nothing(plans: list[tuple[str, tuple[int, ...], str, str, dict[str, Any]]]) -> None:
    codec = HttpCodec()
    for number, (datatype, shape, model, version, more) in enumerate(plans):
        array = np.full(shape, number, DTYPES[datatype].numpy)
        body, length = binary_request(array, datatype, **more)
        for _ in range(2):
            result = codec.decode_request(model, version, body, length)
            assert described(result) == described(HttpCodec().decode_request(model, version, body, length))
        # The same head over a body of another length is refused as it always was.
        for wrong in (body + b"x", body[:-1]):
            with pytest.raises(InvalidArgument):
                codec.decode_request(model, version, wrong, length)


def test_one_body_for_several_models_and_versions() -> None:
    codec = HttpCodec()
    body, length = binary_request(np.zeros((1, 1), np.int32), "INT32")
    for _ in range(2):
        for model, version in (("m", ""), ("n", ""), ("m", "1"), ("n", "1")):
            request = codec.decode_request(model, version, body, length)
            assert (request.model_name, request.model_version) == (model, version)


def test_what_is_learnt_is_bounded() -> None:
    codec = HttpCodec()
    for number in range(1500):
        body, length = binary_request(np.zeros((1, 1), np.int32), "INT32", parameters={"p": "x" * (3000 + number)})
        codec.decode_request("m", "", body, length)
        codec.decode_request("n" * 50_000 + str(number), "v" * 50_000, body, length)
    assert len(codec._layouts) <= 1024
    assert sum(len(part) for key in codec._layouts for part in key) < 6 * 1024 * 1024


# Responses.


def answer(tensors: list[Tensor], request: InferRequest, **more: Any) -> tuple[dict[str, Any], bytes]:
    length, buffers = encode_response(InferResponse("m", "1", tensors, **more), request)
    whole = b"".join(buffers)
    size = len(whole) if length is None else length
    return json.loads(whole[:size]), whole[size:]


NAMES = st.text(max_size=12)


@given(NAMES, NAMES, st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=6), st.booleans())
def test_a_response_is_json(name: str, request_id: str, values: list[int], binary: bool) -> None:
    array = np.array(values, "<i4").reshape(1, -1)
    request = InferRequest("m", (), "", request_id, [RequestedOutput(name, {"binary_data": binary})])
    document, rest = answer([Tensor(name, DTYPES["INT32"], array)], request, id=request_id)
    assert document["model_name"] == "m"
    assert document["model_version"] == "1"
    assert document.get("id", "") == request_id
    (output,) = document["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == (name, "INT32", [1, len(values)])
    if binary:
        assert output["parameters"] == {"binary_data_size": 4 * len(values)}
        assert rest == array.tobytes()
    else:
        assert output["data"] == values
        assert rest == b""


def test_outputs_choose_their_own_form() -> None:
    tensors = [Tensor(name, DTYPES["INT8"], np.array([index], np.int8)) for index, name in enumerate("abc")]
    chosen = {"a": {"binary_data": True}, "b": {"binary_data": False}, "c": {}}
    outputs = [RequestedOutput(name, parameters) for name, parameters in chosen.items()]
    for everything in (False, True):  # as in Triton, it is for requests that list no outputs
        request = InferRequest("m", (), outputs=outputs, parameters={"binary_data_output": everything})
        document, rest = answer(tensors, request)
        assert ["data" not in output for output in document["outputs"]] == [True, False, False]
        assert len(rest) == 1


@pytest.mark.parametrize("datatype", [name for name in DTYPES if name != "BYTES"])
def test_every_data_type_is_json(datatype: str) -> None:
    dtype = DTYPES[datatype]
    array = np.array([[0, 1], [1, 0]]).astype(dtype.numpy)
    document, _ = answer([Tensor("y", dtype, array)], InferRequest("m", ()))
    data = document["outputs"][0]["data"]
    assert len(data) == 4
    if datatype != "BF16":
        assert data == [0, 1, 1, 0]


def test_parts_of_arrays_are_written_in_row_order() -> None:
    array = np.arange(24, dtype="<i4").reshape(4, 6)
    for part in (array[1:3], array[:, ::2], array.T, array[::-1]):
        document, _ = answer([Tensor("y", DTYPES["INT32"], part)], InferRequest("m", ()))
        assert document["outputs"][0]["data"] == part.ravel().tolist()
        request = InferRequest("m", (), parameters={"binary_data_output": True})
        _, rest = answer([Tensor("y", DTYPES["INT32"], part)], request)
        assert rest == part.tobytes()
