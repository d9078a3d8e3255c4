# SPDX-License-Identifier: Apache-2.0
"""Leader election: of several processes, the one that holds a Lease works and the others wait.

Clocks of other machines are not trusted: a Lease has expired when this process has seen no renewal for its duration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from headrace.platforms.kubernetes_client.api import ApiClient, ApiError, Unreachable
from headrace.platforms.kubernetes_client.objects import LEASES, Document, get_int, get_mapping, get_str

log = logging.getLogger("headrace.operator")


@dataclass(frozen=True)
class LeaseSettings:
    """Where the Lease is, and how long it lasts."""

    namespace: str
    identity: str
    """Unique to this process."""
    name: str = "headrace-operator"
    duration_seconds: int = 30
    renew_seconds: float = 10.0
    retry_seconds: float = 2.0


def _monotonic() -> float:
    return asyncio.get_running_loop().time()


class LeaderElector:
    """Acquires the Lease and renews it."""

    def __init__(self, api: ApiClient, settings: LeaseSettings, now: Callable[[], datetime]) -> None:
        self._api = api
        self._settings = settings
        self._now = now
        self._observed: tuple[str, str] = ("", "")
        """Holder and renew time of the Lease when it last changed."""
        self._observed_at = 0.0
        self._leading = False

    async def acquire(self) -> None:
        """Return when this process is the leader."""
        while not await self._try_acquire():  # noqa: ASYNC110  nothing could set an event
            await asyncio.sleep(self._settings.retry_seconds)
        self._leading = True
        log.info("%s is the leader", self._settings.identity)

    async def renew(self) -> None:
        """Renew the Lease; return when it is lost. The caller must then stop working at once."""
        renewed = _monotonic()
        while True:
            await asyncio.sleep(self._settings.renew_seconds)
            if await self._try_acquire():
                renewed = _monotonic()
                continue
            # Another process may take the Lease when it expires; a third of it is left to stop running work.
            deadline = self._settings.duration_seconds * 2 / 3
            while _monotonic() - renewed < deadline and not self._held_by_other():
                await asyncio.sleep(self._settings.retry_seconds)
                if await self._try_acquire():
                    renewed = _monotonic()
                    break
            else:
                self._leading = False
                log.error("%s is no longer the leader", self._settings.identity)
                return

    async def release(self) -> None:
        """Give the Lease up, so that the next leader need not wait for it to expire."""
        if not self._leading:
            return
        self._leading = False
        try:
            lease = await self._api.get(LEASES, self._settings.namespace, self._settings.name)
            if lease is not None and get_str(lease, "spec", "holderIdentity") == self._settings.identity:
                spec = {**get_mapping(lease, "spec"), "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._api.replace(LEASES, self._settings.namespace, self._settings.name, {**lease, "spec": spec})
        except (ApiError, Unreachable) as error:
            log.info("cannot release the Lease, it will expire: %s", error)

    def _held_by_other(self) -> bool:
        return self._observed[0] not in ("", self._settings.identity)

    async def _try_acquire(self) -> bool:
        try:
            return await self._acquire_or_renew()
        except ApiError as error:
            if error.code != 409:
                log.warning("cannot acquire the Lease %s/%s: %s", self._settings.namespace, self._settings.name, error)
        except Unreachable as error:
            log.warning("cannot acquire the Lease: the API server does not answer (%s)", error)
        return False

    async def _acquire_or_renew(self) -> bool:
        namespace, name = self._settings.namespace, self._settings.name
        lease = await self._api.get(LEASES, namespace, name)
        if lease is None:
            body = {
                "apiVersion": LEASES.api_version,
                "kind": "Lease",
                "metadata": {"name": name},
                "spec": self._spec({}),
            }
            await self._api.create(LEASES, namespace, body)
            return True
        holder, renew_time = get_str(lease, "spec", "holderIdentity"), get_str(lease, "spec", "renewTime")
        if self._observed != (holder, renew_time):
            self._observed, self._observed_at = (holder, renew_time), _monotonic()
        duration = get_int(lease, "spec", "leaseDurationSeconds") or self._settings.duration_seconds
        if holder not in ("", self._settings.identity) and _monotonic() - self._observed_at < duration:
            return False
        await self._api.replace(LEASES, namespace, name, {**lease, "spec": self._spec(get_mapping(lease, "spec"))})
        self._observed = (self._settings.identity, "")
        return True

    def _spec(self, before: Document) -> dict[str, Any]:
        now = self._now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_ours = get_str(before, "holderIdentity") == self._settings.identity
        return {
            **before,
            "holderIdentity": self._settings.identity,
            "leaseDurationSeconds": self._settings.duration_seconds,
            "acquireTime": get_str(before, "acquireTime") if is_ours else now,
            "renewTime": now,
            "leaseTransitions": (get_int(before, "leaseTransitions") or 0) + (not is_ours),
        }
