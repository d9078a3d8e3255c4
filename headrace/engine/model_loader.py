# SPDX-License-Identifier: Apache-2.0
"""The model loader: from a configuration and its files to a version that serves, with instances, scheduler and warm-up.

The repository calls it. Blocking work (reading a model, starting its processes) runs in loader threads; if any of it fails,
everything is closed again and the error is raised.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import Literal, ParamSpec, TypeVar

from headrace.backends.contract import (
    Array,
    Backend,
    ComputeInstance,
    EngineServices,
    Model,
    ModelFiles,
    Placement,
    RequestInstance,
    SleepableModel,
    SleepLevel,
)
from headrace.backends.table import backend_named
from headrace.core.errors import InvalidArgument, Unavailable
from headrace.core.telemetry.load_stages import CONFIGURATION, IMPORT, OPEN, WARM_UP, current_stages, stage
from headrace.core.telemetry.metrics import Histogram
from headrace.core.telemetry.progress import Reporter
from headrace.engine.cache import ResponseCache
from headrace.engine.ensembles import EnsembleVersion
from headrace.engine.execution.concatenation import BatchConcatenator, RaggedConcatenator
from headrace.engine.execution.runners import ComputeRunner, RequestRunner
from headrace.engine.execution.warmup import warm_up
from headrace.engine.labels import EnsembleLabels, read_labels
from headrace.engine.repository.ensemble_dependencies import ENSEMBLE_CACHE
from headrace.engine.request_validation import RequestValidator
from headrace.engine.scheduling.dynamic_batcher import AutoDelay, BatchRules, FixedDelay, QueueDelay
from headrace.engine.scheduling.queues import FifoQueue, PolicyQueue, Queue
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.scheduling.scheduler import (
    START_DELAYED,
    BatchScheduler,
    DelayedBatchScheduler,
    ExecutionPlacement,
    read_start_delay,
)
from headrace.engine.sequences.implicit_state import StatefulConcatenator, read_initial_states
from headrace.engine.sequences.scheduler import DelayedSequenceScheduler, SequenceScheduler, is_delayed
from headrace.engine.services import ModelServices
from headrace.engine.sleep import Sleeper
from headrace.engine.statistics import VersionStatistics, first_response_bounds
from headrace.engine.versions import ModelVersion, Scheduler
from headrace.models.config.types import (
    DynamicBatching,
    EnsembleScheduling,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
)

log = logging.getLogger("headrace.engine")

AnyRunner = ComputeRunner | RequestRunner
P = ParamSpec("P")
R = TypeVar("R")


class ModelLoader:
    """Loads versions of models."""

    def __init__(
        self,
        services: ModelServices,
        threads: Executor,
        *,
        cache: ResponseCache | None,
        limiter: RateLimiter,
        summarise: Callable[[VersionStatistics], None] | None = None,
        wait_seconds: float = 120.0,
    ) -> None:
        """`wait_seconds`: how long requests wait for a model that sleeps."""
        self._services = services
        self._threads = threads
        self._cache = cache
        self._limiter = limiter
        self._summarise = summarise
        self._wait_seconds = wait_seconds

    async def load(self, config: ModelConfig, files: ModelFiles, reporter: Reporter) -> ModelVersion | EnsembleVersion:
        """Load a version and warm it up (`repository.directory.LoadVersion`)."""
        with stage(CONFIGURATION):
            labels = await self._blocking(read_labels, config, files.model_folder)
        if isinstance(config.scheduling, EnsembleScheduling):
            if config.response_cache:
                log.warning("model '%s': %s", config.name, ENSEMBLE_CACHE)
            inherited = EnsembleLabels(labels, config.scheduling.steps, self._services.labels)
            ensemble = EnsembleVersion(config, config.scheduling, files.version, self._services, inherited)
            self._add_optional_statistics(config, ensemble.statistics)
            return ensemble
        initial_states: Mapping[str, Array] = {}
        if isinstance(config.scheduling, SequenceBatching):
            initial_states = await self._blocking(read_initial_states, config.scheduling, files.model_folder)
        loaded = _LoadedModel()
        try:
            await self._open_instances(config, files, reporter, loaded)
            statistics = VersionStatistics()
            delay = _delay_of(config)
            runners = self._runners(config, loaded, statistics, delay)
            for runner in runners:
                self._limiter.admit(runner)
            for warmup in config.warmups:
                reporter.update(message=f"warming up: {warmup.name}")
                with stage(WARM_UP):
                    for runner in runners:
                        await warm_up(runner, config, warmup, files.model_folder)
            statistics.reset_executions()
            self._add_optional_statistics(config, statistics)
            return ModelVersion(
                config,
                files.version,
                statistics,
                self._scheduler(config, runners, statistics, delay, initial_states),
                delay,
                labels=labels,
                cache=self._cache,
                close=loaded.close,
                runners=runners,
                sleeper=self._sleeper(loaded),
                wait_seconds=self._wait_seconds,
                load_stages=current_stages(),
            )
        except BaseException:
            await asyncio.shield(self._blocking(loaded.close))
            raise

    def _sleeper(self, loaded: _LoadedModel) -> Sleeper | None:
        """Return what puts a model to sleep; None for one that cannot sleep."""
        if not isinstance(loaded.model, SleepableModel):
            return None
        return Sleeper(
            lambda level: self._blocking(loaded.sleep, level),
            lambda: self._blocking(loaded.wake),
        )

    def _add_optional_statistics(self, config: ModelConfig, statistics: VersionStatistics) -> None:
        if config.decoupled:
            statistics.first_responses = Histogram(first_response_bounds(config))
        if self._summarise is not None:
            self._summarise(statistics)

    async def _open_instances(
        self, config: ModelConfig, files: ModelFiles, reporter: Reporter, loaded: _LoadedModel
    ) -> None:
        placements = placements_of(config)
        reporter.update(done=0, total=1 + len(placements), message="reading the model")
        with stage(IMPORT):
            backend = await self._blocking(backend_named, config.backend)
        with stage(CONFIGURATION):
            await self._blocking(loaded.load, backend, config, files, self._services)
        reporter.advance()
        for group, placement in placements:
            reporter.update(message=f"starting {placement.name}")
            with stage(OPEN):
                await self._blocking(loaded.open_instance, group, placement)
            reporter.advance()

    def _runners(
        self, config: ModelConfig, loaded: _LoadedModel, statistics: VersionStatistics, delay: QueueDelay
    ) -> list[AnyRunner]:
        stateful = isinstance(config.scheduling, SequenceBatching)
        unbatched = concatenator = BatchConcatenator(config)
        if isinstance(config.scheduling, SequenceBatching) and config.scheduling.states:
            unbatched = concatenator = StatefulConcatenator(config, config.scheduling)
        elif (
            config.batch_inputs
            or config.batch_outputs
            or any(spec.allow_ragged_batch or spec.pad_value is not None for spec in config.inputs)
        ):
            concatenator = RaggedConcatenator(config)
        runners: list[AnyRunner] = []
        for group, placement, instance in loaded.instances:
            if isinstance(instance, ComputeInstance):
                runners.append(
                    ComputeRunner(
                        instance,
                        placement,
                        concatenator,
                        statistics,
                        delay,
                        ExecutionPlacement(group.runs),
                        resources=group.resources,
                        priority=group.priority,
                        retry_individually=not stateful,
                    )
                )
            else:
                runners.append(
                    RequestRunner(
                        instance,
                        placement,
                        unbatched,
                        statistics,
                        delay,
                        resources=group.resources,
                        priority=group.priority,
                    )
                )
        loaded.runners = runners
        return runners

    def _scheduler(
        self,
        config: ModelConfig,
        runners: list[AnyRunner],
        statistics: VersionStatistics,
        delay: QueueDelay,
        initial_states: Mapping[str, Array],
    ) -> Scheduler:
        match config.scheduling:
            case SequenceBatching() as sequences:
                start = read_start_delay(os.environ)
                sequence_class = DelayedSequenceScheduler if is_delayed(sequences, start) else SequenceScheduler
                sequence_scheduler = sequence_class(
                    config, sequences, runners, statistics.log, limiter=self._limiter, initial_states=initial_states
                )
                if isinstance(sequence_scheduler, DelayedSequenceScheduler):
                    log.warning("model '%s': %s", config.name, START_DELAYED)
                    sequence_scheduler.delay_start(start)
                return sequence_scheduler
            case DynamicBatching() as batching:
                queue: Queue = PolicyQueue(batching, config.name) if _has_policies(batching) else FifoQueue()
                rules = BatchRules(
                    max(1, config.max_batch_size),
                    frozenset(batching.preferred_batch_sizes),
                    RequestValidator(config).needs_batch_key,
                )
                start = read_start_delay(os.environ)
                batch_class = DelayedBatchScheduler if start.requests else BatchScheduler
                batch_scheduler = batch_class(
                    queue,
                    rules,
                    delay,
                    runners,
                    statistics.log,
                    limiter=self._limiter,
                    in_order=batching.preserve_ordering and len(runners) > 1,
                )
                if isinstance(batch_scheduler, DelayedBatchScheduler):
                    log.warning("model '%s': %s", config.name, START_DELAYED)
                    batch_scheduler.delay_start(start.requests)
                return batch_scheduler
            case _:
                return BatchScheduler(FifoQueue(), None, delay, runners, statistics.log, limiter=self._limiter)

    async def _blocking(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        work = partial(copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _LoadedModel:
    """The model, instances and runners that exist so far; closed in the opposite order."""

    def __init__(self) -> None:
        self.model: Model | None = None
        self.instances: list[tuple[InstanceGroup, Placement, ComputeInstance | RequestInstance]] = []
        self.runners: list[AnyRunner] = []
        self._lock = Lock()
        self._closed = False

    def load(self, backend: Backend, config: ModelConfig, files: ModelFiles, services: EngineServices) -> None:
        """Load the model. All methods are called in loader threads."""
        with self._lock:
            if not self._closed:
                self.model = backend.load(config, files, services)

    def open_instance(self, group: InstanceGroup, placement: Placement) -> None:
        """Create one more instance."""
        with self._lock:
            if self.model is not None:
                self.instances.append((group, placement, self.model.open(placement)))

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """Put the model to sleep; return the bytes that it gives back."""
        with self._lock:
            return self._sleepable().sleep(level)

    def wake(self) -> None:
        """Wake the model."""
        with self._lock:
            self._sleepable().wake()

    def _sleepable(self) -> SleepableModel:
        if not isinstance(self.model, SleepableModel):
            raise Unavailable("the model was unloaded")
        return self.model

    def close(self) -> None:
        """Close everything, even if a part fails to close.

        Waits for an instance that is being opened, and closes it too: the task that waited for it may be cancelled.
        """
        with self._lock:
            self._closed = True
            self._close()

    def _close(self) -> None:
        closers = [runner.close for runner in self.runners] or [instance.close for _, _, instance in self.instances]
        if self.model is not None:
            closers.append(self.model.close)
        self.model, self.instances, self.runners = None, [], []
        for close in closers:
            try:
                close()
            except Exception:
                log.exception("Closing a model failed.")


def placements_of(config: ModelConfig) -> list[tuple[InstanceGroup, Placement]]:
    """Return the placement of each instance of a model: `count` per group, or per GPU of the group."""
    placements = []
    for group in config.instance_groups:
        for index in range(group.count):
            if group.kind == "gpu":
                placements += [(group, Placement(f"{group.name}_{index}_gpu{gpu}", "gpu", gpu)) for gpu in group.gpus]
            else:
                kind: Literal["cpu", "model"] = "model" if group.kind == "model" else "cpu"
                placements.append((group, Placement(f"{group.name}_{index}_{kind}", kind)))
    if not placements:
        raise InvalidArgument(f"model '{config.name}' has no instances: set a count in instance_group, or remove it")
    return placements


def _delay_of(config: ModelConfig) -> QueueDelay:
    batching = config.scheduling
    if not isinstance(batching, DynamicBatching):
        return FixedDelay(0)
    if batching.auto_delay:
        return AutoDelay(batching.latency_target_ms, max(batching.preferred_batch_sizes, default=config.max_batch_size))
    return FixedDelay(batching.max_queue_delay_microseconds * 1000)


def _has_policies(batching: DynamicBatching) -> bool:
    return bool(
        batching.priority_levels or batching.priority_queue_policies or batching.default_queue_policy != QueuePolicy()
    )
