# SPDX-License-Identifier: Apache-2.0
"""From an exchange to an answer: who asks is found, whether they may is checked, the work is awaited, all is written down.

`http` makes a handler of each piece of work. A call goes on when its client goes away: half a start or half a stop would
be worse than one that nobody hears of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.api.access.roles import Principal
from headrace.core.errors import HeadraceError
from headrace.jobs.api.errors import fail, json_head
from headrace.jobs.api.reading import Fields, document, organisation_of, query_of
from headrace.jobs.api.writing import Written, encode
from headrace.net.http.exchange import Exchange, Handler
from headrace.net.http.heads import OK_PLAIN

if TYPE_CHECKING:
    from headrace.jobs.api.gate import Gate

_SEEN = ".read"
"""Operations that change nothing end so: they are written down only when they are refused."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request whose sender is known and may ask."""

    exchange: Exchange
    principal: Principal
    org: str
    ids: tuple[str, ...]
    """What else the path names, in order."""

    @property
    def user_id(self) -> str:
        """Who asks."""
        return self.principal.user_id

    def fields(self) -> Fields:
        """The body."""
        return Fields(document(self.exchange.body))

    def query(self) -> dict[str, str]:
        """The query."""
        return dict(query_of(self.exchange.head.query))


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes of a call."""

    body: Any
    """JSON; a `Text` and what is `Written` are sent as they are."""
    status: int = 200


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is no JSON: a log."""

    text: str = field(repr=False)


Work = Callable[[Call], Awaitable[Answer]]


class Calls:
    """Makes handlers."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._tasks: set[asyncio.Task[None]] = set()

    def handler(self, operation: str, work: Work) -> Handler:
        """A handler for a path that begins with an organisation."""

        def handle(exchange: Exchange) -> None:
            self.go(self._run(exchange, operation, work))

        return handle

    def go(self, work: Any) -> None:
        """Let a coroutine run by itself."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, exchange: Exchange, operation: str, work: Work) -> None:
        org, *ids = exchange.params
        target = ids[-1] if ids else ""
        principal: Principal | None = None
        try:
            principal = await self._gate.admit(exchange, operation, organisation_of(org), target)
            answer = await work(Call(exchange, principal, org, tuple(ids)))
            # Before the answer: what a client has been told is written down.
            if not operation.endswith(_SEEN):
                self._gate.record(exchange, operation, "allowed", principal, org, _made(answer) or target)
            respond(exchange, answer)
        except Exception as error:
            if principal is not None and not operation.endswith(_SEEN):
                why = error.message if isinstance(error, HeadraceError) else type(error).__name__
                self._gate.record(exchange, operation, "failed", principal, org, target, why)
            fail(exchange, error)


def respond(exchange: Exchange, answer: Answer) -> None:
    """Send it."""
    body = answer.body
    if isinstance(body, Text):
        exchange.respond(OK_PLAIN, body.text.encode(errors="replace"))
    elif isinstance(body, Written):
        exchange.respond(json_head(answer.status), body.pieces)
    else:
        exchange.respond(json_head(answer.status), encode(body))


def _made(answer: Answer) -> str:
    """The id of what was made, where something was."""
    body = answer.body
    if isinstance(body, str):
        return body
    found = (body.get("job_id") or body.get("id")) if isinstance(body, dict) else None
    return found if isinstance(found, str) else ""
