# SPDX-License-Identifier: Apache-2.0
"""The example repository behind `headrace serve`, asked by Triton's own clients: every model does what its page says."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from sklearn.datasets import load_digits
from tritonclient.utils import InferenceServerException

from support.servers import serve_process

TYPES = {
    "bool": np.bool_, "uint8": np.uint8, "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64,
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip


@pytest.fixture(scope="module")
def port(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serve_process(tmp_path_factory.mktemp("examples") / "log", repository, ready="ready: ") as server:
        yield server.port


@pytest.fixture
def client(port: int) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=90.0) as client:
        yield client


def given(name: str, array: Any, datatype: str) -> Any:
    tensor = tritonclient.http.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def test_simple_adds_and_subtracts(client: Any) -> None:
    first, second = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
    answer = client.infer("simple", [given("INPUT0", first, "INT32"), given("INPUT1", second, "INT32")])
    assert (answer.as_numpy("OUTPUT0") == first + second).all()
    assert (answer.as_numpy("OUTPUT1") == first - second).all()


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_given_back(client: Any, name: str) -> None:
    metadata = client.get_model_metadata(f"identity_{name}")
    (tensor,) = metadata["inputs"]
    array = np.array([[1, 0, 1]]).astype(TYPES[name])
    answer = client.infer(f"identity_{name}", [given(tensor["name"], array, tensor["datatype"])])
    assert (answer.as_numpy(metadata["outputs"][0]["name"]) == array).all()


def test_digits_are_recognised_with_and_without_the_ensemble(client: Any) -> None:
    images, numbers = load_digits(return_X_y=True)
    wanted = numbers[:64]
    (flat,) = client.get_model_metadata("digits")["inputs"]
    (square,) = client.get_model_metadata("digits_ensemble")["inputs"]
    for model, tensor in (
        ("digits", given(flat["name"], images[:64].astype(np.float32), "FP32")),
        ("digits_ensemble", given(square["name"], images[:64].reshape(-1, 8, 8).astype(np.uint8), "UINT8")),
    ):
        output = client.get_model_metadata(model)["outputs"][0]["name"]
        guesses = np.concatenate(
            [client.infer(model, [part]).as_numpy(output).argmax(1) for part in _parts(client, model, tensor, images)]
        )
        assert (guesses == wanted).mean() > 0.95, model


def _parts(client: Any, model: str, whole: Any, images: Any) -> list[Any]:
    most = client.get_model_config(model)["max_batch_size"]
    datatype = whole.datatype()
    shape = whole.shape()[1:]
    array = images[:64].reshape(64, *shape).astype(np.float32 if datatype == "FP32" else np.uint8)
    return [given(whole.name(), array[start : start + most], datatype) for start in range(0, 64, most)]


def test_strings_are_returned_in_capitals(client: Any) -> None:
    (tensor,) = client.get_model_metadata("strings")["inputs"]
    array = np.array([["straße", "Ünïcode", ""]], dtype=object)
    answer = client.infer("strings", [given(tensor["name"], array, "BYTES")])
    output = client.get_model_metadata("strings")["outputs"][0]["name"]
    assert [item.decode() for item in answer.as_numpy(output).ravel()] == ["STRASSE", "ÜNÏCODE", ""]


def test_the_accumulator_keeps_its_sequences_apart(client: Any) -> None:
    metadata = client.get_model_metadata("accumulator")
    name, output = metadata["inputs"][0]["name"], metadata["outputs"][0]["name"]
    datatype = metadata["inputs"][0]["datatype"]
    kind = {"FP32": np.float32, "INT32": np.int32}[datatype]
    sums = {1001: 0.0, 1002: 0.0}
    for step in range(5):
        for sequence in sums:
            value = step * 10 + sequence % 10
            sums[sequence] += value
            answer = client.infer(
                "accumulator",
                [given(name, np.array([[value]], kind), datatype)],
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == 4,
            )
            assert answer.as_numpy(output).ravel()[0] == sums[sequence]
    with pytest.raises(InferenceServerException, match="START"):
        client.infer("accumulator", [given(name, np.array([[1]], kind), datatype)], sequence_id=1001)


def test_a_decoupled_model_refuses_a_plain_call(client: Any) -> None:
    inputs = [
        given(tensor["name"], np.zeros([max(1, size) for size in tensor["shape"]], np.int32), tensor["datatype"])
        for tensor in client.get_model_metadata("repeat")["inputs"]
        if tensor["datatype"] == "INT32"
    ]
    with pytest.raises(InferenceServerException, match="decoupled"):
        client.infer("repeat", inputs)


def test_statistics_explain_the_batch_sizes(client: Any, port: int) -> None:
    first = np.zeros((1, 16), np.int32)
    client.infer("simple", [given("INPUT0", first, "INT32"), given("INPUT1", first, "INT32")])
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/simple/stats") as answer:
        (stats,) = json.load(answer)["model_stats"]
    assert stats["inference_count"] >= 1
    assert sum(stats["batching"]["reasons"].values()) == stats["execution_count"]
