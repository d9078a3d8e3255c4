# SPDX-License-Identifier: Apache-2.0
"""Who asks, and whether they may: `access` asked with what a head says. Used by `calls`, `inference` and `entrance`."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from headrace.api.access.audit import Outcome
from headrace.api.access.logins import Access, credential
from headrace.api.access.roles import Principal, check
from headrace.core.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import RequestHead


class Gate:
    """See the module. Used from the loop's thread only."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.recall = access.authenticator.recall
        """Whose token it is, if that was found out a moment ago."""

    async def admit(self, exchange: Exchange, operation: str, org: str, target: str) -> Principal:
        """Who asks; raises what they are to be told if they may not."""
        principal = await self.identify(exchange)
        try:
            check(principal, org, operation)
        except HeadraceError as error:
            self.record(exchange, operation, "denied", principal, org, target, error.message)
            raise
        return principal

    async def identify(self, exchange: Exchange) -> Principal:
        """Who asks."""
        token = token_of(exchange.head)
        return self.recall(token, monotonic()) or await self.access.authenticator.identify(token, address_of(exchange))

    def record(
        self,
        exchange: Exchange,
        operation: str,
        outcome: Outcome,
        principal: Principal | None,
        org: str,
        target: str,
        reason: str = "",
    ) -> None:
        """Write it into the audit log."""
        self.access.audit.record(operation, outcome, principal, org, target, address_of(exchange), reason)


def token_of(head: RequestHead) -> str:
    """The token or key that was sent; raises `Unauthenticated` if there is none."""
    sent = head.get(b"authorization")
    return credential(None if sent is None else sent.decode("latin-1"))


def address_of(exchange: Exchange) -> str:
    """The client's address without its port."""
    return exchange.peer.rpartition(":")[0].strip("[]") or exchange.peer
