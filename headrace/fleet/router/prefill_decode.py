# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on separate backends: a prefill backend computes the prompt, a decode backend generates from it.

The router sends the client's body to a prefill backend, gets a transfer token (`core.kv_transfer`), and sends the request
with the token to a decode backend, which fetches the KV cache. Backends have a `role`; without roles the router does not use
this module. To the router a token is opaque text.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.kv_transfer import MAX_TOKEN_CHARACTERS, PREFILL_PATH, TRANSFER_HEADER, prefill_proof
from headrace.fleet.router.backend import Backend, Outcome
from headrace.fleet.router.chooser import Chooser, PickByLoad
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.proxied_request import Forwarder, ProxiedRequest, RequestStrategy
from headrace.fleet.router.requests import JOIN_BYTES, RequestPlan

if TYPE_CHECKING:
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.settings import RouterSettings
    from headrace.fleet.router.upstream import UpstreamConnection
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.heads import Buffer

log = logging.getLogger("headrace.router")

PREFILL = "prefill"
_PROMPT_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions"))
_MAX_RESPONSE_BYTES = 4 * MAX_TOKEN_CHARACTERS
_ACCEPT_ENCODING = re.compile(rb"\r\naccept-encoding: [^\r]*")
_TRANSFER_TOKEN = re.compile(r"[0-9A-Za-z_.-]*")
_REFUSALS = (502, 503)
"""Statuses after which another backend gets the request: the backend, or a server behind it, cannot answer."""


class TransferOutcome:
    """What happened to a prompt: the label `outcome` of `headrace_router_handings_total`."""

    DONE = "handed"
    """The decode backend got a transfer token."""
    SHORT = "short"
    """The body was shorter than `least_bytes`."""
    NO_PREFILL = "no_prefill"
    NO_DECODER = "no_decoder"
    NOTHING = "nothing"
    """The prefill backend had nothing to transfer: less than a page, several prompts, or no room."""
    REFUSED = "refused"
    """The prefill backend answered with an error. If the request is wrong, the decode backend answers the same."""
    FAILED = "failed"
    LATE = "late"


OUTCOME_TEXTS = {
    TransferOutcome.DONE: "a prefill backend computes the prompt first",
    TransferOutcome.SHORT: "the request is too short for a KV transfer to pay off",
    TransferOutcome.NO_PREFILL: "no prefill backend is available: the decode backend computes the prompt",
    TransferOutcome.NO_DECODER: "no decode backend is available: a prefill backend serves the whole request",
}


def has_prompt(request: RequestView) -> bool:
    """Return whether the request has a prompt that a prefill backend can compute."""
    return request.head.method == b"POST" and request.head.path in _PROMPT_PATHS


class PrefillDecode:
    """Chooses prefill and decode backends, and counts outcomes. Used from the loop's thread only."""

    def __init__(self, settings: RouterSettings, backends: Backends) -> None:
        self.settings = settings.pairing
        self.key = settings.transfer_key
        self._prefill_chooser = _PrefillChooser(settings, backends)
        self.chooser: Chooser = _DecodeChooser(settings, backends, self)
        """Chooses the backend that answers: a decode backend, or a prefill backend if there is no other."""
        self.counts: Counter[str] = Counter()
        """Requests by `TransferOutcome`."""
        self.seconds = 0.0
        """Time that prefill backends took for prompts that were transferred."""

    def candidate(self, request: RequestView) -> str:
        """Return `TransferOutcome.DONE` if a prefill backend should compute the prompt; else the reason why not."""
        if len(request.body) < self.settings.least_bytes:
            return TransferOutcome.SHORT
        if not self._prefill_chooser.candidates():
            return TransferOutcome.NO_PREFILL
        if all(backend.address.role == PREFILL for backend in self.chooser.candidates()):
            return TransferOutcome.NO_DECODER
        return TransferOutcome.DONE

    def pick_prefill(self, request: RequestView) -> Backend | None:
        """Choose the backend that computes the prompt. Returns None, and counts why, if there is none."""
        outcome = self.candidate(request)
        if outcome != TransferOutcome.DONE:
            self.counts[outcome] += 1
            return None
        return self._prefill_chooser.pick(request)

    def explain(self, request: RequestView) -> dict[str, Any]:
        """Return what would happen to a request, for `/router/explain`."""
        if not has_prompt(request):
            return {}
        outcome = self.candidate(request)
        details: dict[str, Any] = {"handing": outcome, "handing_because": OUTCOME_TEXTS[outcome]}
        if outcome == TransferOutcome.DONE:
            live = self._prefill_chooser.candidates()
            details["prefill"] = self._prefill_chooser.decide(request, live, lambda backends: backends[0])[0].name
        return details

    def tick(self, now: float) -> None:
        """Let time pass for the prefill policy."""
        self._prefill_chooser.tick(now)


