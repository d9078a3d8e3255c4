# SPDX-License-Identifier: Apache-2.0
"""A second backend is asked when the first takes its time; who answers first has the client, the other is dropped.

`forwarding` makes `HedgedFlow` where the settings ask for it. Only for requests that change nothing, within a budget, and
only until the first byte of an answer.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.choosing.flows import ConsideredFlow
from headrace.fleet.router.choosing.policies import Why
from headrace.fleet.router.flows import Flow
from headrace.fleet.router.retries import RetryBudget
from headrace.fleet.router.settings import RetrySettings

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.choosing.settings import HedgingSettings
    from headrace.net.http.exchange import Buffer
    from headrace.net.http.heads import RequestHead

_SAMPLES = 512
_LEAST_SAMPLES = 20
_EVERY = 32
"""Samples after which the percentile is worked out anew."""
_RESERVE = 10
_INFERENCE = re.compile(
    rb"/v2/models/[^/]+(/versions/[^/]+)?/(infer|generate)|/predict(/[^/]+)?|/v1/models/[^/]+(/versions/[^/]+)?:predict"
    rb"|/v1/(chat/)?completions|/v1/(embeddings|rerank|score)|/generate"
)


class Hedger:
    """When to ask a second one, and whether there is budget for it."""

    def __init__(self, settings: HedgingSettings) -> None:
        self._settings = settings
        self.budget = RetryBudget(RetrySettings(budget=settings.budget, reserve=_RESERVE))
        self.asked = 0
        """Second requests so far."""
        self.won = 0
        """Those that answered first."""
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = 0
        self._percentile = 0.0

    def may(self, head: RequestHead) -> bool:
        """Whether two backends may get the request."""
        if head.method in (b"GET", b"HEAD"):
            return b"upgrade" not in head.by_name
        return self._settings.inference and head.method == b"POST" and _INFERENCE.fullmatch(head.path) is not None

    def delay(self) -> float | None:
        """How long to wait for the first one; None while nobody knows."""
        least, share = self._settings.after_seconds, self._settings.percentile
        if share <= 0:
            return least
        if len(self._seconds) < _LEAST_SAMPLES:
            return least or None
        return max(least, self._percentile)

    def observe(self, seconds: float) -> None:
        """A request's answer began after so long."""
        self._seconds.append(seconds)
        self._seen += 1
        if self._seen % _EVERY == 0 or len(self._seconds) == _LEAST_SAMPLES:
            ordered = sorted(self._seconds)
            self._percentile = ordered[min(len(ordered) - 1, int(len(ordered) * self._settings.percentile))]


class HedgedFlow(ConsideredFlow):
    """The first of two."""

    _second: _SecondFlow | None = None
    _timer: asyncio.TimerHandle | None = None
    _over = False
    """Whether its backend has failed, so that all is left to the second."""

    def _give(self, backend: Backend, *, fresh: bool = False) -> None:
        hedger = self._router.hedger
        if self._timer is None and hedger is not None:
            hedger.budget.earn()
            delay = hedger.delay() if hedger.may(self._exchange.head) else None
            if delay is not None:
                self._timer = asyncio.get_running_loop().call_later(delay, self._hedge)
        super()._give(backend, fresh=fresh)

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `customers.Customer`."""
        if head.outcome == Outcome.REFUSED and self._second is not None:
            # It cannot: the second may still be able to.
            self._over = True
            self._settle(head.outcome)
            return
        self._won()
        super().answered(head, body)

    def answer_begun(self, head: AnswerHead, length: int) -> None:
        """See `customers.Customer`."""
        self._won()
        super().answer_begun(head, length)

    def lose(self) -> None:
        """The second was quicker."""
        super()._cancelled()

    def second_failed(self) -> bool:
        """The second is of no use. Whether the client has to be told, as the first is none either."""
        self._second = None
        return self._over

    def _hedge(self) -> None:
        router, exchange, first = self._router, self._exchange, self._backend
        hedger, chooser, request = router.hedger, router.chooser, self._request
        if first is None or hedger is None or chooser is None or request is None or exchange.started or exchange.closed:
            return
        if not chooser.candidates((*self._tried, first)) or not hedger.budget.spend():
            return
        other = chooser.pick(request, (*self._tried, first), Why.HEDGE)
        if other is not None:
            hedger.asked += 1
            self._second = _SecondFlow()
            self._second.take(router, exchange, self._plan)
            self._second.begin(self, other, (*self._tried, first))

    def _won(self) -> None:
        hedger = self._router.hedger
        if hedger is not None:
            hedger.observe(monotonic() - self._began)
        self._stop_timer()
        second, self._second = self._second, None
        if second is not None:
            second.lose()

    def _try_again_or(self, status: int, why: str, *, may: bool) -> None:
        if self._second is not None and not self._exchange.started:
            self._over = True
            self._settle(Outcome.FAILED)
            return
        self._stop_timer()
        super()._try_again_or(status, why, may=may)

    def _cancelled(self) -> None:
        self._stop_timer()
        second, self._second = self._second, None
        super()._cancelled()
        if second is not None:
            second.lose()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _SecondFlow(Flow):
    """The second: it has the same client, and answers only if it is quicker."""

    _first: HedgedFlow | None = None

    def begin(self, first: HedgedFlow, backend: Backend, tried: tuple[Backend, ...]) -> None:
        """Ask this one."""
        self._first = first
        self._tried = tried
        self._give(backend)

    def lose(self) -> None:
        """The first was quicker, or the client has gone."""
        self._first = None
        self._cancelled()

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `customers.Customer`."""
        first = self._first
        if head.outcome and first is not None and not first.second_failed():
            self._settle(head.outcome)
            return
        self._won()
        super().answered(head, body)

    def answer_begun(self, head: AnswerHead, length: int) -> None:
        """See `customers.Customer`."""
        self._won()
        super().answer_begun(head, length)

    def _won(self) -> None:
        first, self._first = self._first, None
        hedger = self._router.hedger
        if hedger is not None and first is not None:
            hedger.won += 1
            hedger.observe(monotonic() - first._began)
        if first is not None:
            first.lose()

    def _try_again_or(self, status: int, why: str, *, may: bool) -> None:
        first = self._first
        if self._exchange.started or first is None or first.second_failed():
            super()._try_again_or(status, why, may=may)
        else:
            self._settle(Outcome.FAILED)
