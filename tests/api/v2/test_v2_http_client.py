# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP by `tritonclient.http`, sync and aio: what goes in comes out, in every form the client can write."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.http as client
import tritonclient.http.aio
from tensors import ARRAYS, SPECIAL, Array, same
from tritonclient.utils import InferenceServerException

from support.serving import Serving

MB = 1_000_000


def tensor(array: Array, datatype: str, *, binary: bool = True, name: str = "INPUT0") -> client.InferInput:
    created = client.InferInput(name, list(array.shape), datatype)
    created.set_data_from_numpy(array, binary_data=binary)
    return created


def infer(http: client.InferenceServerClient, array: Array, datatype: str, **more: Any) -> Array:
    binary = more.pop("binary", True)
    wanted = more.pop("binary_output", True)
    outputs = [client.InferRequestedOutput("OUTPUT0", binary_data=wanted)]
    result = http.infer("identity", [tensor(array, datatype, binary=binary)], outputs=outputs, **more)
    assert result.get_output("OUTPUT0")["datatype"] == datatype
    return result.as_numpy("OUTPUT0")


@pytest.mark.parametrize("datatype", ARRAYS)
def test_binary_round_trip(http: client.InferenceServerClient, datatype: str) -> None:
    assert same(infer(http, ARRAYS[datatype], datatype), ARRAYS[datatype])


@pytest.mark.parametrize("datatype", SPECIAL)
def test_binary_carries_what_json_cannot(http: client.InferenceServerClient, datatype: str) -> None:
    assert same(infer(http, SPECIAL[datatype], datatype), SPECIAL[datatype])


@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize("datatype", [name for name in ARRAYS if name != "BF16"])
def test_json_round_trip(http: client.InferenceServerClient, datatype: str, binary_output: bool) -> None:
    answer = infer(http, ARRAYS[datatype], datatype, binary=False, binary_output=binary_output)
    if datatype == "BYTES" and not binary_output:
        answer = np.vectorize(lambda text: text.encode(), otypes=[object])(answer)
    assert same(answer, ARRAYS[datatype])


@pytest.mark.parametrize("datatype", [name for name in ARRAYS if name != "BF16"])
def test_binary_in_and_json_out(http: client.InferenceServerClient, datatype: str) -> None:
    answer = infer(http, ARRAYS[datatype], datatype, binary_output=False)
    if datatype == "BYTES":
        answer = np.vectorize(lambda text: text.encode(), otypes=[object])(answer)
    assert same(answer, ARRAYS[datatype])


def test_bf16_as_json_is_a_number(http: client.InferenceServerClient) -> None:
    outputs = [client.InferRequestedOutput("OUTPUT0", binary_data=False)]
    result = http.infer("identity", [tensor(ARRAYS["BF16"], "BF16")], outputs=outputs)
    data = np.array(result.get_output("OUTPUT0")["data"], np.float32)
    assert data.tobytes() == ARRAYS["BF16"].astype(np.float32).tobytes()


def test_bytes_that_are_not_utf8_need_binary_data(http: client.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="binary_data") as failure:
        infer(http, SPECIAL["BYTES"], "BYTES", binary_output=False)
    assert failure.value.status() == "400"


