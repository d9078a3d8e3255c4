# SPDX-License-Identifier: Apache-2.0
"""Tiny classifiers and detectors, and pictures for them."""

from __future__ import annotations

import base64
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from support.model_cache import copy_of

LABELS = {0: "cat", 1: "dog", 2: "newt"}


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return png_of(pixels)


def png_of(pixels: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(content: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode()}"


def tiny_vit(folder: Path) -> Path:
    """A ViTForImageClassification with random weights, as a Hugging Face folder."""
    return copy_of(folder, _write_vit)


def _write_vit(folder: Path) -> None:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(7)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        id2label=LABELS,
        label2id={label: index for index, label in LABELS.items()},
        initializer_range=0.5,
    )
    _save(ViTForImageClassification(config), folder, {"size": {"height": 32, "width": 32}})


def tiny_yolos(folder: Path) -> Path:
    """A YolosForObjectDetection with random weights: logits and boxes as DETR has them."""
    return copy_of(folder, _write_yolos)


def _write_yolos(folder: Path) -> None:
    import torch
    from transformers import YolosConfig, YolosForObjectDetection

    torch.manual_seed(8)
    config = YolosConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=5,
        id2label=LABELS,
        label2id={label: index for index, label in LABELS.items()},
        initializer_range=1.0,
    )
    edges = {"shortest_edge": 64, "longest_edge": 96}
    _save(YolosForObjectDetection(config), folder, {"size": edges})


def _save(model: Any, folder: Path, processor: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    document = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(document | processor))


def onnx_classifier(folder: Path) -> Path:
    """The mean of each colour as the logit of its class: red, green, blue."""
    folder.mkdir(parents=True)
    nodes = [helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)]
    _write(folder / "model.onnx", nodes, [("batch", 3, 16, 16)], [("batch", 3)])
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    return folder


def onnx_yolo(folder: Path, rows: npt.NDArray[np.float32]) -> Path:
    """Always the same anchors, [4 + classes, anchors], whatever the picture."""
    folder.mkdir(parents=True)
    nodes = [
        helper.make_node("ReduceMean", ["pixels"], ["mean"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
        helper.make_node("Squeeze", ["nothing", "last"], ["flat"]),
        helper.make_node("Add", ["flat", "rows"], ["scores"]),
    ]
    constants = {"zero": np.zeros(1, np.float32), "rows": rows[None], "last": np.asarray([3], np.int64)}
    _write(folder / "model.onnx", nodes, [("batch", 3, 64, 64)], [("batch", *rows.shape)], constants)
    (folder / "labels.txt").write_text("person\nbicycle\n")
    return folder


def _write(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: Any = None) -> None:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("pixels", TensorProto.FLOAT, shape) for shape in inputs],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, shape) for shape in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
