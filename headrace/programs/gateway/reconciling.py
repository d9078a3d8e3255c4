# SPDX-License-Identifier: Apache-2.0
"""The loop that holds records against what runs: once at the start, then every few seconds, whatever fails."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.jobs.service import JobService
    from headrace.programs.gateway.metrics import GatewayMetrics

log = logging.getLogger("headrace.gateway")


class Reconciling:
    """`start` it in the loop, `close` it at the end."""

    def __init__(self, jobs: JobService, metrics: GatewayMetrics, seconds: float) -> None:
        self._jobs = jobs
        self._metrics = metrics
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End; a round that is under way is cut short, as a kill would, and the next start sets it right."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            began = monotonic()
            try:
                await self._jobs.reconcile()
            except Exception:
                self._metrics.unreconciled.add()
                log.exception("records could not be held against what runs: trying again in %g s", self._seconds)
            self._metrics.reconciled.observe(monotonic() - began)
            await asyncio.sleep(self._seconds)
