# SPDX-License-Identifier: Apache-2.0
"""Metadata, configuration, statistics and repository control over HTTP, on a folder of models, with Triton's client."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from headrace.api.v2 import repository
from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.serving import Serving, serving

CONFIG = """
backend: "identity"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {size} ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ {size} ] }}
{more}
"""


def make_model(folder: Path, name: str, *, size: int = 4, more: str = "dynamic_batching { }") -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(CONFIG.format(size=size, more=more))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder, "echo")
    make_model(folder, "cached", more="response_cache { enable: true }")
    make_model(folder, "spare")
    make_model(folder, "broken", more="dynamic_batchin { }")
    engines: list[Engine] = []
    control = RepositorySettings(mode="explicit", load_models=("echo", "cached", "broken"), exit_on_error=False)

    async def site() -> Site:
        engines.append(open_engine(EngineSettings(repositories=(folder,), repository=control)))
        await engines[0].start()
        address = Address.parse("127.0.0.1:0")
        return build_site(engines[0].plane, ServerSettings(http=address, grpc=address))[0]

    with serving(site) as running:
        yield running
        running.call(engines[0].close, 5)


@pytest.fixture
def client(server: Serving) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=30.0) as client:
        yield client


def ask(server: Serving, method: str, path: str, document: Any = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, None if document is None else json.dumps(document))
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(content) if content else None


def infer(client: tritonclient.http.InferenceServerClient, model: str, rows: int = 1) -> np.ndarray[Any, Any]:
    tensor = tritonclient.http.InferInput("INPUT0", [rows, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((rows, 4), np.float32))
    return client.infer(model, [tensor]).as_numpy("OUTPUT0")


def test_the_server_says_what_it_is(client: tritonclient.http.InferenceServerClient) -> None:
    metadata = client.get_server_metadata()
    assert metadata["name"] == "headrace"
    assert {"model_repository", "statistics", "binary_tensor_data", "trace"} <= set(metadata["extensions"])
    assert {"system_shared_memory", "cuda_shared_memory"} <= set(metadata["extensions"])


def test_metadata(server: Serving, client: tritonclient.http.InferenceServerClient) -> None:
    expected = {
        "name": "echo",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
    }
    assert client.get_model_metadata("echo") == expected
    assert client.get_model_metadata("echo", "1") == expected
    status, answer = ask(server, "GET", "/v2/models/echo/versions/9")
    assert (status, answer) == (404, {"error": "Request for unknown model: 'echo' version 9 is not found"})


def test_config_is_complete_and_has_numbers(client: tritonclient.http.InferenceServerClient) -> None:
    config = client.get_model_config("echo")
    assert config["input"][0]["dims"] == [4]
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0


def test_a_broken_model_says_what_is_wrong(server: Serving) -> None:
    status, answer = ask(server, "GET", "/v2/models/broken")
    assert status == 503
    assert "broken/config.pbtxt:6" in answer["error"] and "did you mean 'dynamic_batching'" in answer["error"]


def test_statistics_count_requests_and_explain_batches(client: tritonclient.http.InferenceServerClient) -> None:
    before = client.get_inference_statistics("echo")["model_stats"][0]
    infer(client, "echo", rows=2)
    infer(client, "echo", rows=2)
    with pytest.raises(InferenceServerException):
        infer(client, "echo", rows=9)
    (stats,) = client.get_inference_statistics("echo", "1")["model_stats"]
    assert (stats["name"], stats["version"]) == ("echo", "1")
    assert stats["last_inference"] > 1_600_000_000_000
    assert stats["inference_count"] - before["inference_count"] == 4
    assert stats["execution_count"] - before["execution_count"] == 2
    parts = stats["inference_stats"]
    assert parts["success"]["count"] - before["inference_stats"]["success"]["count"] == 2
    assert parts["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 1
    assert parts["queue"]["count"] == parts["compute_infer"]["count"] == parts["success"]["count"]
    assert 0 < parts["compute_infer"]["ns"] <= parts["success"]["ns"]
    assert [batch_stats["batch_size"] for batch_stats in stats["batch_stats"]] == [2]
    assert (stats["response_stats"], stats["memory_usage"]) == ({}, [])
    batching = stats["batching"]
    assert sum(batching["reasons"].values()) == stats["execution_count"]
    assert batching["recent"][-1]["rows"] == 2 and batching["recent"][-1]["reason"] in batching["reasons"]
    assert (batching["in_flight"], batching["delay_microseconds"], batching["delay_auto"]) == (0, 0, False)


def test_cache_hits_are_not_counted_as_executions(client: tritonclient.http.InferenceServerClient) -> None:
    for _ in range(3):
        infer(client, "cached")
    (stats,) = client.get_inference_statistics("cached")["model_stats"]
    assert (stats["execution_count"], stats["inference_count"]) == (1, 1)
    parts = stats["inference_stats"]
    assert (parts["success"]["count"], parts["cache_hit"]["count"], parts["cache_miss"]["count"]) == (3, 2, 1)
    assert parts["queue"]["count"] == 1


def test_statistics_of_all_models(client: tritonclient.http.InferenceServerClient) -> None:
    names = [model_stats["name"] for model_stats in client.get_inference_statistics()["model_stats"]]
    assert {"echo", "cached"} <= set(names) and "broken" not in names


def test_the_index_lists_what_is_there_and_why_it_does_not_serve(
    server: Serving, client: tritonclient.http.InferenceServerClient
) -> None:
    index = {index_entry["name"]: index_entry for index_entry in client.get_model_repository_index()}
    assert index["echo"] == {"name": "echo", "version": "1", "state": "READY"}
    assert index["broken"]["state"] == "UNAVAILABLE" and "dynamic_batching" in index["broken"]["reason"]
    assert ask(server, "POST", "/v2/repository/index")[1] == list(index.values())
    status, ready = ask(server, "POST", "/v2/repository/index", {"ready": True})
    assert status == 200 and {item["state"] for item in ready} == {"READY"}


def test_load_and_unload(client: tritonclient.http.InferenceServerClient) -> None:
    assert not client.is_model_ready("spare")
    client.load_model("spare")
    assert client.is_model_ready("spare")
    assert infer(client, "spare").shape == (1, 4)
    client.unload_model("spare", unload_dependents=True)
    assert not client.is_model_ready("spare")
    index = {index_entry["name"]: index_entry for index_entry in client.get_model_repository_index()}
    assert index["spare"] == {"name": "spare", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}


def test_load_with_a_configuration_and_files(client: tritonclient.http.InferenceServerClient) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    config = {
        "backend": "identity",
        "max_batch_size": 2,
        "input": [{"name": "INPUT0", **tensor}],
        "output": [{"name": "OUTPUT0", **tensor}],
    }
    client.load_model("given", config=json.dumps(config), files={"file:3/note.txt": b"no folder has this"})
    assert client.get_model_metadata("given")["versions"] == ["3"]
    assert client.get_model_config("given")["input"][0]["dims"] == [2]
    client.unload_model("given")


@pytest.mark.parametrize(
    ("path", "document", "status", "text"),
    [
        ("models/none/load", None, 404, "failed to load 'none', failed to poll from model repository"),
        ("models/broken/load", {}, 400, "failed to load 'broken', broken/config.pbtxt:6"),
        ("models/echo/load", [], 400, "must be a JSON object"),
        ("models/echo/load", {"parameters": []}, 400, "'parameters' must be a JSON object"),
        ("models/echo/load", {"parameters": {"config": 1}}, 400, "'config' must be a string"),
        ("models/echo/load", {"parameters": {"confg": "{}"}}, 400, "unknown parameter"),
        ("models/echo/load", {"parameters": {"config": "{}", "file:1/m": "*"}}, 400, "base64"),
        (
            "models/echo/load",
            {"parameters": {"config": "{}", "file:../../m": base64.b64encode(b"x").decode()}},
            400,
            "is not allowed",
        ),
        (
            "models/echo/unload",
            {"parameters": {"unload_dependents": 1}},
            400,
            "invalid value for 'unload_dependents': expected a boolean",
        ),
        ("models/..%2Fecho/load", None, 400, "model name must not contain path traversal characters"),
        ("index", {"ready": "yes"}, 400, "invalid value for 'ready': expected a boolean"),
    ],
)
def test_wrong_requests_are_refused_with_a_reason(
    server: Serving, path: str, document: Any, status: int, text: str
) -> None:
    answered, answer = ask(server, "POST", f"/v2/repository/{path}", document)
    assert answered == status and text in answer["error"]


def test_a_file_that_is_too_large_for_a_request(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is that of a signed 32-bit number; a smaller one stands for it here."""
    monkeypatch.setattr(repository, "_MOST_LOAD_BYTES", 1000)
    parameters = {"config": "{}", "file:1/model.onnx": "A" * 1000}
    answered, answer = ask(server, "POST", "/v2/repository/models/large/load", {"parameters": parameters})
    assert answered == 500 and "exceeds the maximum allowed data size limit INT_MAX" in answer["error"]


def test_text_that_is_not_json(server: Serving) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v2/repository/index", "{")
    answer = connection.getresponse()
    assert answer.status == 400 and b"JSON" in answer.read()
    connection.close()
