# SPDX-License-Identifier: Apache-2.0
"""The webhook server of one replica: its certificates, its HTTPS server and its registration."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headrace.core.limits import MIB, Limits
from headrace.core.telemetry.metrics import Registry
from headrace.fleet.cluster.resources import SERVICES
from headrace.fleet.cluster.webhooks.certificates import Certificates, CertificateStore
from headrace.fleet.cluster.webhooks.registration import WebhookRegistrar
from headrace.fleet.cluster.webhooks.reviews import ClusterSnapshot, Operation, mutate, review, validate_document
from headrace.fleet.cluster.webhooks.settings import READY_PATH, VALIDATED_KINDS, WebhookSettings, webhook_path
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead
from headrace.net.http.routes import Routes
from headrace.net.negotiation import NegotiatingProtocol
from headrace.net.server import HttpServer
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.net.tls import TlsFiles
from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.work_queue import backoff

if TYPE_CHECKING:
    from headrace.core.telemetry.metrics import Registry
    from headrace.net.http.exchange import Exchange

log = logging.getLogger("headrace.operator")

DRAIN_SECONDS = 5.0


class Webhooks:
    """Serves the webhooks. The leader also renews certificates and registers the webhooks."""

    def __init__(
        self,
        api: ApiClient,
        settings: WebhookSettings,
        snapshot: Callable[[], ClusterSnapshot],
        registry: Registry,
        now: Callable[[], datetime],
    ) -> None:
        self._settings = settings
        self._snapshot = snapshot
        self._certificates = CertificateStore(api, settings, now)
        self._registrar = WebhookRegistrar(api, settings)
        self._metrics = WebhookMetrics(registry, lambda: self._expiry)
        self._expiry = 0.0
        self._leads = False
        self._authorities = ""
        """The authorities that were registered at the last refresh."""
        self._wake = asyncio.Event()
        self._certificate_file: CertificateFile | None = None
        self.server: HttpServer | None = None
        """Set once there are certificates."""

    @property
    def registered(self) -> bool:
        """Whether the webhooks are registered."""
        return bool(self._authorities)

    def lead(self) -> None:
        """Start to renew certificates and to register the webhooks."""
        self._leads = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until cancelled. Raises if the address cannot be listened on."""
        failures = 0
        try:
            while True:
                try:
                    await self._refresh()
                    failures = 0
                except (ApiError, Unreachable) as error:
                    failures += 1
                    log.warning("cannot refresh the webhooks: %s", error)
                pause = self._settings.refresh_seconds
                if failures:
                    pause = min(pause, backoff(failures))
                # Not wait_for, which may swallow a cancellation that comes with the timeout.
                timer = asyncio.get_running_loop().call_later(pause, self._wake.set)
                await self._wake.wait()
                timer.cancel()
                self._wake.clear()
        finally:
            await self._close()

    async def _refresh(self) -> None:
        certificates = await self._certificates.refresh(leads=self._leads, known=self._authorities)
        await self._serve(certificates)
        if self._leads:
            # Known only if nothing was written: API servers take a moment to notice a change.
            unchanged = await self._registrar.register(certificates.authorities)
            self._authorities = certificates.authorities if unchanged else ""

    async def _serve(self, certificates: Certificates) -> None:
        self._expiry = certificates.expiry.timestamp()
        if self._certificate_file is None:
            self._certificate_file = CertificateFile(certificates.identity)
        self._certificate_file.put(certificates.identity)
        if self.server is None:
            server = webhook_server(
                Address.parse(self._settings.address), self._certificate_file, self._snapshot, self._metrics
            )
            await server.start()
            self.server = server

    async def _close(self) -> None:
        if self.server is not None:
            await self.server.drain(DRAIN_SECONDS)
        if self._certificate_file is not None:
            self._certificate_file.close()


_BODY_BYTES = 16 * MIB
"""Two documents of up to 1.5 MiB in etcd, with the overhead of JSON."""


class CertificateFile:
    """A key and a certificate in an anonymous file that only this process can open."""

    def __init__(self, pem: bytes) -> None:
        self._file = os.memfd_create("headrace-webhook", os.MFD_CLOEXEC)
        self._pem = b""
        self.put(pem)

    @property
    def files(self) -> TlsFiles:
        """Paths for the TLS server."""
        path = f"/proc/self/fd/{self._file}"
        return TlsFiles(path, path)

    def put(self, pem: bytes) -> None:
        """Replace the key and certificate; the server reloads them within a second."""
        if pem != self._pem:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, pem, 0)
            self._pem = pem

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class WebhookMetrics:
    """Metrics of the webhooks."""

    def __init__(self, registry: Registry, expiry: Callable[[], float]) -> None:
        self.reviews = registry.counter(
            "headrace_operator_reviews_total",
            "Admission reviews by kind, operation (mutate, validate) and outcome: allowed, refused or failed.",
            ["kind", "deed", "outcome"],
        )
        registry.callback(
            "headrace_operator_webhook_certificate_expiry_seconds",
            "Expiry of the webhooks' certificate, in seconds since 1970; 0 before there is one.",
            lambda: {(): expiry()},
        )


class _ReviewHandler:
    """Answers the requests of one path."""

    def __init__(
        self,
        kind: str,
        name: str,
        operation: Operation,
        snapshot: Callable[[], ClusterSnapshot],
        metrics: WebhookMetrics,
    ) -> None:
        self._operation = operation
        self._snapshot = snapshot
        self._counts = {
            outcome: metrics.reviews.labels(kind=kind, deed=name, outcome=outcome)
            for outcome in ("allowed", "refused", "failed")
        }

    def handle(self, exchange: Exchange) -> None:
        try:
            answer, decision = review(exchange.body, self._operation, self._snapshot())
        except Exception as error:
            # The API server follows its failure policy; another client gets the error.
            self._counts["failed"].add()
            exchange.fail(error)
            return
        self._counts["refused" if decision.refusals else "allowed"].add()
        exchange.respond(_OK, msgspec.json.encode(answer))


_OK = ResponseHead(200, [(CONTENT_TYPE, JSON)])
_READY = ResponseHead(200, [(CONTENT_TYPE, b"text/plain")])


def webhook_server(
    address: Address, identity: CertificateFile, snapshot: Callable[[], ClusterSnapshot], metrics: WebhookMetrics
) -> HttpServer:
    """Return a server of all webhooks that is not started yet."""
    routes = Routes()
    for name, operation, kinds in (("mutate", mutate, (SERVICES,)), ("validate", validate_document, VALIDATED_KINDS)):
        for kind in kinds:
            reviewer = _ReviewHandler(kind.kind, name, operation, snapshot, metrics)
            routes.add("POST", webhook_path(kind.kind, name), reviewer.handle)
    routes.add("GET", READY_PATH, lambda exchange: exchange.respond(_READY, b"ok\n"))
    site = Site(routes, limits=Limits(body_bytes=_BODY_BYTES))
    return HttpServer(site, address, partial(NegotiatingProtocol, site), tls=identity.files)
