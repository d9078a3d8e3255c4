# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's image models through a real server and Triton's own client, with no more than `backend` configured."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.vision import LABELS, expected, pixels, write

from headrace.engine.engine import Engine, EngineSettings, open_engine
from headrace.engine.repository.settings import RepositorySettings
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.serve.server import ServerSettings, build_site
from support.serving import serving

with warnings.catch_warnings(action="ignore"):  # gevent's
    import tritonclient.http as library


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("vision_models")
    for kind in ("resnet", "rt_detr"):
        (folder / kind).mkdir()
        write(kind, folder / kind)
    engines: list[Engine] = []

    async def site() -> Site:
        settings = EngineSettings(repositories=(folder,), repository=RepositorySettings(exit_on_error=False), gpus=0)
        engines.append(open_engine(settings))
        await engines[0].start()
        address = Address.parse("127.0.0.1:0")
        return build_site(engines[0].plane, ServerSettings(http=address, grpc=address))[0]

    with serving(site) as running:
        asking = library.InferenceServerClient(f"127.0.0.1:{running.port}")
        yield asking
        asking.close()
        running.call(engines[0].close, 10)


def ask(client: Any, model: str, images: Any, *outputs: Any) -> Any:
    tensor = library.InferInput("pixel_values", list(images.shape), "FP32")
    tensor.set_data_from_numpy(images)
    return client.infer(model, [tensor], outputs=list(outputs) or None)


@pytest.mark.parametrize(("model", "size"), [("resnet", 40), ("rt_detr", 64)])
def test_answers_what_transformers_answers(client: Any, model: str, size: int) -> None:
    given = pixels(3, 5, size)
    answer = ask(client, model, given["pixel_values"])
    for name, array in expected(model, given).items():
        np.testing.assert_allclose(answer.as_numpy(name), array, rtol=1e-3, atol=1e-3)


def test_reports_its_tensors(client: Any) -> None:
    metadata = client.get_model_metadata("rt_detr")
    assert {tensor["name"]: tensor["shape"] for tensor in (*metadata["inputs"], *metadata["outputs"])} == {
        "pixel_values": [-1, 3, -1, -1],
        "logits": [-1, 6, -1],
        "pred_boxes": [-1, 6, 4],
    }


def test_classes_have_the_names_of_config_json(client: Any) -> None:
    given = pixels(2, 6)
    answer = ask(client, "resnet", given["pixel_values"], library.InferRequestedOutput("logits", class_count=2))
    for row, logits in zip(answer.as_numpy("logits"), expected("resnet", given)["logits"], strict=True):
        named = [text.decode().split(":", 2)[1:] for text in row]
        assert named == [[str(best), LABELS[best]] for best in map(int, np.argsort(-logits)[:2])]


def test_wrong_shapes_are_refused(client: Any) -> None:
    for shape, text in (((1, 1, 32, 32), "unexpected shape"), ((9, 3, 32, 32), "batch-size"), ((1, 3, 4, 4), "shape")):
        with pytest.raises(library.InferenceServerException, match=text):
            ask(client, "rt_detr", np.zeros(shape, np.float32))
