# SPDX-License-Identifier: Apache-2.0
"""v1 over gRPC, with grpcio for a client: every method, streams, and messages that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from v1_site import LABELS, TrtisSite, ask, make_repository

from headrace.api.v1.messages import SERVICE, message_class
from headrace.api.v1.shared_memory import control_shared_memory
from support.serving import Serving, serving

Method = Callable[..., Any]
FOUR = np.arange(4, dtype=np.int32).tobytes()


class Client:
    """Calls methods by their names; gives the code's name and the whole answer."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])

    def __call__(self, method: str, timeout: float = 30, **fields: Any) -> tuple[str, Any]:
        call = self.channel.unary_unary(
            f"/{SERVICE}/{method}",
            lambda message: message.SerializeToString(),
            message_class(f"{method}Response").FromString,
        )
        answer = call(message_class(f"{method}Request")(**fields), timeout=timeout)
        return code_of(answer), answer

    def stream(self, requests: Iterator[Any]) -> Iterator[Any]:
        call = self.channel.stream_stream(
            f"/{SERVICE}/StreamInfer",
            lambda message: message.SerializeToString(),
            message_class("InferResponse").FromString,
        )
        answers: Iterator[Any] = call(requests, timeout=30)
        return answers

    def raw(self, method: str, data: bytes) -> bytes:
        answer: bytes = self.channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=30)
        return answer


def code_of(answer: Any) -> str:
    status = answer.request_status
    return str(status.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_number[status.code].name)


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[Client]:
    client = Client(server.port)
    yield client
    client.channel.close()


def pair(**more: Any) -> dict[str, Any]:
    return {
        "model_name": "pair",
        "model_version": -1,
        "meta_data": {
            "batch_size": 1,
            "input": [{"name": "A"}, {"name": "B", "dims": [2, 2]}],
            "output": [{"name": "Y"}, {"name": "X", "cls": {"count": 2}}],
            **more,
        },
        "raw_input": [FOUR, FOUR[::-1]],
    }


def test_infer(client: Client) -> None:
    code, answer = client("Infer", **pair(id=12))
    assert code == "SUCCESS"
    header = answer.meta_data
    assert (header.id, header.model_name, header.model_version, header.batch_size) == (12, "pair", 1, 1)
    assert list(answer.raw_output) == [FOUR[::-1], b""]
    assert (list(header.output[0].raw.dims), header.output[0].raw.batch_byte_size) == ([2, 2], 16)
    assert [(item.idx, item.value) for item in header.output[1].batch_classes[0].cls] == [(3, 3.0), (2, 2.0)]


def test_labels_and_versions(client: Client) -> None:
    request: dict[str, Any] = {
        "model_name": "resnet",
        "meta_data": {
            "batch_size": 2,
            "input": [{"name": "input"}],
            "output": [{"name": "output", "cls": {"count": 1}}],
        },
        "raw_input": [(-np.arange(384, dtype=np.float32)).tobytes()],
    }
    for asked, version in ((-1, 3), (0, 3), (1, 1), (3, 3)):
        _, answer = client("Infer", model_version=asked, **request)
        assert answer.meta_data.model_version == version
        top = [classes.cls[0] for classes in answer.meta_data.output[0].batch_classes]
        assert [(item.idx, item.label) for item in top] == [(0, LABELS[0]), (0, LABELS[0])]
    code, answer = client("Infer", model_version=2, **request)
    assert (code, answer.request_status.msg) == ("NOT_FOUND", "Servable not found for request: Specific(resnet, 2)")


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"model_name": "nobody"}, "INVALID_ARG", "unable to find platform for requested model 'nobody'"),
        ({"raw_input": [FOUR]}, "INVALID_ARG", "unexpected size 0 for input 'B', expecting 16 bytes for model 'pair'"),
        ({"raw_input": [FOUR] * 3}, "INVALID_ARG", "unexpected additional input data for model 'pair'"),
        ({"raw_input": [FOUR, FOUR + b"x"]}, "INVALID_ARG", "unexpected size 17 for input 'B', expecting 16 bytes"),
        ({"meta_data": {}}, "INVALID_ARG", "inference request batch-size must be >= 1"),
        ({"meta_data": {"batch_size": 1}}, "INVALID_ARG", "expected 2 inputs but got 0"),
    ],
)
def test_refusals_are_in_the_answer(client: Client, change: dict[str, Any], code: str, text: str) -> None:
    told, answer = client("Infer", **{**pair(), **change})
    assert told == code
    assert answer.request_status.msg.startswith(text)
    assert not answer.raw_output


