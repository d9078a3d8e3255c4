# SPDX-License-Identifier: Apache-2.0
"""One server with a model of each format, asked for each by Triton's own clients."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from case import Arrays, Case
from contract_cases import MODULES, cases_of, for_each, write_cases
from contract_serving import check
from ml_dtypes import bfloat16

pytestmark = pytest.mark.timeout(300)
"""Frameworks take half a minute to be imported, here and in the server, and AOTInductor compiles."""

HEADRACE = Path(sys.executable).parent / "headrace"
LISTENING = re.compile(r"listening on 127\.0\.0\.1:(\d+)")


class Server:
    """A running `headrace serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, cases: list[Case]) -> None:
        self.process = process
        self.log = log
        self.cases = cases
        self.ports: list[str] = []
        """HTTP first, then gRPC."""

    def wait_until_ready(self) -> None:
        """Return when every model is ready, or tell what the server said."""
        end = time.monotonic() + 200
        while time.monotonic() < end:
            text = self.log.read_text()
            assert self.process.poll() is None, text
            self.ports = LISTENING.findall(text)
            if "model(s)" in text and self.ports:
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready in time:\n{self.log.read_text()}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cases = [case for module in MODULES for case in cases_of(module)]
    folder = tmp_path_factory.mktemp("every_format")
    write_cases(folder / "models", cases)
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [HEADRACE, "serve", folder / "models", "--http-port", "0", "--grpc-port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    running = Server(process, log, cases)
    try:
        running.wait_until_ready()
        yield running
    finally:
        process.terminate()
        code = process.wait(100)
    assert code == 0, log.read_text()


def got(server: Server, path: str) -> Any:
    """What the server answers at a path."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports[0]}{path}", timeout=30) as answer:
        return json.load(answer)


def asked(client: Any, library: Any, case: Case, given: Arrays, types: dict[str, str]) -> dict[str, Any]:
    """A request and its answer, by `tritonclient.http` or `tritonclient.grpc`."""
    inputs = []
    for name, array in given.items():
        tensor = library.InferInput(name, list(array.shape), types[name])
        tensor.set_data_from_numpy(array.view(bfloat16) if types[name] == "BF16" else array)
        inputs.append(tensor)
    wanted = case.expected(given)
    result = client.infer(case.name, inputs, outputs=[library.InferRequestedOutput(name) for name in wanted])
    answer = {name: result.as_numpy(name) for name in wanted}
    return {name: array.view(np.uint16) if array.dtype == bfloat16 else array for name, array in answer.items()}


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_every_format_answers(server: Server, transport: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # gevent's, at import
        if transport == "http":
            import tritonclient.http as library
        else:
            import tritonclient.grpc as library
    client = library.InferenceServerClient(f"127.0.0.1:{server.ports[transport == 'grpc' and len(server.ports) > 1]}")
    try:
        assert client.is_server_ready(), server.log.read_text()

        def one(case: Case) -> None:
            assert client.is_model_ready(case.name), server.log.read_text()
            told = got(server, f"/v2/models/{case.name}")
            types = {each["name"]: each["datatype"] for each in (*told["inputs"], *told["outputs"])}
            for seed in range(2):
                given = case.inputs(2 if case.batches else 1, seed)
                check(case, given, asked(client, library, case, given, types))

        for_each(server.cases, one)
    finally:
        client.close()


def test_it_counts_what_it_answered(server: Server) -> None:
    counted = {each["name"]: each["inference_count"] for each in got(server, "/v2/models/stats")["model_stats"]}
    assert counted.keys() == {case.name for case in server.cases}
