# SPDX-License-Identifier: Apache-2.0
"""The backend of Hugging Face's image models: what it tells of a folder, what it answers, which folders it refuses."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.vision import LABELS, expected, model_of, pixels, save, write
from safetensors.torch import load_file, save_file
from tabular_models import NO_SERVICES, completed_tensors, configured, open_instance

from headrace.backends.contract import ModelFiles, Placement
from headrace.backends.table import backend_named
from headrace.core.dtypes import FP32
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument

BACKEND = "huggingface_vision"
TYPE_FP32 = 11
IMAGES = {"pixel_values": (FP32, (3, -1, -1))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ModelFiles]]:
    folder = tmp_path_factory.mktemp("vision")

    def of(kind: str) -> ModelFiles:
        files = ModelFiles(folder / kind, 1, folder / kind / "1")
        if not files.version_folder.exists():
            save(kind, files.version_folder)
        return files

    return of


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may try to reach anybody."""

    def refuse(*given: Any) -> None:
        raise AssertionError(f"tried to connect: {given[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def copied(files: ModelFiles, folder: Path, **changes: Any) -> ModelFiles:
    """The same model with other words in its config.json."""
    new = ModelFiles(folder / "test", 1, folder / "test" / "1")
    new.version_folder.mkdir(parents=True)
    for file in files.version_folder.iterdir():
        (new.version_folder / file.name).write_bytes(file.read_bytes())
    file = new.version_folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return new


def refused(files: ModelFiles, **more: Any) -> str:
    """What is said of a folder that cannot be served, when it is looked at and when it is loaded."""
    config = configured(BACKEND, IMAGES, {"logits": (FP32, (4,))}, **more)
    with pytest.raises((InvalidArgument, FailedPrecondition)) as caught:
        open_instance(config, files)
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs"),
    [
        ("resnet", [3, -1, -1], {"logits": [4]}),
        ("vit", [3, 32, 32], {"logits": [3]}),
        ("yolos", [3, -1, -1], {"logits": [5, -1], "pred_boxes": [5, 4]}),
        ("rt_detr", [3, -1, -1], {"logits": [6, -1], "pred_boxes": [6, 4]}),
    ],
)
def test_reports_inputs_outputs_and_batch(saved: Any, kind: str, inputs: list[int], outputs: dict[str, Any]) -> None:
    assert completed_tensors(BACKEND, saved(kind)) == {
        "input": {"pixel_values": (TYPE_FP32, inputs)},
        "output": {name: (TYPE_FP32, dims) for name, dims in outputs.items()},
        "max_batch_size": 8,
    }


def test_labels_are_those_of_a_classifier_that_has_names(saved: Any) -> None:
    def labels(kind: str, **parameters: str) -> dict[str, str]:
        config = configured(BACKEND, batch=0, parameters=parameters)
        message = backend_named(BACKEND).complete(config, saved(kind))
        return {output.name: output.label_filename for output in message.output}

    assert labels("resnet") == {"logits": "1/config.json"}
    assert labels("vit") == {"logits": ""}  # LABEL_0, LABEL_1, ... are no names
    assert labels("yolos") == {"logits": "", "pred_boxes": ""}
    # The engine reads label files inside the model's folder only.
    assert labels("vit", model_path=str(saved("resnet").version_folder)) == {"logits": ""}


@pytest.mark.parametrize(
    ("kind", "sizes"), [("resnet", (32, 48)), ("vit", (32,)), ("yolos", (64, 96)), ("rt_detr", (64, 96))]
)
def test_answers_what_transformers_answers(saved: Any, kind: str, sizes: tuple[int, ...]) -> None:
    files = saved(kind)
    given = pixels(1, 0, sizes[0])
    outputs = {name: (FP32, (-1,) * (array.ndim - 1)) for name, array in expected(kind, given).items()}
    instance = open_instance(
        configured(BACKEND, {"pixel_values": (FP32, (3, *((32, 32) if kind == "vit" else (-1, -1))))}, outputs), files
    )
    for seed, size in enumerate(sizes):
        for rows in (1, 3):
            given = pixels(rows, seed, size)
            given["pixel_values"].flags.writeable = False
            answer = instance.compute(given, list(outputs))
            for name, array in expected(kind, given).items():
                assert answer[name].dtype == np.float32
                np.testing.assert_allclose(answer[name], array, rtol=1e-4, atol=1e-4)
    assert set(instance.compute(given, ["logits"])) == {"logits"}
    instance.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        instance.compute(given, ["logits"])


