# SPDX-License-Identifier: Apache-2.0
"""A request that asks a prefill first, then goes to a decoder with the ticket. Made by `forwarding` where there are roles.

A text is generated anew without harm, so such requests are tried again as those that read are: when a backend dies before
its answer begins, or says that it cannot (502, 503), another gets them; prefills too, when no decoder is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.handing import HEADER
from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.choosing.flows import ConsideredFlow
from headrace.fleet.router.pairing.asking import PrefillAsk
from headrace.fleet.router.pairing.pairs import pairable

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.pools import Pool
    from headrace.net.http.exchange import Buffer

_CANNOT = (502, 503)
"""It cannot, or what it stands before cannot be reached."""


class PairedFlow(ConsideredFlow):
    """A request with its body."""

    _prompt: PrefillAsk | None = None
    _ticket = b""
    _pairable = False

    def start(self) -> None:
        """Take the request to a prefill, if it is worth it, and then to a decoder."""
        pairs, chooser = self._router.pairs, self._router.chooser
        if pairs is None or chooser is None or self._prompt is not None:
            super().start()
            return
        request = self._considered(chooser)
        self._pairable = pairable(request)
        prefill = pairs.prefill_for(request) if self._pairable else None
        if prefill is None:
            super().start()
            return
        self._exchange.on_disconnect = self
        self._prompt = PrefillAsk(self._router, pairs, self._exchange, self._plan, self._prefilled)
        self._prompt.start(prefill)

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `customers.Customer`."""
        backend = self._backend
        if head.status in _CANNOT and self._repeatable and backend is not None and self._may_try_another():
            self._tries += 1
            self._tried = (*self._tried, backend)
            other = self._other()
            if other is not None and self._router.budget.spend():
                self._settle(Outcome.REFUSED)
                self._give(other)
                return
        super().answered(head, body)

    @property
    def _repeatable(self) -> bool:
        return self._pairable or super()._repeatable

    def _may_try_another(self) -> bool:
        return self._tries + 1 < self._router.settings.retries.tries and not self._exchange.started

    def _prefilled(self, ticket: bytes, outcome: str) -> None:
        self._ticket = ticket
        self.start()

    def _completed(self, head: bytes, pool: Pool) -> bytes:
        if self._ticket:
            head = b"".join((head, self._exchange.peer_address, b"\r\n", HEADER, b": ", self._ticket))
            return head + (pool.hostless_tail if self._plan.hostless else pool.tail)
        return super()._completed(head, pool)

    def _cancelled(self) -> None:
        if self._prompt is not None:
            self._prompt.cancel()
        super()._cancelled()
