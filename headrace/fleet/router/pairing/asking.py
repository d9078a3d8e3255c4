# SPDX-License-Identifier: Apache-2.0
"""One prompt on its way to a prefill: the client's body to `PREFILL_PATH`, and the ticket that comes back.

Made by `pairing.flows`; a customer of the same connections as `router.flows.Flow`. Whatever happens, its flow is told once:
a ticket, or why there is none.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from headrace.core.handing import HEADER, LONGEST_TICKET, PREFILL_PATH, proof_of_asking
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.pairing.pairs import Handed
from headrace.fleet.router.requests import JOIN_BYTES

if TYPE_CHECKING:
    from headrace.fleet.router.answers import AnswerHead
    from headrace.fleet.router.forwarding import Forwarder
    from headrace.fleet.router.pairing.pairs import Pairs
    from headrace.fleet.router.requests import RequestPlan
    from headrace.fleet.router.upstream import Upstream
    from headrace.net.http.exchange import Buffer, Exchange

log = logging.getLogger("headrace.router")

_MOST_BYTES = 4 * LONGEST_TICKET
_CODINGS = re.compile(rb"\r\naccept-encoding: [^\r]*")
_TICKET = re.compile(r"[0-9A-Za-z_.-]*")

Done = Callable[[bytes, str], None]
"""The ticket and `Handed.DONE`; or nothing, and why."""


class PrefillAsk:
    """See the module, and `customers.Customer` and `customers.Applicant`."""

    plain = True
    sending = False
    silent = False
    upgrade = False

    def __init__(self, router: Forwarder, pairs: Pairs, exchange: Exchange, plan: RequestPlan, done: Done) -> None:
        self._router = router
        self._pairs = pairs
        self._body = exchange.body
        self._head = self._head_of(plan, exchange)
        self._done: Done | None = done
        self._backend: Backend | None = None
        self._connection: Upstream | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fresh = False
        self._answer: AnswerHead | None = None
        self._pieces: list[Buffer] = []
        self._began = time.monotonic()

    def start(self, backend: Backend) -> None:
        """Ask this one."""
        self._backend = backend
        self._router.backends.begin(backend)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._pairs.settings.prefill_seconds, self._late)
        pool = self._router.pools[backend]
        connection = pool.send(self, self._opening())
        if connection is None:
            self._fresh = True
            pool.connect(self)
        else:
            self._go_on(connection)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self._done = None
        self._end(Outcome.CANCELLED, drop=True)

    # Called by the pool.

    def connected(self, connection: Upstream) -> bool:
        """See `customers.Applicant`."""
        if self._backend is None:
            return False
        connection.begin(self, self._opening())
        self._go_on(connection)
        return True

    def unreachable(self, why: str) -> None:
        """See `customers.Applicant`."""
        self._fail(why)

    # Called by the connection.

    def answered(self, head: AnswerHead, body: Buffer) -> None:
        """See `customers.Customer`."""
        self._connection = None
        self._read(head, bytes(body))

    def answer_begun(self, head: AnswerHead, length: int) -> None:
        """See `customers.Customer`."""
        self._answer = head

    def answer_piece(self, data: Buffer) -> bool:
        """See `customers.Customer`."""
        self._pieces.append(bytes(data))
        if sum(map(len, self._pieces)) > _MOST_BYTES:
            self._fail("answered far more than a ticket", drop=True)
        return True

    def answer_chunk(self, data: bytes, begin: int) -> bool:
        """See `customers.Customer`."""
        return self.answer_piece(data[begin:-2])

    def answer_ended(self) -> None:
        """See `customers.Customer`."""
        self._connection = None
        if self._answer is not None:
            self._read(self._answer, b"".join(self._pieces))

    def switched(self, head: AnswerHead, rest: bytes) -> None:
        """See `customers.Customer`. Nobody asked for that."""
        self._fail("answered what it was not asked", drop=True)

    def failed(self, why: str, *, untouched: bool = False, late: bool = False) -> None:
        """See `customers.Customer`."""
        self._connection = None
        backend = self._backend
        if untouched and not self._fresh and not late and backend is not None:
            # It may have closed an idle connection just as we used it.
            self._fresh = True
            self._router.pools[backend].connect(self)
            return
        self._fail(why)

    def writable(self) -> None:
        """See `customers.Customer`."""

    # Inside.

    def _head_of(self, plan: RequestPlan, exchange: Exchange) -> bytes:
        """The client's head with another path: who may ask for an answer may ask for its beginning."""
        _, _, fields = plan.whole.partition(b"\r\n")
        head = b"POST %b HTTP/1.1\r\n%b%b" % (PREFILL_PATH.encode(), fields, exchange.peer_address)
        head = _CODINGS.sub(b"", head)
        if self._pairs.key:
            proof = proof_of_asking(self._pairs.key, bytes(self._body), time.time())
            head += b"\r\n%b: %b" % (HEADER, proof)
        return head

    def _opening(self) -> bytes:
        if self._backend is None:
            return b""
        head = self._head + self._router.pools[self._backend].tail
        return b"".join((head, self._body)) if len(self._body) <= JOIN_BYTES else head

    def _go_on(self, connection: Upstream) -> None:
        self._connection = connection
        if len(self._body) > JOIN_BYTES:
            connection.write(self._body)

    def _read(self, head: AnswerHead, body: bytes) -> None:
        backend = self._backend
        name = backend.name if backend is not None else ""
        self._end(head.outcome)
        if head.status != 200:
            log.info("%s did not take a prompt: it answered %d", name, head.status)
            self._tell(b"", Handed.REFUSED)
            return
        try:
            ticket = orjson.loads(body)["ticket"]
            right = isinstance(ticket, str) and len(ticket) <= LONGEST_TICKET and _TICKET.fullmatch(ticket) is not None
        except (orjson.JSONDecodeError, TypeError, KeyError):
            right = False
        if not right:
            log.warning("%s answered no ticket: is it a Headrace with --role prefill?", name)
            self._tell(b"", Handed.FAILED)
        elif ticket:
            self._pairs.seconds += time.monotonic() - self._began
            self._tell(ticket.encode(), Handed.DONE)
        else:
            self._tell(b"", Handed.NOTHING)

    def _late(self) -> None:
        # Against its health: one that hangs would have each prompt wait as long as this one did.
        self._end(Outcome.FAILED, drop=True)
        self._tell(b"", Handed.LATE)

    def _fail(self, why: str, *, drop: bool = False) -> None:
        backend = self._backend
        if backend is None:
            return
        log.info("%s %s: a decoder computes the prompt", backend.name, why)
        self._end(Outcome.FAILED, drop=drop)
        self._tell(b"", Handed.FAILED)

    def _end(self, outcome: int, *, drop: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        backend, self._backend = self._backend, None
        connection, self._connection = self._connection, None
        if backend is not None:
            self._router.backends.end(backend, outcome, self._router.clock.now)
        if drop and connection is not None:
            connection.drop()

    def _tell(self, ticket: bytes, outcome: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            self._pairs.counts[outcome] += 1
            done(ticket, outcome)
