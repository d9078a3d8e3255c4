# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC by `tritonclient.grpc`, sync and aio, and by its own protobuf classes."""

from __future__ import annotations

import asyncio
import queue
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
import tritonclient.grpc.aio
from tensors import ARRAYS, SPECIAL, Array, same
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.serving import Serving

MB = 1_000_000

CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def tensor(array: Array, datatype: str) -> client.InferInput:
    created = client.InferInput("INPUT0", list(array.shape), datatype)
    created.set_data_from_numpy(array)
    return created


def infer(grpc_client: client.InferenceServerClient, array: Array, datatype: str, **more: Any) -> Array:
    result = grpc_client.infer("identity", [tensor(array, datatype)], client_timeout=30, **more)
    assert result.get_output("OUTPUT0").datatype == datatype
    return result.as_numpy("OUTPUT0")


@pytest.mark.parametrize("datatype", ARRAYS)
def test_round_trip(grpc_client: client.InferenceServerClient, datatype: str) -> None:
    assert same(infer(grpc_client, ARRAYS[datatype], datatype), ARRAYS[datatype])


@pytest.mark.parametrize("datatype", SPECIAL)
def test_special_values(grpc_client: client.InferenceServerClient, datatype: str) -> None:
    assert same(infer(grpc_client, SPECIAL[datatype], datatype), SPECIAL[datatype])


@pytest.mark.parametrize("datatype", CONTENTS)
@pytest.mark.parametrize("times", [1, 3000])
def test_typed_contents(server: Serving, datatype: str, times: int) -> None:
    """The client library writes raw contents only; others write these. Many of them take the road of large messages."""
    array = np.concatenate([ARRAYS[datatype]] * times, axis=1) if times > 1 else ARRAYS[datatype]
    request = service_pb2.ModelInferRequest(model_name="identity")
    described = request.inputs.add(name="INPUT0", datatype=datatype, shape=array.shape)
    getattr(described.contents, CONTENTS[datatype]).extend(array.ravel().tolist())
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.max_receive_message_length", -1)]) as channel:
        response = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=30)
    result = client.InferResult(response)
    assert response.outputs[0].datatype == datatype
    assert same(result.as_numpy("OUTPUT0"), array)


@pytest.mark.parametrize("rows", [1, 2, 63, 64])
def test_rows(grpc_client: client.InferenceServerClient, rows: int) -> None:
    array = np.arange(rows * 7, dtype=np.float32).reshape(rows, 7)
    assert same(infer(grpc_client, array, "FP32"), array)


@pytest.mark.parametrize("shape", [(1,), (1, 0), (2, 1, 1, 3), (1,) * 32])
def test_shapes(grpc_client: client.InferenceServerClient, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    assert same(infer(grpc_client, array, "INT64"), array)


def test_first1000(grpc_client: client.InferenceServerClient) -> None:
    images = np.random.default_rng(1).random((3, 3, 224, 224), dtype=np.float32)
    result = grpc_client.infer("first1000", [tensor(images, "FP32")], client_timeout=30)
    assert same(result.as_numpy("OUTPUT0"), images.reshape(3, -1)[:, :1000])


def test_twenty_megabytes(grpc_client: client.InferenceServerClient) -> None:
    array = np.random.default_rng(2).integers(0, 255, (1, 20 * MB), dtype=np.uint8)
    assert same(infer(grpc_client, array, "UINT8"), array)


@pytest.mark.parametrize("request_id", ["", "one", "naïve 🚰", "x" * 10_000])
def test_the_request_id_comes_back(grpc_client: client.InferenceServerClient, request_id: str) -> None:
    for _ in range(2):
        result = grpc_client.infer("identity", [tensor(ARRAYS["INT32"], "INT32")], request_id=request_id)
        assert result.get_response().id == request_id


def test_model_and_version_are_named(grpc_client: client.InferenceServerClient) -> None:
    for version in ("", "1"):
        given = [tensor(ARRAYS["INT32"], "INT32")]
        response = grpc_client.infer("identity", given, model_version=version).get_response()
        assert (response.model_name, response.model_version) == ("identity", "1")


def test_requested_outputs_and_parameters(grpc_client: client.InferenceServerClient) -> None:
    array = ARRAYS["FP64"]
    own = {"text": "value", "number": 3, "flag": True, "fraction": 0.5}
    outputs = [client.InferRequestedOutput("OUTPUT0")]
    answer = infer(grpc_client, array, "FP64", outputs=outputs, parameters=own, priority=1, timeout=9)
    assert same(answer, array)


@pytest.mark.parametrize("compression", ["gzip", "deflate", None])
def test_compression(grpc_client: client.InferenceServerClient, compression: str | None) -> None:
    array = np.zeros((1, 100_000), np.int32)
    assert same(infer(grpc_client, array, "INT32", compression_algorithm=compression), array)


def test_health(grpc_client: client.InferenceServerClient) -> None:
    assert grpc_client.is_server_live()
    assert grpc_client.is_server_ready()
    assert grpc_client.is_model_ready("identity")
    assert grpc_client.is_model_ready("identity", "1")
    assert not grpc_client.is_model_ready("identity", "2")
    assert not grpc_client.is_model_ready("nope")


def test_the_same_request_again_with_other_numbers(grpc_client: client.InferenceServerClient) -> None:
    """What the codec has learnt from the first must not leak into the next."""
    random = np.random.default_rng(3)
    for shape in ((1, 4), (1, 4), (2, 2), (1, 4), (4, 1), (1, 4000), (1, 4000), (4000 // 64, 64)):
        for datatype, kind in (("INT32", np.int32), ("FP32", np.float32), ("UINT32", np.uint32)):
            array = random.integers(0, 100, shape).astype(kind)
            assert same(infer(grpc_client, array, datatype), array)
            assert same(infer(grpc_client, array, datatype, request_id="x"), array)


def test_async_requests_get_their_own_answers(grpc_client: client.InferenceServerClient) -> None:
    """Many at once, of one shape: they are computed in batches."""
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()

    def keep(number: int, result: Any, error: Any) -> None:
        answers.put((number, result, error))

    for number in range(500):
        array = np.full((1 + number % 3, 5), number, np.int32)
        callback = partial(keep, number)
        grpc_client.async_infer("identity", [tensor(array, "INT32")], callback, request_id=str(number))
    for _ in range(500):
        number, result, error = answers.get(timeout=30)
        assert error is None
        assert result.get_response().id == str(number)
        assert same(result.as_numpy("OUTPUT0"), np.full((1 + number % 3, 5), number, np.int32))


async def _aio(server: Serving) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{server.port}") as aio:
        assert await aio.is_server_ready()

        async def one(number: int) -> None:
            array = np.full((1, 3), number, np.int64)
            result = await aio.infer("identity", [tensor(array, "INT64")], request_id=f"id {number}")
            assert result.get_response().id == f"id {number}"
            assert same(result.as_numpy("OUTPUT0"), array)

        await asyncio.gather(*(one(number) for number in range(300)))
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            await aio.infer("nope", [tensor(ARRAYS["INT32"], "INT32")])


def test_the_aio_client(server: Serving) -> None:
    asyncio.run(_aio(server))


def test_a_method_that_is_not_there_is_unimplemented(server: Serving) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.RpcError) as failure:
            channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"", timeout=30)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
