# SPDX-License-Identifier: Apache-2.0
"""Wait until services are ready or documents are deleted, by polling, and report progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.core.errors import Unavailable
from headrace.fleet.client.contract import Fleet, gather_all, kind_named
from headrace.fleet.client.tables import progress_of, reason_of, summary
from headrace.fleet.names import SERVICE
from headrace.platforms.kubernetes_client.objects import Document, get_str, kind_of, name_of

Report = Callable[[str], None]


@dataclass(frozen=True)
class WaitSettings:
    """How long to wait."""

    seconds: float = 600.0
    """Total time."""
    invalid_seconds: float = 5.0
    """How long a service may be invalid: its model may just have been applied."""
    failing_seconds: float = 60.0
    """How long its pods may fail: what they need may still be starting."""
    poll_seconds: float = 0.5


@dataclass(frozen=True)
class Outcome:
    """The result for one service."""

    namespace: str
    name: str
    ready: bool
    reason: str = ""
    url: str = ""


async def wait_until_ready(
    fleet: Fleet, services: Sequence[Document], report: Report, patience: WaitSettings | None = None
) -> list[Outcome]:
    """Wait for services that were just applied. A failing service does not end the wait for the others."""
    limits = patience or WaitSettings()
    return await gather_all(*(_wait_for_service(fleet, service, report, limits) for service in services))


async def _wait_for_service(fleet: Fleet, service: Document, report: Report, limits: WaitSettings) -> Outcome:
    space, name = get_str(service, "metadata", "namespace"), name_of(service)
    now = asyncio.get_running_loop().time
    deadline, changed_at, state, line = now() + limits.seconds, now(), "waiting", ""
    while True:
        live = await _get_service(fleet, space, name, deadline)
        if live is None:
            return Outcome(space, name, False, "it was deleted meanwhile")
        progress = progress_of(live)
        if progress == "ready":
            return Outcome(space, name, True, url=get_str(live, "status", "url"))
        if progress != state:
            changed_at, state = now(), progress
        if progress_line(live) != line:
            line = progress_line(live)
            report(line)
        patience = {"invalid": limits.invalid_seconds, "failing": limits.failing_seconds}.get(progress)
        if patience is not None and now() - changed_at >= patience:
            return Outcome(space, name, False, reason_of(live))
        if now() >= deadline:
            return Outcome(space, name, False, f"not ready within {limits.seconds:g} s: {reason_of(live)}")
        await asyncio.sleep(min(limits.poll_seconds, max(deadline - now(), 0.01)))


async def _get_service(fleet: Fleet, namespace: str, name: str, deadline: float) -> Document | None:
    """Return the service. Retries while the server does not answer, until the time is over."""
    while True:
        try:
            return await fleet.get(kind_named(SERVICE), namespace, name)
        except Unavailable:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(1.0)


def progress_line(service: Document) -> str:
    """Return one line of progress: `digits: Loading, 0/1 ready: ContainersNotReady: ...`."""
    shown = summary(service)
    state = ", ".join(part for part in (shown.state, f"{shown.ready_replicas}/{shown.replicas} ready") if part)
    return f"{shown.name}: {state}: {shown.reason}" if shown.reason else f"{shown.name}: {state}"


async def wait_until_deleted(
    fleet: Fleet, documents: Sequence[Document], report: Report, patience: WaitSettings
) -> list[str]:
    """Wait until deleted objects, and the pods of services, are gone. Return what is left when the time is over."""
    now = asyncio.get_running_loop().time
    deadline, line = now() + patience.seconds, ""
    while True:
        remaining = [name for document in documents for name in await _remaining(fleet, document)]
        if not remaining or now() >= deadline:
            return remaining
        message = f"waiting for the deletion of {', '.join(remaining[:4])}" + (
            f" and {len(remaining) - 4} more" if remaining[4:] else ""
        )
        if message != line:
            line = message
            report(line)
        await asyncio.sleep(min(patience.poll_seconds, max(deadline - now(), 0.01)))


async def _remaining(fleet: Fleet, document: Document) -> list[str]:
    live = await fleet.live(document)
    uid = get_str(document, "metadata", "uid")
    if live is not None and get_str(live, "metadata", "uid") == uid:
        return [f"{kind_of(document)} {name_of(document)}"]
    # The object may have been created again: its pods are not the deleted ones then.
    if live is not None or kind_of(document) != SERVICE:
        return []
    return [f"pod {name_of(pod)}" for pod in await fleet.pods(document)]
