# SPDX-License-Identifier: Apache-2.0
"""What a Triton user does, with each of Triton's four Python clients: every data type, sequences, image classification.

The models are those of examples/, the digits classifier trained here.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tensors import ARRAYS, same
from tritonclient.utils import InferenceServerException
from v2_servers import models_served, write_model

from support.serving import Serving

EXAMPLES = Path(__file__).parents[3] / "examples"
IDENTITY = """
backend: "identity"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_{kind} dims: [ -1 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_{kind} dims: [ -1 ] }}
"""
CLIENTS = {
    "http": tritonclient.http,
    "http.aio": tritonclient.http.aio,
    "grpc": tritonclient.grpc,
    "grpc.aio": tritonclient.grpc.aio,
}


@pytest.fixture(scope="module")
def make_models() -> Any:
    spec = importlib.util.spec_from_file_location("make_models_for_v2", EXAMPLES / "make_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_models_for_v2"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(make_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("models")
    for datatype in ARRAYS:
        kind = "STRING" if datatype == "BYTES" else datatype
        write_model(folder, f"identity_{datatype.lower()}", IDENTITY.format(kind=kind))
    for name, graph in (("digits", make_models.digits_graph()[0]), ("accumulator", make_models.accumulator_graph())):
        shutil.copytree(EXAMPLES / "models" / name, folder / name)
        (folder / name / "1").mkdir(exist_ok=True)
        make_models.save(graph, folder / name / "1" / "model.onnx")
    with models_served(folder) as running:
        yield running


@pytest.fixture(params=CLIENTS)
def kind(request: pytest.FixtureRequest) -> Any:
    return CLIENTS[request.param]


def with_client(server: Serving, kind: Any, action: Any) -> None:
    """Run `action(client)` with an `infer` that can be awaited, whichever client it is."""

    async def run() -> None:
        client = kind.InferenceServerClient(f"127.0.0.1:{server.port}")

        async def infer(*arguments: Any, **more: Any) -> Any:
            result = client.infer(*arguments, **more)
            return await result if inspect.isawaitable(result) else result

        try:
            await action(infer)
        finally:
            closed = client.close()
            if inspect.isawaitable(closed):
                await closed

    asyncio.run(run())


def given(kind: Any, name: str, array: Any, datatype: str) -> Any:
    tensor = kind.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def test_every_data_type(server: Serving, kind: Any) -> None:
    async def action(infer: Any) -> None:
        for datatype, array in ARRAYS.items():
            result = await infer(f"identity_{datatype.lower()}", [given(kind, "INPUT0", array, datatype)])
            assert same(result.as_numpy("OUTPUT0"), array), datatype

    with_client(server, kind, action)


def test_every_call_of_the_http_clients_reads_long_answers(tmp_path: Path) -> None:
    many = "".join(f'input {{ name: "I{n}" data_type: TYPE_FP32 dims: [ -1 ] }}\n' for n in range(40))
    outputs = many.replace("input {", "output {").replace('"I', '"O')
    for n in range(20):
        write_model(tmp_path, f"many_{n}", f'backend: "identity"\nmax_batch_size: 8\n{many}{outputs}')

    def calls(client: Any) -> list[Any]:
        return [
            client.is_server_live(),
            client.is_server_ready(),
            client.is_model_ready("many_0"),
            client.get_server_metadata(),
            client.get_model_metadata("many_0"),
            client.get_model_config("many_0"),
            client.get_model_repository_index(),
            client.get_inference_statistics(),
            client.get_inference_statistics("many_0"),
            client.get_trace_settings(),
            client.get_log_settings(),
        ]

    async def awaited(url: str) -> list[Any]:
        async with tritonclient.http.aio.InferenceServerClient(url) as client:
            return [await call for call in calls(client)]

    with models_served(tmp_path) as running:
        url = f"127.0.0.1:{running.port}"
        assert asyncio.run(awaited(url)) == calls(tritonclient.http.InferenceServerClient(url))


@pytest.mark.parametrize("ids", [(101, 102), ("anna", "boris")], ids=["numbers", "texts"])
def test_sequences(server: Serving, kind: Any, ids: tuple[Any, Any]) -> None:
    async def action(infer: Any) -> None:
        sums = dict.fromkeys(ids, 0.0)
        for step in range(4):
            for place, sequence in enumerate(ids):
                sums[sequence] += step + place
                result = await infer(
                    "accumulator",
                    [given(kind, "INPUT", np.array([[step + place]], np.float32), "FP32")],
                    sequence_id=sequence,
                    sequence_start=step == 0,
                    sequence_end=step == 3,
                )
                assert result.as_numpy("OUTPUT")[0, 0] == sums[sequence]
        with pytest.raises(InferenceServerException) as failure:
            await infer(
                "accumulator",
                [given(kind, "INPUT", np.ones((1, 1), np.float32), "FP32")],
                sequence_id=ids[0],
                request_id="late",
            )
        assert failure.value.message().startswith("inference request for sequence")
        assert "must specify the START flag" in failure.value.message()

    with_client(server, kind, action)


def test_images_are_classified_with_labels(server: Serving, kind: Any, make_models: Any) -> None:
    """Triton's image client: a batch of images in, the three best classes of each by name out."""
    _, _, images, digits = make_models.digits_data()
    labels = (EXAMPLES / "models" / "digits" / "labels.txt").read_text().splitlines()

    async def action(infer: Any) -> None:
        right = 0
        for start in range(0, 128, 32):
            batch = images[start : start + 32]
            outputs = [kind.InferRequestedOutput("PROBABILITIES", class_count=3)]
            result = await infer("digits", [given(kind, "PIXELS", batch, "FP32")], outputs=outputs)
            classes = result.as_numpy("PROBABILITIES")
            assert classes.shape == (32, 3)
            for row, digit in zip(classes, digits[start : start + 32], strict=True):
                best = [entry.decode().split(":") for entry in row]
                assert [labels[int(place)] for _, place, _ in best] == [label for _, _, label in best]
                values = [float(value) for value, _, _ in best]
                assert values == sorted(values, reverse=True) and len(best[0][0].partition(".")[2]) == 6
                right += int(best[0][1]) == digit
        assert right >= 0.95 * 128

    with_client(server, kind, action)
