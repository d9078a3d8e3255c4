# SPDX-License-Identifier: Apache-2.0
"""Rollouts by steps in a cluster: asks the pods of our routers what they counted, and has `rollouts` decide.

Called by `reconciling` at each look; while a rollout is under way there is another one a little later. Where no router of
ours splits the requests (Knative, a Gateway) nobody is asked, and steps go by time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from headrace.fleet.asking import router_status
from headrace.fleet.names import COMPONENT_LABEL, ROUTER
from headrace.fleet.planning import Plan
from headrace.fleet.planning.front import FRONT, PORT
from headrace.fleet.rollouts.advancing import Note
from headrace.fleet.rollouts.counts import Counted, counted
from headrace.fleet.rollouts.looking import rolled_on, under_way
from headrace.fleet.status.observed import condition_of
from headrace.fleet.words import Document, labels_of, name_of, text

LOOK_SECONDS = 5.0
"""Between two looks at a rollout: how late an error may be noticed."""
_KEPT = 0.8
"""Of this time an answer counts as new: what is told of it brings another look, and that one must find nothing to tell."""
_FORGOTTEN = 10 * LOOK_SECONDS
_ASK_SECONDS = 3.0

Ask = Callable[[str, int], Awaitable[Any]]
"""The status of a router, by host and port; None if it does not answer."""


async def ask_pod(host: str, port: int) -> Any:
    """See `Ask`."""
    return await router_status(host, port, _ASK_SECONDS)


class Stepping:
    """See the module."""

    def __init__(self, now: Callable[[], datetime], ask: Ask = ask_pod) -> None:
        self._now = now
        self._ask = ask
        self._told: dict[str, tuple[datetime, Counted | None]] = {}
        """By the uid of the service: what was answered last, and when."""

    async def moved(self, service: Document, plan: Plan, pods: Iterable[Document]) -> tuple[Document, Sequence[Note]]:
        """The service with the next states of its rollouts in its status, and the events to tell."""
        uid, now = text(service, "metadata", "uid"), self._now()
        if not plan.counted or not under_way(service):
            self._told.pop(uid, None)
            return rolled_on(service, plan, None, now)
        asked, told = self._told.get(uid, (None, None))
        if asked is None or told is None or (now - asked).total_seconds() >= _KEPT * LOOK_SECONDS:
            told = await self._counted(plan, pods)
            for old in [each for each, (when, _) in self._told.items() if (now - when).total_seconds() > _FORGOTTEN]:
                del self._told[old]  # of a service that was deleted in the middle, most likely
            self._told[uid] = (now, told)
        return rolled_on(service, plan, told, now)

    async def _counted(self, plan: Plan, pods: Iterable[Document]) -> Counted | None:
        """By all routers that get requests; None while one of them does not answer."""
        component = ROUTER if ROUTER in plan.components else FRONT
        routers = [each for each in pods if labels_of(each).get(COMPONENT_LABEL) == component and _serves(each)]
        if not routers:
            return None
        answers = await asyncio.gather(*(self._ask(text(each, "status", "podIP"), PORT) for each in routers))
        return counted({name_of(each): answer for each, answer in zip(routers, answers, strict=True)})


def _serves(pod: Document) -> bool:
    ready = text(condition_of(pod, "Ready"), "status") == "True"
    return ready and bool(text(pod, "status", "podIP")) and not text(pod, "metadata", "deletionTimestamp")
