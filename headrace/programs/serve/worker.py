# SPDX-License-Identifier: Apache-2.0
"""One of several workers: everything it shares with the others, put together.

Made by `server` for each process when there are several; see `siblings`, `gathering`, `repeating`, `loading` and `workers`.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any

from headrace.api.metrics.http import Metrics
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.metrics.workers import WorkersMetrics
from headrace.core.telemetry.registry import Registry
from headrace.engine.dataplane import DataPlane
from headrace.programs.serve.gathering import Gathering
from headrace.programs.serve.loading import LoadEverywhere
from headrace.programs.serve.repeating import Repeating
from headrace.programs.serve.siblings import Busy, Siblings, started_at
from headrace.programs.serve.workers import WorkersPlane

_SERVING, _METRICS = "serving", "metrics"
_PATIENCE_SECONDS = 1.0
_SCRAPE_SECONDS = 2.0
"""For a worker that computes in its loop; after that, what it said last has to do."""


class Worker:
    """See the module."""

    def __init__(self, folder: str, index: int, count: int, own: DataPlane) -> None:
        self._own = own
        self._parent = os.getppid()
        self._siblings = Siblings(folder, index, count)
        self.gathering = Gathering(self._siblings, own)
        self.repeating = Repeating(self._siblings)
        self._everywhere = LoadEverywhere(self._siblings, own)
        self._metrics: Metrics | None = None
        self.plane = WorkersPlane(own, self.gathering, self._everywhere)

    @property
    def started(self) -> float:
        """When the server was started: see `siblings.started_at`."""
        return started_at(self._siblings.folder)

    def metrics(self, plane: DataPlane, registry: Registry, settings: MetricsSettings) -> Metrics:
        """This worker's metrics; a scrape of them is one of all workers."""
        ask = partial(self._siblings.ask_all, _METRICS, seconds=_SCRAPE_SECONDS)
        workers = WorkersMetrics(self._siblings.folder, self._siblings.index, ask)
        self._metrics = Metrics(plane, registry, settings, workers=workers)
        return self._metrics

    async def start(self) -> bool:
        """Meet the others; whether one of them serves already, or is too busy to say so."""
        self.gathering.start()
        self._everywhere.start()
        self.repeating.start()
        self._siblings.answer(_SERVING, self._serving)
        await self._siblings.start()
        answers = await self._siblings.ask_all(_SERVING, seconds=_PATIENCE_SECONDS)
        return any(answer is True or isinstance(answer, Busy) for answer in answers.values())

    async def catch_up(self) -> None:
        """Do what the others were asked to before this worker started."""
        await self._everywhere.catch_up()
        await self.repeating.catch_up()
        if self._metrics is not None:
            # Not before: of what its predecessors counted, a worker tells only what is of models that it has.
            self._siblings.answer(_METRICS, self._metrics.answer)

    async def close(self) -> None:
        """Leave the last numbers behind."""
        await self.gathering.keep()
        if self._metrics is not None and self._siblings.answers(_METRICS):
            await self._metrics.answer()
        await self._siblings.close()
        if os.getppid() != self._parent:  # killed: it will not clean up behind itself
            shutil.rmtree(self._siblings.folder, ignore_errors=True)

    async def _serving(self, _arguments: Any) -> bool:
        # Not whether all its models are well: one that never will be is no reason to keep a port closed or open.
        return self._own.started and self._own.accepting
