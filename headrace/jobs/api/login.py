# SPDX-License-Identifier: Apache-2.0
"""Routes for login, logout, health and version; and the console's session and audit routes.

The console's routes below `/api/v2` are Headrace's own; NVIDIA's API does not have them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.api.access.audit import AuditLog
from headrace.api.access.roles import OPERATIONS, is_allowed
from headrace.core.errors import Unavailable
from headrace.jobs.api.handlers import Call, Handlers, Response, address_of, respond, token_of
from headrace.jobs.api.requests import parse_body, parse_number
from headrace.jobs.api.responses import fail
from headrace.version import __version__

if TYPE_CHECKING:
    from headrace.jobs.api.handlers import Authorisation
    from headrace.net.http.exchange import Exchange
    from headrace.net.http.routes import Routes

VERSIONS = ("/api/v1", "/api/v2")

_LINES, _MAX_LINES = 100, 1000


class LoginRoutes:
    """Routes that need no authorisation: login, logout, health, version."""

    def __init__(self, authorisation: Authorisation, handlers: Handlers) -> None:
        self._authenticator = authorisation.access.authenticator
        self._handlers = handlers
        self.ready = True
        """False while the gateway drains."""

    def add_to(self, routes: Routes) -> None:
        """Add the routes."""
        for base in VERSIONS:
            routes.add("POST", f"{base}/login", lambda exchange: self._handlers.spawn(self._login(exchange)))
            routes.add("POST", f"{base}/logout", lambda exchange: self._handlers.spawn(self._logout(exchange)))
        for base in ("", *VERSIONS):
            routes.add("GET", f"{base}/health", self.liveness)
            routes.add("GET", f"{base}/health/liveness", self.liveness)
            routes.add("GET", f"{base}/health/readiness", self.readiness)
            routes.add("GET", f"{base}/version", self.version)

    def liveness(self, exchange: Exchange) -> None:
        """Report healthy."""
        respond(exchange, Response({"status": "healthy", "version": __version__}))

    def readiness(self, exchange: Exchange) -> None:
        """Report ready, or respond 503 while the gateway drains."""
        if self.ready:
            respond(exchange, Response({"status": "ready", "version": __version__}))
        else:
            fail(exchange, Unavailable("the gateway is shutting down: use another one", retry_after_seconds=1.0))

    def version(self, exchange: Exchange) -> None:
        """Send the version of Headrace."""
        respond(exchange, Response({"name": "headrace", "version": __version__, "api": ["v1", "v2"]}))

    async def _login(self, exchange: Exchange) -> None:
        """Exchange a key and an organisation for a token."""
        try:
            body = parse_body(exchange.body)
            # ngc_api_key: the name up to TAO 5.
            key = body.get("ngc_key") or body.get("ngc_api_key")
            login = await self._authenticator.login(key, body.get("ngc_org_name"), address_of(exchange))
        except Exception as error:
            fail(exchange, error)
            return
        content = {
            "user_id": login.user_id,
            "token": login.token,
            "user_name": login.user_name,
            "user_email": login.user_email,
        }
        respond(exchange, Response(content))

    async def _logout(self, exchange: Exchange) -> None:
        """Revoke the token of this request."""
        try:
            await self._authenticator.logout(token_of(exchange.head), address_of(exchange))
        except Exception as error:
            fail(exchange, error)
            return
        respond(exchange, Response({"message": "Logged out: the token is refused from now on"}))


class ConsoleRoutes:
    """Actions for the console."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    async def session(self, call: Call) -> Response:
        """Return the user, and every operation that their role allows in this organisation."""
        principal = call.principal
        role = principal.role_in(call.org) or ""
        session = {
            "user_id": principal.user_id,
            "user_name": principal.user_name,
            "user_email": principal.email,
            "organisation": call.org,
            "role": role,
            "may": [operation for operation in OPERATIONS if is_allowed(role, operation)],
        }
        return Response(session)

    async def audit(self, call: Call) -> Response:
        """Return the newest `size` lines of the audit log about this organisation."""
        size = parse_number(call.query(), "size")
        count = _LINES if size is None else min(size, _MAX_LINES)
        return Response({"events": await asyncio.to_thread(self._audit.recent, call.org, count)})
