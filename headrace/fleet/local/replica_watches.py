# SPDX-License-Identifier: Apache-2.0
"""Long-poll requests from routers that wait for a replica count to change.

A router that scales a service up from zero must learn of new replicas at once, and for minutes nothing changes: so its
request stays open until the count differs from the known one, or a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.errors import NotFound
from headrace.fleet.local.object_store import Service
from headrace.platforms.kubernetes_client.objects import Document

WATCH_SECONDS = 25.0
"""How long a request stays open: less than the timeout of `api_client`."""


@dataclass(eq=False)
class _Watch:
    service: Service
    component: str
    known: Document
    """The known `wanted` and `ready`."""
    changed: asyncio.Future[Document]


class ReplicaWatches:
    """The open requests. Used from the loop's thread only."""

    def __init__(self, replicas: Callable[[Service, str], Document]) -> None:
        """replicas: returns the replica counts of a component; may raise NotFound."""
        self._replicas = replicas
        self._open: set[_Watch] = set()

    async def wait(self, service: Service, component: str, known: Document) -> Document:
        """Return the replica counts as soon as they differ from the known ones. Raises NotFound."""
        counts = self._replicas(service, component)
        if not _same(counts, known):
            return counts
        watch = _Watch(service, component, known, asyncio.get_running_loop().create_future())
        self._open.add(watch)
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                return await watch.changed
        except TimeoutError:
            return known
        finally:
            self._open.discard(watch)

    def notify(self, service: Service) -> None:
        """Complete the requests for a service whose counts have changed."""
        for watch in [watch for watch in self._open if watch.service == service and not watch.changed.done()]:
            try:
                counts = self._replicas(service, watch.component)
            except NotFound:
                continue  # it may come back; otherwise the request times out
            if not _same(counts, watch.known):
                watch.changed.set_result(counts)

    def close(self) -> None:
        """Complete all requests."""
        for watch in self._open:
            if not watch.changed.done():
                watch.changed.set_result(watch.known)


def _same(counts: Document, known: Document) -> bool:
    return all(counts.get(name) == known.get(name) for name in ("wanted", "ready"))
