# SPDX-License-Identifier: Apache-2.0
"""Copies of requests for a version whose answers nobody gets: they are compared with those that were returned.

Called by `entry` after the caller has its answer, so a copy delays no one's answer and fails no one's request. Only so many
are under way at once; others are dropped, and counted. The copy takes computing time like any request: a candidate that
computes in the server's own loop makes others wait.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from headrace.core.clock import Clock
from headrace.core.messages import InferRequest, InferResponse
from headrace.engine.scheduling.pending import Pending
from headrace.engine.traffic.accounts import Account, Numbers
from headrace.engine.traffic.choosing import Chance, Points
from headrace.engine.traffic.comparing import Comparison, compare
from headrace.engine.traffic.histograms import Tally, bucket_of
from headrace.engine.traffic.lanes import Serving
from headrace.engine.traffic.metrics import TrafficMetrics

log = logging.getLogger("headrace.traffic")

MOST_IN_FLIGHT = 64
_LARGE = 1 << 16
"""Elements of an answer that are compared in a thread: the loop has others to serve."""


class Shadow:
    """One candidate. `version` comes and goes with the directory."""

    def __init__(
        self,
        model: str,
        name: str,
        share: float,
        tolerance: float,
        *,
        clock: Clock,
        metrics: TrafficMetrics,
        chance: Chance,
    ) -> None:
        self.model = model
        self.name = name
        self.number = ""
        self.share = share
        self.version: Serving | None = None
        self.account = Account()
        self.dropped = 0
        self.compared = self.agreed = 0
        self.choices_compared = self.choices_agreed = 0
        self.differences: Tally = {}
        self.in_flight = 0
        self._tolerance = tolerance
        self._now = clock.monotonic
        self._chance = chance
        self._points = Points(f"shadow {name} of {model}")
        self._metrics = metrics
        self._pending: set[Pending] = set()
        self._told_of_failure = False

    def wants(self, sequence: str) -> bool:
        """Whether this request is to be copied; of a sequence, all or none."""
        return self.share >= 1 or (self._points.of(sequence) if sequence else self._chance()) < self.share

    def copy(self, request: InferRequest, response: InferResponse) -> None:
        """Send a copy of a request that was answered so."""
        version = self.version
        if version is None or self.in_flight >= MOST_IN_FLIGHT:
            self.dropped += 1
            self._count("dropped")
            return
        self.in_flight += 1
        # Not at once: the caller's answer may still be on its way out.
        asyncio.get_running_loop().call_soon(self._send, version, request, response)

    def close(self) -> None:
        """Nobody wants the answers any more."""
        self.version = None
        for pending in list(self._pending):
            pending.cancel()

    def numbers(self) -> Numbers:
        """As JSON for other processes."""
        return {
            **self.account.numbers(),
            "dropped": self.dropped,
            "compared": self.compared,
            "agreed": self.agreed,
            "choices_compared": self.choices_compared,
            "choices_agreed": self.choices_agreed,
            "differences": {str(bucket): times for bucket, times in self.differences.items()},
        }

    def _send(self, version: Serving, request: InferRequest, response: InferResponse) -> None:
        made = InferRequest(
            request.model_name, request.inputs, self.number, request.id, request.outputs, request.parameters
        )
        began = self._now()
        self.account.requests += 1
        holder: list[Pending] = []

        def told(result: InferResponse | BaseException) -> None:
            self._pending.difference_update(holder)
            self._answered(result, response, began)

        try:
            pending = version.infer(made, told)
        except Exception as error:
            self._answered(error, response, began)
            return
        if not pending.cancelled:
            holder.append(pending)
            self._pending.add(pending)

    def _answered(self, result: InferResponse | BaseException, response: InferResponse, began: float) -> None:
        if isinstance(result, BaseException):
            self.in_flight -= 1
            self.account.failed(result)
            self._count("failed")
            if not self._told_of_failure:
                self._told_of_failure = True
                log.warning("shadow '%s' of model '%s' failed, told once: %s", self.name, self.model, result)
            return
        self.account.succeeded(self._now() - began)
        work = partial(compare, response.outputs, result.outputs, self._tolerance)
        if sum(tensor.array.size for tensor in response.outputs) <= _LARGE:
            self.in_flight -= 1
            self._compared(work())
            return
        future = asyncio.get_running_loop().run_in_executor(None, work)
        future.add_done_callback(self._compared_later)

    def _compared_later(self, future: asyncio.Future[Comparison]) -> None:
        self.in_flight -= 1
        if not future.cancelled():
            self._compared(future.result())

    def _compared(self, comparison: Comparison) -> None:
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