def test_without_requested_outputs_all_are_returned_in_the_default_form(http: client.InferenceServerClient) -> None:
    """The client then asks for binary_data_output."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    result = http.infer("identity", [tensor(array, "INT32")])
    assert result.get_output("OUTPUT0")["parameters"] == {"binary_data_size": 24}
    assert same(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("rows", [1, 2, 63, 64])
def test_rows(http: client.InferenceServerClient, rows: int) -> None:
    array = np.arange(rows * 7, dtype=np.float32).reshape(rows, 7)
    assert same(infer(http, array, "FP32"), array)


@pytest.mark.parametrize("shape", [(1,), (1, 0), (2, 1, 1, 3), (1,) * 32])
def test_shapes(http: client.InferenceServerClient, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    assert same(infer(http, array, "INT64"), array)


def test_first1000(http: client.InferenceServerClient) -> None:
    images = np.random.default_rng(1).random((3, 3, 224, 224), dtype=np.float32)
    result = http.infer("first1000", [tensor(images, "FP32")])
    assert same(result.as_numpy("OUTPUT0"), images.reshape(3, -1)[:, :1000])


def test_twenty_megabytes(http: client.InferenceServerClient) -> None:
    array = np.random.default_rng(2).integers(0, 255, (1, 20 * MB), dtype=np.uint8)
    assert same(infer(http, array, "UINT8"), array)


@pytest.mark.parametrize("request_id", ["", "one", "naïve 🚰", 'quotes " and \\', "x" * 10_000])
def test_the_request_id_comes_back(http: client.InferenceServerClient, request_id: str) -> None:
    for _ in range(2):
        result = http.infer("identity", [tensor(ARRAYS["INT32"], "INT32")], request_id=request_id)
        assert result.get_response().get("id", "") == request_id


def test_model_and_version_are_named(http: client.InferenceServerClient) -> None:
    for version in ("", "1"):
        result = http.infer("identity", [tensor(ARRAYS["INT32"], "INT32")], model_version=version)
        assert result.get_response()["model_name"] == "identity"
        assert result.get_response()["model_version"] == "1"


def test_request_parameters_are_taken(http: client.InferenceServerClient) -> None:
    own = {"text": "value", "number": 3, "flag": True}
    array = ARRAYS["FP64"]
    result = http.infer("identity", [tensor(array, "FP64")], parameters=own, priority=1, timeout=1000)
    assert same(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("asked", ["gzip", "deflate", None])
@pytest.mark.parametrize("sent", ["gzip", "deflate", None])
@pytest.mark.parametrize("size", [3, 100_000])
def test_compression(http: client.InferenceServerClient, sent: str | None, asked: str | None, size: int) -> None:
    array = np.arange(size, dtype=np.int32).reshape(1, size)
    for binary in (True, False):
        answer = infer(
            http,
            array,
            "INT32",
            binary=binary,
            binary_output=binary,
            request_compression_algorithm=sent,
            response_compression_algorithm=asked,
        )
        assert same(answer, array)


def test_health(http: client.InferenceServerClient) -> None:
    assert http.is_server_live()
    assert http.is_server_ready()
    assert http.is_model_ready("identity")
    assert http.is_model_ready("identity", "1")
    assert not http.is_model_ready("identity", "2")
    assert not http.is_model_ready("nope")


def test_the_same_request_again_with_other_numbers(http: client.InferenceServerClient) -> None:
    """What the codec has learnt from the first must not leak into the next."""
    random = np.random.default_rng(3)
    for shape in ((1, 4), (1, 4), (2, 2), (1, 4), (4, 1), (1, 40)):
        for datatype, kind in (("INT32", np.int32), ("FP32", np.float32), ("UINT32", np.uint32)):
            array = random.integers(0, 100, shape).astype(kind)
            assert same(infer(http, array, datatype), array)
            assert same(infer(http, array, datatype, request_id="x"), array)


def test_async_requests_get_their_own_answers(server: Serving) -> None:
    with client.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=8, network_timeout=30.0) as http:
        arrays = [np.full((1, 5), number, np.int32) for number in range(100)]
        requests = [
            http.async_infer("identity", [tensor(array, "INT32")], request_id=str(number))
            for number, array in enumerate(arrays)
        ]
        for number, request in enumerate(requests):
            result = request.get_result()
            assert result.get_response()["id"] == str(number)
            assert same(result.as_numpy("OUTPUT0"), arrays[number])


async def _aio(server: Serving) -> None:
    async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{server.port}") as http:
        assert await http.is_server_ready()

        async def one(number: int) -> None:
            array = np.full((1, 3), number, np.int64)
            given = tritonclient.http.aio.InferInput("INPUT0", [1, 3], "INT64")
            given.set_data_from_numpy(array, binary_data=bool(number % 2))
            result = await http.infer("identity", [given], request_id=f"id {number}")
            assert result.get_response()["id"] == f"id {number}"
            assert same(result.as_numpy("OUTPUT0"), array)

        await asyncio.gather(*(one(number) for number in range(200)))
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            await http.infer("nope", [tensor(ARRAYS["INT32"], "INT32")])


def test_the_aio_client(server: Serving) -> None:
    asyncio.run(_aio(server))