def test_health_status_and_one_counter_for_both_transports(client: Client, server: Serving) -> None:
    code, live = client("Health", mode="live")
    assert (code, live.health) == ("SUCCESS", True)
    web = ask(server, "GET", "/api/health/live").status.request_id
    code, ready = client("Health", mode="ready")
    assert (code, ready.health) == ("SUCCESS", False)
    assert [web, ready.request_status.request_id] == [live.request_status.request_id + 1, web + 1]
    code, other = client("Health", mode="sleepy")
    assert (code, other.request_status.msg) == ("UNKNOWN", "unknown health mode 'sleepy'")
    code, all_models = client("Status")
    assert code == "SUCCESS"
    assert len(all_models.server_status.model_status) >= 7
    assert all_models.server_status.health_stats.success.count >= 3
    code, unknown = client("Status", model_name="x")
    assert (code, unknown.request_status.msg) == ("NOT_FOUND", "no status available for unknown model 'x'")
    assert client("Profile", cmd="start")[0] == "UNSUPPORTED"


def test_models_and_the_repository(client: Client) -> None:
    assert client("ModelControl", model_name="spare", type="LOAD")[0] == "SUCCESS"
    assert "spare" in client("Status", model_name="spare")[1].server_status.model_status
    assert client("ModelControl", model_name="spare", type="UNLOAD")[0] == "SUCCESS"
    code, answer = client("ModelControl", model_name="nix", type="LOAD")
    assert (code, answer.request_status.msg) == (
        "NOT_FOUND",
        "failed to load 'nix', failed to poll from model repository",
    )
    assert client("ModelControl", model_name="../nix", type="LOAD")[0] == "INVALID_ARG"
    index = client("Repository", index=True)[1].index
    assert {"spare", "pair", "broken"} < {entry.name for entry in index.models}
    stats = client("Status")[1].server_status
    assert stats.model_control_stats.success.count == 2
    assert stats.repository_stats.success.count == 1


def test_shared_memory(client: Client, site: TrtisSite) -> None:
    file = site.shared / "k"
    file.write_bytes(FOUR + bytes(16))
    place = {"shared_memory_key": "/k", "offset": 0}
    code, answer = client("SharedMemoryControl", register={"name": "r", "system_shared_memory": place, "byte_size": 32})
    assert code == "SUCCESS", answer
    request = pair()
    request["meta_data"]["input"][0]["shared_memory"] = {"name": "r", "offset": 0, "byte_size": 16}
    request["meta_data"]["output"][0]["shared_memory"] = {"name": "r", "offset": 16, "byte_size": 16}
    request["raw_input"] = [FOUR[::-1]]
    code, answer = client("Infer", **request)
    assert code == "SUCCESS", answer
    assert list(answer.raw_output) == [b"", b""]
    assert file.read_bytes() == FOUR + FOUR[::-1]
    shown = client("SharedMemoryControl", status={})[1].shared_memory_status.shared_memory_region
    assert [
        (document.name, document.system_shared_memory.shared_memory_key, document.byte_size) for document in shown
    ] == [("r", "/k", 32)]
    assert client("SharedMemoryControl", unregister={"name": ""})[0] == "INVALID_ARG"
    assert client("SharedMemoryControl", unregister={"name": "r"})[0] == "SUCCESS"
    assert not client("SharedMemoryControl", status={})[1].shared_memory_status.shared_memory_region
    assert client("SharedMemoryControl", unregister_all={})[0] == "SUCCESS"
    assert client("SharedMemoryControl", register={"name": "q"})[0] == "INVALID_ARG"
    assert client("SharedMemoryControl")[0] == "INVALID_ARG"


class Device:
    """A GPU for shared memory: notes what it is told."""

    def __init__(self) -> None:
        self.handles: list[bytes] = []

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        self.handles.append(raw_handle)
        self.name, self.device_id, self.byte_size = name, device_id, byte_size

    def system_regions(self) -> list[Any]:
        return []

    def cuda_regions(self) -> list[Any]:
        return [self]


def test_shared_memory_of_a_gpu() -> None:
    device: Any = Device()
    gpu = {"name": "g", "cuda_shared_memory": {"raw_handle": bytes(64), "device_id": 1}, "byte_size": 8}
    request = message_class("SharedMemoryControlRequest")
    assert control_shared_memory(device, request(register=gpu)) is None
    assert device.handles == [bytes(64)]
    status = control_shared_memory(device, request(status={}))
    assert status is not None
    (region,) = status.shared_memory_region
    assert (region.name, region.cuda_shared_memory.device_id, region.byte_size) == ("g", 1, 8)


