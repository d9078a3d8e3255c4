# SPDX-License-Identifier: Apache-2.0
"""Waits until services are ready, or documents are gone, and tells on the way. Looks again and again, as any fleet can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.errors import Unavailable
from headrace.fleet.client.contract import Fleet
from headrace.fleet.client.kinds import SERVICE, kind_named
from headrace.fleet.client.summaries import reason_of, summary, verdict
from headrace.fleet.client.tasks import together
from headrace.fleet.words import Document, kind_of, name_of, text

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Patience:
    """How long to wait for what."""

    seconds: float = 600.0
    """For all of it."""
    invalid_seconds: float = 5.0
    """That a service says it must be edited: its model may have been applied a moment ago."""
    failing_seconds: float = 60.0
    """That its pods fail: what they need may be on its way."""
    look_seconds: float = 0.5


@dataclass(frozen=True)
class Outcome:
    """What came of one service."""

    namespace: str
    name: str
    ready: bool
    reason: str = ""
    url: str = ""


async def until_ready(
    fleet: Fleet, services: Sequence[Document], tell: Tell, patience: Patience | None = None
) -> list[Outcome]:
    """What becomes of services that were just applied, each by itself. Those that fail do not end the wait for others."""
    limits = patience or Patience()
    return await together(*(_one(fleet, each, tell, limits) for each in services))


async def _one(fleet: Fleet, service: Document, tell: Tell, limits: Patience) -> Outcome:
    space, name = text(service, "metadata", "namespace"), name_of(service)
    now = asyncio.get_running_loop().time
    ends, since, state, told = now() + limits.seconds, now(), "waiting", ""
    while True:
        found = await _look(fleet, space, name, ends)
        if found is None:
            return Outcome(space, name, False, "it was deleted meanwhile")
        said = verdict(found)
        if said == "ready":
            return Outcome(space, name, True, url=text(found, "status", "url"))
        if said != state:
            since, state = now(), said
        if line_of(found) != told:
            told = line_of(found)
            tell(told)
        patience = {"invalid": limits.invalid_seconds, "failing": limits.failing_seconds}.get(said)
        if patience is not None and now() - since >= patience:
            return Outcome(space, name, False, reason_of(found))
        if now() >= ends:
            return Outcome(space, name, False, f"not ready within {limits.seconds:g} s: {reason_of(found)}")
        await asyncio.sleep(min(limits.look_seconds, max(ends - now(), 0.01)))


async def _look(fleet: Fleet, namespace: str, name: str, ends: float) -> Document | None:
    """As it is now. A server that does not answer for a moment is asked again, until the time is over."""
    while True:
        try:
            return await fleet.get(kind_named(SERVICE), namespace, name)
        except Unavailable:
            if asyncio.get_running_loop().time() >= ends:
                raise
            await asyncio.sleep(1.0)


def line_of(service: Document) -> str:
    """`digits: Loading, 0/1 ready: ContainersNotReady: ...`: one line for who waits."""
    told = summary(service)
    state = ", ".join(each for each in (told.state, f"{told.ready_replicas}/{told.replicas} ready") if each)
    return f"{told.name}: {state}: {told.reason}" if told.reason else f"{told.name}: {state}"


async def until_gone(fleet: Fleet, documents: Sequence[Document], tell: Tell, patience: Patience) -> list[str]:
    """Wait for the end of objects that were deleted, and of the pods of services. What is left when the time is over."""
    now = asyncio.get_running_loop().time
    ends, told = now() + patience.seconds, ""
    while True:
        left = [each for one in documents for each in await _left(fleet, one)]
        if not left or now() >= ends:
            return left
        said = f"waiting for the end of {', '.join(left[:4])}" + (f" and {len(left) - 4} more" if left[4:] else "")
        if said != told:
            told = said
            tell(told)
        await asyncio.sleep(min(patience.look_seconds, max(ends - now(), 0.01)))


async def _left(fleet: Fleet, document: Document) -> list[str]:
    found = await fleet.live(document)
    uid = text(document, "metadata", "uid")
    if found is not None and text(found, "metadata", "uid") == uid:
        return [f"{kind_of(document)} {name_of(document)}"]
    # Somebody may have made it anew meanwhile: its pods are none of ours then.
    if found is not None or kind_of(document) != SERVICE:
        return []
    return [f"pod {name_of(each)}" for each in await fleet.pods(document)]
