# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/embeddings`: texts in, vectors out. Registered by `http`.

Each text is a request of its own, so that the engine batches those of all clients together.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.api.openai.errors import Refused, fail
from headrace.api.openai.fields import Fields, read_document
from headrace.api.openai.models import Models, Target
from headrace.api.openai.passing import pass_on
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.dtypes import BYTES
from headrace.core.errors import Internal, InvalidArgument
from headrace.core.generation import EMBEDDING, TEXT_INPUT
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.tensors import Tensor, tensor_from_values
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Pending
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

TOKEN_COUNT = "token_count"  # noqa: S105  # the name of an output
"""An output that a model may have: how many tokens a text was."""

Vector = npt.NDArray[np.float32]


class Embeddings:
    """Over one data plane."""

    def __init__(self, plane: DataPlane, settings: OpenAiSettings, models: Models) -> None:
        self._plane = plane
        self._settings = settings
        self._models = models

    def handle(self, exchange: Exchange) -> None:
        """One request."""
        document = read_document(exchange.body)
        exchange.body = b""
        fields = Fields(document)
        target = self._models.that_embeds(fields)
        if target.proxied:
            pass_on(self._plane, exchange, target, document, self._settings)
            return
        texts = self._texts(fields)
        coding = fields.get("encoding_format")
        if coding not in (None, "float", "base64"):
            raise fields.refused("encoding_format", "must be 'float' or 'base64'")
        size = _size(target.config)
        wanted = fields.integer("dimensions", 1, 1 << 20)
        if wanted is not None and wanted != size:
            of_model = f"model '{target.asked}' has {size}" if size else "the model has as many as it has"
            raise fields.refused("dimensions", f"{of_model}, and its embeddings are not cut: leave it out")
        _Texts(self._plane, exchange, target, texts, self._settings.texts_at_once, coded=coding == "base64").begin()

    def _texts(self, fields: Fields) -> list[str]:
        given = fields.get("input")
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not 0 < len(texts) <= self._settings.texts:
            raise fields.refused("input", f"must be a string, or a list of 1 to {self._settings.texts} strings")
        for index, text in enumerate(texts):
            if isinstance(text, int | list):
                raise Refused(f"input[{index}]", "tokens are not taken: send the text itself")
            if not isinstance(text, str) or not text:
                raise Refused(f"input[{index}]", "must be a string that is not empty")
        return texts


class _Texts:
    """The texts of one exchange, a few in the engine at a time."""

    def __init__(
        self, plane: DataPlane, exchange: Exchange, target: Target, texts: Sequence[str], at_once: int, *, coded: bool
    ) -> None:
        self._plane = plane
        self._exchange = exchange
        self._target = target
        self._texts = texts
        self._at_once = at_once
        self._coded = coded
        self._vectors: list[Vector | None] = [None] * len(texts)
        self._left = len(texts)
        self._tokens = 0
        self._next = 0
        self._running: dict[int, Pending] = {}
        self._over = False

    def begin(self) -> None:
        """Ask for the first of them. Raises at once if that is wrong."""
        self._exchange.on_disconnect = self.cancel
        try:
            self._go_on()
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._over = True
        running, self._running = self._running, {}
        for pending in running.values():
            pending.cancel()

    def _go_on(self) -> None:
        config = self._target.config
        while self._next < len(self._texts) and len(self._running) < self._at_once and not self._over:
            index = self._next
            self._next += 1
            shape = [1, 1] if config.max_batch_size else [1]
            tensor = tensor_from_values(TEXT_INPUT, BYTES, shape, [self._texts[index]])
            request = InferRequest(config.name, [tensor])
            self._running[index] = self._plane.infer(request, partial(self._told, index))

    def _told(self, index: int, result: InferResponse | BaseException) -> None:
        if self._over:
            return
        self._running.pop(index, None)
        try:
            if isinstance(result, InvalidArgument):
                # The model says it of its input, the client knows of no such thing.
                raise Refused(f"input[{index}]", result.message.removeprefix(f"input '{TEXT_INPUT}' "))
            if isinstance(result, BaseException):
                raise result
            self._take(index, result.outputs)
            self._left -= 1
            if self._left:
                self._go_on()
            else:
                self._over = True
                self._exchange.respond(OK_JSON, self._json())
        except Exception as error:
            self.cancel()
            fail(self._exchange, error)

    def _take(self, index: int, outputs: Sequence[Tensor]) -> None:
        by_name = {tensor.name: tensor.array for tensor in outputs}
        self._vectors[index] = np.ascontiguousarray(by_name[EMBEDDING].ravel(), dtype=np.float32)
        if TOKEN_COUNT in by_name:
            self._tokens += int(by_name[TOKEN_COUNT].ravel()[0])

    def _json(self) -> bytes:
        data: list[dict[str, Any]] = []
        for index, vector in enumerate(self._vectors):
            if vector is None:
                raise Internal("a text was left without an embedding")
            shown = b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if self._coded else vector
            data.append({"object": "embedding", "index": index, "embedding": shown})
        usage = {"prompt_tokens": self._tokens, "total_tokens": self._tokens}
        document = {"object": "list", "data": data, "model": self._target.asked, "usage": usage}
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _size(config: ModelConfig) -> int | None:
    dims = next(spec.dims for spec in config.outputs if spec.name == EMBEDDING)
    return dims[-1] if dims and dims[-1] > 0 else None
