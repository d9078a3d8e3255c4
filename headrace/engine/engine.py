# SPDX-License-Identifier: Apache-2.0
"""The engine: repository, model loader, services and data plane. Programs and tests create it with `open_engine`.

`start` loads the models while the data plane already answers; `close` retires them. Without a repository the engine serves
two built-in models: `identity` returns its input, of any type and shape; `first1000` takes images `[n, 3, 224, 224]` and
returns the first 1,000 numbers of each, so that a large request has the small response of a classifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.backends.contract import ModelFiles, Nodes
from headrace.backends.devices import visible_gpus
from headrace.core.clock import Clock, SystemClock
from headrace.core.dtypes import FP32
from headrace.core.kept_memory import KeptMemory
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.limits import MIB
from headrace.core.telemetry.metrics import Registry
from headrace.core.telemetry.progress import Progress, Reporter, silent
from headrace.engine.cache import ResponseCache
from headrace.engine.dataplane import DataPlane
from headrace.engine.model_loader import ModelLoader
from headrace.engine.repository.control import RepositoryControl
from headrace.engine.repository.directory import Directory, ServedModel
from headrace.engine.repository.load_context import ABANDONED_LOADS
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.residency_metrics import add_load_metrics, add_residency_metrics, add_sleep_metrics
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.services import ModelServices
from headrace.models.config.types import DynamicBatching, InputSpec, InstanceGroup, ModelConfig, OutputSpec

log = logging.getLogger("headrace.engine")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine."""

    repositories: tuple[str | Path, ...] = ()
    """Model repositories; none for the built-in models."""
    repository: RepositorySettings = field(default_factory=RepositorySettings)
    strict_readiness: bool = True
    """Whether the server is ready only if every model is; otherwise it is ready as soon as it answers."""
    gpus: int | None = None
    """Number of GPUs; None to detect them."""
    cache_bytes: int = 64 * MIB
    """Size of the response cache; 0 for none."""
    cache_ttl_seconds: float = 0.0
    """Maximum age of a cached response (0: unlimited)."""
    rate_limit_resources: Mapping[str, int] = field(default_factory=dict)
    """Units of each rate limiter resource, by name."""
    kv_transfer: KvTransferSettings = field(default_factory=KvTransferSettings)
    """The server's role in KV transfer between prefill and decode servers."""
    nodes: Nodes | None = None
    """The other nodes of a server on several machines. Whoever made it closes it, after the engine."""
    summary_quantiles: tuple[float, ...] = ()
    """Quantiles of every version's times to record, in addition to the histograms; they cost more. None for no summaries."""


class Engine:
    """An inference engine: models behind a data plane."""

    def __init__(self, settings: EngineSettings, clock: Clock, progress: Progress = silent) -> None:
        self.metrics = Registry(clock)
        self._threads = ThreadPoolExecutor(
            settings.repository.model_load_thread_count + ABANDONED_LOADS, thread_name_prefix="headrace-load"
        )
        kept = KeptMemory() if settings.repository.mode == "on-demand" else None
        self._kept_memory = kept
        services = ModelServices(self.metrics, settings.kv_transfer, settings.nodes, kept)
        self.cache = (
            ResponseCache(settings.cache_bytes, settings.cache_ttl_seconds, clock) if settings.cache_bytes else None
        )
        if self.cache is not None:
            self.cache.add_to(self.metrics)
        quantiles = settings.summary_quantiles
        self._loader = ModelLoader(
            services,
            self._threads,
            cache=self.cache,
            limiter=RateLimiter(settings.rate_limit_resources),
            summarise=(lambda statistics: statistics.summarise(clock, quantiles)) if quantiles else None,
            wait_seconds=settings.repository.wait_seconds,
        )
        self.control: RepositoryControl | None = None
        if settings.repositories:
            gpus = visible_gpus() if settings.gpus is None else settings.gpus
            repository = replace(settings.repository, gpus=gpus, kept_memory=kept)
            self.control = RepositoryControl(settings.repositories, self._loader.load, repository, clock, progress)
            add_residency_metrics(self.metrics, self.control.on_demand)
        self._builtin = Directory()
        directory = self.control.directory if self.control else self._builtin
        self.plane = DataPlane(directory, self.control, services.adapters)
        self.plane.strict_readiness = settings.strict_readiness
        services.plane = self.plane
        add_sleep_metrics(self.metrics, self.plane)
        add_load_metrics(self.metrics, self.plane)

    async def start(self) -> None:
        """Load the models; return when all were tried."""
        if self.control is not None:
            await self.control.start()
        else:
            await load_builtin_models(self._loader, self._builtin)

    async def try_load(self, config: ModelConfig, files: ModelFiles) -> None:
        """Load a version, warm it up and free it again. Raise what loading raises."""
        version = await self._loader.load(config, files, Reporter(silent, SystemClock(), config.name))
        await version.retire(0)

    async def close(self, grace_seconds: float) -> None:
        """Retire the models; requests in flight have `grace_seconds` to finish."""
        if self.control is not None:
            await self.control.close(grace_seconds)
        else:
            for model in list(self._builtin.models.values()):
                for version in model.versions.values():
                    await version.retire(grace_seconds)
        if self._kept_memory is not None:
            await asyncio.to_thread(self._kept_memory.close)
        self._threads.shutdown(wait=False)


def open_engine(settings: EngineSettings, progress: Progress = silent) -> Engine:
    """Create an engine with the system clock. Call it from a running event loop."""
    return Engine(settings, SystemClock(), progress)


def try_load(config: ModelConfig, files: ModelFiles) -> None:
    """Load a version as a server would, and free it again. Raise what loading raises. Needs no event loop.

    `check_repository` of `headrace models check` takes it.
    """

    async def load() -> None:
        engine = open_engine(EngineSettings(cache_bytes=0))
        try:
            await engine.try_load(config, files)
        finally:
            await engine.close(0)

    asyncio.run(load())


_NO_FILES = ModelFiles(Path(), 1, Path())

BUILTIN_MODELS = (
    ModelConfig(
        "identity",
        "identity",
        max_batch_size=64,
        inputs=(InputSpec("INPUT0", None, None),),
        outputs=(OutputSpec("OUTPUT0", None, None),),
        instance_groups=(InstanceGroup("identity", runs="inline"),),
        scheduling=DynamicBatching(),
    ),
    ModelConfig(
        "first1000",
        "identity",
        max_batch_size=64,
        inputs=(InputSpec("INPUT0", FP32, (3, 224, 224)),),
        outputs=(OutputSpec("OUTPUT0", FP32, (1000,)),),
        instance_groups=(InstanceGroup("first1000", runs="inline"),),
        scheduling=DynamicBatching(),
        parameters={"first": "1000"},
    ),
)


async def load_builtin_models(loader: ModelLoader, directory: Directory) -> None:
    """Load the built-in models into a directory."""
    for config in BUILTIN_MODELS:
        version = await loader.load(config, _NO_FILES, Reporter(silent, SystemClock(), config.name))
        directory.put(ServedModel(config.name), {1: version})
