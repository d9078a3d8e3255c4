# SPDX-License-Identifier: Apache-2.0
"""The `Scaler` of one machine: asks the daemon of `headrace up`, through its socket. Made by `apps.router`.

A daemon that is away fails a wake for as long as it is: what runs goes on, and the wake is tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.fleet.local.client import LocalFleet
from headrace.fleet.router.waking.scaler import Replicas, ScalerFailed
from headrace.fleet.router.waking.settings import LocalPlace, Target

log = logging.getLogger("headrace.router")

_NOT_KNOWN = Replicas(-1, -1)


class LocalScaler:
    """See the module."""

    def __init__(self, place: LocalPlace) -> None:
        self._fleet = LocalFleet(Path(place.folder))
        self._service = place.service
        self._telling: set[asyncio.Task[None]] = set()

    async def replicas(self, target: Target) -> Replicas:
        """See `Scaler.replicas`."""
        return await self._after(target, _NOT_KNOWN)

    async def scale(self, target: Target, replicas: int) -> None:
        """See `Scaler.scale`."""
        try:
            await self._fleet.scale(target.namespace, self._service, target.name, replicas)
        except HeadraceError as error:
            raise ScalerFailed(error.message) from None

    async def watch(self, target: Target) -> AsyncIterator[Replicas]:
        """See `Scaler.watch`: the daemon answers when it is otherwise."""
        known = _NOT_KNOWN
        while True:
            found = await self._after(target, known)
            if found != known:
                known = found
                yield found

    async def close(self) -> None:
        """Nothing is open between two questions."""
        for each in self._telling:
            each.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    def tell(self, target: Target, parts: Mapping[str, float]) -> None:
        """Of a cold start, for `headrace describe`. Nothing depends on it."""
        task = asyncio.ensure_future(self._tell(target, parts))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, target: Target, parts: Mapping[str, float]) -> None:
        try:
            await self._fleet.woken(target.namespace, self._service, parts)
        except HeadraceError as error:
            log.info("nobody was told of a cold start: %s", error.message)

    async def _after(self, target: Target, known: Replicas) -> Replicas:
        seen = {"wanted": known.wanted, "ready": known.ready}
        try:
            told = await self._fleet.replicas(target.namespace, self._service, target.name, seen)
        except HeadraceError as error:
            raise ScalerFailed(error.message) from None
        return Replicas(told["wanted"], told["ready"], told.get("started", 0.0), told.get("found", 0.0))
