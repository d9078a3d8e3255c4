# SPDX-License-Identifier: Apache-2.0
"""One server with a model of each format, asked for each by Triton's own clients."""

from __future__ import annotations

import json
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from case import Arrays, Case
from contract_cases import MODULES, cases_of, for_each, write_cases
from contract_serving import check
from ml_dtypes import bfloat16

from support.programs import Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
"""All frameworks are imported, here and in the server. `test_backend_contract` covers each without a process."""


@dataclass(frozen=True)
class Served:
    """A running `headrace serve`, and what it serves."""

    program: Program
    cases: list[Case]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("every_format")
    for module in MODULES:
        write_cases(folder / "models", module)
    arguments = ("serve", folder / "models", "--http-port", "0", "--grpc-port", "0")
    with Program(*arguments, log=folder / "log", ready="model(s)") as program:
        yield Served(program, [case for module in MODULES for case in cases_of(module)])


def get_json(served: Served, path: str) -> Any:
    """What the server answers at a path."""
    with urllib.request.urlopen(served.program.url + path, timeout=30) as answer:
        return json.load(answer)


def infer_outputs(client: Any, library: Any, case: Case, given: Arrays, types: dict[str, str]) -> dict[str, Any]:
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
def test_every_format_answers(served: Served, transport: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # gevent's, at import
        if transport == "http":
            import tritonclient.http as library
        else:
            import tritonclient.grpc as library
    client = library.InferenceServerClient(f"127.0.0.1:{served.program.ports[transport == 'grpc']}")
    try:
        assert client.is_server_ready(), served.program.log

        def one(case: Case) -> None:
            assert client.is_model_ready(case.name), served.program.log
            answer = get_json(served, f"/v2/models/{case.name}")
            types = {tensor["name"]: tensor["datatype"] for tensor in (*answer["inputs"], *answer["outputs"])}
            for seed in range(2):
                given = case.inputs(2 if case.batches else 1, seed)
                check(case, given, infer_outputs(client, library, case, given, types))

        for_each(served.cases, one)
    finally:
        client.close()


def test_it_counts_what_it_answered(served: Served) -> None:
    counted = {
        model_stats["name"]: model_stats["inference_count"]
        for model_stats in get_json(served, "/v2/models/stats")["model_stats"]
    }
    assert counted.keys() == {case.name for case in served.cases}
