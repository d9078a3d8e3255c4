# SPDX-License-Identifier: Apache-2.0
"""Wrong requests over HTTP: each is refused with 400 or 404 and a reason, never with 500, and the server goes on."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.properties import examples
from support.serving import Serving

INFER = b"/v2/models/identity/infer"


def request(
    server: Serving, path: bytes, body: bytes = b"", *fields: bytes, method: bytes = b"POST"
) -> tuple[int, Any]:
    """One request as bytes: nothing in between corrects what is wrong in it."""
    lines = [b"%b %b HTTP/1.1" % (method, path), b"host: test", b"connection: close", b"content-length: %d" % len(body)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(b"\r\n".join([*lines, *fields, b"", b""]) + body)
        received = b""
        while piece := sock.recv(65536):
            received += piece
    head, _, content = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content


def post(server: Serving, document: Any, *, path: bytes = INFER) -> tuple[int, Any]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return request(server, path, body)


def post_binary(server: Serving, document: Any, binary: bytes, length: bytes | None = None) -> tuple[int, Any]:
    text = json.dumps(document).encode()
    length = b"%d" % len(text) if length is None else length
    return request(server, INFER, text + binary, b"inference-header-content-length: " + length)


def one(**changes: Any) -> dict[str, Any]:
    """A right request, changed: a value of None takes the member out."""
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]} | changes
    return {"inputs": [{key: value for key, value in tensor.items() if value is not ...}]}


def nested(depth: int, inside: str = "1") -> bytes:
    return b"[" * depth + inside.encode() + b"]" * depth


def with_member(name: str, value: bytes) -> bytes:
    """A right request with one member of its tensor given as JSON text."""
    members = {"name": b'"INPUT0"', "datatype": b'"INT32"', "shape": b"[1,2]", "data": b"[1,2]", name: value}
    return b'{"inputs":[{%b}]}' % b",".join(b'"%b":%b' % (key.encode(), text) for key, text in members.items())


@pytest.fixture(autouse=True)
def _still_alive(server: Serving, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.ERROR):
        yield
    assert post(server, one())[0] == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def assert_refused(answer: tuple[int, Any], *fragments: str, status: int = 400) -> str:
    assert answer[0] == status, answer
    text = answer[1]["error"]
    assert isinstance(text, str)
    for fragment in fragments:
        assert fragment in text
    # Whatever a client sent, the answer is a sentence and not an echo of it.
    assert 0 < len(text) < 2000
    return text


DOCUMENTS: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "JSON"),
    "not JSON": (b"hello", "JSON"),
    "half of it": (b'{"inputs":[{"name":', "JSON"),
    "not UTF-8": (b'{"inputs":"\xff"}', "JSON"),
    "NaN in an integer": (
        b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1],"data":[NaN]}]}',
        "whole number",
    ),
    "NaN and half a surrogate": (b'{"id":"\\ud800","inputs":[{"name":"INPUT0","data":[NaN]}]}', "JSON"),
    "NaN nested deeply": (b"[" * 100_000 + b"NaN" + b"]" * 100_000, "JSON"),
    "NaN and a number of many digits": (b"[NaN," + b"9" * 10_000 + b"]", "JSON"),
    "two documents": (json.dumps(one()).encode() * 2, "JSON"),
    "half a surrogate": (b'{"inputs":[{"name":"\\ud800","datatype":"INT32","shape":[1],"data":[1]}]}', ""),
    "a list": ([], "object"),
    "a string": ("inputs", "object"),
    "a number": (5, "object"),
    "null": (None, "object"),
    "no inputs": ({}, "inputs"),
    "inputs null": ({"inputs": None}, "inputs"),
    "inputs empty": ({"inputs": []}, "inputs"),
    "inputs an object": ({"inputs": {"name": "INPUT0"}}, "inputs"),
    "inputs a string": ({"inputs": "INPUT0"}, "inputs"),
    "an input that is null": ({"inputs": [None]}, "'name', 'shape' and 'datatype'"),
    "an input that is a number": ({"inputs": [1]}, "'name', 'shape' and 'datatype'"),
    "an input that is a string": ({"inputs": ["name"]}, "'name', 'shape' and 'datatype'"),
    "an input that is a list": ({"inputs": [["name"]]}, "'name', 'shape' and 'datatype'"),
    "too many inputs": ({"inputs": one()["inputs"] * 1025}, "1024"),
    "two inputs": ({"inputs": one()["inputs"] * 2}, "expected 1 inputs but got 2 inputs for model 'identity'"),
    "no name": (one(name=...), "name"),
    "name a number": (one(name=5), "name"),
    "name null": (one(name=None), "name"),
    "name a list": (one(name=["INPUT0"]), "name"),
    "another name": (one(name="INPUT1"), "INPUT0"),
    "a long name": (one(name="x" * 1_000_000), ""),
    "a long name and a wrong shape": (one(name="x" * 1_000_000, shape=[-1]), ""),
    "a long name and no data": (one(name="x" * 1_000_000, data=...), ""),
    "no datatype": (one(datatype=...), "datatype"),
    "datatype unknown": (one(datatype="INT128"), "INT128"),
    "datatype in small letters": (one(datatype="int32"), "int32"),
    "datatype null": (one(datatype=None), "datatype"),
    "datatype a number": (one(datatype=5), "datatype"),
    "datatype a list": (one(datatype=["INT32"]), "datatype"),
    "datatype an object": (one(datatype={}), "datatype"),
    "datatype nested deeply": (with_member("datatype", nested(1000)), "datatype"),
    "no shape": (one(shape=...), "shape"),
    "shape null": (one(shape=None), "shape"),
    "shape a number": (one(shape=2), "shape"),
    "shape a string": (one(shape="12"), "shape"),
    "shape of strings": (one(shape=["1", "2"]), "dimension"),
    "shape with null": (one(shape=[1, None]), "dimension"),
    "shape with a list": (one(shape=[[1, 2]]), "dimension"),
    "shape negative": (one(shape=[1, -2]), "-2"),
    "shape negative twice": (one(shape=[-1, -2]), "dimension"),
    "shape true": (one(shape=[True, 2]), "dimension"),
    "shape a fraction": (one(shape=[1, 2.0]), "dimension"),
    "shape a large fraction": (one(shape=[1, 1e300]), "dimension"),
    "shape huge": (one(shape=[1, 1 << 62]), "byte size overflow for input"),
    "shape whose product overflows": (
        one(shape=[1 << 32, 1 << 32]),
        "causes total element count to exceed maximum size of",
    ),
    "shape over 64 bits": (with_member("shape", b"[1,99999999999999999999]"), "dimension"),
    "shape huge beside a zero": (one(shape=[0, 1 << 62], data=[]), ""),
    "shape of 33 dimensions": (one(shape=[1] * 33, data=[1]), "32"),
    "shape of a million dimensions": (one(shape=[1] * 1_000_000, data=[1]), "32"),
    "shape nested deeply": (with_member("shape", nested(1000)), "dimension"),
    "no batch": (one(shape=[], data=[1]), "batch"),
    "a batch of none": (one(shape=[0, 2], data=[]), "batch"),
    "a batch too large": (
        one(shape=[65, 1], data=[1] * 65),
        "inference request batch-size must be <= 64 for 'identity'",
    ),
    "no data": (one(data=...), "data"),
    "data null": (one(data=None), ""),
    "data a string": (one(data="12"), ""),
    "data an object": (one(data={"0": 1}), ""),
    "too few": (one(data=[1]), "1 elements"),
    "too many": (one(data=[1, 2, 3]), "3 elements"),
    "none": (one(data=[]), "0 elements"),
    "ragged": (one(shape=[2, 2], data=[[1, 2], [3]]), "different lengths"),
    "ragged, of the right count": (one(shape=[2, 2], data=[[1, 2, 3], [4]]), "different lengths"),
    "numbers beside lists": (one(shape=[1, 2], data=[1, [2]]), "different lengths"),
    "strings for numbers": (one(data=["1", "2"]), "whole number"),
    "null for a number": (one(data=[1, None]), "whole number"),
    "an object for a number": (one(data=[1, {}]), "whole number"),
    "true for a number": (one(data=[1, True]), "whole number"),
    "a fraction for a whole number": (one(data=[1, 2.5]), "whole number"),
    "numbers for booleans": (one(datatype="BOOL", data=[1, 0]), "true or false"),
    "numbers for strings": (one(datatype="BYTES", data=[1, 2]), "string"),
    "an object for a string": (one(datatype="BYTES", data=["a", {}]), "string"),
    "INT8 out of range": (one(datatype="INT8", data=[1, 128]), "do not fit"),
    "INT32 out of range": (one(data=[1, 1 << 31]), "do not fit"),
    "INT64 out of range": (one(datatype="INT64", data=[1, 1 << 63]), "do not fit"),
    "UINT8 negative": (one(datatype="UINT8", data=[1, -1]), "do not fit"),
    "UINT64 out of range": (with_member("data", b"[1,99999999999999999999]"), ""),
    "FP16 out of range": (one(datatype="FP16", data=[1, 1e6]), "do not fit"),
    "FP32 out of range": (one(datatype="FP32", data=[1, 1e300]), "do not fit"),
    "BF16 out of range": (one(datatype="BF16", data=[1, 1e300]), "do not fit"),
    "data nested deeply": (with_member("data", nested(1000)), ""),
    "data nested more deeply than a parser goes": (with_member("data", nested(100_000)), ""),
    "objects nested deeply": (b'{"inputs":' + b'{"a":' * 1000 + b"1" + b"}" * 1001, ""),
    "parameters a list": (one() | {"parameters": []}, "parameters"),
    "parameters a string": (one() | {"parameters": "p"}, "parameters"),
    "an input's parameters a list": (one(parameters=[]), "parameters"),
    "an input's parameters nested deeply": (with_member("parameters", nested(1000)), "parameters"),
    "outputs an object": (one() | {"outputs": {"name": "OUTPUT0"}}, "outputs"),
    "outputs of strings": (one() | {"outputs": ["OUTPUT0"]}, "output"),
    "an output without a name": (one() | {"outputs": [{}]}, "name"),
    "an output with a number for a name": (one() | {"outputs": [{"name": 5}]}, "name"),
    "an output unknown": (one() | {"outputs": [{"name": "OUTPUT1"}]}, "OUTPUT0"),
    "an output with a long name": (one() | {"outputs": [{"name": "x" * 1_000_000}]}, ""),
    "an output twice": (one() | {"outputs": [{"name": "OUTPUT0"}] * 2}, "output 'OUTPUT0' already exists in request"),
    "too many outputs": (one() | {"outputs": [{"name": "OUTPUT0"}] * 1025}, "1024"),
    "an output's parameters a list": (one() | {"outputs": [{"name": "OUTPUT0", "parameters": []}]}, "parameters"),
    "id a number": (one() | {"id": 5}, "attempt to access JSON non-string as string: 'id'"),
    "id null": (one() | {"id": None}, "id"),
    "id a list": (one() | {"id": []}, "id"),
    "binary_data_size without binary data": (one(data=..., parameters={"binary_data_size": 8}), "8"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_wrong_document(server: Serving, name: str) -> None:
    document, word = DOCUMENTS[name]
    assert_refused(post(server, document), word)


BINARY: dict[str, tuple[Any, int, str]] = {
    "negative": (-1, 8, "binary"),
    "too large": (9, 8, "binary"),
    "huge": (1 << 62, 8, "binary"),
    "a fraction": (8.0, 8, "binary"),
    "true": (True, 1, "binary"),
    "a string": ("8", 8, "binary"),
    "a list": ([8], 8, "binary"),
    "an object": ({"size": 8}, 8, "binary"),
    "a long string": ("8" * 1_000_000, 8, "binary"),
    "too small, and bytes are left": (4, 8, "Expected 8, got 4"),
    "not what the shape says": (12, 12, "input byte size mismatch for input 'INPUT0'"),
    "none, and bytes are left": (0, 8, "Expected 8, got 0"),
    "right, and more bytes follow": (8, 9, "unexpected additional input data"),
    "right, and a megabyte follows": (8, 1_000_008, "unexpected additional input data"),
}


@pytest.mark.parametrize("name", BINARY)
def test_a_wrong_binary_data_size(server: Serving, name: str) -> None:
    size, sent, word = BINARY[name]
    document = one(data=..., parameters={"binary_data_size": size})
    assert_refused(post_binary(server, document, bytes(sent)), word)
    # Also when the codec has seen a right request just before.
    assert post_binary(server, one(data=..., parameters={"binary_data_size": 8}), bytes(8))[0] == 200
    assert_refused(post_binary(server, document, bytes(sent)), word)


def test_a_binary_data_size_nested_deeply(server: Serving) -> None:
    text = with_member("parameters", b'{"binary_data_size":%b}' % nested(1000)).replace(b',"data":[1,2]', b"")
    assert_refused(
        request(server, INFER, text + bytes(8), b"inference-header-content-length: %d" % len(text)), "binary"
    )


def test_binary_data_beside_data(server: Serving) -> None:
    assert_refused(post_binary(server, one(parameters={"binary_data_size": 8}), bytes(8)), "both")


def test_binary_data_that_no_input_claims(server: Serving) -> None:
    assert_refused(post_binary(server, one(), bytes(8)), "unexpected additional input data for model 'identity'")


def test_inputs_that_claim_the_same_bytes(server: Serving) -> None:
    tensor = one(data=..., parameters={"binary_data_size": 8})["inputs"][0]
    assert_refused(post_binary(server, {"inputs": [tensor, tensor | {"name": "INPUT1"}]}, bytes(8)), "0 bytes are left")


@pytest.mark.parametrize(
    "length", [b"-1", b"1.5", b"abc", b"0x10", b"", b"99999999999999999999", b"1e3", b"+8", b"9999"]
)
def test_a_wrong_header_length(server: Serving, length: bytes) -> None:
    document = one(data=..., parameters={"binary_data_size": 8})
    assert_refused(post_binary(server, document, bytes(8), length), "Inference-Header-Content-Length")


@pytest.mark.parametrize("length", [b"1", b"10"])
def test_a_header_length_that_cuts_the_json(server: Serving, length: bytes) -> None:
    document = one(data=..., parameters={"binary_data_size": 8})
    assert_refused(post_binary(server, document, bytes(8), length), "JSON")


STRINGS = {
    "no length": b"\1\0\0",
    "a length and nothing": b"\5\0\0\0",
    "a length that is too large": b"\5\0\0\0abcd",
    "the largest length": b"\xff\xff\xff\xff" + bytes(100),
    "one element in place of two": b"\2\0\0\0ab",
    "three elements in place of two": b"\1\0\0\0a" * 3,
    "bytes left at the end": b"\1\0\0\0a" * 2 + b"\0",
    "nothing": b"",
}


@pytest.mark.parametrize("name", STRINGS)
def test_wrong_lengths_of_strings(server: Serving, name: str) -> None:
    data = STRINGS[name]
    assert_refused(
        post_binary(server, one(datatype="BYTES", data=..., parameters={"binary_data_size": len(data)}), data), "string"
    )


def test_many_strings_that_are_not_there(server: Serving) -> None:
    """The count is refused before memory is taken for it."""
    document = one(datatype="BYTES", shape=[1, 1 << 40], data=..., parameters={"binary_data_size": 8})
    assert_refused(post_binary(server, document, bytes(8)), "string elements for inference input")


# Models.


@pytest.mark.parametrize("name", ["nope", "Identity", "identity2", "a.b-c_d", "x" * 255])
def test_an_unknown_model(server: Serving, name: str) -> None:
    path = b"/v2/models/%b/infer" % name.encode()
    assert (
        assert_refused(post(server, one(), path=path), status=404)
        == f"Request for unknown model: '{name}' is not found"
    )


def test_an_unknown_version(server: Serving) -> None:
    path = b"/v2/models/identity/versions/99/infer"
    text = assert_refused(post(server, one(), path=path), status=404)
    assert text == "Request for unknown model: 'identity' version 99 is not found"
    assert post(server, one(), path=b"/v2/models/identity/versions/1/infer")[0] == 200


NAMES = [
    b"..",
    b".",
    b"%2e%2e",
    b"%2e",
    b"..%2f..%2fetc%2fpasswd",
    b"a%2fb",
    b"a%5cb",
    b"a%00b",
    b"%00",
    b"%ff",
    b"%c0%ae%c0%ae",
    b"%",
    b"%zz",
    b"-rf",
    b"~root",
    b"a b",
    b"%0d%0ax-injected:%201",
    b"%F0%9F%9A%B0",
    b"x" * 256,
    b"x" * 4096,
    b"%41" * 1400,
    b"a..b",
    b"${jndi}",
    b"{model}",
    b"'",
    b'"',
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [b"/v2/models/%b/infer", b"/v2/models/%b/versions/1/infer"])
def test_a_name_that_no_model_has(server: Serving, name: bytes, shape: bytes) -> None:
    status, answer = request(server, shape % name, json.dumps(one()).encode())
    assert status in (400, 404)
    if isinstance(answer, dict):
        assert len(answer["error"]) < 500
        assert "\0" not in answer["error"]


@pytest.mark.parametrize("version", [*NAMES, b"01", b"-1", b"1.0", b"latest"])
def test_a_version_that_no_model_has(server: Serving, version: bytes) -> None:
    status, answer = request(server, b"/v2/models/identity/versions/%b/infer" % version, json.dumps(one()).encode())
    assert status in (400, 404)
    assert not isinstance(answer, dict) or len(answer["error"]) < 500


@pytest.mark.parametrize("name", NAMES)
def test_readiness_of_a_name_that_no_model_has(server: Serving, name: bytes) -> None:
    assert request(server, b"/v2/models/%b/ready" % name, method=b"GET")[0] in (400, 404)


@pytest.mark.parametrize(
    "path",
    [
        b"/v2/models/identity/infer/",
        b"/v2/models//infer",
        b"/v2/models/identity//infer",
        b"/v2/nope",
    ],
)
def test_paths_that_are_not_there(server: Serving, path: bytes) -> None:
    assert request(server, path, json.dumps(one()).encode())[0] in (400, 404)


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"DELETE", b"PATCH"])
def test_other_methods(server: Serving, method: bytes) -> None:
    assert request(server, INFER, method=method) == (405, {"error": "Method Not Allowed"})


# What only a model can know.


def first1000(server: Serving, document: Any, binary: bytes) -> tuple[int, Any]:
    text = json.dumps(document).encode()
    fields = b"inference-header-content-length: %d" % len(text)
    return request(server, b"/v2/models/first1000/infer", text + binary, fields)


def test_a_model_says_which_shape_it_takes(server: Serving) -> None:
    document = one(datatype="FP32", shape=[1, 16], data=..., parameters={"binary_data_size": 64})
    text = assert_refused(first1000(server, document, bytes(64)))
    assert "unexpected shape for input 'INPUT0' for model 'first1000'. Expected [-1,3,224,224], got [1,16]." in text


def test_a_model_says_which_type_it_takes(server: Serving) -> None:
    size = 3 * 224 * 224
    document = one(datatype="INT8", shape=[1, 3, 224, 224], data=..., parameters={"binary_data_size": size})
    text = assert_refused(first1000(server, document, bytes(size)))
    unknown = "[request id: <id_unknown>] "
    assert text == f"{unknown}inference input 'INPUT0' data-type is 'INT8', but model 'first1000' expects 'FP32'"


def test_a_model_says_which_inputs_it_misses(server: Serving) -> None:
    tensor = one()["inputs"][0]
    text = assert_refused(post(server, {"id": "7", "inputs": [tensor | {"name": "A"}, tensor | {"name": "B"}]}))
    assert text == (
        "[request id: 7] expected 1 inputs but got 2 inputs for model 'identity'. Got input(s) ['A','B'], "
        "but missing required input(s) ['INPUT0']. Please provide all required input(s)."
    )


def test_a_byte_count_mismatch_is_reported_in_tritons_words(server: Serving) -> None:
    document = one(data=..., parameters={"binary_data_size": 12})
    assert_refused(
        post_binary(server, document, bytes(12)), "input byte size mismatch for input 'INPUT0'", "Expected 8, got 12"
    )


# Anything at all.

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=8)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("INPUT0") | JSON,
        "datatype": st.sampled_from(["INT32", "FP16", "BF16", "BYTES", "BOOL", "UINT64"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data": st.lists(SCALARS, max_size=4) | JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "x"]), JSON, max_size=2) | JSON,
    },
)
DOCUMENT = st.fixed_dictionaries(
    {},
    optional={
        "inputs": st.lists(TENSORS, max_size=2) | JSON,
        "outputs": st.lists(st.dictionaries(st.sampled_from(["name", "parameters"]), JSON, max_size=2), max_size=2)
        | JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_output", "x"]), JSON, max_size=2) | JSON,
        "id": JSON,
    },
)


@settings(
    max_examples=examples(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(DOCUMENT | JSON, st.binary(max_size=20), st.booleans())
def test_any_document_is_answered_or_refused(server: Serving, document: Any, binary: bytes, with_length: bool) -> None:
    try:
        text = json.dumps(document).encode()
    except ValueError:
        return
    if with_length:
        status, answer = post_binary(server, document, binary)
    else:
        status, answer = request(server, INFER, text)
    assert status in (200, 400), (status, answer)


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.binary(max_size=100))
def test_any_bytes_are_refused(server: Serving, body: bytes) -> None:
    assert request(server, INFER, body)[0] == 400
