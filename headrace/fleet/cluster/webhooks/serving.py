# SPDX-License-Identifier: Apache-2.0
"""The webhooks on a socket, by our own wire with TLS. Made by `running`.

Key and certificate are given to the wire as files, which it looks at every second. They are files in memory alone: the root
of the operator's container cannot be written to, and a key on a disk is one more to guard.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headrace.core.limits import MIB, Limits
from headrace.fleet.cluster.resources import SERVICES
from headrace.fleet.cluster.webhooks.reviews import Deed, Sight, mutated, reviewed, validated
from headrace.fleet.cluster.webhooks.settings import CHECKED, READY_PATH, path_of
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import WireServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles

if TYPE_CHECKING:
    from headrace.core.telemetry.registry import Registry
    from headrace.net.http.exchange import Exchange

_BODY_BYTES = 16 * MIB
"""Two documents, of which etcd takes one and a half MiB each, and what JSON makes of them."""


class Identity:
    """A key and a certificate as a file that only this process can open."""

    def __init__(self, pem: bytes) -> None:
        self._file = os.memfd_create("headrace-webhook", os.MFD_CLOEXEC)
        self._pem = b""
        self.put(pem)

    @property
    def files(self) -> TlsFiles:
        """For the wire."""
        path = f"/proc/self/fd/{self._file}"
        return TlsFiles(path, path)

    def put(self, pem: bytes) -> None:
        """Take others into use, within a second; nothing happens if they are the same."""
        if pem != self._pem:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, pem, 0)
            self._pem = pem

    def close(self) -> None:
        """Forget them."""
        os.close(self._file)


class WebhookMetrics:
    """What is counted of reviews."""

    def __init__(self, registry: Registry, ends: Callable[[], float]) -> None:
        self.reviews = registry.counter(
            "headrace_operator_reviews_total",
            "Reviews by kind, deed (mutate, validate) and outcome: allowed, refused or failed.",
            ["kind", "deed", "outcome"],
        )
        registry.callback(
            "headrace_operator_webhook_certificate_expiry_seconds",
            "When the webhooks' certificate ends, in seconds since 1970; 0 before there is one.",
            lambda: {(): ends()},
        )


class _Reviewer:
    """Answers one path."""

    def __init__(self, kind: str, deed: str, act: Deed, sight: Callable[[], Sight], metrics: WebhookMetrics) -> None:
        self._act = act
        self._sight = sight
        self._counts = {
            each: metrics.reviews.labels(kind=kind, deed=deed, outcome=each)
            for each in ("allowed", "refused", "failed")
        }

    def handle(self, exchange: Exchange) -> None:
        try:
            answer, verdict = reviewed(exchange.body, self._act, self._sight())
        except Exception as error:
            # The API server does as its failure policy says; who sent no review is told so.
            self._counts["failed"].add()
            exchange.fail(error)
            return
        self._counts["refused" if verdict.refusals else "allowed"].add()
        exchange.respond(_OK, msgspec.json.encode(answer))


_OK = ResponseHead(200, [(CONTENT_TYPE, JSON)])
_READY = ResponseHead(200, [(CONTENT_TYPE, b"text/plain")])


def server_of(address: Address, identity: Identity, sight: Callable[[], Sight], metrics: WebhookMetrics) -> WireServer:
    """A server of all webhooks, not started yet."""
    routes = Routes()
    for deed, act, kinds in (("mutate", mutated, (SERVICES,)), ("validate", validated, CHECKED)):
        for each in kinds:
            reviewer = _Reviewer(each.kind, deed, act, sight, metrics)
            routes.add("POST", path_of(each.kind, deed), reviewer.handle)
    routes.add("GET", READY_PATH, lambda exchange: exchange.respond(_READY, b"ok\n"))
    site = Site(routes, limits=Limits(body_bytes=_BODY_BYTES))
    return WireServer(site, address, partial(NegotiatingProtocol, site), tls=identity.files)
