# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings`. Each text is a request of its own, so that the engine batches the texts of all clients."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.api.openai.errors import BadRequest, fail
from headrace.api.openai.fields import Fields, parse_body
from headrace.api.openai.models import Models, Target
from headrace.api.openai.proxy import forward
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.dtypes import BYTES
from headrace.core.errors import Internal, InvalidArgument
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

TOKEN_COUNT = "token_count"  # noqa: S105  # the name of an output
"""An optional output of a model: the number of tokens of a text."""

Vector = npt.NDArray[np.float32]


class Embeddings:
    """Handlers over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def handle(self, exchange: Exchange) -> None:
        """Handle one request."""
        fields = parse_body(exchange)
        target = self._models.embedding_model(fields)
        if target.proxied:
            forward(self._plane, exchange, target, fields.members, self._settings)
            return
        texts = self._texts(fields)
        encoding = fields.get("encoding_format")
        if encoding not in (None, "float", "base64"):
            raise fields.error("encoding_format", "must be 'float' or 'base64'")
        size = _size(target.config)
        dimensions = fields.integer("dimensions", 1, 1 << 20)
        if dimensions is not None and dimensions != size:
            has = f"model '{target.requested_name}' has {size}" if size else "the model does not declare its dimensions"
            raise fields.error("dimensions", f"{has}, and embeddings are not truncated: leave it out")
        _EmbeddingCalls(
            self._plane, exchange, target, texts, self._settings.texts_at_once, base64=encoding == "base64"
        ).begin()

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


class _EmbeddingCalls:
    """The texts of one request, a few in the engine at a time."""

    def __init__(
        self, plane: DataPlane, exchange: Exchange, target: Target, texts: Sequence[str], at_once: int, *, base64: bool
    ) -> None:
        self._plane = plane
        self._exchange = exchange
        self._target = target
        self._texts = texts
        self._at_once = at_once
        self._base64 = base64
        self._vectors: list[Vector | None] = [None] * len(texts)
        self._left = len(texts)
        self._tokens = 0
        self._next = 0
        self._running: dict[int, PendingRequest] = {}
        self._finished = False

    def begin(self) -> None:
        """Send the first texts to the engine; raise at once if they are invalid."""
        self._exchange.on_disconnect = self.cancel
        try:
            self._send_more()
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel all requests: the client is gone."""
        self._finished = True
        running, self._running = self._running, {}
        for pending in running.values():
            pending.cancel()

    def _send_more(self) -> None:
        config = self._target.config
        while self._next < len(self._texts) and len(self._running) < self._at_once and not self._finished:
            index = self._next
            self._next += 1
            shape = [1, 1] if config.max_batch_size else [1]
            tensor = tensor_from_values(TEXT_INPUT, BYTES, shape, [self._texts[index]])
            request = InferRequest(config.name, [tensor])
            self._running[index] = self._plane.infer(request, partial(self._completed, index))

    def _completed(self, index: int, result: InferResponse | BaseException) -> None:
        if self._finished:
            return
        self._running.pop(index, None)
        try:
            if isinstance(result, InvalidArgument):
                # The model's message names its input, which the client does not know.
                raise BadRequest(f"input[{index}]", result.message.removeprefix(f"input '{TEXT_INPUT}' "))
            if isinstance(result, BaseException):
                raise result
            self._add(index, result.outputs)
            self._left -= 1
            if self._left:
                self._send_more()
            else:
                self._finished = True
                self._exchange.respond(OK_JSON, self._json())
        except Exception as error:
            self.cancel()
            fail(self._exchange, error)

    def _add(self, index: int, outputs: Sequence[Tensor]) -> None:
        by_name = {tensor.name: tensor.array for tensor in outputs}
        self._vectors[index] = np.ascontiguousarray(by_name[EMBEDDING].ravel(), dtype=np.float32)
        if TOKEN_COUNT in by_name:
            self._tokens += int(by_name[TOKEN_COUNT].ravel()[0])

    def _json(self) -> bytes:
        data: list[dict[str, Any]] = []
        for index, vector in enumerate(self._vectors):
            if vector is None:
                raise Internal("a text has no embedding")
            embedding = b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if self._base64 else vector
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        document = {"object": "list", "data": data, "model": self._target.requested_name, "usage": usage}
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _size(config: ModelConfig) -> int | None:
    dims = next(spec.dims for spec in config.outputs if spec.name == EMBEDDING)
    return dims[-1] if dims and dims[-1] > 0 else None
