# SPDX-License-Identifier: Apache-2.0
"""A detector's outputs as boxes in pixels of the original picture, the surest first.

Two families: sets of boxes with logits, as DETR and its kin have them, and one tensor of anchors, as YOLO exports it, which
needs non-maximum suppression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.jobs.microservice.vision.preprocessing import Placed

Array = npt.NDArray[np.float32]
MOST_CANDIDATES = 3000
"""Looked at by the suppression, which compares each with each."""


@dataclass(frozen=True, slots=True)
class Box:
    """Something that was found: corners in pixels of the original."""

    index: int
    score: float
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which boxes are told."""

    least_score: float
    overlap: float
    most: int


def detr_boxes(logits: Array, boxes: Array, labels: int, placed: Placed, wanted: Wanted) -> list[Box]:
    """From `logits` [queries, classes] and `pred_boxes` [queries, 4], shares of the picture by centre and size.

    One class more than there are labels is "no object", and the classes exclude each other; else each stands by itself.
    """
    # A model whose labels nobody knows is taken for one like DETR, whose last class is nothing.
    excludes = labels in (0, logits.shape[-1] - 1)
    scores = softmax(logits)[:, :-1] if excludes else 1 / (1 + np.exp(-np.clip(logits, -80, 80)))
    if not scores.size:
        return []
    best = scores.argmax(-1)
    sure = scores[np.arange(len(best)), best]
    height, width = placed.size
    corners = _corners(boxes * np.asarray([width, height, width, height], np.float32))
    return _told(corners, sure, best, placed, wanted, np.flatnonzero(sure >= wanted.least_score))


def yolo_boxes(output: Array, labels: int, placed: Placed, wanted: Wanted) -> list[Box]:
    """From [4 + classes, anchors] or its transpose; with [anchors, 5 + classes], the fifth is how sure there is anything."""
    rows = output.T if _channels_first(output, labels) else output
    scores = rows[:, 4:]
    if labels and scores.shape[1] == labels + 1:
        scores = scores[:, 1:] * scores[:, :1]
    if not scores.size:
        return []
    best = scores.argmax(-1)
    sure = scores[np.arange(len(best)), best]
    boxes = rows[:, :4]
    if boxes.size and float(np.abs(boxes).max()) <= 2.0:
        # Shares of the picture, as some exports have them.
        height, width = placed.size
        boxes = boxes * np.asarray([width, height, width, height], np.float32)
    corners = _corners(boxes)
    chosen = np.flatnonzero(sure >= wanted.least_score)
    chosen = chosen[np.argsort(-sure[chosen], kind="stable")][:MOST_CANDIDATES]
    kept = suppress(corners[chosen], sure[chosen], best[chosen], wanted.overlap)
    return _told(corners, sure, best, placed, wanted, chosen[kept])


def suppress(corners: Array, scores: Array, classes: npt.NDArray[Any], overlap: float) -> npt.NDArray[np.intp]:
    """Of boxes of one class that overlap more than this, keep the surest. Returns places, the surest first."""
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
        apart = (shared <= overlap * np.maximum(union, 1e-12)) | (classes[rest] != classes[first])
        order = rest[apart]
    return np.asarray(kept, np.intp)


def softmax(logits: Array) -> Array:
    """Along the last axis."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    made: Array = powers / powers.sum(-1, keepdims=True)
    return made


def _channels_first(output: Array, labels: int) -> bool:
    rows, columns = int(output.shape[0]), int(output.shape[1])
    if labels:
        for count in (4 + labels, 5 + labels):
            if (rows == count) != (columns == count):
                return rows == count
    return rows < columns


def _corners(boxes: Array) -> Array:
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], -1)


def _told(
    corners: Array, scores: Array, classes: npt.NDArray[Any], placed: Placed, wanted: Wanted, chosen: npt.NDArray[Any]
) -> list[Box]:
    order = chosen[np.argsort(-scores[chosen], kind="stable")][: wanted.most]
    offset = np.asarray(placed.offset * 2, np.float32)
    scale = np.asarray(placed.scale * 2, np.float32)
    height, width = placed.original
    places = np.clip((corners[order] - offset) / scale, 0, np.asarray([width, height] * 2, np.float32))
    return [
        Box(int(classes[index]), float(scores[index]), *(float(edge) for edge in place))
        for index, place in zip(order, places, strict=True)
    ]
