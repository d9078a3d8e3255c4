# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings`. Each text is a request of its own, so that the engine batches the texts of all clients."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields
from headrace.api.openai.item_calls import ItemCalls, embedding_of, text_request, token_count
from headrace.api.openai.models import Models
from headrace.api.openai.proxy import parse_or_forward
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.errors import InvalidArgument
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange


class Embeddings:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def handle(self, exchange: Exchange) -> None:
        """Handle one request."""
        parsed = parse_or_forward(self._plane, exchange, self._models.embedding_model, self._settings)
        if parsed is None:
            return
        fields, target = parsed
        texts = self._texts(fields)
        encoding = fields.get("encoding_format")
        if encoding not in (None, "float", "base64"):
            raise fields.error("encoding_format", "must be 'float' or 'base64'")
        size = _size(target.config)
        dimensions = fields.integer("dimensions", 1, 1 << 20)
        if dimensions is not None and dimensions != size:
            has = f"model '{target.requested_name}' has {size}" if size else "the model does not declare its dimensions"
            raise fields.error("dimensions", f"{has}, and embeddings are not truncated: leave it out")
        requests = [text_request(target.config, {TEXT_INPUT: text}) for text in texts]
        write = partial(_json, name=target.requested_name, base64=encoding == "base64")
        ItemCalls(self._plane, exchange, requests, self._settings.texts_at_once, write, _embedding_error).begin()

    def _texts(self, fields: Fields) -> list[str]:
        value = fields.get("input")
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not 0 < len(texts) <= self._settings.texts:
            raise fields.error("input", f"must be a string, or a list of 1 to {self._settings.texts} strings")
        for index, text in enumerate(texts):
            if isinstance(text, int | list):
                raise BadRequest(f"input[{index}]", "tokens are not supported: send the text")
            if not isinstance(text, str) or not text:
                raise BadRequest(f"input[{index}]", "must be a non-empty string")
        return texts


def _embedding_error(index: int, error: InvalidArgument) -> BadRequest:
    # The model's message names its input, which the client does not know.
    return BadRequest(f"input[{index}]", error.message.removeprefix(f"input '{TEXT_INPUT}' "))


def _json(responses: Sequence[InferResponse], *, name: str, base64: bool) -> bytes:
    data: list[dict[str, Any]] = []
    for index, response in enumerate(responses):
        vector = embedding_of(response)
        embedding = b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    tokens = token_count(responses)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    document = {"object": "list", "data": data, "model": name, "usage": usage}
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _size(config: ModelConfig) -> int | None:
    dims = next(spec.dims for spec in config.outputs if spec.name == EMBEDDING)
    return dims[-1] if dims and dims[-1] > 0 else None