class _PrefillChooser(Chooser):
    """Chooses among prefill backends."""

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """Return the prefill backends that can take a request."""
        return [backend for backend in super().candidates(exclude) if backend.address.role == PREFILL]


class _DecodeChooser(Chooser):
    """Chooses among the backends that answer requests."""

    def __init__(self, settings: RouterSettings, backends: Backends, prefill_decode: PrefillDecode) -> None:
        super().__init__(settings, backends)
        self._prefill_decode = prefill_decode

    def candidates(self, exclude: Collection[Backend] = ()) -> Sequence[Backend]:
        """Return the decode backends that can take a request; without any, the prefill backends."""
        live = super().candidates(exclude)
        return [backend for backend in live if backend.address.role != PREFILL] or live

    def decide(self, request: RequestView, live: Sequence[Backend], pick_by_load: PickByLoad) -> tuple[Backend, str]:
        """Choose a backend, and say if it is a prefill backend."""
        backend, reason = super().decide(request, live, pick_by_load)
        return backend, ChoiceReason.AGGREGATED if backend.address.role == PREFILL else reason

    def explain(self, request: RequestView, live: Sequence[Backend]) -> dict[str, Any]:
        """Add what would happen to the prompt."""
        return {**super().explain(request, live), **self._prefill_decode.explain(request)}

    def tick(self, now: float) -> None:
        """Let time pass for both policies."""
        super().tick(now)
        self._prefill_decode.tick(now)


class PrefillFirst(RequestStrategy):
    """The strategy of a request: a prefill backend computes its prompt before a decode backend gets it.

    Text can be generated again without harm, so a request with a prompt is retried like an idempotent one: when a backend
    dies before its response starts, or refuses (502, 503). Without a decode backend, a prefill backend gets the retry.
    """

    def __init__(self, prefill_decode: PrefillDecode) -> None:
        self._prefill_decode = prefill_decode
        self._prefill: PrefillRequest | None = None

    def start(self, request: ProxiedRequest) -> bool:
        """Send the prompt to a prefill backend, if there is one and the prompt is long enough."""
        chooser = request.router.chooser
        if chooser is None or self._prefill is not None:
            return False
        view = request.view_for(chooser)
        self.repeatable = has_prompt(view)
        backend = self._prefill_decode.pick_prefill(view) if self.repeatable else None
        if backend is None:
            return False
        request.exchange.on_disconnect = request
        self._prefill = PrefillRequest(
            request.router,
            self._prefill_decode,
            request.exchange,
            request.plan,
            partial(self._prefill_done, request),
        )
        self._prefill.start(backend)
        return True

    def response_received(self, request: ProxiedRequest, head: UpstreamHead) -> bool:
        """Retry a refused request on another backend."""
        return not (head.status in _REFUSALS and request.retry_refused())

    def cancelled(self, request: ProxiedRequest) -> None:
        """Cancel the prefill request."""
        if self._prefill is not None:
            self._prefill.cancel()

    def _prefill_done(self, request: ProxiedRequest, token: bytes) -> None:
        if token:
            request.extra_head = b"\r\n%b: %b" % (TRANSFER_HEADER, token)
        request.start()


