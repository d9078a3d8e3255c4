# SPDX-License-Identifier: Apache-2.0
"""The client of the Lepton API: one HTTP request per call. It knows paths and status codes, not services.

A cancelled caller waits for the answer to a change: otherwise it would not know whether the change was made.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from headrace.net.http_client import HttpResponse, parse_server_url, request
from headrace.platforms.commands import run_to_end
from headrace.platforms.lepton.settings import TOKEN, WORKSPACE, LeptonSettings

log = logging.getLogger("headrace.launch")


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A response whose status code the caller handles."""

    status: int
    body: Any


class LeptonClient:
    """The API of one workspace."""

    def __init__(self, settings: LeptonSettings) -> None:
        self._settings = settings
        self._host = parse_server_url(settings.gateway).hostname
        self._root = f"/api/v2/workspaces/{quote(settings.workspace, safe='')}"

    async def get(self, path: str, *accepted: int) -> ApiResponse:
        """Send a GET. `accepted`: status codes in addition to 2xx that the caller handles."""
        return await self._request("GET", path, None, accepted)

    async def post(self, path: str, body: Any, *accepted: int) -> ApiResponse:
        """Send a POST."""
        return await self._change("POST", path, body, accepted)

    async def delete(self, path: str, *accepted: int) -> ApiResponse:
        """Send a DELETE."""
        return await self._change("DELETE", path, None, accepted)

    async def _change(self, method: str, path: str, body: Any, accepted: tuple[int, ...]) -> ApiResponse:
        return await run_to_end(self._request(method, path, body, accepted))

    async def _request(self, method: str, path: str, body: Any, accepted: tuple[int, ...]) -> ApiResponse:
        self._check()
        response = await asyncio.to_thread(self._send, method, self._root + path, body)
        status, content = response.status, response.json()
        if 200 <= status < 300 or status in accepted:
            return ApiResponse(status, content)
        log.warning("Lepton answered %s %s with %d: %s", method, path.partition("?")[0], status, response.content[:500])
        raise self._error(status, content)

    def _check(self) -> None:
        if not self._settings.workspace:
            raise FailedPrecondition(f"no Lepton workspace is configured: set {WORKSPACE}")
        if not self._settings.token:
            raise FailedPrecondition(f"there is no token for Lepton: set {TOKEN}; the dashboard's settings make one")

    def _send(self, method: str, path: str, body: Any) -> HttpResponse:
        settings = self._settings
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {settings.token}", "Accept": "application/json"}
        try:
            return request(method, settings.gateway, path, raw, headers, seconds=settings.request_seconds)
        except OSError as error:
            log.warning("The Lepton gateway %s does not answer: %s", self._host, error)
            raise Unavailable(
                f"Lepton's gateway {self._host} does not answer; try again, or check the network"
            ) from None

    def _error(self, status: int, content: Any) -> Exception:
        detail = content.get("message") or content.get("code") if isinstance(content, dict) else None
        more = f": {str(detail)[:500]}" if detail else ""
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
