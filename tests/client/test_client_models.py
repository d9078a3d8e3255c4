# SPDX-License-Identifier: Apache-2.0
"""Questions about a server and its models, and loading and unloading, over both protocols, blocking and not."""

from __future__ import annotations

import json
import socket
from typing import Any

import numpy as np
import pytest
from client_servers import RealServer

from headrace.client import Client
from headrace.core.errors import InvalidArgument, NotFound, Unavailable


def test_health(client: Any) -> None:
    assert client.live()
    assert client.ready()
    assert client.ready("echo")
    assert client.ready("echo", version=1)
    assert not client.ready("echo", version=7)
    assert not client.ready("nope")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_an_unreachable_server_is_not_live_and_not_ready(make: Any, scheme: str) -> None:
    with make(f"{scheme}://127.0.0.1:1") as client:
        assert not client.live()
        assert not client.ready()
        assert not client.ready("echo")


def test_a_server_that_hangs_is_not_live(make: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for scheme in ("http", "grpc"):
            with make(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}") as client:
                assert not client.live(timeout=0.2)


def test_metadata_of_server_and_model(client: Any) -> None:
    assert "binary_tensor_data" in client.metadata()["extensions"]
    assert client.metadata("echo") == {
        "name": "echo",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
    }
    with pytest.raises(NotFound, match="nope"):
        client.metadata("nope")


def test_config_is_the_same_over_both_protocols(real: RealServer) -> None:
    with Client(real.http) as http, Client(real.grpc) as grpc:
        for model in ("echo", "story", "counter"):
            over_http, over_grpc = http.config(model), grpc.config(model)
            common = over_http.keys() & over_grpc.keys()
            assert {"name", "backend", "max_batch_size", "input", "output"} <= common
            for key in ("name", "backend", "max_batch_size", "output", "version_policy", "instance_group"):
                assert over_http[key] == over_grpc[key]
            names = [(tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in over_grpc["input"]]
            assert names == [(tensor["name"], tensor["data_type"], tensor["dims"]) for tensor in over_http["input"]]
        assert grpc.config("story")["model_transaction_policy"] == {"decoupled": True}


def test_statistics_count_requests(client: Any) -> None:
    def count() -> int:
        (found,) = client.statistics("same_FP32", version=1)
        assert found["name"] == "same_FP32"
        return int(found["inference_stats"]["success"]["count"])

    before = count()
    client.infer("same_FP32", {"x": np.zeros((1, 1), np.float32)})
    assert count() == before + 1
    assert {"echo", "story"} <= {statistic["name"] for statistic in client.statistics()}


def test_the_index_and_loading(client: Any) -> None:
    def state() -> str:
        (found,) = [model for model in client.models() if model["name"] == "same_UINT8"]
        return str(found["state"])

    assert state() == "READY"
    client.unload("same_UINT8")
    assert state() == "UNAVAILABLE"
    assert "same_UINT8" not in [model["name"] for model in client.models(ready=True)]
    with pytest.raises((NotFound, Unavailable), match="same_UINT8"):
        client.infer("same_UINT8", {"x": np.zeros((1, 1), np.uint8)})
    client.load("same_UINT8")
    assert state() == "READY"


def test_loading_with_a_configuration_of_ones_own(client: Any) -> None:
    config = {
        "name": "same_INT8",
        "backend": "identity",
        "max_batch_size": 4,
        "input": [{"name": "x", "data_type": "TYPE_INT16", "dims": [2]}],
        "output": [{"name": "y", "data_type": "TYPE_INT16", "dims": [2]}],
    }
    try:
        for given in (config, json.dumps(config)):
            client.load("same_INT8", config=given)
            assert client.metadata("same_INT8")["inputs"] == [{"name": "x", "datatype": "INT16", "shape": [-1, 2]}]
    finally:
        client.load("same_INT8")
    assert client.metadata("same_INT8")["inputs"][0]["datatype"] == "INT8"


def test_loading_with_files(client: Any) -> None:
    config = {
        "backend": "python",
        **{
            key: [{"name": name, "data_type": "TYPE_INT32", "dims": [1]}]
            for key, name in (("input", "x"), ("output", "y"))
        },
    }
    code = (
        "import triton_python_backend_utils as pb\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        x = pb.get_input_tensor_by_name\n"
        "        return [pb.InferenceResponse([pb.Tensor('y', x(r, 'x').as_numpy() * 3)]) for r in requests]\n"
    )
    client.load("by_hand", config=config, files={"1/model.py": code.encode()})
    try:
        assert client.infer("by_hand", {"x": np.array([5], np.int32)})["y"].tolist() == [15]
    finally:
        client.unload("by_hand")
    with pytest.raises(InvalidArgument, match="files need a config"):
        client.load("by_hand", files={"1/model.py": b""})


def test_a_failed_load_states_the_reason(client: Any) -> None:
    with pytest.raises(Exception, match="nope") as caught:
        client.load("nope")
    assert caught.value.status
    with pytest.raises(InvalidArgument, match="not empty"):
        client.load("")
