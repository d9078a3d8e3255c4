# SPDX-License-Identifier: Apache-2.0
"""The steps of a start on a platform: launch, see whether it stays up, and undo what failed. Called by `launcher`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from headrace.core.errors import AlreadyExists, FailedPrecondition, HeadraceError
from headrace.platforms.contract import Driver, Handle, LaunchSpec, Observed
from headrace.platforms.http_asking import get

log = logging.getLogger("headrace.launch")

SETTLE_SECONDS = 5.0
"""How long a start looks whether the service answers, or dies at once. A queue takes longer, and is not waited for."""
LAST_LINES = 20
_LIVENESS = "/api/v1/health/liveness"
_UNDO_SECONDS = 5.0


class StartFailed(FailedPrecondition):
    """Raise when a service ends by itself instead of becoming ready."""

    def __init__(self, message: str, last_lines: str = "") -> None:
        super().__init__(message)
        self.last_lines = last_lines
        """Of its log, for whoever can show several lines."""


class Existed(Exception):
    """The platform has one of this name already: not ours, and not to be stopped in the course of undoing."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@runtime_checkable
class Describing(Protocol):
    """A driver that knows more of a service once it has an address: its node, its tunnel."""

    async def described(self, handle: Handle) -> Handle:
        """The handle with what is known by now."""


async def described(driver: Driver, handle: Handle) -> Handle:
    """The handle, with all that the driver can tell of it by now."""
    return await driver.described(handle) if isinstance(driver, Describing) else handle


async def check_platform_ready(driver: Driver) -> None:
    """Raises FailedPrecondition with all that is missing, before anything is recorded or made."""
    missing = [check for check in await driver.preflight() if not check.passed]
    if missing:
        told = "; ".join(f"{check.name}: {check.message}" for check in missing)
        raise FailedPrecondition(f"{driver.name} is not ready for services. {told}")


async def launch(driver: Driver, spec: LaunchSpec) -> Handle:
    """Start it. Raises Existed, or what the platform says."""
    try:
        return await driver.start(spec)
    except AlreadyExists as error:
        raise Existed(error.message) from None


async def first_steps(driver: Driver, handle: Handle, settle_seconds: float = SETTLE_SECONDS) -> str:
    """Its address, as soon as it answers there, or is likely to; "" where that takes longer. Raises StartFailed."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + settle_seconds
    pause, url = 0.02, None
    while True:
        observed = await driver.status(handle)
        if observed.phase in ("ended", "gone"):
            raise await failed_start(driver, handle, observed)
        url = url or await driver.endpoint(handle)
        if url is not None and await get(url, _LIVENESS, 1.0) is not None:
            return url
        if loop.time() >= limit:
            return url or ""
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.5)


async def failed_start(driver: Driver, handle: Handle, observed: Observed) -> StartFailed:
    """Why it did not stay up, with its last words."""
    lines = await driver.logs(handle, LAST_LINES)
    reason = observed.reason or ("it is gone" if observed.phase == "gone" else "it has ended")
    last = next((line for line in reversed(lines.splitlines()) if line.strip()), "")
    words = f"service {handle.job_id} did not stay up: {reason}"
    return StartFailed(f"{words}; its last words: {last.strip()[:300]}" if last else words, lines)


async def undo(driver: Driver, handle: Handle, forget: Callable[[], bool]) -> None:
    """Stop it and forget it, to the end, whoever is cancelled meanwhile. What cannot be stopped stays recorded."""

    async def work() -> None:
        try:
            await driver.stop(handle, _UNDO_SECONDS)
        except HeadraceError as error:
            log.error("service %s could not be removed: %s; it stays recorded", handle.job_id, error.message)
            return
        await asyncio.to_thread(forget)

    undoing = asyncio.ensure_future(work())
    try:
        await asyncio.shield(undoing)
    except asyncio.CancelledError:
        await asyncio.wait([undoing])
        raise
