# SPDX-License-Identifier: Apache-2.0
"""The `Scaler` of one machine: asks the daemon of `headrace up`, through its socket. Made by `apps.router`.

A daemon that is away fails a wake for as long as it is: what runs goes on, and the wake is tried again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.fleet.local.client import LocalFleet
from headrace.router.waking.scaler import Replicas, ScalerFailed, polled
from headrace.router.waking.settings import LocalPlace, Target

_LOOK_SECONDS = 0.05


class LocalScaler:
    """See the module."""

    def __init__(self, place: LocalPlace) -> None:
        self._fleet = LocalFleet(Path(place.folder))
        self._service = place.service

    async def replicas(self, target: Target) -> Replicas:
        """See `Scaler.replicas`."""
        try:
            told = await self._fleet.replicas(target.namespace, self._service, target.name)
        except HeadraceError as error:
            raise ScalerFailed(error.message) from None
        return Replicas(told["wanted"], told["ready"])

    async def scale(self, target: Target, replicas: int) -> None:
        """See `Scaler.scale`."""
        try:
            await self._fleet.scale(target.namespace, self._service, target.name, replicas)
        except HeadraceError as error:
            raise ScalerFailed(error.message) from None

    def watch(self, target: Target) -> AsyncIterator[Replicas]:
        """See `Scaler.watch`."""
        return polled(self.replicas, target, _LOOK_SECONDS)

    async def close(self) -> None:
        """Nothing is open between two questions."""