def test_boxes_are_shares_of_the_image(saved: Any) -> None:
    config = configured(BACKEND, IMAGES, {"logits": (FP32, (6, -1)), "pred_boxes": (FP32, (6, 4))})
    boxes = open_instance(config, saved("rt_detr")).compute(pixels(2, 1, 64), ["pred_boxes"])["pred_boxes"]
    assert boxes.shape == (2, 6, 4)
    assert boxes.min() >= 0 and boxes.max() <= 1


def test_half_precision_answers_in_fp32(saved: Any) -> None:
    config = configured(BACKEND, IMAGES, {"logits": (FP32, (4,))}, parameters={"dtype": "bfloat16"})
    given = pixels(2, 3)
    answer = open_instance(config, saved("resnet")).compute(given, ["logits"])["logits"]
    wanted = expected("resnet", given)["logits"]
    assert answer.dtype == np.float32
    assert not np.array_equal(answer, wanted)
    np.testing.assert_allclose(answer, wanted, rtol=0.1, atol=0.05 * np.abs(wanted).max())


def test_model_path_names_another_folder(saved: Any, tmp_path: Path) -> None:
    files = ModelFiles(tmp_path / "test", 1, tmp_path / "test" / "1")
    files.version_folder.mkdir(parents=True)
    save("resnet", files.version_folder / "weights" / "final")
    given = pixels(1, 4)
    for path in ("weights/final", str(saved("resnet").version_folder)):
        config = configured(BACKEND, IMAGES, {"logits": (FP32, (4,))}, parameters={"model_path": path})
        answer = open_instance(config, files).compute(given, ["logits"])["logits"]
        np.testing.assert_allclose(answer, expected("resnet", given)["logits"], rtol=1e-4, atol=1e-3)


def test_instances_share_their_weights(saved: Any) -> None:
    config = configured(BACKEND, IMAGES, {"logits": (FP32, (4,))})
    model = backend_named(BACKEND).load(config, saved("resnet"), NO_SERVICES)
    first, second = (model.open(Placement(f"test_{number}_cpu")) for number in range(2))
    assert first._model is second._model
    with pytest.raises(FailedPrecondition, match="GPU 7"):
        model.open(Placement("test_0_gpu7", "gpu", 7))
    first.close()
    assert second.compute(pixels(1, 0), ["logits"])["logits"].shape == (1, 4)
    model.close()


def test_wrong_images_are_refused(saved: Any) -> None:
    config = configured(BACKEND, IMAGES, {"logits": (FP32, (5, -1)), "pred_boxes": (FP32, (5, 4))})
    instance = open_instance(config, saved("yolos"))
    for shape in ((2, 1, 64, 64), (2, 3, 8, 8), (3, 64, 64)):
        with pytest.raises(InvalidArgument, match=r"yolos|shape") as caught:
            instance.compute({"pixel_values": np.zeros(shape, np.float32)}, ["logits"])
        assert "Traceback" not in caught.value.message
    assert instance.compute(pixels(1, 0, 64), ["logits"])["logits"].shape == (1, 5, 5)


