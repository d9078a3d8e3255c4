# SPDX-License-Identifier: Apache-2.0
"""`response_stats` of decoupled models, over HTTP and over gRPC."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from v2_servers import ask, models_served

from support.serving import Serving

REPEAT = Path(__file__).parents[3] / "examples" / "models" / "repeat"
PARTS = {"compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(REPEAT, folder / "repeat")
    with models_served(folder) as running:
        yield running


def _stream(client: Any, numbers: list[int]) -> None:
    reported: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: reported.put((result, error)))
    tensor = tritonclient.grpc.InferInput("IN", [len(numbers)], "INT32")
    tensor.set_data_from_numpy(np.array(numbers, np.int32))
    client.async_stream_infer("repeat", [tensor], enable_empty_final_response=True)
    final = False
    while not final:
        result, error = reported.get(timeout=30)
        assert error is None
        final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def test_both_transports_report_the_same(server: Serving) -> None:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        _stream(client, [1, 2])
        _stream(client, [5])
        (counted,) = client.get_inference_statistics("repeat").model_stats
        status, document = ask(server, "GET", "/v2/models/repeat/stats")
    assert status == 200
    response_stats = document["model_stats"][0]["response_stats"]
    assert list(response_stats) == ["0", "1", "2"]
    assert [response_stats[place]["success"]["count"] for place in response_stats] == [2, 1, 0]
    assert [response_stats[place]["empty_response"]["count"] for place in response_stats] == [0, 1, 1]
    assert [response_stats[place]["compute_infer"]["count"] for place in response_stats] == [2, 2, 1]
    assert [response_stats[place]["compute_output"]["count"] for place in response_stats] == [2, 1, 0]
    for place, parts in response_stats.items():
        assert parts.keys() == PARTS
        for part, duration in parts.items():
            field = getattr(counted.response_stats[place], part)
            assert (field.count, field.ns) == (duration["count"], duration["ns"])
