# SPDX-License-Identifier: Apache-2.0
"""Keeps rollouts by steps going: asks the routers of a service what they counted, and has the controller look at it again.

Made and run by `controller`, which decides by `rollouts` and writes the state into the status. Nothing is remembered here
but what routers told last: a daemon that is killed in a step goes on from the status, with the next answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.fleet.local.asking import router_status
from headrace.fleet.local.routing import Routers
from headrace.fleet.local.store import Store
from headrace.fleet.rollouts.counts import Counted, counted
from headrace.fleet.rollouts.looking import under_way
from headrace.fleet.words import name_of, text

log = logging.getLogger("headrace.fleet")

Service = tuple[str, str]
_LOOK_SECONDS = 0.5
"""Between two looks at a rollout: how late an error may be noticed."""


class Stepping:
    """See the module. Used from the loop's thread only."""

    def __init__(self, store: Store, routers: Routers, ask: Callable[[Service], None]) -> None:
        """ask: have a look at a service."""
        self._store = store
        self._routers = routers
        self._ask = ask
        self._counted: dict[Service, Counted | None] = {}

    def counted(self, service: Service) -> Counted | None:
        """What the routers of a service told last; None as long as not all of them have."""
        return self._counted.get(service)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("looking at rollouts failed; trying again")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        services = [
            (text(each, "metadata", "namespace"), name_of(each))
            for each in self._store.all("InferenceService")
            if under_way(each)
        ]
        for gone in [each for each in self._counted if each not in services]:
            del self._counted[gone]
        for service in services:
            routers = self._routers.of(service)
            answers = await asyncio.gather(*(router_status(each.port) for each in routers))
            told = {each.name: answer for each, answer in zip(routers, answers, strict=True)}
            self._counted[service] = counted(told) if told else None
            self._ask(service)