class PrefillRequest:
    """Sends one prompt to a prefill backend and reads the transfer token from the response.

    Implements `upstream.UpstreamHandler` and `upstream.ConnectionWaiter`. Calls `done` once: with the token, or with b"".
    """

    fast_path = True
    sending = False
    is_head = False
    upgrade = False

    def __init__(
        self,
        router: Forwarder,
        prefill_decode: PrefillDecode,
        exchange: Exchange,
        plan: RequestPlan,
        done: Callable[[bytes], None],
    ) -> None:
        self._router = router
        self._prefill_decode = prefill_decode
        self._body = exchange.body
        self._head = self._build_head(plan, exchange)
        self._done: Callable[[bytes], None] | None = done
        self._backend: Backend | None = None
        self._connection: UpstreamConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._new_connection = False
        self._response_head: UpstreamHead | None = None
        self._pieces: list[Buffer] = []
        self._started_at = time.monotonic()

    def start(self, backend: Backend) -> None:
        """Send the prompt to this backend."""
        self._backend = backend
        self._router.backends.begin(backend)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._prefill_decode.settings.prefill_seconds, self._timed_out)
        pool = self._router.pools[backend]
        connection = pool.send(self, self._first_bytes())
        if connection is None:
            self._new_connection = True
            pool.connect(self)
        else:
            self._send_rest(connection)

    def cancel(self) -> None:
        """Stop: the client has gone."""
        self._done = None
        self._end(Outcome.CANCELLED, drop=True)

    # Called by the pool.

    def connected(self, connection: UpstreamConnection) -> bool:
        """Send the prompt on a new connection."""
        if self._backend is None:
            return False
        connection.start_request(self, self._first_bytes())
        self._send_rest(connection)
        return True

    def connection_failed(self, why: str) -> None:
        """Continue without a token."""
        self._fail(why)

    # Called by the connection.

    def response_received(self, head: UpstreamHead, body: Buffer) -> None:
        """Read the token."""
        self._connection = None
        self._read(head, bytes(body))

    def response_started(self, head: UpstreamHead, length: int) -> None:
        """Keep the head until the body is complete."""
        self._response_head = head

    def response_data(self, data: Buffer) -> bool:
        """Collect the body, up to a limit."""
        self._pieces.append(bytes(data))
        if sum(map(len, self._pieces)) > _MAX_RESPONSE_BYTES:
            self._fail("sent a response that is too long for a transfer token", drop=True)
        return True

    def response_chunk(self, data: bytes, begin: int) -> bool:
        """Collect the body."""
        return self.response_data(data[begin:-2])

    def response_ended(self) -> None:
        """Read the token."""
        self._connection = None
        if self._response_head is not None:
            self._read(self._response_head, b"".join(self._pieces))

    def protocol_switched(self, head: UpstreamHead, rest: bytes) -> None:
        """Fail: 101 is not a valid response."""
        self._fail("switched protocols without being asked", drop=True)

    def response_failed(self, why: str, *, unanswered: bool = False, timed_out: bool = False) -> None:
        """Retry on a new connection, or continue without a token."""
        self._connection = None
        backend = self._backend
        if unanswered and not self._new_connection and not timed_out and backend is not None:
            # The backend may have closed the idle connection just as we used it.
            self._new_connection = True
            self._router.pools[backend].connect(self)
            return
        self._fail(why)

    def upstream_writable(self) -> None:
        """Do nothing: the body is written at once."""

    # Private.

    def _build_head(self, plan: RequestPlan, exchange: Exchange) -> bytes:
        """Return the client's head with the prefill path: its credentials are valid for both."""
        _, _, fields = plan.buffered.partition(b"\r\n")
        head = b"POST %b HTTP/1.1\r\n%b%b" % (PREFILL_PATH.encode(), fields, exchange.peer_address)
        head = _ACCEPT_ENCODING.sub(b"", head)
        if self._prefill_decode.key:
            proof = prefill_proof(self._prefill_decode.key, bytes(self._body), time.time())
            head += b"\r\n%b: %b" % (TRANSFER_HEADER, proof)
        return head

    def _first_bytes(self) -> bytes:
        if self._backend is None:
            return b""
        head = self._head + self._router.pools[self._backend].head_end
        return b"".join((head, self._body)) if len(self._body) <= JOIN_BYTES else head

    def _send_rest(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        if len(self._body) > JOIN_BYTES:
            connection.write(self._body)

    def _read(self, head: UpstreamHead, body: bytes) -> None:
        backend = self._backend
        name = backend.name if backend is not None else ""
        self._end(head.outcome)
        if head.status != 200:
            log.info("%s refused a prompt with status %d", name, head.status)
            self._report(b"", TransferOutcome.REFUSED)
            return
        try:
            token = orjson.loads(body)["ticket"]
            valid = (
                isinstance(token, str)
                and len(token) <= MAX_TOKEN_CHARACTERS
                and _TRANSFER_TOKEN.fullmatch(token) is not None
            )
        except (orjson.JSONDecodeError, TypeError, KeyError):
            valid = False
        if not valid:
            log.warning("%s sent no transfer token: is it a Headrace server with --role prefill?", name)
            self._report(b"", TransferOutcome.FAILED)
        elif token:
            self._prefill_decode.seconds += time.monotonic() - self._started_at
            self._report(token.encode(), TransferOutcome.DONE)
        else:
            self._report(b"", TransferOutcome.NOTHING)

    def _timed_out(self) -> None:
        # This counts against its health: otherwise each prompt would wait as long for a backend that hangs.
        self._end(Outcome.FAILED, drop=True)
        self._report(b"", TransferOutcome.LATE)

    def _fail(self, why: str, *, drop: bool = False) -> None:
        backend = self._backend
        if backend is None:
            return
        log.info("%s %s: a decode backend computes the prompt", backend.name, why)
        self._end(Outcome.FAILED, drop=drop)
        self._report(b"", TransferOutcome.FAILED)

    def _end(self, outcome: int, *, drop: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        backend, self._backend = self._backend, None
        connection, self._connection = self._connection, None
        if backend is not None:
            self._router.backends.end(backend, outcome, self._router.clock.now)
        if drop and connection is not None:
            connection.cancel()

    def _report(self, token: bytes, outcome: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            self._prefill_decode.counts[outcome] += 1
            done(token)
