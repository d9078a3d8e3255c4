# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to the Lepton gateway. Called by `driver`; knows paths and codes, not what a service is.

Whoever is cancelled while something is being changed waits for the answer first: otherwise nobody would know whether it was.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from headrace.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from headrace.platforms.lepton.settings import TOKEN, WORKSPACE, LeptonSettings

log = logging.getLogger("headrace.launch")

_MOST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: only of codes that mean something to the caller."""

    status: int
    body: Any


class LeptonApi:
    """The API of one workspace."""

    def __init__(self, settings: LeptonSettings) -> None:
        parts = urlsplit(settings.gateway)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"{settings.gateway[:200]!a} is no address of a Lepton gateway")
        self._settings = settings
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._root = f"{parts.path.rstrip('/')}/api/v2/workspaces/{quote(settings.workspace, safe='')}"

    async def get(self, path: str, *accepted: int) -> Answer:
        """Look. Codes beside 200 that are answers to the caller are named."""
        return await self._ask("GET", path, None, accepted)

    async def post(self, path: str, body: Any, *accepted: int) -> Answer:
        """Make something."""
        return await self._change("POST", path, body, accepted)

    async def delete(self, path: str, *accepted: int) -> Answer:
        """Remove something."""
        return await self._change("DELETE", path, None, accepted)

    async def _change(self, method: str, path: str, body: Any, accepted: tuple[int, ...]) -> Answer:
        work = asyncio.ensure_future(self._ask(method, path, body, accepted))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            if not work.cancelled():
                work.exception()
            raise

    async def _ask(self, method: str, path: str, body: Any, accepted: tuple[int, ...]) -> Answer:
        self._check()
        status, raw = await asyncio.to_thread(self._send, method, self._root + path, body)
        try:
            told = json.loads(raw) if raw.strip() else None
        except ValueError:
            told = None
        if 200 <= status < 300 or status in accepted:
            return Answer(status, told)
        log.warning("Lepton answered %s %s with %d: %s", method, path.partition("?")[0], status, raw[:500])
        raise self._error(status, told)

    def _check(self) -> None:
        if not self._settings.workspace:
            raise FailedPrecondition(f"no Lepton workspace is chosen: set {WORKSPACE}")
        if not self._settings.token:
            raise FailedPrecondition(f"there is no token for Lepton: set {TOKEN}; the dashboard's settings make one")

    def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        seconds = self._settings.request_seconds
        connection: http.client.HTTPConnection
        if self._secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self._settings.token}", "Accept": "application/json"}
        raw = None
        if body is not None:
            raw = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            return response.status, response.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            log.warning("Lepton's gateway %s does not answer: %s", self._host, error)
            raise Unavailable(
                f"Lepton's gateway {self._host} does not answer; try again, or look at the network"
            ) from None
        finally:
            connection.close()

    def _error(self, status: int, told: Any) -> Exception:
        said = told.get("message") or told.get("code") if isinstance(told, dict) else None
        more = f": {str(said)[:500]}" if said else ""
        match status:
            case 401:
                return Unauthenticated(f"Lepton refuses the token: make a new one in the dashboard and set {TOKEN}")
            case 403:
                return PermissionDenied(f"Lepton does not allow this with this token{more}")
            case 404:
                return FailedPrecondition(
                    f"Lepton does not know the workspace {self._settings.workspace[:100]!a}{more}"
                )
            case 400 | 422:
                return InvalidArgument(f"Lepton refuses this{more}")
            case 402 | 429:
                return ResourceExhausted(f"the Lepton workspace has no room for this now{more}")
        return Unavailable(f"Lepton answers with an error, {status}{more}; try again later")
