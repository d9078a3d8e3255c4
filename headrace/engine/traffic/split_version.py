# SPDX-License-Identifier: Apache-2.0
"""One version in a traffic split: forwards requests to it and counts results. `split` creates it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from headrace.core.clock import Clock
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.metrics import Counter
from headrace.engine.scheduling.pending_request import PendingRequest, ResponseCallback, StreamCallback
from headrace.engine.traffic.settings import RollbackRules
from headrace.engine.traffic.statistics import RollbackWindow, TrafficMetrics, VersionCounts

OutReason = Literal["", "missing", "rolled_back"]
SuccessCallback = Callable[[InferRequest, InferResponse], None]
"""Notified of a successful request, after its response was delivered."""


class RequestTarget(Protocol):
    """A loaded version, as seen by a split."""

    express: Callable[[InferRequest], InferResponse | None] | None

    def infer(self, request: InferRequest, done: ResponseCallback) -> PendingRequest:
        """Compute a request; `done` gets the response later."""

    def infer_stream(self, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Compute a request with any number of responses."""


class SplitVersion:
    """One version in a split. `target` is set while the version is loaded."""

    def __init__(
        self,
        model: str,
        name: str,
        share: float,
        *,
        rules: RollbackRules | None,
        clock: Clock,
        metrics: TrafficMetrics,
        on_bad: Callable[[SplitVersion, str], None],
        on_refused: Callable[[SplitVersion], None],
    ) -> None:
        self.model = model
        self.name = name
        """The version's name in the split: a number or a label."""
        self.number = ""
        """"" while the label is not known because the model is not loaded."""
        self.share = share
        self.target: RequestTarget | None = None
        self.rolled_back = ""
        """Why it was rolled back; "" if it was not."""
        self.counts = VersionCounts()
        self.refused_in_a_row = 0
        """Refused requests since the last successful one; only for versions with rollback rules."""
        self._now = clock.monotonic
        self._metrics = metrics
        self._window = RollbackWindow(rules, clock) if rules is not None else None
        self._on_bad = on_bad
        self._on_refused = on_refused
        self._request_counter: Counter | None = None
        self._error_counter: Counter | None = None

    @property
    def out(self) -> OutReason:
        """Why it gets no requests; "" if it does."""
        return "rolled_back" if self.rolled_back else "missing" if self.target is None else ""

    def create_metrics(self) -> None:
        """Create its metrics, so that they are exported as 0."""
        self._request_counter = self._metrics.requests(self.model, self.name)
        self._error_counter = self._metrics.errors(self.model, self.name)

    def diverted(self) -> None:
        """Count a request that goes to another version instead."""
        self.counts.diverted += 1
        self._metrics.diverted(self.model, self.name, self.out or "missing").value += 1

    def express(self, request: InferRequest) -> InferResponse | None:
        """Compute a request on the express path; None, without any effect, if it must take the regular path."""
        express = self.target.express if self.target is not None else None
        if express is None:
            return None
        started = self._now()
        try:
            response = express(request)
        except Exception as error:
            self._count_request()
            self._failed(error, started)
            raise
        if response is not None:
            self._count_request()
            self._succeeded(started)
        return response

    def infer(
        self, target: RequestTarget, request: InferRequest, done: ResponseCallback, on_success: SuccessCallback | None
    ) -> PendingRequest:
        """Compute a request; call `on_success` after a successful response was delivered."""
        started = self._now()
        self._count_request()

        def callback(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                self._failed(result, started)
                done(result)
                return
            self._succeeded(started)
            done(result)
            if on_success is not None:
                on_success(request, result)

        try:
            return target.infer(request, callback)
        except Exception as error:
            self._failed(error, started)
            raise

    def infer_stream(
        self,
        target: RequestTarget,
        request: InferRequest,
        on_response: StreamCallback,
        on_success: SuccessCallback | None,
    ) -> PendingRequest:
        """Compute a request with any number of responses; call `on_success` if there was exactly one."""
        started = self._now()
        self._count_request()
        several = False

        def callback(result: InferResponse | BaseException | None, final: bool) -> None:
            nonlocal several
            if not final:
                several = True
            elif isinstance(result, BaseException):
                self._failed(result, started)
            else:
                self._succeeded(started)
            on_response(result, final)
            if final and on_success is not None and not several and isinstance(result, InferResponse):
                on_success(request, result)

        try:
            return target.infer_stream(request, callback)
        except Exception as error:
            self._failed(error, started)
            raise

    def _count_request(self) -> None:
        self.counts.requests += 1
        counter = self._request_counter
        if counter is None:
            self.create_metrics()
            counter = self._metrics.requests(self.model, self.name)
        counter.value += 1

    def _succeeded(self, started: float) -> None:
        seconds = self._now() - started
        self.counts.succeeded(seconds)
        if self._window is not None:
            self.refused_in_a_row = 0
            self._judge(self._window.add(seconds, error=False))

    def _failed(self, error: BaseException, started: float) -> None:
        refused = self.counts.refused
        if self.counts.failed(error):
            if self._error_counter is not None:
                self._error_counter.value += 1
            if self._window is not None:
                self._judge(self._window.add(self._now() - started, error=True))
        elif self._window is not None and self.counts.refused > refused and not self.rolled_back:
            self.refused_in_a_row += 1
            self._on_refused(self)

    def _judge(self, reason: str) -> None:
        if reason and not self.rolled_back:
            self._on_bad(self, reason)
