# SPDX-License-Identifier: Apache-2.0
"""Shadows: versions that get copies of requests; their responses are compared with the returned ones and then dropped.

`split` copies a request after its caller has the response, so a copy never delays or fails a caller's request. The number of
copies in flight is limited; more are dropped and counted. A copy takes computing time like any request: a shadow that
computes in the server's event loop delays other requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.clock import Clock
from headrace.core.dtypes import BF16, bf16_to_float32
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.pending_request import PendingRequest
from headrace.engine.traffic.split_version import RequestTarget
from headrace.engine.traffic.statistics import BucketCounts, Numbers, TrafficMetrics, VersionCounts, bucket_of
from headrace.engine.traffic.version_choice import KeyHash, RandomSource

log = logging.getLogger("headrace.traffic")

MAX_IN_FLIGHT = 64
_LARGE = 1 << 16
"""Responses with more elements are compared in a thread, not in the event loop."""


class Shadow:
    """One shadow. `target` is set while the version is loaded."""

    def __init__(
        self,
        model: str,
        name: str,
        share: float,
        tolerance: float,
        *,
        clock: Clock,
        metrics: TrafficMetrics,
        chance: RandomSource,
    ) -> None:
        self.model = model
        self.name = name
        self.number = ""
        self.share = share
        self.target: RequestTarget | None = None
        self.counts = VersionCounts()
        self.dropped = 0
        self.compared = self.agreed = 0
        self.choices_compared = self.choices_agreed = 0
        self.differences: BucketCounts = {}
        self.in_flight = 0
        self._tolerance = tolerance
        self._now = clock.monotonic
        self._chance = chance
        self._points = KeyHash(f"shadow {name} of {model}")
        self._metrics = metrics
        self._pending: set[PendingRequest] = set()
        self._failure_logged = False

    def wants(self, sequence: str) -> bool:
        """Return whether to copy a request; of a sequence, all requests are copied or none."""
        return self.share >= 1 or (self._points.of(sequence) if sequence else self._chance()) < self.share

    def copy(self, request: InferRequest, response: InferResponse) -> None:
        """Send a copy of a request that got this response."""
        target = self.target
        if target is None or self.in_flight >= MAX_IN_FLIGHT:
            self.dropped += 1
            self._count("dropped")
            return
        self.in_flight += 1
        # Not immediately: the caller's response may not have been sent yet.
        asyncio.get_running_loop().call_soon(self._send, target, request, response)

    def close(self) -> None:
        """Cancel all copies in flight."""
        self.target = None
        for pending in list(self._pending):
            pending.cancel()

    def numbers(self) -> Numbers:
        """Return the counts as JSON, for other processes."""
        return {
            **self.counts.numbers(),
            "dropped": self.dropped,
            "compared": self.compared,
            "agreed": self.agreed,
            "choices_compared": self.choices_compared,
            "choices_agreed": self.choices_agreed,
            "differences": {str(bucket): times for bucket, times in self.differences.items()},
        }

    def _send(self, target: RequestTarget, request: InferRequest, response: InferResponse) -> None:
        copy = InferRequest(
            request.model_name, request.inputs, self.number, request.id, request.outputs, request.parameters
        )
        started = self._now()
        self.counts.requests += 1
        holder: list[PendingRequest] = []

        def callback(result: InferResponse | BaseException) -> None:
            self._pending.difference_update(holder)
            self._answered(result, response, started)

        try:
            pending = target.infer(copy, callback)
        except Exception as error:
            self._answered(error, response, started)
            return
        if not pending.cancelled:
            holder.append(pending)
            self._pending.add(pending)

    def _answered(self, result: InferResponse | BaseException, response: InferResponse, started: float) -> None:
        if isinstance(result, BaseException):
            self.in_flight -= 1
            self.counts.failed(result)
            self._count("failed")
            if not self._failure_logged:
                self._failure_logged = True
                log.warning("Shadow '%s' of model '%s' failed (logged once): %s", self.name, self.model, result)
            return
        self.counts.succeeded(self._now() - started)
        work = partial(compare_answers, response.outputs, result.outputs, self._tolerance)
        if sum(tensor.array.size for tensor in response.outputs) <= _LARGE:
            self.in_flight -= 1
            self._compared(work())
            return
        future = asyncio.get_running_loop().run_in_executor(None, work)
        future.add_done_callback(self._compared_later)

    def _compared_later(self, future: asyncio.Future[AnswerComparison]) -> None:
        self.in_flight -= 1
        if not future.cancelled():
            self._compared(future.result())

    def _compared(self, comparison: AnswerComparison) -> None:
        self.compared += 1
        self.agreed += comparison.agrees
        self._count("agreed" if comparison.agrees else "differed")
        if comparison.difference is not None:
            bucket = bucket_of(comparison.difference)
            self.differences[bucket] = self.differences.get(bucket, 0) + 1
        if comparison.same_choice is not None:
            self.choices_compared += 1
            self.choices_agreed += comparison.same_choice

    def _count(self, outcome: str) -> None:
        self._metrics.shadows(self.model, self.name, outcome).value += 1


class AnswerComparison(NamedTuple):
    """The comparison of two responses to one request."""

    agrees: bool
    """Same outputs and shapes, equal integers and texts, floating-point numbers within the tolerance."""
    difference: float | None
    """The largest difference of two floating-point numbers; None if there are none."""
    same_choice: bool | None
    """Whether the largest number of each vector has the same index; None if there are no vectors."""


def compare_answers(returned: Sequence[Tensor], shadow: Sequence[Tensor], tolerance: float) -> AnswerComparison:
    """Compare all outputs by name. May run in any thread."""
    agrees = {tensor.name for tensor in returned} == {tensor.name for tensor in shadow}
    by_name = {tensor.name: tensor for tensor in shadow}
    differences: list[float] = []
    choices: list[bool] = []
    for tensor in returned:
        match = by_name.get(tensor.name)
        if match is None:
            continue
        mine, theirs = _array(tensor), _array(match)
        if mine.shape != theirs.shape or mine.dtype.kind != theirs.dtype.kind:
            agrees = False
        elif mine.dtype.kind != "f":
            agrees = agrees and bool(np.array_equal(mine, theirs))
        elif mine.size:
            close, difference = _floats(mine, theirs, tolerance)
            agrees = agrees and close
            differences.append(difference)
            if mine.ndim and mine.shape[-1] > 1:
                choices.append(bool(np.array_equal(mine.argmax(-1), theirs.argmax(-1))))
    return AnswerComparison(agrees, max(differences, default=None), all(choices) if choices else None)


def _floats(mine: npt.NDArray[Any], theirs: npt.NDArray[Any], tolerance: float) -> tuple[bool, float]:
    # In double precision: the difference of two half-precision numbers may not be representable in half precision.
    first, second = mine.astype(np.float64, copy=False), theirs.astype(np.float64, copy=False)
    close = bool(np.isclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True).all())
    with np.errstate(invalid="ignore"):
        apart = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    apart = np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return close, float(apart.max())


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    array = np.asarray(tensor.array)
    return bf16_to_float32(array) if tensor.dtype is BF16 else array
