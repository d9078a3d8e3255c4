# SPDX-License-Identifier: Apache-2.0
"""Models that say what a picture shows: one of so many classes."""

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
from headrace.jobs.microservice.vision.detection import softmax
from headrace.jobs.microservice.vision.preprocessing import Array

LOGITS = "logits"
_TOLERANCE = 1e-3


class ClassifierKind:
    """Pictures to labels."""

    model_type = "classifier"
    parameters: tuple[Parameter, ...] = (
        IMAGES,
        BATCH_SIZE,
        Parameter("top_k", "integer", 5, least=1, most=1000),
        *ACCEPTED,
    )

    def __init__(self, model: PictureModel, output: str) -> None:
        self._model = model
        self._output = output

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Kind.infer`."""
        read = read_parameters(self.parameters, given)
        urls = read["images"]
        seen = await self._model.look(urls, read["batch_size"])
        predictions = []
        for url, (_, outputs) in zip(urls, seen, strict=True):
            best = self._best(outputs[self._output].ravel(), read["top_k"])
            first = best[0]
            predictions.append({"image": shown(url), **first, "top_k": best})
        return {
            "response": ", ".join(each["label"] for each in predictions),
            "confidence": predictions[0]["confidence"],
            "predictions": predictions,
            "total_images": len(predictions),
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """See `Kind.chat`."""
        raise refused("classifies images")

    async def close(self) -> None:
        """See `Kind.close`."""
        self._model.reader.close()

    def _best(self, numbers: Array, count: int) -> list[dict[str, Any]]:
        if not numbers.size:
            raise Internal("the model gave no classes; the server's log has the details")
        # What is called logits is none yet; other names say nothing.
        ready = self._output != LOGITS and _are_shares(numbers)
        shares = numbers if ready else softmax(numbers.astype(np.float32))
        order = np.argsort(-shares, kind="stable")[:count]
        return [
            {"label": self._model.label(int(index)), "class_id": int(index), "confidence": rounded(shares[index])}
            for index in order
        ]


def _are_shares(numbers: Array) -> bool:
    """Whether a softmax is part of the model."""
    return bool(numbers.min() >= 0 and abs(float(numbers.sum()) - 1) < _TOLERANCE)
