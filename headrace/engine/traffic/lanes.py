# SPDX-License-Identifier: Apache-2.0
"""One version in a split: passes requests on to it and keeps its account. Made and asked by `entry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from headrace.core.clock import Clock
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.telemetry.metrics import Counter
from headrace.engine.scheduling.pending import Answered, Done, Pending
from headrace.engine.traffic.accounts import Account, Window
from headrace.engine.traffic.metrics import TrafficMetrics
from headrace.engine.traffic.settings import Rollback

Out = Literal["", "missing", "rolled_back"]
Answer = Callable[[InferRequest, InferResponse], None]
"""Hears of a request that was answered well, after its caller has."""


class Serving(Protocol):
    """What a lane asks of a version."""

    express: Callable[[InferRequest], InferResponse | None] | None

    def infer(self, request: InferRequest, done: Done) -> Pending:
        """See `ModelVersion.infer`."""

    def infer_stream(self, request: InferRequest, answered: Answered) -> Pending:
        """See `ModelVersion.infer_stream`."""


class Lane:
    """See the module. `version` comes and goes with the directory."""

    def __init__(
        self,
        model: str,
        name: str,
        share: float,
        *,
        rules: Rollback | None,
        clock: Clock,
        metrics: TrafficMetrics,
        on_bad: Callable[[Lane, str], None],
        on_refused: Callable[[Lane], None],
    ) -> None:
        self.model = model
        self.name = name
        """As the split calls it: a number or a label."""
        self.number = ""
        """"" while its label is not known, because its model is not loaded."""
        self.share = share
        self.version: Serving | None = None
        self.rolled_back = ""
        """Why it has lost its traffic."""
        self.account = Account()
        self.refused_in_a_row = 0
        """Requests since the last that it answered; for judged versions only."""
        self._now = clock.monotonic
        self._metrics = metrics
        self._window = Window(rules, clock) if rules is not None else None
        self._on_bad = on_bad
        self._on_refused = on_refused
        self._counts: Counter | None = None
        self._errors: Counter | None = None

    @property
    def out(self) -> Out:
        """Why it gets no requests; "" if it does."""
        return "rolled_back" if self.rolled_back else "missing" if self.version is None else ""

    def show(self) -> None:
        """Have its metrics, at 0 if need be."""
        self._counts = self._metrics.requests(self.model, self.name)
        self._errors = self._metrics.errors(self.model, self.name)

    def diverted(self) -> None:
        """A request that was meant for it goes to another."""
        self.account.diverted += 1
        self._metrics.diverted(self.model, self.name, self.out or "missing").value += 1

    def answer(self, request: InferRequest) -> InferResponse | None:
        """The short way: None, and nothing has been done, if the request is to take the long one."""
        express = self.version.express if self.version is not None else None
        if express is None:
            return None
        began = self._now()
        try:
            response = express(request)
        except Exception as error:
            self._begun()
            self._failed(error, began)
            raise
        if response is not None:
            self._begun()
            self._succeeded(began)
        return response

    def infer(self, version: Serving, request: InferRequest, done: Done, heard: Answer | None) -> Pending:
        """Compute a request; `heard` is told of a good answer, after the caller."""
        began = self._now()
        self._begun()

        def told(result: InferResponse | BaseException) -> None:
            if isinstance(result, BaseException):
                self._failed(result, began)
                done(result)
                return
            self._succeeded(began)
            done(result)
            if heard is not None:
                heard(request, result)

        try:
            return version.infer(request, told)
        except Exception as error:
            self._failed(error, began)
            raise

    def infer_stream(
        self, version: Serving, request: InferRequest, answered: Answered, heard: Answer | None
    ) -> Pending:
        """The same for any number of answers; `heard` is told if there was exactly one."""
        began = self._now()
        self._begun()
        several = False

        def told(result: InferResponse | BaseException | None, final: bool) -> None:
            nonlocal several
            if not final:
                several = True
            elif isinstance(result, BaseException):
                self._failed(result, began)
            else:
                self._succeeded(began)
            answered(result, final)
            if final and heard is not None and not several and isinstance(result, InferResponse):
                heard(request, result)

        try:
            return version.infer_stream(request, told)
        except Exception as error:
            self._failed(error, began)
            raise

    def _begun(self) -> None:
        self.account.requests += 1
        counts = self._counts
        if counts is None:
            self.show()
            counts = self._metrics.requests(self.model, self.name)
        counts.value += 1

    def _succeeded(self, began: float) -> None:
        seconds = self._now() - began
        self.account.succeeded(seconds)
        if self._window is not None:
            self.refused_in_a_row = 0
            self._judge(self._window.add(seconds, error=False))

    def _failed(self, error: BaseException, began: float) -> None:
        refused = self.account.refused
        if self.account.failed(error):
            if self._errors is not None:
                self._errors.value += 1
            if self._window is not None:
                self._judge(self._window.add(self._now() - began, error=True))
        elif self._window is not None and self.account.refused > refused and not self.rolled_back:
            self.refused_in_a_row += 1
            self._on_refused(self)

    def _judge(self, reason: str) -> None:
        if reason and not self.rolled_back:
            self._on_bad(self, reason)
