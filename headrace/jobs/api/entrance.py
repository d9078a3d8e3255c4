# SPDX-License-Identifier: Apache-2.0
"""What needs no token: login, health, version. And the way out: logout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.core.errors import Unavailable
from headrace.jobs.api.calls import Answer, Calls, respond
from headrace.jobs.api.errors import fail
from headrace.jobs.api.gate import address_of, token_of
from headrace.jobs.api.reading import document
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.jobs.api.gate import Gate
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

VERSIONS = ("/api/v1", "/api/v2")


class Entrance:
    """Handlers."""

    def __init__(self, gate: Gate, calls: Calls) -> None:
        self._authenticator = gate.access.authenticator
        self._calls = calls
        self.ready = True
        """False while the gateway drains."""

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        for base in VERSIONS:
            routes.add("POST", f"{base}/login", lambda exchange: self._calls.go(self._login(exchange)))
            routes.add("POST", f"{base}/logout", lambda exchange: self._calls.go(self._logout(exchange)))
        for base in ("", *VERSIONS):
            routes.add("GET", f"{base}/health", self.liveness)
            routes.add("GET", f"{base}/health/liveness", self.liveness)
            routes.add("GET", f"{base}/health/readiness", self.readiness)
            routes.add("GET", f"{base}/version", self.version)

    def liveness(self, exchange: Exchange) -> None:
        """It answers, so it lives."""
        respond(exchange, Answer({"status": "healthy", "version": __version__}))

    def readiness(self, exchange: Exchange) -> None:
        """Whether it takes new work."""
        if self.ready:
            respond(exchange, Answer({"status": "ready", "version": __version__}))
        else:
            fail(exchange, Unavailable("the gateway is shutting down: ask another one", retry_after_seconds=1.0))

    def version(self, exchange: Exchange) -> None:
        """Which Headrace this is."""
        respond(exchange, Answer({"name": "headrace", "version": __version__, "api": ["v1", "v2"]}))

    async def _login(self, exchange: Exchange) -> None:
        """A key and an organisation become a token."""
        try:
            body = document(exchange.body)
            # ngc_api_key: as it was called up to TAO 5.
            key = body.get("ngc_key") or body.get("ngc_api_key")
            found = await self._authenticator.login(key, body.get("ngc_org_name"), address_of(exchange))
        except Exception as error:
            fail(exchange, error)
            return
        told = {
            "user_id": found.user_id,
            "token": found.token,
            "user_name": found.user_name,
            "user_email": found.user_email,
        }
        respond(exchange, Answer(told))

    async def _logout(self, exchange: Exchange) -> None:
        """The token of this request is refused from now on."""
        try:
            await self._authenticator.logout(token_of(exchange.head), address_of(exchange))
        except Exception as error:
            fail(exchange, error)
            return
        respond(exchange, Answer({"message": "Logged out: the token is refused from now on"}))
