# SPDX-License-Identifier: Apache-2.0
"""Classifiers and detectors over HTTP: the seed's bodies, labels, boxes, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_models import LABELS, data_url, onnx_classifier, onnx_yolo, png, png_of, tiny_vit, tiny_yolos
from PIL import Image
from service_process import LocalService, local_service, settings_for
from store_stub import StoreStub

from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalService, Path]]:
    folder = tmp_path_factory.mktemp("classifier")
    model = tiny_vit(folder / "vit")
    settings = settings_for(model, folder, media=MediaSettings(folders=(folder,)))
    with local_service(settings) as running:
        running.until("model_loaded")
        yield running, model


def test_a_classifier_answers_the_seeds_body_as_transformers_does(vit: tuple[LocalService, Path]) -> None:
    import torch
    from transformers import ViTForImageClassification

    running, folder = vit
    pictures = [png(seed=1), png(50, 20, seed=2)]
    body: dict[str, Any] = {"images": [data_url(picture) for picture in pictures], "batch_size": 1}
    results = running.infer(**body)
    together = running.infer(**body | {"batch_size": 8})["predictions"]
    for one, other in zip(results["predictions"], together, strict=True):
        assert one["label"] == other["label"] and one["confidence"] == pytest.approx(other["confidence"], abs=1e-4)
    model = ViTForImageClassification.from_pretrained(folder)
    for content, told in zip(pictures, results["predictions"], strict=True):
        with Image.open(BytesIO(content)) as opened:
            resized = opened.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
        pixels = (np.asarray(resized, np.float32) / 255 - 0.5) / 0.5
        with torch.no_grad():
            logits = model(torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None]).logits[0]
        shares = logits.softmax(-1)
        best = int(shares.argmax())
        assert (told["class_id"], told["label"]) == (best, LABELS[best])
        assert told["confidence"] == pytest.approx(float(shares[best]), abs=1e-4)
        assert [prediction["class_id"] for prediction in told["top_k"]] == shares.argsort(descending=True).tolist()
        assert told["image"] == "data:image/png;base64,..."
    assert results["response"] == ", ".join(prediction["label"] for prediction in results["predictions"])
    assert results["total_images"] == 2 and results["model_type"] == "classifier"


def test_a_picture_by_its_path_where_the_operator_allows_it(vit: tuple[LocalService, Path]) -> None:
    running, folder = vit
    place = folder.parent / "picture.png"
    place.write_bytes(png(seed=1))
    by_path = running.infer(images=str(place), top_k=1)
    assert (
        by_path["predictions"][0]["top_k"]
        == running.infer(images=data_url(png(seed=1)), top_k=1)["predictions"][0]["top_k"]
    )
    assert "images[0]" in running.refused(images="/etc/hostname.png")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"batch_size": 1}, "'images' is required"),
        ({"images": []}, "'images' is required"),
        ({"images": [7]}, "'images' is a list: use a string or a list of strings"),
        ({"images": "x", "batch_size": "one"}, "'batch_size' is 'one'"),
        ({"images": "x", "batch_size": 0}, "'batch_size' is 0: use an integer from 1 to 256"),
        ({"images": "x", "batch_size": True}, "'batch_size' is true"),
        ({"images": "x", "confidence_threshold": 0.5}, "'confidence_threshold' is not a parameter of this model"),
        ({"images": "https://example.com/picture.exe"}, "unsupported extensions"),
        ({"images": "data:text/html;base64,AAAA"}, "text/html"),
        ({"images": data_url(b"no picture at all")}, "images[0]"),
        ({"images": data_url(png()[:200])}, "images[0]"),
        ({"images": ["http://127.0.0.1:9/a.png"]}, "images[0]"),
        ({"images": ["s3://bucket/image.jpg"]}, "Cloud-storage URIs are not supported by the inference service"),
        ({"images": [data_url(png())] * 65}, "at most 64"),
    ],
)
def test_wrong_requests_are_named(vit: tuple[LocalService, Path], body: dict[str, Any], text: str) -> None:
    assert text in vit[0].refused(**body)


def test_a_classifier_in_onnx_with_a_label_file(tmp_path: Path) -> None:
    model = onnx_classifier(tmp_path / "colours")
    specs = {"image_mean": [0, 0, 0], "image_std": [0.5, 0.5, 0.5]}
    with local_service(settings_for(model, tmp_path, specs=specs)) as running:
        running.until("model_loaded")
        red, blue = np.zeros((20, 20, 3), np.uint8), np.zeros((20, 20, 3), np.uint8)
        red[..., 0] = blue[..., 2] = 255
        results = running.infer(images=[data_url(png_of(red)), data_url(png_of(blue))], batch_size=2, top_k=3)
        assert [prediction["label"] for prediction in results["predictions"]] == ["red", "blue"]
        shares = {prediction["label"]: prediction["confidence"] for prediction in results["predictions"][0]["top_k"]}
        expected = np.exp([2.0, 0, 0]) / np.exp([2.0, 0, 0]).sum()
        assert shares == pytest.approx(dict(zip(("red", "green", "blue"), expected, strict=True)), abs=1e-5)


def test_rest_mode_takes_model_and_images_from_the_workspaces_bucket(tmp_path: Path) -> None:
    model = onnx_classifier(tmp_path / "made")
    blue = np.zeros((20, 20, 3), np.uint8)
    blue[..., 2] = 255
    objects = {f"results/job/{path.name}": path.read_bytes() for path in model.iterdir()}
    objects |= {"image1.jpg": png_of(blue), "image2.jpg": png_of(blue[..., ::-1].copy())}
    with StoreStub({"bucket": objects}) as store:
        credentials = CloudCredentials.from_metadata(store.metadata("bucket"))
        settings = settings_for(tmp_path, tmp_path, credentials=credentials)
        with local_service(replace(settings, model_path="aws://bucket/results/job")) as running:
            running.until("model_loaded")
            results = running.infer(images=["s3://bucket/image1.jpg", "s3://bucket/image2.jpg"], batch_size=1)
            assert results["response"] == "blue, red"
            assert results["predictions"][0]["image"] == "s3://bucket/image1.jpg"
            assert "images[0]" in running.refused(images=["s3://elsewhere/image1.jpg"])
        refused = replace(settings, model_path="aws://elsewhere/results/job")
        with local_service(refused) as running:
            assert "elsewhere" in running.until("initialization_error")["initialization_error"]


def test_a_folder_as_triton_has_it(tmp_path: Path) -> None:
    model = tmp_path / "colours"
    onnx_classifier(model / "1")
    (model / "1" / "labels.txt").rename(model / "words.txt")
    (model / "config.pbtxt").write_text(
        'backend: "onnxruntime"\nmax_batch_size: 4\n'
        'input { name: "pixels" data_type: TYPE_FP32 dims: [ 3, 16, 16 ] }\n'
        'output { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "words.txt" }\n'
    )
    with local_service(settings_for(model, tmp_path)) as running:
        running.until("model_loaded")
        green = np.zeros((20, 20, 3), np.uint8)
        green[..., 1] = 255
        assert running.infer(images=data_url(png_of(green)))["response"] == "green"
        scrape = running.raw("/metrics")
        assert 'nv_inference_request_success{model="colours",version="1"} 1' in scrape


def test_a_detector_answers_the_seeds_body_as_transformers_does(tmp_path: Path) -> None:
    import torch
    from transformers import YolosForObjectDetection

    folder = tiny_yolos(tmp_path / "yolos")
    content = png(80, 60, seed=5)
    with local_service(settings_for(folder, tmp_path)) as running:
        running.until("model_loaded")
        results = running.infer(images=[data_url(content)], confidence_threshold=0.5)
        reported = results["predictions"][0]
        assert (reported["width"], reported["height"], results["model_type"]) == (80, 60, "detector")
        with Image.open(BytesIO(content)) as opened:
            resized = opened.convert("RGB").resize((85, 64), Image.Resampling.BILINEAR)
        pixels = (np.asarray(resized, np.float32) / 255 - 0.5) / 0.5
        model = YolosForObjectDetection.from_pretrained(folder)
        with torch.no_grad():
            outputs = model(torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None])
        scores, classes = outputs.logits[0].softmax(-1)[:, :-1].max(-1)
        expected = [
            (LABELS[int(classes[row])], float(scores[row]), _corners(outputs.pred_boxes[0, row].tolist(), 80, 60))
            for row in scores.argsort(descending=True).tolist()
            if scores[row] >= 0.5
        ]
        assert 0 < len(expected) == len(reported["detections"]) == results["total_detections"]
        for found, (label, score, corners) in zip(reported["detections"], expected, strict=True):
            assert found["label"] == label
            assert found["confidence"] == pytest.approx(score, abs=1e-3)
            assert found["box"] == pytest.approx(corners, abs=0.1)
        everything = running.infer(images=data_url(content), confidence_threshold=0.0, max_detections=2)
        assert len(everything["predictions"][0]["detections"]) == 2
        assert "'confidence_threshold' is 1.5" in running.refused(images="x", confidence_threshold=1.5)


def _corners(box: list[float], width: int, height: int) -> list[float]:
    x, y, across, down = box
    low, high = (x - across / 2, y - down / 2), (x + across / 2, y + down / 2)
    edges = (low[0] * width, low[1] * height, high[0] * width, high[1] * height)
    return [min(max(edge, 0), most) for edge, most in zip(edges, (width, height, width, height), strict=True)]


def test_a_yolo_detector(tmp_path: Path) -> None:
    # Centre x, centre y, width, height in the 64 x 64 that the model sees; then person, bicycle.
    rows = np.asarray(
        [
            (32, 32, 16, 16, 0.9, 0.1),
            (33, 32, 16, 16, 0.8, 0.1),  # the same person
            (33, 32, 16, 16, 0.1, 0.7),  # a bicycle at the same place
            (10, 32, 8, 8, 0.6, 0.0),
            (50, 50, 8, 8, 0.2, 0.1),
            *[(0, 0, 0, 0, 0, 0)] * 15,
        ],
        np.float32,
    ).T
    model = onnx_yolo(tmp_path / "yolo", np.ascontiguousarray(rows))
    with local_service(settings_for(model, tmp_path)) as running:
        assert running.until("model_loaded")["model_type"] == "detector"
        # 128 x 64 becomes 64 x 32 with 16 grey rows above and below.
        results = running.infer(images=data_url(png(128, 64)), confidence_threshold=0.5)
        found = [
            (detection["label"], detection["confidence"], detection["box"])
            for detection in results["predictions"][0]["detections"]
        ]
        assert found == [
            ("person", pytest.approx(0.9), [48, 16, 80, 48]),
            ("bicycle", pytest.approx(0.7), [50, 16, 82, 48]),
            ("person", pytest.approx(0.6), [12, 24, 28, 40]),
        ]


def test_a_model_that_is_not_for_the_architecture(tmp_path: Path) -> None:
    model = onnx_classifier(tmp_path / "colours")
    with local_service(settings_for(model, tmp_path, "cosmos-rl")) as running:
        reported = running.until("model_load_error")
        assert "cosmos-rl serves vision_language" in reported["model_load_error"]


def test_weights_that_are_not_weights(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["ViTForImageClassification"], "model_type": "vit"})
    )
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with local_service(settings_for(folder, tmp_path)) as running:
        assert "broken" in running.until("model_load_error")["model_load_error"]
