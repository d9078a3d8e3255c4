# SPDX-License-Identifier: Apache-2.0
"""Models that turn a text into a vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.core.dtypes import BYTES
from headrace.core.errors import InvalidArgument
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.core.tensors import Tensor
from headrace.engine.dataplane import DataPlane
from headrace.jobs.microservice.kinds.computing import compute_all
from headrace.jobs.microservice.kinds.contract import Chat, ChatAnswer
from headrace.jobs.microservice.kinds.generating import refused
from headrace.jobs.microservice.kinds.parameters import Parameter, ignored, read_parameters


class EmbeddingKind:
    """Texts to vectors. Every text is a request of its own, which the engine batches."""

    model_type = "embedding"
    parameters: tuple[Parameter, ...] = (
        Parameter("input", "texts", also=("text", "texts", "prompt")),
        *ignored("conv_mode", "mode", "model"),
    )

    def __init__(self, plane: DataPlane, model: str, *, batched: bool) -> None:
        self._plane = plane
        self._model = model
        self._shape = (1, 1) if batched else (1,)

    async def infer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `Kind.infer`."""
        texts = read_parameters(self.parameters, given)["input"]
        if not texts or not all(texts):
            raise InvalidArgument(
                "'input' (or 'text') is required: give a text, or a list of texts, none of them empty"
            )
        answers = await compute_all(self._plane, self._model, [[self._tensor(text)] for text in texts])
        vectors = [np.asarray(answer[EMBEDDING], np.float32).ravel() for answer in answers]
        return {
            "response": f"{len(vectors)} embeddings of {vectors[0].size} numbers",
            "embeddings": [vector.tolist() for vector in vectors],
            "dimensions": int(vectors[0].size),
            "total_texts": len(vectors),
        }

    async def chat(self, chat: Chat) -> ChatAnswer:
        """See `Kind.chat`."""
        raise refused("embeds texts")

    async def close(self) -> None:
        """See `Kind.close`."""

    def _tensor(self, text: str) -> Tensor:
        array = np.empty(1, object)
        array[0] = text.encode(errors="replace")
        return Tensor(TEXT_INPUT, BYTES, array.reshape(self._shape))
