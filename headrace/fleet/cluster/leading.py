# SPDX-License-Identifier: Apache-2.0
"""One of several controllers leads: whoever holds the Lease. The others wait.

Clocks of other machines are not trusted: a Lease has run out when nobody was seen to renew it for as long as it lasts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.fleet.cluster.api import Api, Refused, Unreachable
from headrace.fleet.cluster.resources import LEASES
from headrace.fleet.words import Document, part, text, whole

log = logging.getLogger("headrace.operator")


@dataclass(frozen=True)
class LeaseSettings:
    """Where the Lease is, and how long it lasts."""

    namespace: str
    identity: str
    """Of this process, and of no other."""
    name: str = "headrace-operator"
    lasts_seconds: int = 30
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0


class Leader:
    """Gets the Lease, and keeps it."""

    def __init__(self, api: Api, settings: LeaseSettings, now: Callable[[], datetime]) -> None:
        self._api = api
        self._settings = settings
        self._now = now
        self._seen: tuple[str, str] = ("", "")
        self._since = 0.0
        self._held = False

    async def acquire(self) -> None:
        """Return when this process leads."""
        while not await self._tried():  # noqa: ASYNC110  nobody here could set an event
            await asyncio.sleep(self._settings.retry_seconds)
        self._held = True
        log.info("%s leads", self._settings.identity)

    async def keep(self) -> None:
        """Renew the Lease; return when it is lost. Whoever leads must then stop at once."""
        good = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.renew_seconds)
            if await self._tried():
                good = time.monotonic()
                continue
            # Another may take it when it has run out; a third of it is left for what is under way.
            while time.monotonic() - good < self._settings.lasts_seconds * 2 / 3 and not self._another():
                await asyncio.sleep(self._settings.retry_seconds)
                if await self._tried():
                    good = time.monotonic()
                    break
            else:
                self._held = False
                log.error("%s no longer leads", self._settings.identity)
                return

    async def release(self) -> None:
        """Let the next one lead without waiting."""
        if not self._held:
            return
        self._held = False
        try:
            found = await self._api.get(LEASES, self._settings.namespace, self._settings.name)
            if found is not None and text(found, "spec", "holderIdentity") == self._settings.identity:
                freed = {**found, "spec": {**part(found, "spec"), "holderIdentity": "", "leaseDurationSeconds": 1}}
                await self._api.replace(LEASES, self._settings.namespace, self._settings.name, freed)
        except (Refused, Unreachable) as error:
            log.info("the Lease stays until it runs out: %s", error)

    def _another(self) -> bool:
        return self._seen[0] not in ("", self._settings.identity)

    async def _tried(self) -> bool:
        try:
            return await self._try()
        except Refused as refused:
            if refused.code != 409:
                log.warning("the Lease %s/%s: %s", self._settings.namespace, self._settings.name, refused)
        except Unreachable as error:
            log.warning("the Lease cannot be asked for: the API server does not answer (%s)", error)
        return False

    async def _try(self) -> bool:
        namespace, name = self._settings.namespace, self._settings.name
        found = await self._api.get(LEASES, namespace, name)
        if found is None:
            body = {
                "apiVersion": LEASES.api_version,
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": self._spec({}),
            }
            await self._api.create(LEASES, namespace, body)
            return True
        holder, renewed = text(found, "spec", "holderIdentity"), text(found, "spec", "renewTime")
        if self._seen != (holder, renewed):
            self._seen, self._since = (holder, renewed), time.monotonic()
        lasts = whole(found, "spec", "leaseDurationSeconds") or self._settings.lasts_seconds
        if holder not in ("", self._settings.identity) and time.monotonic() - self._since < lasts:
            return False
        await self._api.replace(LEASES, namespace, name, {**found, "spec": self._spec(part(found, "spec"))})
        self._seen = (self._settings.identity, "")
        return True

    def _spec(self, before: Document) -> dict[str, Any]:
        now = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = text(before, "holderIdentity") == self._settings.identity
        return {
            **before,
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": self._settings.lasts_seconds,
            "acquireTime": text(before, "acquireTime") if ours else now,
            "renewTime": now,
            "leaseTransitions": (whole(before, "leaseTransitions") or 0) + (not ours),
        }
