# SPDX-License-Identifier: Apache-2.0
"""Inference against a real server, over both protocols, blocking and not: what goes in comes out."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from client_servers import RealServer

from headrace.client import ClassScore, Client, Input, Output, Result, SequenceStep
from headrace.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented

INTEGERS = ["UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"]
FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}


def row(*values: float) -> Any:
    return np.array([values], dtype=np.float32)


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_numbers_with_their_edges(client: Any, name: str) -> None:
    info = np.iinfo(name.lower())
    array = np.array([[info.min, info.max, 0], [1, info.max - 1, 7]], dtype=info.dtype)
    result = client.infer(f"same_{name}", {"x": array})
    assert result["y"].dtype == array.dtype
    np.testing.assert_array_equal(result["y"], array)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_to_the_bit(client: Any, name: str) -> None:
    info = np.finfo(FLOATS[name])
    array = np.array([[info.min, info.max, np.nan], [np.inf, -0.0, info.tiny]], dtype=FLOATS[name])
    assert client.infer(f"same_{name}", {"x": array})["y"].tobytes() == array.tobytes()


def test_truth_values(client: Any) -> None:
    array = np.array([[True, False, True]])
    np.testing.assert_array_equal(client.infer("same_BOOL", {"x": array})["y"], array)


def test_bf16_from_float32_from_bits_and_from_ml_dtypes(client: Any) -> None:
    values = np.array([[1.5, -2.0, 3e38]], dtype=np.float32)
    ours = client.infer("same_BF16", {"x": Input(values, dtype="BF16")})
    assert ours["y"].dtype == np.float32
    assert ours.tensors["y"].dtype.name == "BF16"
    np.testing.assert_array_equal(ours["y"], values.astype(ml_dtypes.bfloat16).astype(np.float32))
    bits = client.infer("same_BF16", {"x": Input(ours.tensors["y"].array, dtype="BF16")})
    np.testing.assert_array_equal(bits["y"], ours["y"])
    theirs = client.infer("same_BF16", {"x": values.astype(ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(theirs["y"], ours["y"])


@pytest.mark.parametrize(
    "values",
    [
        [["naïve 🚰", "b"], ["", "d"]],
        [[b"\xff\x00", b"b"], [b"", b"d"]],
        np.array([[b"one", b"two"]], dtype=object),
        np.array([["one", "three"]]),
        np.array([[b"one", b"three"]]),
    ],
    ids=["text", "bytes", "objects", "numpy text", "numpy bytes"],
)
def test_bytes_from_lists_and_arrays(client: Any, values: Any) -> None:
    wanted = [item.encode() if isinstance(item, str) else bytes(item) for line in values for item in (*line,)]
    result = client.infer("same_BYTES", {"x": values})
    assert result["y"].ravel().tolist() == wanted
    assert result["y"].shape == np.shape(values)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.arange(12, dtype=">f4").reshape(3, 4),
        np.zeros((0, 5), dtype=np.float32),
        np.arange(700_000, dtype=np.float32).reshape(700, 1000),
    ],
    ids=["transposed", "every second", "big-endian", "empty", "2.8 MB"],
)
def test_arrays_of_any_memory_layout(client: Any, array: Any) -> None:
    np.testing.assert_array_equal(client.infer("same_FP32", {"x": array})["y"], array)


def test_a_result_names_the_version_that_computed_it(client: Any) -> None:
    result = client.infer("echo", {"INPUT0": row(1, 2, 3, 4)}, version=1, request_id="my own id", outputs=["OUTPUT0"])
    assert (result.model_name, result.model_version, result.request_id) == ("echo", "1", "my own id")
    assert list(result) == ["OUTPUT0"]
    assert "OUTPUT0" in result
    assert len(result) == 1
    assert "FP32" in repr(result)
    with pytest.raises(KeyError, match="there are: OUTPUT0"):
        result["y"]


def test_classes_with_their_labels(client: Any) -> None:
    rows = np.array([[1, 4, 3, 2], [0, 0, 0.5, 9]], dtype=np.float32)
    result = client.infer("echo", {"INPUT0": rows}, outputs=[Output("OUTPUT0", classes=2)])
    assert result.classes("OUTPUT0") == [
        [ClassScore(4.0, 1, "dog"), ClassScore(3.0, 2, "bird")],
        [ClassScore(9.0, 3, "fish: a carp"), ClassScore(0.5, 2, "bird")],
    ]


def test_an_output_that_is_not_a_classification_is_refused() -> None:
    from headrace.core.tensors import Tensor

    result = Result("m", "1", [Tensor.of("y", row(1)), Tensor.of("t", np.array([b"just text"], object))])
    for name in ("y", "t"):
        with pytest.raises(InvalidArgument, match="classes=5"):
            result.classes(name)


def test_a_sequence_keeps_its_memory(client: Any) -> None:
    one = {"x": np.array([5], dtype=np.int32)}
    first = client.infer("counter", one, sequence=SequenceStep(77, start=True))["y"][0]
    client.infer("counter", one, sequence=SequenceStep(77))
    last = client.infer("counter", one, sequence=SequenceStep(77, end=True))
    assert last["y"][0] == first + 10


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_compressed_both_ways(real: RealServer, make: Any, protocol: str, compression: str) -> None:
    array = np.zeros((100, 100), dtype=np.float32)
    with make(getattr(real, protocol), compression=compression) as client:
        np.testing.assert_array_equal(client.infer("same_FP32", {"x": array})["y"], array)
        assert client.metadata("echo")["name"] == "echo"
        with pytest.raises(NotFound, match="'nope' is not found"):
            client.infer("nope", {"x": array})


@pytest.mark.parametrize(
    ("inputs", "more", "text"),
    [
        ({"x": [1, 2]}, {}, "dtype='FP32'"),
        ({"x": []}, {}, "dtype='FP32'"),
        ({"x": [["a"], ["b", "c"]]}, {}, "different lengths"),
        ({"x": np.zeros(2, complex)}, {}, "complex128"),
        ({"x": np.array([1, "a"], object)}, {}, "use bytes or text"),
        ({"x": Input(np.zeros(2), dtype="FP31")}, {}, "use one of BOOL"),
        ({"x": Input(np.zeros(2), dtype="INT32")}, {}, "astype"),
        ({"x": Input(np.zeros(2, np.int64), dtype="INT32")}, {}, "astype"),
        ({"x": Input(np.zeros(2, np.int32), dtype="BF16")}, {}, "astype"),
        ({"x": Input([1.5], dtype="INT32")}, {}, "not a whole number"),
        ([np.zeros(2)], {}, "dictionary"),
        ({}, {"outputs": "y"}, r"\['y'\]"),
        ({}, {"parameters": {"a": [1]}}, "parameter 'a' is a list"),
        ({}, {"sequence": SequenceStep(0)}, "must not be 0"),
        ({}, {"timeout": 0}, "more than 0 seconds"),
        ({}, {"timeout": math.nan}, "more than 0 seconds"),
    ],
)
def test_mistakes_are_reported_before_anything_is_sent(inputs: Any, more: Any, text: str) -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidArgument, match=text):
        client.infer("m", inputs, **more)


def test_lists_of_numbers_with_a_type(client: Any) -> None:
    result = client.infer("same_FP16", {"x": Input([[1, 2.5]], dtype="FP16")})
    assert result["y"].tolist() == [[1.0, 2.5]]
    narrowed = client.infer("same_FP16", {"x": Input(np.array([[0.1]]), dtype="FP16")})
    assert narrowed["y"][0, 0] == np.float16(0.1)


@pytest.mark.parametrize(
    ("model", "inputs", "error", "text"),
    [
        ("nope", {"x": row(1)}, NotFound, "unknown model: 'nope' is not found"),
        ("echo", {"INPUT0": row(1)}, InvalidArgument, r"Expected \[-1,4\], got \[1,1\]"),
        ("echo", {"INPUT0": np.zeros((1, 4))}, InvalidArgument, "expects 'FP32'"),
        ("echo", {"other": row(1, 2, 3, 4)}, InvalidArgument, "INPUT0"),
        ("../etc", {"x": row(1)}, InvalidArgument, "not allowed"),
        ("..", {"x": row(1)}, InvalidArgument, "not allowed"),
    ],
)
def test_what_a_server_refuses_is_an_error_of_its_class(
    client: Any, model: str, inputs: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        client.infer(model, inputs, request_id="find-me.1")
    assert caught.value.request_id == "find-me.1"
    assert caught.value.status in (400, 404, "INVALID_ARGUMENT", "NOT_FOUND")
    assert client.infer("echo", {"INPUT0": row(1, 2, 3, 4)}) is not None


def test_a_decoupled_model_wants_a_stream(client: Any) -> None:
    with pytest.raises(Unimplemented, match="decoupled"):
        client.infer("story", {"text": ["a"], "count": np.array([1], np.int32)})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_closed_client_says_so(real: RealServer, protocol: str) -> None:
    client = Client(getattr(real, protocol))
    assert client.live()
    client.close()
    client.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        client.infer("echo", {"INPUT0": row(1, 2, 3, 4)})
