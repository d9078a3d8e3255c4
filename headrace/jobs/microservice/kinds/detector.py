# SPDX-License-Identifier: Apache-2.0
"""Models that say what is where in a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.core.errors import Internal
from headrace.jobs.microservice.kinds.computing import rounded
from headrace.jobs.microservice.kinds.contract import Chat, ChatAnswer
from headrace.jobs.microservice.kinds.generating import refused
from headrace.jobs.microservice.kinds.parameters import Parameter, read_parameters
from headrace.jobs.microservice.kinds.pictures import ACCEPTED, BATCH_SIZE, IMAGES, PictureModel, shown
from headrace.jobs.microservice.vision.detection import Box, Wanted, detr_boxes, yolo_boxes
from headrace.jobs.microservice.vision.preprocessing import Array, Placed

LOGITS, BOXES = "logits", "pred_boxes"
_DIGITS = 2
_RANK = 2


class DetectorKind:
    """Pictures to boxes. `anchors` is the output of a model like YOLO; "" for one like DETR."""

    model_type = "detector"
    parameters: tuple[Parameter, ...] = (
        IMAGES,
        BATCH_SIZE,
        Parameter("confidence_threshold", "number", 0.5, least=0, most=1, also=("threshold",)),
        Parameter("iou_threshold", "number", 0.45, least=0, most=1, also=("nms_threshold",)),
        Parameter("max_detections", "integer", 300, least=1, most=3000),
        *ACCEPTED,
    )

    def __init__(self, model: PictureModel, anchors: str = "") -> None:
        self._model = model
        self._anchors = anchors

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Kind.infer`."""
        read = read_parameters(self.parameters, given)
        urls = read["images"]
        wanted = Wanted(read["confidence_threshold"], read["iou_threshold"], read["max_detections"])
        seen = await self._model.look(urls, read["batch_size"])
        predictions: list[dict[str, Any]] = []
        for url, (placed, outputs) in zip(urls, seen, strict=True):
            boxes = [self._told(box) for box in self._boxes(placed, outputs, wanted)]
            height, width = placed.original
            predictions.append({"image": shown(url), "width": width, "height": height, "detections": boxes})
        counts = [len(each["detections"]) for each in predictions]
        labels = sorted({box["label"] for each in predictions for box in each["detections"]})
        scores = [box["confidence"] for each in predictions for box in each["detections"]]
        return {
            "response": f"{sum(counts)} objects in {len(counts)} images" + (f": {', '.join(labels)}" if labels else ""),
            "confidence": max(scores, default=0.0),
            "predictions": predictions,
            "total_detections": sum(counts),
            "total_images": len(counts),
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """See `Kind.chat`."""
        raise refused("detects objects in images")

    async def close(self) -> None:
        """See `Kind.close`."""
        self._model.reader.close()

    def _boxes(self, placed: Placed, outputs: Mapping[str, Array], wanted: Wanted) -> list[Box]:
        count = len(self._model.labels)
        if self._anchors:
            return yolo_boxes(_flat(outputs[self._anchors]), count, placed, wanted)
        return detr_boxes(_flat(outputs[LOGITS]), _flat(outputs[BOXES]), count, placed, wanted)

    def _told(self, box: Box) -> dict[str, Any]:
        corners = [rounded(edge, _DIGITS) for edge in (box.left, box.top, box.right, box.bottom)]
        return {
            "label": self._model.label(box.index),
            "class_id": box.index,
            "confidence": rounded(box.score),
            "box": corners,
        }


def _flat(array: Array) -> Array:
    """Without a dimension of 1 in front; NaN as 0, which is no box."""
    while array.ndim > _RANK and array.shape[0] == 1:
        array = array[0]
    if array.ndim != _RANK:
        raise Internal("the detector gave an output that is not a table of boxes; the server's log has the details")
    return np.nan_to_num(array.astype(np.float32))
