# SPDX-License-Identifier: Apache-2.0
"""ModelStreamInfer: decoupled models, order, errors both ways, the end of answers, cancelling, slow readers."""

from __future__ import annotations

import asyncio
import queue
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException
from v2_servers import functions_served, models_served, write_model

from headrace.api.v2.grpc import V2Grpc
from headrace.api.v2.settings import V2Settings
from headrace.models.config.types import InstanceGroup
from headrace.net.grpc.services import Services
from headrace.net.site import Site
from support.engines import Gate, config_of, plane_of
from support.serving import Serving, serving
from support.waiting import eventually

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
FLOOD_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
FLOOD = '''
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """COUNT answers of 1 MB each, as quickly as it can; then an error if COUNT is 3."""

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            for _ in range(count):
                if request.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1_000_000, np.uint8))]))
            if count == 3:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("three is too many")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
UNREAD = 8_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(EXAMPLES / "repeat", folder / "repeat")
    write_model(folder, "flood", FLOOD_CONFIG, FLOOD)
    write_model(
        folder,
        "text",
        'backend: "identity" input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] } '
        'output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }',
    )
    write_model(
        folder,
        "same",
        'backend: "identity" max_batch_size: 8 input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } '
        'output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }',
    )
    with models_served(folder, V2Settings(stream_unread_bytes=UNREAD)) as running:
        yield running


class Streaming:
    """A stream of tritonclient and what came of it."""

    def __init__(self, server: Serving, **more: Any) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}")
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.answers.put((result, error)), **more)

    def send(self, model: str, name: str, array: Any, datatype: str = "INT32", **more: Any) -> None:
        tensor = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        self.client.async_stream_infer(model, [tensor], **more)

    def next(self) -> tuple[Any, Any]:
        return self.answers.get(timeout=30)

    def response(self) -> Any:
        result, error = self.next()
        assert error is None, error
        return result.get_response()

    def __enter__(self) -> Streaming:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream()
        self.client.close()


def ints(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


def final(response: Any) -> bool:
    return bool(response.parameters["triton_final_response"].bool_param)


def test_many_answers_without_a_final_marker(server: Serving) -> None:
    with Streaming(server) as stream:
        stream.send("repeat", "IN", ints(4, 5, 6), request_id="a")
        got = [stream.next()[0] for _ in range(3)]
        assert [int(item.as_numpy("OUT")[0]) for item in got] == [4, 5, 6]
        assert [item.get_response().id for item in got] == ["a"] * 3
        assert not any(final(item.get_response()) for item in got)
        # Nothing was left behind: the next answer is the next request's.
        stream.send("repeat", "IN", ints(), request_id="none")
        stream.send("repeat", "IN", ints(7), request_id="b")
        assert stream.response().id == "b"


def test_the_final_marker_is_sent_to_clients_that_request_it(server: Serving) -> None:
    with Streaming(server) as stream:
        for numbers in ((1, 2), ()):
            stream.send("repeat", "IN", ints(*numbers), request_id="a", enable_empty_final_response=True)
            for _ in numbers:
                response = stream.response()
                assert len(response.outputs) == 2 and not final(response)
            response = stream.response()
            assert final(response) and not response.outputs and not response.raw_output_contents
            assert (response.model_name, response.model_version, response.id) == ("repeat", "1", "a")


def test_models_with_one_answer_can_be_streamed_too(server: Serving) -> None:
    with Streaming(server) as stream:
        for number in range(300):
            stream.send("same", "IN", ints(number).reshape(1, 1), request_id=str(number))
        for number in range(300):
            response = stream.response()
            assert response.id == str(number) and final(response)
            assert response.raw_output_contents[0] == number.to_bytes(4, "little")


def test_errors_are_messages_and_the_stream_continues(server: Serving) -> None:
    with Streaming(server) as stream:
        stream.send("none", "IN", ints(1))
        stream.send("same", "WRONG", ints(1).reshape(1, 1), request_id="9")
        stream.send("flood", "COUNT", ints(3))
        stream.send("same", "IN", ints(1).reshape(1, 1))
        texts, results = [], 0
        for _ in range(7):
            result, error = stream.next()
            if error is not None:
                texts.append(error.message())
            else:
                results += 1
        assert results == 4
        assert "Request for unknown model: 'none' is not found" in texts
        assert any(text.startswith("[request id: 9] unexpected inference input 'WRONG'") for text in texts)
        assert any("three is too many" in text for text in texts)


def test_errors_are_grpc_statuses_for_clients_that_request_it(server: Serving) -> None:
    with Streaming(server, headers={"triton_grpc_error": "true"}) as stream:
        stream.send("same", "IN", ints(1).reshape(1, 1), request_id="1")
        assert stream.response().id == "1"
        stream.send("none", "IN", ints(1))
        _, error = stream.next()
        assert "NOT_FOUND" in error.status() and "unknown model" in error.message()


def requests_of(*requests: Any) -> Iterator[Any]:
    yield from requests


def raw_request(model: str, name: str, array: Any, **more: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, **more)
    request.inputs.add(name=name, datatype="INT32", shape=array.shape)
    request.raw_input_contents.append(array.tobytes())
    return request


@pytest.fixture
def stub(server: Serving) -> Iterator[Any]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_a_stream_ends_when_all_is_answered(stub: Any) -> None:
    requests = [raw_request("same", "IN", ints(1).reshape(1, 1), id="x"), raw_request("repeat", "IN", ints(1, 2))]
    answers = list(stub.ModelStreamInfer(requests_of(*requests), timeout=30))
    assert len(answers) == 3
    assert list(stub.ModelStreamInfer(requests_of(), timeout=30)) == []


def test_an_error_names_its_request(stub: Any) -> None:
    (answer,) = stub.ModelStreamInfer(requests_of(raw_request("same", "X", ints(1).reshape(1, 1), id="q")), timeout=30)
    assert answer.error_message and answer.infer_response.id == "q" and final(answer.infer_response)


def test_a_message_that_is_not_a_request(server: Serving) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        method = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        right = raw_request("same", "IN", ints(1).reshape(1, 1)).SerializeToString()
        answers = [
            service_pb2.ModelStreamInferResponse.FromString(item) for item in method(iter([b"\xff", right]), timeout=30)
        ]
    assert "not a ModelInferRequest" in answers[0].error_message
    assert answers[1].infer_response.raw_output_contents


async def _aio(server: Serving) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:

        async def requests() -> Any:
            for number in (3, 1):
                tensor = tritonclient.grpc.aio.InferInput("IN", [number], "INT32")
                tensor.set_data_from_numpy(np.arange(number, dtype=np.int32))
                yield {"model_name": "repeat", "inputs": [tensor], "request_id": str(number)}

        ids = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            ids.append(result.get_response().id)
        assert sorted(ids) == ["1", "3", "3", "3"]


def test_the_aio_client(server: Serving) -> None:
    asyncio.run(_aio(server))


def settled(server: Serving, model: str) -> int:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        stats = client.get_inference_statistics(model).model_stats[0].inference_stats
        return int(stats.success.count + stats.fail.count)


def test_cancelling_a_stream_cancels_its_requests(server: Serving, stub: Any) -> None:
    before = settled(server, "repeat")
    request = raw_request("repeat", "IN", ints(*range(10_000)))
    request.inputs.add(name="DELAY", datatype="UINT32", shape=[10_000])
    request.raw_input_contents.append(np.full(10_000, 20, np.uint32).tobytes())
    call = stub.ModelStreamInfer(requests_of(request), timeout=60)
    next(call)
    call.cancel()
    eventually(lambda: settled(server, "repeat") == before + 1)


def test_a_client_that_does_not_read_is_broken_off(server: Serving, stub: Any) -> None:
    """The model sends 200 MB; the server keeps no more than it was told to."""
    before = settled(server, "flood")
    call = stub.ModelStreamInfer(requests_of(raw_request("flood", "COUNT", ints(200))), timeout=60)
    got = 0
    with pytest.raises(grpc.RpcError) as failure:
        for _ in call:
            got += 1
            if got == 1:
                eventually(lambda: settled(server, "flood") == before + 1)
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "are unread" in failure.value.details() and got < 200


def test_a_client_that_reads_gets_all(server: Serving, stub: Any) -> None:
    sizes = [
        len(item.infer_response.raw_output_contents[0])
        for item in stub.ModelStreamInfer(requests_of(raw_request("flood", "COUNT", ints(4))), timeout=60)
    ]
    assert sizes == [1_000_000] * 4


def test_answers_of_plain_models_keep_the_order_of_their_requests() -> None:
    """The first request is held up in its model; the second, to another model, is done and waits for it."""
    gate = Gate()
    group = (InstanceGroup("slow", runs="thread"),)
    models = [
        (config_of("slow", instance_groups=group, scheduling=None), gate),
        (config_of("quick"), lambda inputs: {"OUTPUT0": inputs["INPUT0"]}),
    ]
    with functions_served(models) as running, Streaming(running) as stream:
        stream.send("slow", "INPUT0", ints(1).reshape(1, 1), request_id="1")
        stream.send("quick", "INPUT0", ints(2).reshape(1, 1), request_id="2")
        running.call(gate.entered)
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
            eventually(lambda: client.get_inference_statistics("quick").model_stats[0].inference_count == 1)
        assert stream.answers.empty()
        gate.let()
        assert [stream.response().id for _ in range(2)] == ["1", "2"]


def test_many_concurrent_requests_are_throttled_and_all_answered() -> None:
    """More than a stream may have at the same time: the rest waits, none is lost, and the order holds."""
    gate = Gate()
    group = (InstanceGroup("slow", runs="thread"),)
    with functions_served([(config_of("slow", instance_groups=group, scheduling=None), gate)]) as running:
        with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            requests = [raw_request("slow", "INPUT0", ints(n).reshape(1, 1), id=str(n)) for n in range(3000)]
            threading.Timer(0.2, partial(gate.let, 3000)).start()
            answers = [response.infer_response.id for response in stub.ModelStreamInfer(iter(requests), timeout=60)]
    assert answers == [str(n) for n in range(3000)]


def test_an_answer_that_cannot_be_written_ends_its_request(server: Serving, stub: Any) -> None:
    before = settled(server, "repeat")
    request = raw_request("repeat", "IN", ints(*range(10_000)))
    request.inputs.add(name="DELAY", datatype="UINT32", shape=[10_000])
    request.raw_input_contents.append(np.full(10_000, 20, np.uint32).tobytes())
    wanted = request.outputs.add(name="OUT")
    wanted.parameters["classification"].int64_param = 1
    request.outputs.add(name="INDEX")
    text = raw_request("text", "IN", ints(1), id="t")
    text.inputs[0].datatype, text.raw_input_contents[0] = "BYTES", b"\1\0\0\0a"
    text.outputs.add(name="OUT").parameters["classification"].int64_param = 1
    call = stub.ModelStreamInfer(requests_of(text, request), timeout=60)
    first = next(call)
    assert first.infer_response.id == "t" and "class result not available" in first.error_message
    assert next(call).infer_response.outputs[0].datatype == "BYTES"
    call.cancel()
    eventually(lambda: settled(server, "repeat") == before + 1)


def test_a_server_that_stops_ends_its_streams_when_all_is_answered() -> None:
    gate, made = Gate(), []

    async def site() -> Site:
        plane = await plane_of([(config_of("slow", instance_groups=(InstanceGroup("slow", runs="thread"),)), gate)])
        made.append(V2Grpc(plane))
        services = Services()
        made[0].add_to(services)
        return Site(services=services)

    with serving(site) as running, Streaming(running) as busy, Streaming(running) as idle:
        busy.send("slow", "INPUT0", ints(1).reshape(1, 1), request_id="1")
        running.call(gate.entered)
        idle.send("none", "INPUT0", ints(1).reshape(1, 1))
        assert "unknown model" in idle.next()[1].message()
        running.call(made[0].drain)
        assert "the server is stopping" in idle.next()[1].message()
        assert busy.answers.empty()
        gate.let()
        assert busy.response().id == "1"
        assert "UNAVAILABLE" in busy.next()[1].status()


def test_many_wrong_requests_behind_a_full_stream() -> None:
    """They wait, and are then refused one after the other without piling up on the stack."""
    gate = Gate()
    group = (InstanceGroup("slow", runs="thread"),)
    with functions_served([(config_of("slow", instance_groups=group, scheduling=None), gate)]) as running:
        with grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            right = [raw_request("slow", "INPUT0", ints(n).reshape(1, 1)) for n in range(1024)]
            wrong = [raw_request("none", "INPUT0", ints(n)) for n in range(3000)]
            threading.Timer(0.3, partial(gate.let, 1024)).start()
            answers = [item.error_message for item in stub.ModelStreamInfer(iter(right + wrong), timeout=60)]
    assert answers == [""] * 1024 + ["Request for unknown model: 'none' is not found"] * 3000


def test_a_decoupled_model_needs_the_stream(server: Serving) -> None:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        tensor = tritonclient.grpc.InferInput("IN", [1], "INT32")
        tensor.set_data_from_numpy(ints(1))
        with pytest.raises(InferenceServerException) as failure:
            client.infer("repeat", [tensor])
    assert "ModelInfer RPC doesn't support models with decoupled transaction policy" in failure.value.message()
    assert "UNIMPLEMENTED" in failure.value.status()
