# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/guides/from-triton.md: what they call the same is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc
from v2_servers import ask, models_served, write_model

from headrace.api.metrics.hardware import CPU, GPU
from headrace.api.metrics.model_metrics import COLUMNS, LOAD_SECONDS, PENDING
from headrace.api.v2.settings import V2Settings
from headrace.core.errors import Code
from headrace.net.grpc.status import GRPC_STATUS
from headrace.net.http.heads import HTTP_STATUS
from support.serving import Serving

GUIDE = Path(__file__).parents[3] / "docs/guides/from-triton.md"
CONFIG = """
backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] }
"""
BODIES = {
    "infer": {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]}]},
    "generate": {"INPUT0": 1},
    "generate_stream": {"INPUT0": 1},
}


def rows(title: str) -> list[list[str]]:
    """The cells of the table whose first column has this title."""
    lines = GUIDE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {title} |")) + 2
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def same(title: str, pattern: str) -> list[Any]:
    return [name for row in rows(title) if row[-1].startswith("same") for name in re.findall(pattern, row[0])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "M", CONFIG)
    with models_served(folder, V2Settings(allow_client_shm=True)) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), same("endpoint", r"`(GET|POST) (\S+)`"))
def test_every_endpoint_that_is_the_same_answers(server: Serving, method: str, path: str) -> None:
    path = path.replace("/versions/V", "/versions/1")
    body = BODIES.get(path.rpartition("/")[2], {}) if method == "POST" else None
    status, answer = ask(server, method, path, body)
    # The models of this server are polled, so they are neither loaded nor unloaded by request.
    assert status == (503 if path.endswith(("/load", "/unload")) else 200), answer


def test_every_grpc_method_is_there(server: Serving) -> None:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        service = tritonclient.grpc.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        codes = {}
        for method in service.methods:
            request = getattr(tritonclient.grpc.service_pb2, method.input_type.name)()
            call = getattr(client._client_stub, method.name)
            requests = iter([request]) if method.name == "ModelStreamInfer" else request
            try:
                call(requests, timeout=30)
            except grpc.RpcError as error:
                codes[method.name] = error.code()
        assert len(service.methods) >= 20
        assert grpc.StatusCode.UNIMPLEMENTED not in codes.values(), codes


@pytest.mark.parametrize("name", same("metric", r"`(nv_\w+)`"))
def test_every_metric_that_is_the_same_is_declared(name: str) -> None:
    ours = {column.name for column in (*COLUMNS, PENDING, LOAD_SECONDS)}
    assert name in ours | {metric[1] for metric in GPU} | {metric[0] for metric in CPU}


@pytest.mark.parametrize(
    ("code", "http", "status"),
    [
        (row[0].strip("`"), int(row[1]), row[2].strip("`"))
        for row in rows("error of Triton")
        if row[-1].startswith("same")
    ],
)
def test_every_error_that_is_the_same_has_the_same_codes(code: str, http: int, status: str) -> None:
    ours = {"INVALID_ARG": Code.INVALID_ARGUMENT, "UNSUPPORTED": Code.UNIMPLEMENTED}.get(code) or Code[code]
    assert HTTP_STATUS[ours] == http
    assert GRPC_STATUS[ours].name == status
