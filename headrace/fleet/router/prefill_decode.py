# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on separate backends: a prefill backend computes the prompt, a decode backend generates from it.

The router sends the client's body to a prefill backend, gets a transfer token (`core.kv_transfer`), and sends the request
with the token to a decode backend, which fetches the KV cache. Backends have a `role`; without roles the router does not use
this module. To the router a token is opaque text.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from headrace.core.kv_transfer import MAX_TOKEN_CHARACTERS, PREFILL_PATH, TRANSFER_HEADER, prefill_proof
from headrace.fleet.router.backend import Backend
from headrace.fleet.router.chooser import Chooser, PickByLoad
from headrace.fleet.router.policies import ChoiceReason, RequestView
from headrace.fleet.router.proxied_request import Forwarder, ProxiedRequest, RequestStrategy
from headrace.fleet.router.requests import RequestPlan
from headrace.fleet.router.side_request import SideRequest

if TYPE_CHECKING:
    from headrace.fleet.router.backends import Backends
    from headrace.fleet.router.responses import UpstreamHead
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.exchange import Exchange

log = logging.getLogger("headrace.router")

PREFILL = "prefill"
_PROMPT_PATHS = frozenset((b"/v1/chat/completions", b"/v1/completions"))
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
    """The prefill backend had nothing to transfer: less than a page, several prompts, or no memory."""
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
            request.extra_head += b"\r\n%b: %b" % (TRANSFER_HEADER, token)
        request.start()


class PrefillRequest(SideRequest):
    """Sends one prompt to a prefill backend and reads the transfer token from the response.

    Calls `done` once: with the token, or with b"".
    """

    max_response_bytes = 4 * MAX_TOKEN_CHARACTERS

    def __init__(
        self,
        router: Forwarder,
        prefill_decode: PrefillDecode,
        exchange: Exchange,
        plan: RequestPlan,
        done: Callable[[bytes], None],
    ) -> None:
        self._prefill_decode = prefill_decode
        super().__init__(router, self._build_head(plan, exchange), exchange.body)
        self._done: Callable[[bytes], None] | None = done
        self._started_at = time.monotonic()

    def start(self, backend: Backend) -> None:
        """Send the prompt to this backend."""
        self.send(backend, self._prefill_decode.settings.prefill_seconds)

    def cancel(self) -> None:
        """Stop: the client has gone."""
        self._done = None
        super().cancel()

    # Private.

    def _build_head(self, plan: RequestPlan, exchange: Exchange) -> bytes:
        """Return the client's head with the prefill path: its credentials are valid for both."""
        _, _, fields = plan.buffered.partition(b"\r\n")
        head = b"POST %b HTTP/1.1\r\n%b%b" % (PREFILL_PATH.encode(), fields, exchange.peer_address)
        head = _ACCEPT_ENCODING.sub(b"", head)
        if self._prefill_decode.key:
            proof = prefill_proof(self._prefill_decode.key, bytes(exchange.body), time.time())
            head += b"\r\n%b: %b" % (TRANSFER_HEADER, proof)
        return head

    def _received(self, head: UpstreamHead, body: bytes) -> None:
        backend = self.backend
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

    def _failed(self, backend: Backend, reason: str, *, late: bool) -> None:
        log.info("%s %s: a decode backend computes the prompt", backend.name, reason)
        self._report(b"", TransferOutcome.LATE if late else TransferOutcome.FAILED)

    def _report(self, token: bytes, outcome: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            self._prefill_decode.counts[outcome] += 1
            done(token)
