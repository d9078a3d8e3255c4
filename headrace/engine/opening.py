# SPDX-License-Identifier: Apache-2.0
"""From a configuration and its files to a version that serves: backend, instances, scheduler, warm-up.

Called by the repository, which knows when. What blocks (reading a model, starting its processes) runs in loader threads;
if any of it fails, all of it is closed again and the reason is raised.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
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
)
from headrace.backends.table import backend_named
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.metrics import Histogram
from headrace.core.telemetry.progress import Reporter
from headrace.engine.cache import ResponseCache
from headrace.engine.checking import RequestChecker
from headrace.engine.ensembles import EnsembleVersion
from headrace.engine.execution.joining import Joiner
from headrace.engine.execution.ragged import RaggedJoiner
from headrace.engine.execution.request_runner import RequestRunner
from headrace.engine.execution.runners import ComputeRunner
from headrace.engine.execution.warmup import warm_up
from headrace.engine.labels import InheritedLabels, read_labels
from headrace.engine.repository.ensembles import ENSEMBLE_CACHE
from headrace.engine.scheduling.batches import BatchRules
from headrace.engine.scheduling.delay import AutoDelay, Delay, FixedDelay
from headrace.engine.scheduling.delayed_start import START_DELAYED, DelayedBatchScheduler, read_start_delay
from headrace.engine.scheduling.limiter import Limiter
from headrace.engine.scheduling.pace import Pace
from headrace.engine.scheduling.queues import FifoQueue, PolicyQueue, Queue
from headrace.engine.scheduling.scheduler import BatchScheduler
from headrace.engine.sequences.delayed_start import DelayedSequenceScheduler, is_delayed
from headrace.engine.sequences.scheduler import SequenceScheduler
from headrace.engine.sequences.states import StatefulJoiner, read_initial_states
from headrace.engine.services import ModelServices
from headrace.engine.statistics import VersionStatistics, first_answer_bounds
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


class VersionOpener:
    """Opens versions; what they share is given once."""

    def __init__(
        self,
        services: ModelServices,
        threads: Executor,
        *,
        cache: ResponseCache | None,
        limiter: Limiter,
        summarise: Callable[[VersionStatistics], None] | None = None,
    ) -> None:
        self._services = services
        self._threads = threads
        self._cache = cache
        self._limiter = limiter
        self._summarise = summarise

    async def open(self, config: ModelConfig, files: ModelFiles, reporter: Reporter) -> ModelVersion | EnsembleVersion:
        """Load a version and warm it up. See `repository.contract.OpenVersion`."""
        labels = await self._blocking(read_labels, config, files.model_folder)
        if isinstance(config.scheduling, EnsembleScheduling):
            if config.response_cache:
                log.warning("model '%s': %s", config.name, ENSEMBLE_CACHE)
            inherited = InheritedLabels(labels, config.scheduling.steps, self._services.labels)
            ensemble = EnsembleVersion(config, config.scheduling, files.version, self._services, inherited)
            self._count_more(config, ensemble.statistics)
            return ensemble
        initial_states: Mapping[str, Array] = {}
        if isinstance(config.scheduling, SequenceBatching):
            initial_states = await self._blocking(read_initial_states, config.scheduling, files.model_folder)
        opened = _Opened()
        try:
            await self._open_instances(config, files, reporter, opened)
            statistics = VersionStatistics()
            delay = _delay_of(config)
            runners = self._runners(config, opened, statistics, delay)
            for runner in runners:
                self._limiter.admit(runner)
            for warmup in config.warmups:
                reporter.update(message=f"warming up: {warmup.name}")
                for runner in runners:
                    await warm_up(runner, config, warmup, files.model_folder)
            statistics.forget_executions()
            self._count_more(config, statistics)
            return ModelVersion(
                config,
                files.version,
                statistics,
                self._scheduler(config, runners, statistics, delay, initial_states),
                delay,
                labels=labels,
                cache=self._cache,
                close=opened.close,
                runners=runners,
            )
        except BaseException:
            await asyncio.shield(self._blocking(opened.close))
            raise

    def _count_more(self, config: ModelConfig, statistics: VersionStatistics) -> None:
        if config.decoupled:
            statistics.first_answers = Histogram(first_answer_bounds(config))
        if self._summarise is not None:
            self._summarise(statistics)

    async def _open_instances(
        self, config: ModelConfig, files: ModelFiles, reporter: Reporter, opened: _Opened
    ) -> None:
        placements = placements_of(config)
        reporter.update(done=0, total=1 + len(placements), message="reading the model")
        backend = await self._blocking(backend_named, config.backend)
        await self._blocking(opened.load, backend, config, files, self._services)
        reporter.advance()
        for group, placement in placements:
            reporter.update(message=f"starting {placement.name}")
            await self._blocking(opened.open, group, placement)
            reporter.advance()

    def _runners(
        self, config: ModelConfig, opened: _Opened, statistics: VersionStatistics, delay: Delay
    ) -> list[AnyRunner]:
        stateful = isinstance(config.scheduling, SequenceBatching)
        plain = joiner = Joiner(config)
        if isinstance(config.scheduling, SequenceBatching) and config.scheduling.states:
            plain = joiner = StatefulJoiner(config, config.scheduling)
        elif (
            config.batch_inputs
            or config.batch_outputs
            or any(spec.allow_ragged_batch or spec.pad_value is not None for spec in config.inputs)
        ):
            joiner = RaggedJoiner(config)
        runners: list[AnyRunner] = []
        for group, placement, instance in opened.instances:
            if isinstance(instance, ComputeInstance):
                runners.append(
                    ComputeRunner(
                        instance,
                        placement,
                        joiner,
                        statistics,
                        delay,
                        Pace(group.runs),
                        resources=group.resources,
                        priority=group.priority,
                        alone_again=not stateful,
                    )
                )
            else:
                runners.append(
                    RequestRunner(
                        instance,
                        placement,
                        plain,
                        statistics,
                        delay,
                        resources=group.resources,
                        priority=group.priority,
                    )
                )
        opened.runners = runners
        return runners

    def _scheduler(
        self,
        config: ModelConfig,
        runners: list[AnyRunner],
        statistics: VersionStatistics,
        delay: Delay,
        initial_states: Mapping[str, Array],
    ) -> Scheduler:
        match config.scheduling:
            case SequenceBatching() as sequences:
                start = read_start_delay(os.environ)
                make_sequences = DelayedSequenceScheduler if is_delayed(sequences, start) else SequenceScheduler
                sequence_scheduler = make_sequences(
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
                    RequestChecker(config).by_shape,
                )
                start = read_start_delay(os.environ)
                make_batches = DelayedBatchScheduler if start.requests else BatchScheduler
                batch_scheduler = make_batches(
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
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))


class _Opened:
    """What has been opened so far, to be closed in the opposite order."""

    def __init__(self) -> None:
        self.model: Model | None = None
        self.instances: list[tuple[InstanceGroup, Placement, ComputeInstance | RequestInstance]] = []
        self.runners: list[AnyRunner] = []
        self._lock = Lock()
        self._closed = False

    def load(self, backend: Backend, config: ModelConfig, files: ModelFiles, services: EngineServices) -> None:
        """Read the model. From a loader thread, as all of these."""
        with self._lock:
            if not self._closed:
                self.model = backend.load(config, files, services)

    def open(self, group: InstanceGroup, placement: Placement) -> None:
        """Make one more instance."""
        with self._lock:
            if self.model is not None:
                self.instances.append((group, placement, self.model.open(placement)))

    def close(self) -> None:
        """Close all of it, whatever fails on the way.

        Waits for what is being opened: whoever waited for that may have been cancelled, and it is to be closed too.
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
                log.exception("closing a model failed")


def placements_of(config: ModelConfig) -> list[tuple[InstanceGroup, Placement]]:
    """Where the instances of a model go: `count` of them per group, or per GPU of the group."""
    placements = []
    for group in config.instance_groups:
        for index in range(group.count):
            if group.kind == "gpu":
                placements += [(group, Placement(f"{group.name}_{index}_gpu{gpu}", "gpu", gpu)) for gpu in group.gpus]
            else:
                kind: Literal["cpu", "model"] = "model" if group.kind == "model" else "cpu"
                placements.append((group, Placement(f"{group.name}_{index}_{kind}", kind)))
    if not placements:
        raise InvalidArgument(f"model '{config.name}' has no instances: give it an instance_group, or none at all")
    return placements


def _delay_of(config: ModelConfig) -> Delay:
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