def test_a_configuration_of_another_model_is_refused(saved: Any) -> None:
    wrong = [
        (IMAGES, {"logits": (FP32, (1000,))}, "dims"),
        ({"images": (FP32, (3, -1, -1))}, {"logits": (FP32, (4,))}, "pixel_values"),
        (IMAGES, {"pred_boxes": (FP32, (5, 4))}, "pred_boxes"),
    ]
    for inputs, outputs, text in wrong:
        with pytest.raises(InvalidArgument, match=text):
            backend_named(BACKEND).load(configured(BACKEND, inputs, outputs), saved("resnet"), NO_SERVICES)
    with pytest.raises(InvalidArgument, match="correct its dims"):  # a ViT takes one size
        backend_named(BACKEND).load(configured(BACKEND, IMAGES, {"logits": (FP32, (3,))}), saved("vit"), NO_SERVICES)
    assert "dtype" in refused(saved("resnet"), parameters={"dtype": "int4"})
    assert "INTRA_OP" in refused(saved("resnet"), parameters={"INTRA_OP_THREAD_COUNT": "many"})


def test_pickles_are_refused_with_what_to_do(saved: Any, tmp_path: Path) -> None:
    files = copied(saved("resnet"), tmp_path)
    (files.version_folder / "model.safetensors").unlink()
    assert "put model.safetensors" in refused(files)
    torch.save(model_of("resnet").state_dict(), files.version_folder / "pytorch_model.bin")
    text = refused(files)
    assert "save_pretrained" in text and "pickle" in text


class PickledMarker:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.folder,)


def test_no_code_of_the_folder_runs(saved: Any, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = f"import pathlib\npathlib.Path({str(canary)!r}).mkdir()\n"
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForImageClassification": "evil.EvilModel"}
    files = copied(saved("resnet"), tmp_path, auto_map=auto_map)
    (files.version_folder / "evil.py").write_text(evil)
    torch.save(PickledMarker(canary), files.version_folder / "pytorch_model.bin")
    # The type is known, so that the package's own class serves it.
    instance = open_instance(configured(BACKEND, IMAGES, {"logits": (FP32, (4,))}), files)
    given = pixels(1, 1)
    np.testing.assert_allclose(
        instance.compute(given, ["logits"])["logits"], expected("resnet", given)["logits"], rtol=1e-4, atol=1e-3
    )
    unknown = copied(files, tmp_path / "unknown", model_type="evil")
    assert "code of its own" in refused(unknown)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no config.json"),
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}', "backend llm"),
        (b'{"architectures": "nonsense"}', "nothing as architectures"),
        (
            b'{"architectures": ["ResNetForImageClassification"], "model_type": "llama"}',
            "no classifier of type 'llama'",
        ),
        (b'{"architectures": ["ImageGPTForImageClassification"], "model_type": "imagegpt"}', "backend python"),
        (b'{"architectures": ["ResNetForImageClassification"], "model_type": 7}', "not know"),
    ],
)
def test_bad_config_json_is_reported(tmp_path: Path, content: bytes | None, text: str) -> None:
    files = ModelFiles(tmp_path / "test", 1, tmp_path / "test" / "1")
    files.version_folder.mkdir(parents=True)
    if content is not None:
        (files.version_folder / "config.json").write_bytes(content)
    assert text in refused(files)
    with pytest.raises(HeadraceError, match=text):
        completed_tensors(BACKEND, files)


def test_weights_that_are_not_all_there_are_refused(saved: Any, tmp_path: Path) -> None:
    """Transformers would make up those that are missing."""
    files = copied(saved("resnet"), tmp_path)
    file = files.version_folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: value for name, value in weights.items() if "classifier" not in name}, file)
    assert "2 of its weights" in refused(files)
    save_file(weights | {"classifier.1.weight": torch.zeros(9, 16)}, file)
    assert "model.safetensors" in refused(files)
    # Old files have no count of the batches that were seen.
    save_file({name: value for name, value in weights.items() if "num_batches" not in name}, file)
    open_instance(configured(BACKEND, IMAGES, {"logits": (FP32, (4,))}), files).close()


def test_write_makes_a_model_of_a_repository(tmp_path: Path) -> None:
    write("resnet", tmp_path)
    assert json.loads((tmp_path / "1" / "config.json").read_text())["id2label"] == {
        str(k): v for k, v in LABELS.items()
    }
