# SPDX-License-Identifier: Apache-2.0
"""Send parsed requests to the data plane, with a deadline.

A batch of several parts is sent part by part, a few at a time, all to the version that answered the first part, so that a
response comes from one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from headrace.api.predict.requests import ParsedRequest, Part
from headrace.core.errors import DeadlineExceeded, HeadraceError
from headrace.core.requests import InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending_request import PendingRequest

OnResponses = Callable[[Sequence[InferResponse] | BaseException], None]
"""Called with the responses to all parts of a request."""

_AT_ONCE = 8
"""Parts of one batch in the engine at the same time: it must not fill a queue that other requests share."""


class Cancellable(Protocol):
    """A request that can be cancelled."""

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """Cancel it, with an error for its client or because the client is gone."""


class Deadlines:
    """Cancels requests that take too long. All have the same timeout, so they expire in order and one timer is enough."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[Cancellable, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Cancellable) -> None:
        """Start the timeout of a request, or start it again."""
        if self._seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._waiting.pop(waiting, None)
        self._waiting[waiting] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._sweep, loop)

    def remove(self, waiting: Cancellable) -> None:
        """Stop the timeout of a request."""
        self._waiting.pop(waiting, None)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        expired = []
        for waiting, deadline in self._waiting.items():
            if deadline > now:
                self._timer = loop.call_later(deadline - now, self._sweep, loop)
                break
            expired.append(waiting)
        for waiting in expired:
            self._waiting.pop(waiting, None)
            waiting.cancel(
                DeadlineExceeded(
                    f"no prediction within {self._seconds:g} seconds: try again later or send less at once; "
                    "the server's limit is inference_timeout_s"
                )
            )


class Predictor:
    """Sends the requests of one server."""

    def __init__(self, plane: DataPlane, timeout_seconds: float) -> None:
        self._plane = plane
        self.deadlines = Deadlines(timeout_seconds)

    def predict_now(self, request: ParsedRequest) -> InferResponse | None:
        """Return the response if the model can answer at once and one engine request is enough."""
        return None if request.is_split else self._plane.answer(request.engine_request)

    def predict(self, request: ParsedRequest, on_responses: OnResponses) -> Cancellable:
        """Send a request and call back later; raise at once if it is invalid."""
        if request.is_split and request.parts is not None:
            batch = _SplitBatch(self._plane, self.deadlines, request, request.parts, on_responses)
            batch.begin()
            self.deadlines.add(batch)
            return batch
        deadlines = self.deadlines

        def done(result: InferResponse | BaseException) -> None:
            deadlines.remove(pending)
            on_responses(result if isinstance(result, BaseException) else (result,))

        pending = self._plane.infer(request.engine_request, done)
        deadlines.add(pending)
        return pending


class _SplitBatch:
    """A batch of several parts."""

    def __init__(
        self,
        plane: DataPlane,
        deadlines: Deadlines,
        request: ParsedRequest,
        parts: Sequence[Part],
        on_responses: OnResponses,
    ) -> None:
        self._plane = plane
        self._deadlines = deadlines
        self._request = request
        self._on_responses: OnResponses | None = on_responses
        self._responses: list[InferResponse | None] = [None] * len(parts)
        self._left = len(parts)
        self._parts = parts
        self._next = 1
        self._running: dict[int, PendingRequest] = {}
        self._version = ""

    def begin(self) -> None:
        """Send the first part, whose response has the version."""
        self._running[0] = self._plane.infer(self._request.engine_request, partial(self._completed, 0))

    def cancel(self, reason: HeadraceError | None = None) -> None:
        """Cancel all parts."""
        self._finish(reason)

    def _completed(self, index: int, result: InferResponse | BaseException) -> None:
        if self._on_responses is None:
            return
        self._running.pop(index, None)
        if isinstance(result, BaseException):
            self._finish(result)
            return
        self._responses[index] = result
        self._left -= 1
        self._version = result.model_version
        if not self._left:
            self._finish([response for response in self._responses if response is not None])
            return
        try:
            self._send_more()
        except Exception as error:
            self._finish(error)

    def _send_more(self) -> None:
        parts = self._parts
        while self._next < len(parts) and len(self._running) < _AT_ONCE:
            index = self._next
            self._next += 1
            request = self._request.request_for(parts[index].row, self._version)
            self._running[index] = self._plane.infer(request, partial(self._completed, index))

    def _finish(self, result: Sequence[InferResponse] | BaseException | None) -> None:
        on_responses, self._on_responses = self._on_responses, None
        running, self._running = self._running, {}
        self._deadlines.remove(self)
        for pending in running.values():
            pending.cancel()
        if on_responses is not None and result is not None:
            on_responses(result)
