# SPDX-License-Identifier: Apache-2.0
"""A JSON request whose layout is remembered is decoded, or refused, as one that is seen for the first time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.api.v2.http_codec import HttpCodec, encode_response
from headrace.core.dtypes import FP32
from headrace.core.errors import HeadraceError
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor

KNOWN = b'{"inputs":[{"name":"A","shape":[1,3],"datatype":"FP32","data":[1,2.5,3e1]}],"parameters":{"x":1}}'


def outcome(codec: HttpCodec, body: bytes) -> Any:
    try:
        request = codec.decode_request("m", "", body, None)
    except HeadraceError as error:
        return type(error), error.message
    tensors = [(t.name, t.dtype.name, t.shape, t.array.tobytes()) for t in request.inputs]
    return request.model_name, request.id, dict(request.parameters), request.outputs, tensors


def warmed(*bodies: bytes) -> HttpCodec:
    codec = HttpCodec()
    for body in bodies:
        outcome(codec, body)
    return codec


def with_numbers(numbers: bytes) -> bytes:
    return KNOWN.replace(b"[1,2.5,3e1]", numbers)


@pytest.mark.parametrize(
    "numbers",
    [
        b"[4,5,6]",
        b"[ 4 ,\n5.25e-3, -6 ]",
        b"[4,5]",
        b"[4,5,6,7]",
        b"[]",
        b"[true,5,6]",
        b"[false,5,6]",
        b"[null,5,6]",
        b'["4",5,6]',
        b"[NaN,5,6]",
        b"[1e300,5,6]",
        b"[[4,5,6]]",
        b"[4,5,[6]]",
        b"[4,5,6",
        b"4,5,6]",
        b"[4,5,6]]",
        b'[4,5,6],"data":[7,8,9]',
        b'[4,5,6],"shape":[3,1]',
        b"[4,,6]",
        b'{"a":4}',
        b"",
    ],
)
def test_other_numbers_in_a_remembered_layout(numbers: bytes) -> None:
    body = with_numbers(numbers)
    expected = outcome(HttpCodec(), body)
    codec = warmed(KNOWN)
    assert outcome(codec, body) == expected
    assert outcome(codec, body) == expected
    assert outcome(codec, KNOWN) == outcome(HttpCodec(), KNOWN)


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":5,"inputs":[{"name":"A","shape":[3],"datatype":"FP32","data":[1,2,3]}]}',
        b'{"inputs":[{"data":[9,9,9],"name":"A","shape":[3],"datatype":"FP32","data":[1,2,3]}]}',
        b'{"inputs":[{"name":"\\"data\\":[","shape":[3],"datatype":"FP32","data":[1,2,3]}]}',
        b'{"inputs":[{"na\\"data":[1,2],"name":"A","shape":[3],"datatype":"FP32","data":[1,2,3]}]}',
        b'{"inputs":[{"name":"A","data":[1,2,3],"datatype":"INT32","shape":[3]}]}',
        b'{"inputs":[{"name":"A","shape":[3],"datatype":"BOOL","data":[true,false,true]}]}',
        b'{"inputs":[{"name":"A","shape":[2],"datatype":"BYTES","data":["u","l"]}]}',
        b'{"inputs":[{"name":"A","shape":[2],"datatype":"BF16","data":[1,2]}]}',
        b'{"inputs":[{"name":"A","shape":[2],"datatype":"FP16","data":[1,2]}]}',
        b'{"id":"7","inputs":[{"name":"A","shape":[2],"datatype":"UINT8","data":[1,2]}]}',
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":[1]},{"name":"B","shape":[1],"datatype":"FP32","data":[2]}]}',
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32","data":7}]}',
        b'{"inputs":[{"name":"A","shape":[1],"datatype":"FP32"}],"x":{"data":[1]}}',
        b'{"inputs": [{"name": "A", "shape": [2], "datatype": "INT64", "data": [9007199254740993, -1]}]}',
    ],
)
def test_requests_of_any_form_are_decoded_alike_every_time(body: bytes) -> None:
    expected = outcome(HttpCodec(), body)
    codec = HttpCodec()
    for _ in range(3):
        assert outcome(codec, body) == expected
    other = body.replace(b"[1,2,3]", b"[7,8,9]")
    assert outcome(codec, other) == outcome(HttpCodec(), other)


def test_the_text_around_the_numbers_decides() -> None:
    codec = warmed(KNOWN)
    for changed in (
        KNOWN.replace(b'"A"', b'"B"'),
        KNOWN.replace(b'"x":1', b'"x":2'),
        KNOWN.replace(b"[1,3]", b"[3,1]"),
        KNOWN + b" ",
        KNOWN[:-1],
    ):
        assert outcome(codec, changed) == outcome(HttpCodec(), changed)


def test_a_remembered_layout_is_used() -> None:
    codec = warmed(KNOWN)
    assert len(codec._json_layouts) == 1
    first = codec.decode_request("m", "", with_numbers(b"[4,5,6]"), None)
    assert type(first.inputs) is tuple  # a parsed request has a list
    np.testing.assert_array_equal(first.inputs[0].array, np.array([[4, 5, 6]], np.float32))


def test_layouts_are_kept_for_each_model_and_version_and_not_without_bound() -> None:
    codec = warmed(KNOWN)
    assert codec.decode_request("other", "2", KNOWN, None).model_version == "2"
    assert codec.decode_request("m", "", KNOWN, None).model_name == "m"
    for number in range(3000):
        outcome(codec, KNOWN.replace(b'"x":1', b'"x":%d' % number).replace(b'"A"', b'"A%d"' % number))
    assert len(codec._json_layouts) <= 1024
    large = KNOWN.replace(b'"A"', b'"%b"' % (b"A" * 900)).replace(b'"x":1', b'"x":"%b"' % (b"y" * 4000))
    before = len(codec._json_layouts)
    assert outcome(codec, large) == outcome(HttpCodec(), large)
    assert len(codec._json_layouts) == before


def test_a_json_answer_with_one_tensor_has_the_text_of_any_other() -> None:
    tensor = Tensor("O", FP32, np.array([[1, 2.5]], np.float32))
    length, buffers = encode_response(InferResponse("m", "1", (tensor,)), InferRequest("m", ()))
    assert length is None
    assert b"".join(buffers) == (
        b'{"model_name":"m","model_version":"1",'
        b'"outputs":[{"name":"O","datatype":"FP32","shape":[1,2],"data":[1.0,2.5]}]}'
    )
