# SPDX-License-Identifier: Apache-2.0
"""The engine as a whole: repository, opener, services and data plane, put together. Made by composition roots and tests.

`open_engine` makes it; `start` loads the models, while the data plane already answers; `close` retires them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.backends.devices import visible_gpus
from headrace.core.clock import Clock, SystemClock
from headrace.core.handing import HandingSettings
from headrace.core.limits import MIB
from headrace.core.telemetry.progress import Progress, silent
from headrace.core.telemetry.registry import Registry
from headrace.engine.builtin import open_builtin_models
from headrace.engine.cache import ResponseCache
from headrace.engine.dataplane import DataPlane
from headrace.engine.opening import VersionOpener
from headrace.engine.repository.control import RepositoryControl
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.scheduling.limiter import Limiter
from headrace.engine.services import ModelServices

log = logging.getLogger("headrace.engine")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine can be told."""

    repositories: tuple[str | Path, ...] = ()
    """Folders of models; none for the built-in ones."""
    repository: RepositorySettings = field(default_factory=RepositorySettings)
    strict_readiness: bool = True
    """Ready only when every model is; otherwise as soon as the server answers."""
    gpus: int | None = None
    """How many GPUs there are; None to look."""
    cache_bytes: int = 64 * MIB
    """Size of the response cache; 0 for none."""
    cache_ttl_seconds: float = 0.0
    """How old a kept answer may be; 0 for any age."""
    rate_limit_resources: Mapping[str, int] = field(default_factory=dict)
    """How much there is of a resource that instances share (`rate_limiter`), by its name."""
    handing: HandingSettings = field(default_factory=HandingSettings)
    """The server's part where prefill and decode are apart."""
    summary_quantiles: tuple[float, ...] = ()
    """Quantiles of every version's times to keep, dearer than the histograms there always are; none for no summaries."""


class Engine:
    """Models behind a data plane."""

    def __init__(self, settings: EngineSettings, clock: Clock, progress: Progress = silent) -> None:
        self.metrics = Registry(clock)
        self._threads = ThreadPoolExecutor(
            settings.repository.model_load_thread_count, thread_name_prefix="headrace-load"
        )
        services = ModelServices(self.metrics, settings.handing)
        self.cache = (
            ResponseCache(settings.cache_bytes, settings.cache_ttl_seconds, clock) if settings.cache_bytes else None
        )
        if self.cache is not None:
            self.cache.add_to(self.metrics)
        quantiles = settings.summary_quantiles
        self._opener = VersionOpener(
            services,
            self._threads,
            cache=self.cache,
            limiter=Limiter(settings.rate_limit_resources),
            summarise=(lambda statistics: statistics.summarise(clock, quantiles)) if quantiles else None,
        )
        self.control: RepositoryControl | None = None
        if settings.repositories:
            gpus = visible_gpus() if settings.gpus is None else settings.gpus
            repository = replace(settings.repository, gpus=gpus)
            self.control = RepositoryControl(settings.repositories, self._opener.open, repository, clock, progress)
        self._builtin = Directory()
        self.plane = DataPlane(self.control.directory if self.control else self._builtin, self.control)
        self.plane.strict_readiness = settings.strict_readiness
        services.plane = self.plane

    async def start(self) -> None:
        """Load the models; returns when all were tried."""
        if self.control is not None:
            await self.control.start()
        else:
            await open_builtin_models(self._opener, self._builtin)

    async def close(self, grace_seconds: float) -> None:
        """Retire the models: what is in flight may finish in `grace_seconds`."""
        if self.control is not None:
            await self.control.close(grace_seconds)
        else:
            for model in list(self._builtin.models.values()):
                for version in model.versions.values():
                    await version.retire(grace_seconds)
        self._threads.shutdown(wait=False)


def open_engine(settings: EngineSettings, progress: Progress = silent) -> Engine:
    """An engine by the machine's own clock. From within a running loop."""
    return Engine(settings, SystemClock(), progress)
