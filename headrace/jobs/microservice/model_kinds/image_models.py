# SPDX-License-Identifier: Apache-2.0
"""Image models: classifiers and object detectors, with images given by URL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.core.dtypes import FP16, FP32, UINT8
from headrace.core.errors import Internal, InvalidArgument
from headrace.core.generation import PromptImage
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.model_kinds.contract import (
    Chat,
    ChatAnswer,
    MediaItem,
    Parameter,
    chat_unsupported,
    ignored,
    read_parameters,
)
from headrace.jobs.microservice.model_kinds.image_transforms import (
    Array,
    Detection,
    DetectionLimits,
    ImageInput,
    PreparedImage,
    Preprocessing,
    detr_boxes,
    prepare,
    softmax,
    yolo_boxes,
)
from headrace.jobs.microservice.model_kinds.media import Reader, read_media
from headrace.jobs.microservice.model_kinds.tensors import compute_all, rounded
from headrace.jobs.microservice.profiles import MediaRules
from headrace.models.config.types import ModelConfig
from headrace.models.storage.locations import public_text

_TOLERANCE = 1e-3

LOGITS, BOXES = "logits", "pred_boxes"
_DIGITS = 2
_RANK = 2

IMAGES = Parameter("images", "texts", aliases=("image", "media", "files"))
BATCH_SIZE = Parameter("batch_size", "integer", 1, minimum=1, maximum=256)
ACCEPTED = ignored("conv_mode", "mode", "model")

_CHANNELS = 3


class ClassifierKind:
    """Images to labels."""

    model_type = "classifier"
    parameters: tuple[Parameter, ...] = (
        IMAGES,
        BATCH_SIZE,
        Parameter("top_k", "integer", 5, minimum=1, maximum=1000),
        *ACCEPTED,
    )

    def __init__(self, model: ImageModel, output: str) -> None:
        self._model = model
        self._output = output

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Run an inference request."""
        read = read_parameters(self.parameters, fields)
        urls = read["images"]
        results = await self._model.run(urls, read["batch_size"])
        predictions = []
        for url, (_, outputs) in zip(urls, results, strict=True):
            best = self._best(outputs[self._output].ravel(), read["top_k"])
            first = best[0]
            predictions.append({"image": display_url(url), **first, "top_k": best})
        return {
            "response": ", ".join(prediction["label"] for prediction in predictions),
            "confidence": predictions[0]["confidence"],
            "predictions": predictions,
            "total_images": len(predictions),
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Reject chats."""
        raise chat_unsupported("classifies images")

    async def close(self) -> None:
        """Close the media reader."""
        self._model.reader.close()

    def _best(self, scores: Array, count: int) -> list[dict[str, Any]]:
        if not scores.size:
            raise Internal("the model returned no classes; the server's log has the details")
        # An output named logits is not normalised; other names say nothing.
        normalised = self._output != LOGITS and _are_probabilities(scores)
        probabilities = scores if normalised else softmax(scores.astype(np.float32))
        best = np.argsort(-probabilities, kind="stable")[:count]
        return [
            {
                "label": self._model.label(int(index)),
                "class_id": int(index),
                "confidence": rounded(probabilities[index]),
            }
            for index in best
        ]


def _are_probabilities(numbers: Array) -> bool:
    """Return whether the model already applies a softmax."""
    return bool(numbers.min() >= 0 and abs(float(numbers.sum()) - 1) < _TOLERANCE)


class DetectorKind:
    """Images to boxes. `anchors` is the output of a YOLO-like model; "" for a DETR-like one."""

    model_type = "detector"
    parameters: tuple[Parameter, ...] = (
        IMAGES,
        BATCH_SIZE,
        Parameter("confidence_threshold", "number", 0.5, minimum=0, maximum=1, aliases=("threshold",)),
        Parameter("iou_threshold", "number", 0.45, minimum=0, maximum=1, aliases=("nms_threshold",)),
        Parameter("max_detections", "integer", 300, minimum=1, maximum=3000),
        *ACCEPTED,
    )

    def __init__(self, model: ImageModel, anchors: str = "") -> None:
        self._model = model
        self._anchors = anchors

    async def infer(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Run an inference request."""
        read = read_parameters(self.parameters, fields)
        urls = read["images"]
        limits = DetectionLimits(read["confidence_threshold"], read["iou_threshold"], read["max_detections"])
        results = await self._model.run(urls, read["batch_size"])
        predictions: list[dict[str, Any]] = []
        for url, (prepared, outputs) in zip(urls, results, strict=True):
            boxes = [self._as_json(box) for box in self._boxes(prepared, outputs, limits)]
            height, width = prepared.original
            predictions.append({"image": display_url(url), "width": width, "height": height, "detections": boxes})
        counts = [len(prediction["detections"]) for prediction in predictions]
        labels = sorted({box["label"] for prediction in predictions for box in prediction["detections"]})
        scores = [box["confidence"] for prediction in predictions for box in prediction["detections"]]
        return {
            "response": f"{sum(counts)} objects in {len(counts)} images" + (f": {', '.join(labels)}" if labels else ""),
            "confidence": max(scores, default=0.0),
            "predictions": predictions,
            "total_detections": sum(counts),
            "total_images": len(counts),
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """Reject chats."""
        raise chat_unsupported("detects objects in images")

    async def close(self) -> None:
        """Close the media reader."""
        self._model.reader.close()

    def _boxes(self, prepared: PreparedImage, outputs: Mapping[str, Array], limits: DetectionLimits) -> list[Detection]:
        count = len(self._model.labels)
        if self._anchors:
            return yolo_boxes(_as_table(outputs[self._anchors]), count, prepared, limits)
        return detr_boxes(_as_table(outputs[LOGITS]), _as_table(outputs[BOXES]), count, prepared, limits)

    def _as_json(self, box: Detection) -> dict[str, Any]:
        corners = [rounded(edge, _DIGITS) for edge in (box.left, box.top, box.right, box.bottom)]
        return {
            "label": self._model.label(box.index),
            "class_id": box.index,
            "confidence": rounded(box.score),
            "box": corners,
        }


def _as_table(array: Array) -> Array:
    """Remove leading dimensions of 1; NaN becomes 0, which is not a box."""
    while array.ndim > _RANK and array.shape[0] == 1:
        array = array[0]
    if array.ndim != _RANK:
        raise Internal("the detector's output is not a table of boxes; the server's log has the details")
    return np.nan_to_num(array.astype(np.float32))


@dataclass(frozen=True, slots=True)
class ImageModel:
    """A model that takes images: its input, preprocessing and labels."""

    plane: DataPlane
    model: str
    max_batch_size: int
    target: ImageInput
    preprocessing: Preprocessing
    labels: Mapping[int, str]
    reader: Reader
    rules: MediaRules

    def label(self, index: int) -> str:
        """Return the label of a class, or its number."""
        return self.labels.get(index, str(index))

    async def run(self, urls: Sequence[str] | None, batch_size: int) -> list[tuple[PreparedImage, Mapping[str, Array]]]:
        """Run the model; return each prepared image with its outputs."""
        if not urls:
            raise InvalidArgument("'images' is required: give a URL, or a list of URLs")
        items = [MediaItem(url, "image", f"images[{index}]") for index, url in enumerate(urls)]
        media = await read_media(self.reader, items, self.rules)
        prepared = await asyncio.to_thread(self._prepare, [item for item in media if isinstance(item, PromptImage)])
        batches = self._batches(prepared, batch_size)
        responses = await compute_all(self.plane, self.model, [[self._tensor(batch)] for batch in batches])
        results: list[tuple[PreparedImage, Mapping[str, Array]]] = []
        for batch, outputs in zip(batches, responses, strict=True):
            for row, prepared_image in enumerate(batch):
                results.append((prepared_image, {name: self._row(array, row) for name, array in outputs.items()}))
        return results

    def _prepare(self, images: Sequence[PromptImage]) -> list[PreparedImage]:
        return [prepare(image.pixels, self.preprocessing, self.target) for image in images]

    def _batches(self, prepared: Sequence[PreparedImage], batch_size: int) -> list[list[PreparedImage]]:
        """Group images in order; only neighbours of equal size share a batch."""
        max_size = max(1, min(batch_size, self.max_batch_size))
        batches: list[list[PreparedImage]] = []
        for image in prepared:
            last = batches[-1] if batches else []
            if last and len(last) < max_size and last[0].array.shape == image.array.shape:
                last.append(image)
            else:
                batches.append([image])
        return batches

    def _tensor(self, batch: Sequence[PreparedImage]) -> Tensor:
        batched = self.max_batch_size > 0 or self.target.explicit_batch
        array = np.stack([image.array for image in batch]) if batched else batch[0].array
        return Tensor.of(self.target.name, array)

    def _row(self, array: Array, row: int) -> Array:
        return array[row] if self.max_batch_size > 0 or self.target.explicit_batch else array


def image_input(config: ModelConfig) -> ImageInput | None:
    """Return the image input of a model; None if it does not take exactly one image."""
    required = [spec for spec in config.inputs if not spec.optional]
    if len(required) != 1 or required[0].dims is None or required[0].dtype not in (FP32, UINT8):
        return None
    dims = required[0].dims
    explicit_batch = config.max_batch_size == 0 and len(dims) == 4 and dims[0] in (1, -1)
    if explicit_batch:
        dims = dims[1:]
    if len(dims) != 3:
        return None
    whole_numbers = required[0].dtype is UINT8
    if dims[0] == _CHANNELS:
        return ImageInput(required[0].name, dims[1], dims[2], True, whole_numbers, explicit_batch)
    if dims[2] == _CHANNELS:
        return ImageInput(required[0].name, dims[0], dims[1], False, whole_numbers, explicit_batch)
    return None


def output_dims(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of each output for one image."""
    explicit_batch = config.max_batch_size == 0
    dims_of = {}
    for spec in config.outputs:
        if spec.dtype in (FP32, FP16) and spec.dims is not None:
            dims = spec.dims
            dims_of[spec.name] = dims[1:] if explicit_batch and len(dims) > 1 and dims[0] in (1, -1) else dims
    return dims_of


def display_url(url: str) -> str:
    """Return a URL for a response: without image data or signature."""
    return url.split(",", 1)[0][:64] + ",..." if url[:5].lower() == "data:" else public_text(url)