def test_without_shared_memory_it_is_refused(tmp_path: Path) -> None:
    site = TrtisSite(make_repository(tmp_path / "models"), memory=False)
    with serving(site.build) as server:
        client = Client(server.port)
        text = "Client shared memory is disabled: start the server with --allow-client-shm=true"
        for request in ({"status": {}}, {"unregister_all": {}}):
            code, answer = client("SharedMemoryControl", **request)
            assert code == "UNSUPPORTED"
            assert answer.request_status.msg.startswith(text)
        assert ask(server, "GET", "/api/sharedmemorycontrol/status").outcome[2].startswith(text)
        request = pair()
        request["meta_data"]["input"][0]["shared_memory"] = {"name": "r", "byte_size": 16}
        assert client("Infer", **request)[1].request_status.msg.startswith(text)
        client.channel.close()
        server.call(site.engine.close, 5)


def stateful(step: int, flags: int, correlation: int = 5) -> Any:
    return message_class("InferRequest")(
        model_name="stateful",
        model_version=-1,
        meta_data={
            "batch_size": 1,
            "id": step,
            "flags": flags,
            "correlation_id": correlation,
            "input": [{"name": "A"}],
            "output": [{"name": "X"}],
        },
        raw_input=[np.int32(step).tobytes()],
    )


def test_a_stream_answers_in_order_and_survives_wrong_requests(client: Client) -> None:
    wrong = message_class("InferRequest")(model_name="nobody", meta_data={"batch_size": 1, "id": 99})
    requests = [stateful(1, 1), stateful(2, 0), wrong, stateful(3, 2), stateful(4, 0)]
    answers = list(client.stream(iter(requests)))
    assert [answer.meta_data.id for answer in answers] == [1, 2, 99, 3, 4]
    assert [code_of(answer) for answer in answers] == ["SUCCESS", "SUCCESS", "INVALID_ARG", "SUCCESS", "INVALID_ARG"]
    assert [bytes(answer.raw_output[0]) for answer in answers if answer.raw_output] == [
        np.int32(step).tobytes() for step in (1, 2, 3)
    ]


def test_a_stream_applies_backpressure_to_a_fast_sender(client: Client) -> None:
    """More requests than are taken at once, and more bytes than fit into the windows."""
    rows = np.random.default_rng(0).random((4, 20_000, 2), np.float32).tobytes()
    header = {"batch_size": 4, "input": [{"name": "A", "dims": [20_000, 2]}], "output": [{"name": "X"}]}

    def requests() -> Iterator[Any]:
        for number in range(1, 151):
            yield message_class("InferRequest")(
                model_name="variable", model_version=-1, meta_data={**header, "id": number}, raw_input=[rows]
            )

    count = 0
    for count, answer in enumerate(client.stream(requests()), 1):
        assert answer.meta_data.id == count
        assert answer.raw_output[0] == rows
    assert count == 150


def test_an_empty_stream_ends(client: Client) -> None:
    assert list(client.stream(iter(()))) == []


def test_a_cancelled_stream_leaves_nothing_behind(client: Client, server: Serving, site: TrtisSite) -> None:
    def endless() -> Iterator[Any]:
        yield stateful(1, 1, correlation=6)

    answers = client.stream(endless())
    assert code_of(next(answers)) == "SUCCESS"
    answers.cancel()  # type: ignore[attr-defined]
    assert client("Health", mode="live")[0] == "SUCCESS"
    version = site.engine.plane.find("stateful")
    assert version is not None
    assert version.statistics.in_flight == 0


@pytest.mark.parametrize("method", ["Status", "Infer", "Health", "ModelControl", "SharedMemoryControl", "Repository"])
def test_bytes_that_are_not_a_message_are_refused_by_grpc_itself(client: Client, method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.raw(method, b"\x0a\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the message is not a" in caught.value.details()


def test_a_header_that_is_none_is_refused_in_the_answer(client: Client) -> None:
    broken = b"\x0a\x06single" + b"\x1a\x03\x0a\xff\xff"
    answer = message_class("InferResponse").FromString(client.raw("Infer", broken))
    assert code_of(answer) == "INVALID_ARG"
    assert answer.request_status.msg.startswith("unable to parse request for model 'single'")
