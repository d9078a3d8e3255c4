# SPDX-License-Identifier: Apache-2.0
"""The workloads that activation scales: the `Scaler` protocol, and the observed state of each target.

The Kubernetes and the local scaler are in `programs.router_scalers`. The last observed state counts until another one is
observed: if the API server is unreachable, running replicas are still used.

Instead of scaling to zero, `put_models_to_sleep` frees the memory of a warm Headrace server. Its replica stays ready: the
server holds a request to a sleeping model, and wakes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.settings import ScaleTarget
from headrace.net.http_client import request

log = logging.getLogger("headrace.router")

RETRY_SECONDS = (0.1, 5.0)
"""The first pause after a failure, and the longest."""
_OBSERVED_SECONDS = 1.0
"""Minimum interval between two writes of the same replica count: the watch may be late."""

_INDEX_SECONDS = 10.0
_SLEEP_SECONDS = 180.0
"""Timeout of putting a model to sleep: a server waits up to two minutes for the requests in flight."""


@dataclass(frozen=True, slots=True)
class ReplicaCounts:
    """Replicas of a target."""

    desired: int
    """Desired replicas, `wanted` in JSON."""
    ready: int
    """Ready replicas, without those that are being stopped."""
    started_at: float = field(default=0.0, compare=False)
    """When the process of a ready replica started, since the epoch; 0 if unknown."""
    ready_at: float = field(default=0.0, compare=False)
    """When it was found to be ready, since the epoch; 0 if unknown."""


class ScalerError(Exception):
    """A replica count could not be read or written, for now or for good. The message says what to do."""


class Scaler(Protocol):
    """Reads and writes the replica counts of targets. Called from the loop's thread; everything raises `ScalerError`."""

    async def replicas(self, target: ScaleTarget) -> ReplicaCounts:
        """Return the current counts."""

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        """Set the desired replicas. Returns when that is stored, not when it is reached."""

    def watch(self, target: ScaleTarget) -> AsyncIterator[ReplicaCounts]:
        """Yield the current counts and every change, in order. May end; the caller starts again."""

    async def close(self) -> None:
        """Close connections. Replicas keep running."""


