# SPDX-License-Identifier: Apache-2.0
"""Hedging: send a slow request to a second backend, use the first response, and cancel the other attempt.

Only for requests that change nothing, within a budget, and only until the first byte of a response.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.policies import ChoiceReason
from headrace.fleet.router.proxied_request import ProxiedRequest, RequestStrategy
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import RetrySettings

if TYPE_CHECKING:
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.settings import HedgingSettings
    from headrace.net.http.heads import RequestHead

_SAMPLES = 512
_MIN_SAMPLES = 20
_UPDATE_EVERY = 32
"""Samples after which the percentile is computed again."""
_RESERVE = 10
_INFERENCE = re.compile(
    rb"/v2/models/[^/]+(/versions/[^/]+)?/(infer|generate)|/predict(/[^/]+)?|/v1/models/[^/]+(/versions/[^/]+)?:predict"
    rb"|/v1/(chat/)?completions|/v1/(embeddings|rerank|score)|/generate"
)


class Hedger:
    """Decides when to send a second request, and whether the budget allows it."""

    def __init__(self, settings: HedgingSettings) -> None:
        self._settings = settings
        self.budget = RetryBudget(RetrySettings(budget=settings.budget, reserve=_RESERVE))
        self.hedged = 0
        """Second requests so far."""
        self.won = 0
        """Second requests that answered first."""
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._observed = 0
        self._percentile = 0.0

    def may_hedge(self, head: RequestHead) -> bool:
        """Return whether two backends may get the request."""
        if head.method in (b"GET", b"HEAD"):
            return b"upgrade" not in head.by_name
        return self._settings.inference and head.method == b"POST" and _INFERENCE.fullmatch(head.path) is not None

    def delay(self) -> float | None:
        """Return how long to wait for the first backend; None while there are too few samples."""
        minimum, share = self._settings.after_seconds, self._settings.percentile
        if share <= 0:
            return minimum
        if len(self._seconds) < _MIN_SAMPLES:
            return minimum or None
        return max(minimum, self._percentile)

    def observe(self, seconds: float) -> None:
        """Add a sample: the time until a response started."""
        self._seconds.append(seconds)
        self._observed += 1
        if self._observed % _UPDATE_EVERY == 0 or len(self._seconds) == _MIN_SAMPLES:
            ordered = sorted(self._seconds)
            self._percentile = ordered[min(len(ordered) - 1, int(len(ordered) * self._settings.percentile))]


class HedgedRequest(RequestStrategy):
    """The strategy of a request that may get a second attempt."""

    def __init__(self, hedger: Hedger) -> None:
        self._hedger = hedger
        self._second: ProxiedRequest | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._failed = False
        """Whether the first attempt has failed, so that only the second is left."""

    def sending(self, request: ProxiedRequest) -> None:
        """Start the timer for the second attempt."""
        if self._timer is None:
            hedger = self._hedger
            hedger.budget.earn()
            delay = hedger.delay() if hedger.may_hedge(request.exchange.head) else None
            if delay is not None:
                self._timer = asyncio.get_running_loop().call_later(delay, self._hedge, request)

    def response_received(self, request: ProxiedRequest, head: UpstreamHead) -> bool:
        """Cancel the second attempt; or drop a refusal while the second attempt may still succeed."""
        if head.outcome == Outcome.REFUSED and self._second is not None:
            self._failed = True
            request.end_attempt(head.outcome)
            return False
        self._win(request)
        return True

    def response_started(self, request: ProxiedRequest) -> None:
        """Cancel the second attempt."""
        self._win(request)

    def attempt_failed(self, request: ProxiedRequest) -> bool:
        """Leave the request to the second attempt, if there is one."""
        if self._second is not None and not request.exchange.started:
            self._failed = True
            request.end_attempt(Outcome.FAILED)
            return True
        self._stop_timer()
        return False

    def cancelled(self, request: ProxiedRequest) -> None:
        """Cancel the second attempt."""
        self._stop_timer()
        self._cancel_second()

    def second_failed(self) -> bool:
        """Discard the second attempt. Return True if the first has failed as well."""
        self._second = None
        return self._failed

    def _hedge(self, request: ProxiedRequest) -> None:
        router, exchange, first = request.router, request.exchange, request.backend
        hedger, chooser, view = self._hedger, router.chooser, request.view
        if first is None or chooser is None or view is None or exchange.started or exchange.closed:
            return
        tried = (*request.tried, first)
        if not chooser.candidates(tried) or not hedger.budget.spend():
            return
        other = chooser.pick(view, tried, ChoiceReason.HEDGE)
        if other is not None:
            hedger.hedged += 1
            second = self._second = type(request)()
            second.prepare(router, exchange, request.plan)
            second.strategy = _SecondAttempt(hedger, request, self)
            second.tried = tried
            second.usage = request.usage
            second.send_to(other)

    def _win(self, request: ProxiedRequest) -> None:
        self._hedger.observe(monotonic() - request.started_at)
        self._stop_timer()
        self._cancel_second()

    def _cancel_second(self) -> None:
        second, self._second = self._second, None
        if second is not None:
            second.strategy = None
            second.cancel_attempt()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _SecondAttempt(RequestStrategy):
    """The strategy of the second attempt: it has the same client, and responds only if it is first."""

    def __init__(self, hedger: Hedger, first: ProxiedRequest, hedged: HedgedRequest) -> None:
        self._hedger = hedger
        self._first: ProxiedRequest | None = first
        self._hedged = hedged

    def response_received(self, request: ProxiedRequest, head: UpstreamHead) -> bool:
        """Cancel the first attempt; or drop an error while the first attempt may still succeed."""
        if head.outcome and self._first is not None and not self._hedged.second_failed():
            request.end_attempt(head.outcome)
            return False
        self._win()
        return True

    def response_started(self, request: ProxiedRequest) -> None:
        """Cancel the first attempt."""
        self._win()

    def attempt_failed(self, request: ProxiedRequest) -> bool:
        """Leave the request to the first attempt, unless it has failed too."""
        if request.exchange.started or self._first is None or self._hedged.second_failed():
            return False
        request.end_attempt(Outcome.FAILED)
        return True

    def _win(self) -> None:
        first, self._first = self._first, None
        if first is not None:
            self._hedger.won += 1
            self._hedger.observe(monotonic() - first.started_at)
            first.cancel_attempt()
