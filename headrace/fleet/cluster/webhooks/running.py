# SPDX-License-Identifier: Apache-2.0
"""The webhooks of one replica: certificates, server and registration, looked after until it ends. Started by `program`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from headrace.core.telemetry.registry import Registry
from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.queue import backoff
from headrace.fleet.cluster.webhooks.certificates import Certificates
from headrace.fleet.cluster.webhooks.keeping import Keeper
from headrace.fleet.cluster.webhooks.registering import Registrar
from headrace.fleet.cluster.webhooks.reviews import Sight
from headrace.fleet.cluster.webhooks.serving import Identity, WebhookMetrics, server_of
from headrace.fleet.cluster.webhooks.settings import WebhookSettings
from headrace.net.server import WireServer
from headrace.net.sockets import Address

log = logging.getLogger("headrace.operator")

DRAIN_SECONDS = 5.0


class Webhooks:
    """Serves reviews. `lead` says that this replica is the one that renews and registers."""

    def __init__(
        self,
        api: Api,
        settings: WebhookSettings,
        sight: Callable[[], Sight],
        registry: Registry,
        now: Callable[[], datetime],
    ) -> None:
        self._settings = settings
        self._sight = sight
        self._keeper = Keeper(api, settings, now)
        self._registrar = Registrar(api, settings)
        self._metrics = WebhookMetrics(registry, lambda: self._ends)
        self._ends = 0.0
        self._leads = False
        self._authorities = ""
        """Those that the API server was seen to know of at the last look."""
        self._soon = asyncio.Event()
        self._identity: Identity | None = None
        self.server: WireServer | None = None
        """Listening, once there are certificates."""

    @property
    def registered(self) -> bool:
        """Whether the API server was seen to know of us."""
        return bool(self._authorities)

    def lead(self) -> None:
        """From now on, renew and register."""
        self._leads = True
        self._soon.set()

    async def run(self) -> None:
        """Look after everything until cancelled. Raises when the address cannot be listened on."""
        failures = 0
        try:
            while True:
                try:
                    await self._look()
                    failures = 0
                except (Refused, Unreachable) as error:
                    failures += 1
                    log.warning("the webhooks cannot be looked after: %s", error)
                pause = self._settings.look_seconds
                if failures:
                    pause = min(pause, backoff(failures))
                # Not wait_for, which may take a cancellation for a timeout when both come at once.
                timer = asyncio.get_running_loop().call_later(pause, self._soon.set)
                await self._soon.wait()
                timer.cancel()
                self._soon.clear()
        finally:
            await self._close()

    async def _look(self) -> None:
        certificates = await self._keeper.look(leads=self._leads, known=self._authorities)
        await self._serve(certificates)
        if self._leads:
            # Known is what was there already: a change takes API servers a moment to hear of.
            same = await self._registrar.register(certificates.authorities)
            self._authorities = certificates.authorities if same else ""

    async def _serve(self, certificates: Certificates) -> None:
        self._ends = certificates.ends.timestamp()
        if self._identity is None:
            self._identity = Identity(certificates.identity)
        self._identity.put(certificates.identity)
        if self.server is None:
            server = server_of(Address.parse(self._settings.address), self._identity, self._sight, self._metrics)
            await server.start()
            self.server = server

    async def _close(self) -> None:
        if self.server is not None:
            await self.server.drain(DRAIN_SECONDS)
        if self._identity is not None:
            self._identity.close()
