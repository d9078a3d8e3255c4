# SPDX-License-Identifier: Apache-2.0
"""HTTP handlers of the job API: authenticate, authorise, run the operation, audit and respond.

An operation continues when its client disconnects: a half-finished start or stop is worse than an unread response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from headrace.api.access.audit import Outcome
from headrace.api.access.authenticator import Access, parse_credential
from headrace.api.access.roles import Principal, check_permission
from headrace.core.errors import HeadraceError
from headrace.jobs.api.requests import Fields, parse_body, parse_organisation
from headrace.jobs.api.responses import EncodedJson, encode_json, fail, json_head
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import OK_PLAIN, parse_query

if TYPE_CHECKING:
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import RequestHead

_READ_SUFFIX = ".read"
"""Suffix of read-only operations: they are audited only when they are denied."""


@dataclass(frozen=True, slots=True)
class Call:
    """One authorised request."""

    exchange: Exchange
    principal: Principal
    org: str
    ids: tuple[str, ...]
    """The other ids in the path, in order."""

    @property
    def user_id(self) -> str:
        """Return the id of the user."""
        return self.principal.user_id

    def fields(self) -> Fields:
        """Return the fields of the body."""
        return Fields(parse_body(self.exchange.body))

    def query(self) -> dict[str, str]:
        """Return the query parameters."""
        return dict(parse_query(self.exchange.head.query))


@dataclass(frozen=True, slots=True)
class Response:
    """The response to a call."""

    body: Any
    """JSON; `Text` and `EncodedJson` are sent unchanged."""
    status: int = 200


@dataclass(frozen=True, slots=True)
class Text:
    """A plain-text body: a log."""

    text: str = field(repr=False)


Action = Callable[[Call], Awaitable[Response]]


class Handlers:
    """Turns operations into HTTP handlers."""

    def __init__(self, authorisation: Authorisation) -> None:
        self._authorisation = authorisation
        self._tasks: set[asyncio.Task[None]] = set()

    def handler(self, operation: str, action: Action) -> Handler:
        """Return the handler of a path whose first parameter is an organisation."""

        def handle(exchange: Exchange) -> None:
            self.spawn(self._run(exchange, operation, action))

        return handle

    def spawn(self, work: Any) -> None:
        """Run a coroutine as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for running operations."""
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, exchange: Exchange, operation: str, action: Action) -> None:
        org, *ids = exchange.params
        target = ids[-1] if ids else ""
        principal: Principal | None = None
        try:
            principal = await self._authorisation.authorise(exchange, operation, parse_organisation(org), target)
            response = await action(Call(exchange, principal, org, tuple(ids)))
            # Audit before responding: every response that a client has seen is in the audit log.
            if not operation.endswith(_READ_SUFFIX):
                self._authorisation.record(
                    exchange, operation, "allowed", principal, org, _created_id(response) or target
                )
            respond(exchange, response)
        except Exception as error:
            if principal is not None and not operation.endswith(_READ_SUFFIX):
                reason = error.message if isinstance(error, HeadraceError) else type(error).__name__
                self._authorisation.record(exchange, operation, "failed", principal, org, target, reason)
            fail(exchange, error)


def respond(exchange: Exchange, response: Response) -> None:
    """Send the response."""
    body = response.body
    if isinstance(body, Text):
        exchange.respond(OK_PLAIN, body.text.encode(errors="replace"))
    elif isinstance(body, EncodedJson):
        exchange.respond(json_head(response.status), body.pieces)
    else:
        exchange.respond(json_head(response.status), encode_json(body))


def _created_id(response: Response) -> str:
    """Return the id of the created record; "" if there is none."""
    body = response.body
    if isinstance(body, str):
        return body
    created_id = (body.get("job_id") or body.get("id")) if isinstance(body, dict) else None
    return created_id if isinstance(created_id, str) else ""


class Authorisation:
    """Authentication, role checks and the audit log; used from the loop's thread only."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.cached_principal = access.authenticator.cached_principal
        """Return the cached principal of a token; None if there is none."""

    async def authorise(self, exchange: Exchange, operation: str, org: str, target: str) -> Principal:
        """Return the principal of a request; raise if it is not allowed."""
        principal = await self.identify(exchange)
        try:
            check_permission(principal, org, operation)
        except HeadraceError as error:
            self.record(exchange, operation, "denied", principal, org, target, error.message)
            raise
        return principal

    async def identify(self, exchange: Exchange) -> Principal:
        """Return the principal of a request."""
        token = token_of(exchange.head)
        return self.cached_principal(token, monotonic()) or await self.access.authenticator.identify(
            token, address_of(exchange)
        )

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
        """Write an entry to the audit log."""
        self.access.audit.record(operation, outcome, principal, org, target, address_of(exchange), reason)


def token_of(head: RequestHead) -> str:
    """Return the token or key of a request; raise `Unauthenticated` if there is none."""
    sent = head.get(b"authorization")
    return parse_credential(None if sent is None else sent.decode("latin-1"))


def address_of(exchange: Exchange) -> str:
    """Return the client's address without its port."""
    return exchange.peer.rpartition(":")[0].strip("[]") or exchange.peer
