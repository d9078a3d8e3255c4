# SPDX-License-Identifier: Apache-2.0
"""From a client's exchange to a flow: the handlers for everything that is not the router's own.

`proxy.RouterProxy` registers `Forwarder.whole` and `Forwarder.streamed`. What a request goes through is in `flows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from headrace.fleet.router.backend import Backend
from headrace.fleet.router.backends import Backends
from headrace.fleet.router.choosing.flows import ConsideredFlow, ConsideredStreamedFlow
from headrace.fleet.router.choosing.hedging import HedgedFlow, Hedger
from headrace.fleet.router.flows import Flow, wrong_length
from headrace.fleet.router.pairing.flows import PairedFlow
from headrace.fleet.router.requests import RequestPlan, plan_of
from headrace.fleet.router.streaming import StreamedFlow
from headrace.fleet.router.waking.held import HeldFlow

if TYPE_CHECKING:
    from headrace.fleet.router.choosing.chooser import Chooser
    from headrace.fleet.router.choosing.queueing import WaitingLine
    from headrace.fleet.router.pairing.pairs import Pairs
    from headrace.fleet.router.pools import CoarseClock, Pool
    from headrace.fleet.router.retries import RetryBudget
    from headrace.fleet.router.settings import RouterSettings
    from headrace.fleet.router.waking.activator import Activator
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import RequestHead


class Forwarder:
    """What all flows share."""

    def __init__(
        self,
        settings: RouterSettings,
        backends: Backends,
        pools: dict[Backend, Pool],
        budget: RetryBudget,
        clock: CoarseClock,
    ) -> None:
        self.settings = settings
        self.backends = backends
        self.pools = pools
        self.budget = budget
        self.clock = clock
        self.waking: Activator | None = None
        """Where what is behind the backends sleeps: who holds requests until it is awake."""
        self.chooser: Chooser | None = None
        """Who chooses, where a choice looks at the requests."""
        self.flow: type[Flow] = ConsideredFlow
        """What requests become then; or one that is asked of two."""
        self.hedger: Hedger | None = None
        self.pairs: Pairs | None = None
        """Where prefill and decode are apart: who does which."""
        self.line: WaitingLine | None = None
        """Where requests wait when every backend has all it may have."""

    def whole(self, exchange: Exchange) -> None:
        """A handler: the request's body is there."""
        plan: Any = exchange.head.memo
        if plan is None:
            plan = self._plan(exchange.head)
        if len(exchange.body) != plan.whole_length:
            # A promise of the wire's; a request with the wrong length would swallow the next one.
            raise wrong_length()
        if self.chooser is None:
            Flow().forward(self, exchange, plan)
        else:
            flow = self.flow()
            flow.take(self, exchange, plan)
            flow.start()

    def streamed(self, exchange: Exchange) -> None:
        """A handler: the request's body follows."""
        plan = cast("RequestPlan | None", exchange.head.memo) or self._plan(exchange.head)
        flow = StreamedFlow() if self.chooser is None else ConsideredStreamedFlow()
        flow.take(self, exchange, plan)
        flow.start()

    def consider(self, chooser: Chooser | None, hedger: Hedger | None, pairs: Pairs | None) -> None:
        """From now on, have these choose; None: by number alone."""
        self.chooser, self.hedger, self.pairs = chooser, hedger, pairs
        self.flow = PairedFlow if pairs is not None else ConsideredFlow if hedger is None else HedgedFlow

    def nobody(self, flow: Flow, exchange: Exchange) -> None:
        """No backend can take the request: it waits, or its client is told."""
        if self.line is not None and self.backends.live:
            self.line.add(HeldFlow(flow, exchange))
        elif not self.hold(flow, exchange):
            exchange.fail(self.backends.unavailable())

    def hold(self, flow: Flow, exchange: Exchange) -> bool:
        """Have the request wait until somebody is awake; False where nobody sleeps."""
        if self.waking is None:
            return False
        self.waking.hold(HeldFlow(flow, exchange))
        return True

    def _plan(self, head: RequestHead) -> RequestPlan:
        plan = plan_of(head, self.settings)
        head.memo = plan
        return plan
