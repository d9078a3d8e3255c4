# SPDX-License-Identifier: Apache-2.0
"""Flows whose backend the chooser finds. Made by `forwarding` in place of its own when there is a chooser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.fleet.router.choosing.policies import Why
from headrace.fleet.router.choosing.request import Request
from headrace.fleet.router.flows import Flow
from headrace.fleet.router.streaming import StreamedFlow

if TYPE_CHECKING:
    from headrace.fleet.router.backend import Backend
    from headrace.fleet.router.choosing.chooser import Chooser


class _Considered(Flow):
    """What the two below share."""

    _request: Request | None = None

    def start(self) -> None:
        """Take the request to a backend."""
        router, exchange = self._router, self._exchange
        chooser = router.chooser
        if chooser is None:
            # The settings have changed while it waited.
            super().start()
            return
        backend = chooser.pick(self._considered(chooser))
        if backend is None:
            router.nobody(self, exchange)
            return
        router.budget.earn()
        exchange.on_disconnect = self
        self._give(backend)

    def _considered(self, chooser: Chooser) -> Request:
        """The request as choices see it; with its session, if there are sessions."""
        request, exchange = self._request, self._exchange
        if request is None:
            request = self._request = Request(exchange.head, exchange.body)
            if chooser.sessions is not None:
                request.session, line = chooser.sessions.cookie_for(request)
                exchange.more_lines += line
        return request

    def _other(self) -> Backend | None:
        chooser, request = self._router.chooser, self._request
        if chooser is None or request is None:
            return super()._other()
        return chooser.pick(request, self._tried, Why.RETRY)


class ConsideredFlow(_Considered):
    """A request with its body."""


class ConsideredStreamedFlow(_Considered, StreamedFlow):
    """A request whose body is passed on as it comes, so that only its head can be looked at."""
