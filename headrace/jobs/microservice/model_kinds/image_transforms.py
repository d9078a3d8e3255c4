# SPDX-License-Identifier: Apache-2.0
"""Image preprocessing and box decoding, with numpy and Pillow.

Preprocessing follows the preprocessor_config.json of Hugging Face's image processors; for other models the size is the
input's own, and the job's specs (`image_size`, `image_mean`, `image_std`, `rescale_factor`, `resize_mode`) give the rest.
Boxes are decoded from DETR-like outputs (boxes with logits) and YOLO-like outputs (anchors, which need non-maximum
suppression).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headrace.core.errors import InvalidArgument
from headrace.core.generation import Pixels

Mode = Literal["stretch", "edges", "letterbox", "keep"]
Array = npt.NDArray[Any]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GREY = 114
_BILINEAR = 2
_SMALL_CONVNEXT = 384
_MAX_EDGE = 8192

FloatArray = npt.NDArray[np.float32]
MAX_CANDIDATES = 3000
"""Maximum number of boxes for non-maximum suppression, which compares all pairs."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The image input of a model."""

    name: str
    height: int
    """-1 for any."""
    width: int
    channels_first: bool = True
    whole_numbers: bool = False
    """Whether it takes UINT8, which is neither scaled nor normalised."""
    explicit_batch: bool = False
    """Whether its shape has a batch dimension, because the model does not batch."""


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How images are preprocessed."""

    mode: Mode = "stretch"
    height: int = 224
    width: int = 224
    """For `edges`: `height` is the shorter edge, `width` the maximum of the longer edge; 0 for any."""
    crop: tuple[int, int] | None = None
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    resample: int = _BILINEAR


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """A preprocessed image, and its mapping to the original."""

    array: Array
    """Without a batch dimension."""
    scale: tuple[float, float]
    """Preprocessed pixels per original pixel, horizontally and vertically."""
    offset: tuple[float, float]
    size: tuple[int, int]
    """Height and width of the model's input."""
    original: tuple[int, int]


def preprocessing_of(
    config: Mapping[str, Any], specs: Mapping[str, Any], target: ImageInput, *, is_detector: bool
) -> Preprocessing:
    """Derive the preprocessing from a preprocessor_config.json (may be empty), the specs and the input."""
    preprocessing = _from_processor(config) if config else _from_input(target, is_detector=is_detector)
    edge = specs.get("image_size")
    if edge is not None:
        height, width = _pair("image_size", edge)
        preprocessing = replace(
            preprocessing,
            mode="stretch" if preprocessing.mode == "edges" else preprocessing.mode,
            height=height,
            width=width,
            crop=None,
        )
    if mode := specs.get("resize_mode"):
        if mode not in ("stretch", "letterbox"):
            raise InvalidArgument(f"resize_mode is {str(mode)[:32]!a}: use stretch or letterbox")
        preprocessing = replace(preprocessing, mode=mode)
    if (mean := specs.get("image_mean")) is not None:
        preprocessing = replace(preprocessing, mean=_rgb_values("image_mean", mean))
    if (std := specs.get("image_std")) is not None:
        preprocessing = replace(preprocessing, std=_rgb_values("image_std", std))
    if (factor := specs.get("rescale_factor")) is not None:
        preprocessing = replace(preprocessing, scale=float(factor))
    if target.height > 0 and target.width > 0 and not _matches(preprocessing, target):
        # The model takes one size only, so another size in the file cannot be right.
        preprocessing = replace(
            preprocessing, mode="letterbox" if preprocessing.mode == "letterbox" else "stretch", crop=None
        )
        preprocessing = replace(preprocessing, height=target.height, width=target.width)
    return preprocessing


def prepare(pixels: Pixels, preprocessing: Preprocessing, target: ImageInput) -> PreparedImage:
    """Preprocess one image."""
    from PIL import Image

    height, width = pixels.shape[:2]
    image = Image.fromarray(np.ascontiguousarray(pixels))
    new_height, new_width = _resized(height, width, preprocessing)
    if (new_height, new_width) != (height, width):
        image = image.resize((new_width, new_height), Image.Resampling(preprocessing.resample))
    array: Array = np.asarray(image)
    offset = (0.0, 0.0)
    if preprocessing.mode == "letterbox":
        array, offset = _letterbox(array, preprocessing.height, preprocessing.width)
    if preprocessing.crop is not None:
        array, offset = _crop(array, *preprocessing.crop)
    if not target.whole_numbers:
        array = array.astype(np.float32) * np.float32(preprocessing.scale)
        array = (array - np.asarray(preprocessing.mean, np.float32)) / np.asarray(preprocessing.std, np.float32)
    if target.channels_first:
        array = array.transpose(2, 0, 1)
    input_shape = array.shape[1:] if target.channels_first else array.shape[:2]
    scale = (new_width / width, new_height / height)
    return PreparedImage(
        np.ascontiguousarray(array), scale, offset, (int(input_shape[0]), int(input_shape[1])), (height, width)
    )


