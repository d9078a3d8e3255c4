# SPDX-License-Identifier: Apache-2.0
"""Many small requests of one exchange, answered together.

Each text, or pair of texts, is a request of its own, so that the engine batches those of all clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.api.openai.errors import BadRequest, fail
from headrace.core.dtypes import BYTES
from headrace.core.errors import InvalidArgument
from headrace.core.generation import EMBEDDING
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import tensor_from_values
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.models.config.types import ModelConfig
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import OK_JSON

TOKEN_COUNT = "token_count"  # noqa: S105  # the name of an output
"""An optional output of a model: the number of tokens of a text."""

Vector = npt.NDArray[np.float32]


class ItemCalls:
    """The requests of one exchange, a few in the engine at a time."""

    def __init__(
        self,
        plane: DataPlane,
        exchange: Exchange,
        requests: Sequence[InferRequest],
        at_once: int,
        write: Callable[[Sequence[InferResponse]], bytes],
        rename_error: Callable[[int, InvalidArgument], BadRequest],
    ) -> None:
        """`write` returns the body of the response; `rename_error` turns a model's error about an item into the client's."""
        self._plane = plane
        self._exchange = exchange
        self._requests = requests
        self._at_once = at_once
        self._write = write
        self._rename_error = rename_error
        self._responses: dict[int, InferResponse] = {}
        self._next = 0
        self._running: dict[int, PendingRequest] = {}
        self._finished = False

    def begin(self) -> None:
        """Send the first requests to the engine; raise at once if they are invalid."""
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
        while self._next < len(self._requests) and len(self._running) < self._at_once and not self._finished:
            index = self._next
            self._next += 1
            self._running[index] = self._plane.infer(self._requests[index], partial(self._completed, index))

    def _completed(self, index: int, result: InferResponse | BaseException) -> None:
        if self._finished:
            return
        self._running.pop(index, None)
        try:
            if isinstance(result, InvalidArgument):
                raise self._rename_error(index, result)
            if isinstance(result, BaseException):
                raise result
            self._responses[index] = result
            if len(self._responses) < len(self._requests):
                self._send_more()
            else:
                self._finished = True
                responses = [self._responses[number] for number in range(len(self._requests))]
                self._exchange.respond(OK_JSON, self._write(responses))
        except Exception as error:
            self.cancel()
            fail(self._exchange, error)


def text_request(config: ModelConfig, texts: Mapping[str, str]) -> InferRequest:
    """Return a request whose inputs are one text each."""
    shape = [1, 1] if config.max_batch_size else [1]
    return InferRequest(config.name, [tensor_from_values(name, BYTES, shape, [text]) for name, text in texts.items()])


def embedding_of(response: InferResponse) -> Vector:
    """Return the vector of a text."""
    return np.ascontiguousarray(_output(response, EMBEDDING).ravel(), dtype=np.float32)


def score_of(response: InferResponse, name: str) -> float:
    """Return an output that is one number."""
    return float(_output(response, name).ravel()[0])


def token_count(responses: Sequence[InferResponse]) -> int:
    """Return the tokens of all texts; 0 for a model that does not count them."""
    counts = [tensor.array for response in responses for tensor in response.outputs if tensor.name == TOKEN_COUNT]
    return sum(int(count.ravel()[0]) for count in counts)


def _output(response: InferResponse, name: str) -> npt.NDArray[np.generic]:
    return next(tensor.array for tensor in response.outputs if tensor.name == name)
