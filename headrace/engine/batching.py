# SPDX-License-Identifier: Apache-2.0
"""Computes requests that arrive together as one batch, and gives each caller its own rows back.

Owned by `dataplane`. Requests that the event loop read in one round are gathered and computed at the end of it, so a
lone request waits for nobody and a crowd shares one call of the model. Rows are counted, not requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import Internal
from headrace.core.messages import InferResponse
from headrace.core.tensors import Tensor

log = logging.getLogger("headrace.engine")

Array = npt.NDArray[Any]
Compute = Callable[[Array], Array]
Done = Callable[[InferResponse | BaseException], None]
Entry = tuple[Tensor, str, Done]
"""A request's input, its id, and who waits for it."""

OUTPUT_NAME = "OUTPUT0"
VERSION = "1"


class Batcher:
    """For one model with one input and one output, both with the batch as first dimension."""

    def __init__(self, model_name: str, compute: Compute, max_rows: int) -> None:
        self._model_name = model_name
        self._compute = compute
        self._max_rows = max_rows
        self._waiting: list[Entry] = []
        self.batches = 0
        self.rows = 0

    def submit(self, tensor: Tensor, request_id: str, done: Done) -> None:
        """Compute a tensor's rows soon; `done` gets as many rows, or the error, in the loop's thread."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((tensor, request_id, done))

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if len(waiting) == 1:
            self._run(waiting)
            return
        batch: list[Entry] = []
        size = 0
        for entry in waiting:
            rows = len(entry[0].array)
            if batch and (size + rows > self._max_rows or not _fits(batch[0][0], entry[0])):
                self._run(batch)
                batch, size = [], 0
            batch.append(entry)
            size += rows
        self._run(batch)

    def _run(self, batch: list[Entry]) -> None:
        self.batches += 1
        try:
            if len(batch) == 1:
                together = self._checked(batch[0][0].array)
            else:
                together = self._checked(np.concatenate([tensor.array for tensor, _, _ in batch]))
        except Exception:
            log.exception("model '%s' failed on a batch of %d requests", self._model_name, len(batch))
            failure = Internal(f"model '{self._model_name}' failed; the server's log has the details")
            for _, _, done in batch:
                _deliver(done, failure)
            return
        if len(batch) == 1:
            tensor, request_id, done = batch[0]
            outputs = (Tensor(OUTPUT_NAME, tensor.dtype, together),)
            _deliver(done, InferResponse(self._model_name, VERSION, outputs, request_id))
            return
        dtype = batch[0][0].dtype
        start = 0
        for tensor, request_id, done in batch:
            stop = start + len(tensor.array)
            outputs = (Tensor(OUTPUT_NAME, dtype, together[start:stop]),)
            start = stop
            _deliver(done, InferResponse(self._model_name, VERSION, outputs, request_id))

    def _checked(self, rows: Array) -> Array:
        self.rows += len(rows)
        result = self._compute(rows)
        if len(result) != len(rows):
            raise Internal(f"the model returned {len(result)} rows for a batch of {len(rows)}")
        if result.dtype != rows.dtype:
            raise Internal(f"the model returned {result.dtype} for {rows.dtype}")
        return result


def _deliver(done: Done, result: InferResponse | BaseException) -> None:
    """Tell a caller. One caller's failure must not cost the others of its batch their answers."""
    try:
        done(result)
    except Exception:
        log.exception("an answer could not be delivered")


def _fits(first: Tensor, other: Tensor) -> bool:
    return first.dtype is other.dtype and first.array.shape[1:] == other.array.shape[1:]