def _from_input(target: ImageInput, *, is_detector: bool) -> Preprocessing:
    height = target.height if target.height > 0 else 640 if is_detector else 224
    width = target.width if target.width > 0 else 640 if is_detector else 224
    if is_detector:
        return Preprocessing("letterbox", height, width)
    return Preprocessing("stretch", height, width, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _from_processor(config: Mapping[str, Any]) -> Preprocessing:
    mode, height, width = _size(config)
    crop = None
    if config.get("do_center_crop") and config.get("crop_size") is not None:
        crop = _pair("crop_size", config["crop_size"])
    crop_share = config.get("crop_pct")
    if mode == "edges" and isinstance(crop_share, int | float) and crop_share > 0 and not config.get("do_center_crop"):
        # As ConvNeXt does: small images are enlarged and cropped, large ones stretched.
        if height < _SMALL_CONVNEXT:
            crop, height = (height, height), int(height / crop_share)
        else:
            mode, width = "stretch", height
    normalize = config.get("do_normalize", True)
    return Preprocessing(
        mode if config.get("do_resize", True) else "keep",
        height,
        width,
        crop,
        float(config.get("rescale_factor", 1 / 255)) if config.get("do_rescale", True) else 1.0,
        _rgb_values("image_mean", config.get("image_mean") or IMAGENET_MEAN) if normalize else (0.0, 0.0, 0.0),
        _rgb_values("image_std", config.get("image_std") or IMAGENET_STD) if normalize else (1.0, 1.0, 1.0),
        int(config.get("resample", _BILINEAR) or 0),
    )


def _size(config: Mapping[str, Any]) -> tuple[Mode, int, int]:
    size = config.get("size", 224)
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return "edges", _edge("size", size["shortest_edge"]), int(size.get("longest_edge") or 0)
    if isinstance(size, int) and config.get("do_center_crop"):
        return "edges", _edge("size", size), 0
    return ("stretch", *_pair("size", size))


def _resized(height: int, width: int, preprocessing: Preprocessing) -> tuple[int, int]:
    if preprocessing.mode == "keep":
        return height, width
    if preprocessing.mode == "stretch":
        return preprocessing.height, preprocessing.width
    if preprocessing.mode == "letterbox":
        ratio = min(preprocessing.height / height, preprocessing.width / width)
        return max(1, round(height * ratio)), max(1, round(width * ratio))
    shorter, longer = sorted((height, width))
    raw: float = preprocessing.height
    if preprocessing.width and longer / shorter * raw > preprocessing.width:
        raw = preprocessing.width * shorter / longer
    edge, other = round(raw), int(raw * longer / shorter)
    new = (edge, other) if height <= width else (other, edge)
    return max(1, min(new[0], _MAX_EDGE)), max(1, min(new[1], _MAX_EDGE))


def _letterbox(array: Array, height: int, width: int) -> tuple[Array, tuple[float, float]]:
    top, left = (height - array.shape[0]) // 2, (width - array.shape[1]) // 2
    canvas = np.full((height, width, array.shape[2]), _GREY, array.dtype)
    canvas[top : top + array.shape[0], left : left + array.shape[1]] = array
    return canvas, (float(left), float(top))


def _crop(array: Array, height: int, width: int) -> tuple[Array, tuple[float, float]]:
    # An image smaller than the crop gets a black border, as in Hugging Face.
    grow_y, grow_x = max(0, height - array.shape[0]), max(0, width - array.shape[1])
    if grow_y or grow_x:
        before = (grow_y + 1) // 2, (grow_x + 1) // 2
        array = np.pad(array, ((before[0], grow_y - before[0]), (before[1], grow_x - before[1]), (0, 0)))
    top, left = (array.shape[0] - height) // 2, (array.shape[1] - width) // 2
    cropped = array[top : top + height, left : left + width]
    return cropped, (float((grow_x + 1) // 2 - left), float((grow_y + 1) // 2 - top))


def _matches(preprocessing: Preprocessing, target: ImageInput) -> bool:
    if preprocessing.crop is not None:
        return preprocessing.crop == (target.height, target.width)
    return preprocessing.mode in ("stretch", "letterbox") and (preprocessing.height, preprocessing.width) == (
        target.height,
        target.width,
    )


def _pair(name: str, size: Any) -> tuple[int, int]:
    if isinstance(size, Mapping) and "height" in size and "width" in size:
        return _edge(name, size["height"]), _edge(name, size["width"])
    if isinstance(size, Mapping) and "shortest_edge" in size:
        return _edge(name, size["shortest_edge"]), _edge(name, size["shortest_edge"])
    if isinstance(size, Sequence) and not isinstance(size, str) and len(size) == 2:
        return _edge(name, size[0]), _edge(name, size[1])
    return _edge(name, size), _edge(name, size)


def _edge(name: str, value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= _MAX_EDGE:
        raise InvalidArgument(f"{name} must be a size from 1 to {_MAX_EDGE}: write 224 or [224, 224]")
    return value


def _rgb_values(name: str, values: Any) -> tuple[float, ...]:
    numbers = values if isinstance(values, list | tuple) else [values] * 3
    if len(numbers) not in (1, 3) or not all(isinstance(number, int | float) for number in numbers):
        raise InvalidArgument(f"{name} must have one number for each of red, green and blue")
    floats = tuple(float(number) for number in numbers)
    return floats * 3 if len(floats) == 1 else floats


@dataclass(frozen=True, slots=True)
class Detection:
    """A detected object: corners in pixels of the original."""

    index: int
    score: float
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class DetectionLimits:
    """Which detections to return."""

    min_score: float
    overlap: float
    max_detections: int


def detr_boxes(
    logits: FloatArray, boxes: FloatArray, labels: int, prepared: PreparedImage, limits: DetectionLimits
) -> list[Detection]:
    """Decode `logits` [queries, classes] and `pred_boxes` [queries, 4], relative centre and size.

    With one class more than labels, the last class is "no object" and classes are exclusive (softmax); otherwise sigmoid.
    """
    # Without labels, assume DETR, whose last class is "no object".
    exclusive = labels in (0, logits.shape[-1] - 1)
    scores = softmax(logits)[:, :-1] if exclusive else 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
    if not scores.size:
        return []
    best = scores.argmax(-1)
    confidence = scores[np.arange(len(best)), best]
    height, width = prepared.size
    corners = _corners(boxes * np.asarray([width, height, width, height], np.float32))
    return _detections(corners, confidence, best, prepared, limits, np.flatnonzero(confidence >= limits.min_score))


def yolo_boxes(output: FloatArray, labels: int, prepared: PreparedImage, limits: DetectionLimits) -> list[Detection]:
    """Decode [4 + classes, anchors] or its transpose; in [anchors, 5 + classes] the fifth value is the objectness."""
    rows = output.T if _channels_first(output, labels) else output
    scores = rows[:, 4:]
    if labels and scores.shape[1] == labels + 1:
        scores = scores[:, 1:] * scores[:, :1]
    if not scores.size:
        return []
    best = scores.argmax(-1)
    confidence = scores[np.arange(len(best)), best]
    boxes = rows[:, :4]
    if boxes.size and float(np.abs(boxes).max()) <= 2.0:
        # Some exports have relative coordinates.
        height, width = prepared.size
        boxes = boxes * np.asarray([width, height, width, height], np.float32)
    corners = _corners(boxes)
    chosen = np.flatnonzero(confidence >= limits.min_score)
    chosen = chosen[np.argsort(-confidence[chosen], kind="stable")][:MAX_CANDIDATES]
    kept = suppress(corners[chosen], confidence[chosen], best[chosen], limits.overlap)
    return _detections(corners, confidence, best, prepared, limits, chosen[kept])


def suppress(
    corners: FloatArray, scores: FloatArray, classes: npt.NDArray[Any], overlap: float
) -> npt.NDArray[np.intp]:
    """Non-maximum suppression per class. Returns the indices of kept boxes, highest score first."""
    order = np.argsort(-scores, kind="stable")
    areas = np.prod(np.clip(corners[:, 2:] - corners[:, :2], 0, None), -1)
    kept: list[int] = []
    while order.size:
        first, rest = order[0], order[1:]
        kept.append(int(first))
        low = np.maximum(corners[first, :2], corners[rest, :2])
        high = np.minimum(corners[first, 2:], corners[rest, 2:])
        shared = np.prod(np.clip(high - low, 0, None), -1)
        union = areas[first] + areas[rest] - shared
        separate = (shared <= overlap * np.maximum(union, 1e-12)) | (classes[rest] != classes[first])
        order = rest[separate]
    return np.asarray(kept, np.intp)


def softmax(logits: FloatArray) -> FloatArray:
    """Compute the softmax along the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: FloatArray = powers / powers.sum(-1, keepdims=True)
    return probabilities


def _channels_first(output: FloatArray, labels: int) -> bool:
    rows, columns = int(output.shape[0]), int(output.shape[1])
    if labels:
        for count in (4 + labels, 5 + labels):
            if (rows == count) != (columns == count):
                return rows == count
    return rows < columns


def _corners(boxes: FloatArray) -> FloatArray:
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], -1)


def _detections(
    corners: FloatArray,
    scores: FloatArray,
    classes: npt.NDArray[Any],
    prepared: PreparedImage,
    limits: DetectionLimits,
    chosen: npt.NDArray[Any],
) -> list[Detection]:
    order = chosen[np.argsort(-scores[chosen], kind="stable")][: limits.max_detections]
    offset = np.asarray(prepared.offset * 2, np.float32)
    scale = np.asarray(prepared.scale * 2, np.float32)
    height, width = prepared.original
    boxes = np.clip((corners[order] - offset) / scale, 0, np.asarray([width, height] * 2, np.float32))
    return [
        Detection(int(classes[index]), float(scores[index]), *(float(edge) for edge in box))
        for index, box in zip(order, boxes, strict=True)
    ]