class ScaleTargets:
    """Watches all targets, scales them, and remembers failures. Used from the loop's thread only."""

    def __init__(self, targets: Sequence[ScaleTarget], scaler: Scaler, on_change: Callable[[], None]) -> None:
        self.all = tuple(targets)
        self.lock = asyncio.Lock()
        """Held while a replica count is decided and written, so that a decision from before a scale-down is not written
        after it."""
        self._scaler = scaler
        self._on_change = on_change
        self._counts: dict[ScaleTarget, ReplicaCounts] = {}
        self._failure: dict[ScaleTarget, str] = {}
        self._scaled_up_at: dict[ScaleTarget, float] = {}
        """When a target was last scaled up; -inf if it was scaled to zero since."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to watch."""
        self._tasks = [asyncio.create_task(self._watch(target)) for target in self.all]

    async def close(self) -> None:
        """Stop watching, and close the scaler."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scaler.close()

    def update(self, targets: Sequence[ScaleTarget]) -> None:
        """Replace the targets, or their scaling; keep what is known of those that stay."""
        before = {str(target): target for target in self.all}
        self.all = tuple(targets)
        kept = [(before[str(target)], target) for target in targets if str(target) in before]
        self._counts = {new: self._counts[old] for old, new in kept if old in self._counts}
        self._failure = {new: self._failure[old] for old, new in kept if old in self._failure}
        self._scaled_up_at = {new: self._scaled_up_at[old] for old, new in kept if old in self._scaled_up_at}
        for task in self._tasks:
            task.cancel()
        self.start()

    async def scale(self, target: ScaleTarget, replicas: int) -> None:
        """Set the desired replicas of a target. Raises `ScalerError`."""
        try:
            await self._scaler.scale(target, replicas)
        except ScalerError as error:
            self._record_failure(target, error)
            raise
        self._failure.pop(target, None)
        self._scaled_up_at[target] = asyncio.get_running_loop().time() if replicas else float("-inf")
        log.info("%s: %d replicas", target, replicas)

    async def scale_from_zero(self) -> None:
        """Set one replica for every target that has none. Raises `ScalerError` after trying all of them."""
        error: ScalerError | None = None
        now = asyncio.get_running_loop().time()
        for target in self.at_zero:
            if now - self._scaled_up_at.get(target, float("-inf")) < _OBSERVED_SECONDS:
                continue
            try:
                await self.scale(target, 1)
            except ScalerError as failed:
                error = failed
        if error is not None:
            raise error

    def counts(self, target: ScaleTarget) -> ReplicaCounts | None:
        """Return the last observed counts of a target."""
        return self._counts.get(target)

    @property
    def known(self) -> bool:
        """Whether every target was observed or has failed."""
        return all(target in self._counts or target in self._failure for target in self.all)

    @property
    def ready(self) -> bool:
        """Whether all observed targets have ready replicas."""
        return all(counts.desired and counts.ready for counts in self._counts.values())

    def start_times(self) -> dict[str, float]:
        """Return when the last replica started and when it was found ready; 0 if unknown."""
        started = max((counts.started_at for counts in self._counts.values()), default=0.0)
        ready = max((counts.ready_at for counts in self._counts.values()), default=0.0)
        return {"started": started, "loading": ready}

    @property
    def are_scaled_up(self) -> bool:
        """Whether all targets have replicas, or are starting them."""
        return len(self._counts) == len(self.all) and all(counts.desired for counts in self._counts.values())

    @property
    def at_zero(self) -> tuple[ScaleTarget, ...]:
        """Targets with no desired replicas."""
        return tuple(target for target, counts in self._counts.items() if not counts.desired)

    @property
    def has_failures(self) -> bool:
        """Whether a target could not be read or scaled."""
        return bool(self._failure)

    def not_ready_reason(self) -> str:
        """Return why the targets are not ready, as text for users; "" if they are."""
        for target in self.all:
            counts = self._counts.get(target)
            if target in self._failure:
                return f"{target}: {self._failure[target]}"
            if counts is not None and not (counts.desired and counts.ready):
                return (
                    f"{target} has {counts.ready} of {counts.desired} replicas ready; look at its pods "
                    f"(`kubectl describe {target.kind.lower()} {target.name} -n {target.namespace}`)"
                )
        return ""

    def as_json(self) -> list[dict[str, Any]]:
        """Return the state of all targets, for the status."""
        return [self._target_json(target, self._counts.get(target)) for target in self.all]

    def __str__(self) -> str:
        return ", ".join(map(str, self.all))

    async def _watch(self, target: ScaleTarget) -> None:
        pause = RETRY_SECONDS[0]
        while True:
            try:
                async for counts in self._scaler.watch(target):
                    pause = RETRY_SECONDS[0]
                    self._failure.pop(target, None)
                    self._counts[target] = counts
                    self._on_change()
            except ScalerError as error:
                self._record_failure(target, error)
            except Exception:
                log.exception("Watching %s failed; trying again", target)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS[1])

    def _record_failure(self, target: ScaleTarget, error: ScalerError) -> None:
        if self._failure.get(target) == str(error):
            return
        log.warning("%s: %s", target, error)
        self._failure[target] = str(error)
        self._on_change()

    def _target_json(self, target: ScaleTarget, counts: ReplicaCounts | None) -> dict[str, Any]:
        return {
            "kind": target.kind,
            "namespace": target.namespace,
            "name": target.name,
            "wanted": counts.desired if counts else None,
            "ready": counts.ready if counts else None,
            "failure": self._failure.get(target, ""),
        }


async def put_models_to_sleep(url: str, level: int) -> list[str]:
    """Put all models of a server to sleep that support it; return their names, [] for another kind of server."""
    return await asyncio.to_thread(_put_to_sleep, url, level)


def _put_to_sleep(url: str, level: int) -> list[str]:
    index = _post(url, "/v2/repository/index", {"ready": True}, _INDEX_SECONDS)
    entries = index if isinstance(index, list) else []
    names = {entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
    path = "/v1/models/{}/sleep"
    return [
        name
        for name in sorted(names)
        if _post(url, path.format(quote(name, safe="")), {"level": level}, _SLEEP_SECONDS) is not None
    ]


def _post(url: str, path: str, document: dict[str, Any], seconds: float) -> Any | None:
    """Return the JSON of a response; None for an error, which is logged."""
    try:
        response = request("POST", url, path, json.dumps(document).encode(), seconds=seconds)
        if response.status == 200:
            return json.loads(response.content)
        log.info("%s%s answered %d: %s", url, path, response.status, response.content[:200].decode(errors="replace"))
    except (OSError, InvalidArgument, ValueError) as error:
        log.warning("%s%s failed: %s", url, path, error)
    return None
