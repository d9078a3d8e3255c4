# SPDX-License-Identifier: Apache-2.0
"""Metadata, configuration, statistics and repository control over gRPC, with Triton's clients, sync and aio."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException
from v2_servers import models_served, write_model

from support.serving import Serving

CONFIG = """
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }
parameters { key: "colour" value { string_value: "blue" } }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("echo", "spare"):
        write_model(folder, name, CONFIG)
    write_model(folder, "broken", "backendd: 1")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with models_served(folder, mode="explicit", load_models=("echo",), exit_on_error=False) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}") as made:
        yield made


def infer(client: Any, model: str, rows: int = 1) -> Any:
    tensor = tritonclient.grpc.InferInput("INPUT0", [rows, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((rows, 4), np.float32))
    return client.infer(model, [tensor])


def test_the_same_facts_as_over_http(server: Serving, client: Any) -> None:
    infer(client, "echo", 2)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as http:
        one = client.get_server_metadata(as_json=True)
        assert one == http.get_server_metadata()
        one = client.get_model_metadata("echo", "1", as_json=True)
        shown = http.get_model_metadata("echo")
        assert [
            (tensor["name"], tensor["datatype"], [int(n) for n in tensor["shape"]]) for tensor in one["inputs"]
        ] == [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in shown["inputs"]]
        assert (one["versions"], one["platform"]) == (shown["versions"], shown["platform"])
        config = client.get_model_config("echo").config
        assert (config.max_batch_size, list(config.input[0].dims)) == (8, [4])
        assert config.parameters["colour"].string_value == "blue"
        assert config.instance_group[0].name == http.get_model_config("echo")["instance_group"][0]["name"]
        (stats,) = client.get_inference_statistics("echo", "1").model_stats
        (facts,) = http.get_inference_statistics("echo", "1")["model_stats"]
        assert (stats.name, stats.version, stats.inference_count) == ("echo", "1", facts["inference_count"])
        assert stats.execution_count == facts["execution_count"] and stats.last_inference > 1_600_000_000_000
        for part, duration in facts["inference_stats"].items():
            field = getattr(stats.inference_stats, part)
            assert (field.count, field.ns) == (duration["count"], duration["ns"])
        assert [batch_stats.batch_size for batch_stats in stats.batch_stats] == [
            batch_stats["batch_size"] for batch_stats in facts["batch_stats"]
        ]
        assert stats.batch_stats[-1].compute_infer.count


def test_the_repository(client: Any) -> None:
    index = {model.name: model for model in client.get_model_repository_index().models}
    assert index["echo"].state == "READY" and index["echo"].version == "1"
    assert not client.is_model_ready("spare")
    client.load_model("spare")
    assert client.is_model_ready("spare") and infer(client, "spare").as_numpy("OUTPUT0").shape == (1, 4)
    client.unload_model("spare", unload_dependents=True)
    assert not client.is_model_ready("spare")
    index = {model.name: model for model in client.get_model_repository_index().models}
    assert (index["spare"].state, index["spare"].reason) == ("UNAVAILABLE", "unloaded")


def test_loading_with_a_configuration_and_files(client: Any) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {"backend": "identity", "input": [{"name": "I", **tensor}], "output": [{"name": "O", **tensor}]}
    client.load_model("given", config=json.dumps(config), files={"file:3/note.txt": b"\x00\xff"})
    assert list(client.get_model_metadata("given").versions) == ["3"]
    client.unload_model("given")


@pytest.mark.parametrize(
    ("action", "arguments", "code", "text"),
    [
        ("load_model", ("none",), "NOT_FOUND", "failed to load 'none', failed to poll from model repository"),
        ("load_model", ("broken",), "INVALID_ARGUMENT", "failed to load 'broken'"),
        ("load_model", ("../echo",), "INVALID_ARGUMENT", "must not contain path traversal characters"),
        ("load_model", ("",), "INVALID_ARGUMENT", "Model name cannot be empty."),
        ("unload_model", ("..",), "INVALID_ARGUMENT", "must not contain path traversal characters"),
        ("get_model_metadata", ("none",), "NOT_FOUND", "Request for unknown model: 'none' is not found"),
        ("get_model_config", ("echo", "9"), "NOT_FOUND", "version 9 is not found"),
        ("get_inference_statistics", ("none",), "NOT_FOUND", "unknown model"),
        ("get_model_config", ("a/b",), "INVALID_ARGUMENT", "is not allowed"),
    ],
)
def test_what_is_refused(client: Any, action: str, arguments: tuple[str, ...], code: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as failure:
        getattr(client, action)(*arguments)
    assert text in failure.value.message() and code in failure.value.status()


async def _aio(server: Serving, module: Any) -> None:
    async with module.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert await client.is_server_live() and await client.is_model_ready("echo")
        assert await client.get_server_metadata() and await client.get_model_metadata("echo")
        assert await client.get_model_config("echo") and await client.get_inference_statistics()
        assert await client.get_model_repository_index()
        await client.load_model("spare")
        await client.unload_model("spare")
        await client.update_trace_settings(settings={"trace_rate": "9"})
        assert "9" in str(await client.get_trace_settings())
        await client.update_trace_settings(settings={"trace_rate": None})
        assert "log_info" in str(await client.get_log_settings())
        with pytest.raises(InferenceServerException, match="unknown model"):
            await client.get_model_metadata("none")


@pytest.mark.parametrize("module", [tritonclient.http.aio, tritonclient.grpc.aio], ids=["http", "grpc"])
def test_everything_with_the_aio_clients(server: Serving, module: Any) -> None:
    asyncio.run(_aio(server, module))


def test_messages_that_are_none(server: Serving) -> None:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for method in tritonclient.grpc.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            if method.input_type.fields and not method.client_streaming:
                with pytest.raises(grpc.RpcError) as failure:
                    channel.unary_unary(f"/inference.GRPCInferenceService/{method.name}")(b"\xff\xff", timeout=30)
                assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name
