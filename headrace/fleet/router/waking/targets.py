# SPDX-License-Identifier: Apache-2.0
"""The targets as they stand: follows each through the scaler, asks for other numbers, and knows what went wrong.

Owned by `activator`. What was seen last counts until something else is seen: an API server that is gone must not take along
what is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from headrace.fleet.router.waking.scaler import Replicas, Scaler, ScalerFailed
from headrace.fleet.router.waking.settings import Target

log = logging.getLogger("headrace.router")

RETRY_SECONDS = (0.1, 5.0)
"""The first pause after a failure, and the longest."""
_SEEN_SECONDS = 1.0


class Targets:
    """See the module. Used from the loop's thread only."""

    def __init__(self, targets: Sequence[Target], scaler: Scaler, on_change: Callable[[], None]) -> None:
        self.all = tuple(targets)
        self.scaling = asyncio.Lock()
        """Held by who decides and then scales: what was decided before a fall must not be written after it."""
        self._scaler = scaler
        self._on_change = on_change
        self._seen: dict[Target, Replicas] = {}
        self._failure: dict[Target, str] = {}
        self._woken: dict[Target, float] = {}
        """When it was asked that there be some, as long as nobody has asked for none since."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow them."""
        self._tasks = [asyncio.create_task(self._follow(target)) for target in self.all]

    async def close(self) -> None:
        """Follow them no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scaler.close()

    def renew(self, targets: Sequence[Target]) -> None:
        """Others, or the same with other numbers: what is known of those that stay counts on."""
        before = {str(each): each for each in self.all}
        self.all = tuple(targets)
        stay = [(before[str(each)], each) for each in targets if str(each) in before]
        self._seen = {new: self._seen[old] for old, new in stay if old in self._seen}
        self._failure = {new: self._failure[old] for old, new in stay if old in self._failure}
        self._woken = {new: self._woken[old] for old, new in stay if old in self._woken}
        for task in self._tasks:
            task.cancel()
        self.start()

    async def scale(self, target: Target, replicas: int) -> None:
        """There should be so many. Raises `ScalerFailed`."""
        try:
            await self._scaler.scale(target, replicas)
        except ScalerFailed as failed:
            self._failed(target, failed)
            raise
        self._failure.pop(target, None)
        self._woken[target] = asyncio.get_running_loop().time() if replicas else float("-inf")
        log.info("%s: %d replicas", target, replicas)

    async def wake(self) -> None:
        """Of whom there should be none, there should be one. Raises `ScalerFailed`, when all have been asked for."""
        failed: ScalerFailed | None = None
        now = asyncio.get_running_loop().time()
        for target in self.sleeping:
            # What was asked for a moment ago need not have been seen yet.
            if now - self._woken.get(target, float("-inf")) < _SEEN_SECONDS:
                continue
            try:
                await self.scale(target, 1)
            except ScalerFailed as error:
                failed = error
        if failed is not None:
            raise failed

    def seen(self, target: Target) -> Replicas | None:
        """How it stood when it was last seen."""
        return self._seen.get(target)

    @property
    def known(self) -> bool:
        """Whether every one has been seen, or could not be."""
        return all(target in self._seen or target in self._failure for target in self.all)

    @property
    def ready(self) -> bool:
        """Whether all that were ever seen are there."""
        return all(seen.wanted and seen.ready for seen in self._seen.values())

    def moments(self) -> dict[str, float]:
        """Of those that are ready: when the last of them began, and was found to be; nothing where nobody tells."""
        started = max((each.started for each in self._seen.values()), default=0.0)
        found = max((each.found for each in self._seen.values()), default=0.0)
        return {"started": started, "loading": found}

    @property
    def wanted(self) -> bool:
        """Whether all are there, or on their way."""
        return len(self._seen) == len(self.all) and all(seen.wanted for seen in self._seen.values())

    @property
    def sleeping(self) -> tuple[Target, ...]:
        """Those of which there should be none."""
        return tuple(target for target, seen in self._seen.items() if not seen.wanted)

    @property
    def troubled(self) -> bool:
        """Whether something could not be done or found out."""
        return bool(self._failure)

    def why_not(self) -> str:
        """Why they are not ready, for people; empty if they are."""
        for target in self.all:
            seen = self._seen.get(target)
            if target in self._failure:
                return f"{target}: {self._failure[target]}"
            if seen is not None and not (seen.wanted and seen.ready):
                return (
                    f"{target} has {seen.ready} of {seen.wanted} replicas ready; look at its pods "
                    f"(`kubectl describe {target.kind.lower()} {target.name} -n {target.namespace}`)"
                )
        return ""

    def as_json(self) -> list[dict[str, Any]]:
        """For the status."""
        return [self._json_of(target, self._seen.get(target)) for target in self.all]

    def __str__(self) -> str:
        return ", ".join(map(str, self.all))

    async def _follow(self, target: Target) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            try:
                async for seen in self._scaler.watch(target):
                    pause = RETRY_SECONDS[0]
                    self._failure.pop(target, None)
                    self._seen[target] = seen
                    self._on_change()
            except ScalerFailed as failed:
                self._failed(target, failed)
            except Exception:
                log.exception("following %s failed; trying again", target)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _failed(self, target: Target, failed: ScalerFailed) -> None:
        if self._failure.get(target) == str(failed):
            return
        log.warning("%s: %s", target, failed)
        self._failure[target] = str(failed)
        self._on_change()

    def _json_of(self, target: Target, seen: Replicas | None) -> dict[str, Any]:
        return {
            "kind": target.kind,
            "namespace": target.namespace,
            "name": target.name,
            "wanted": seen.wanted if seen else None,
            "ready": seen.ready if seen else None,
            "failure": self._failure.get(target, ""),
        }
