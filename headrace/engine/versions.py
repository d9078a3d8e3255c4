# SPDX-License-Identifier: Apache-2.0
"""One version of a model that serves: checks its requests, passes them to its scheduler, keeps its accounts.

Made by `opening`, found by the data plane through the repository's directory. In the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from time import monotonic_ns
from typing import Protocol

from headrace.core.errors import HeadraceError, InvalidArgument, Unavailable, Unimplemented
from headrace.core.messages import InferRequest, StepRequest
from headrace.core.tensors import Tensor
from headrace.engine.cache import ResponseCache, key_of
from headrace.engine.checking import RequestChecker
from headrace.engine.express import express_for
from headrace.engine.scheduling.delay import AutoDelay, Delay
from headrace.engine.scheduling.pending import Answered, Done, Pending, StreamPending
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.scheduling.watching import Watch
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ModelConfig, SequenceBatching

_copies = count(1)
"""Tells two loads of the same version apart, for the cache."""


class Scheduler(Protocol):
    """What a version asks of its scheduler."""

    @property
    def waiting(self) -> int:
        """Requests that are not being computed yet."""

    def add(self, pending: Pending) -> None:
        """Compute a request when its turn comes; raises when it may not wait."""

    def close(self, reason: HeadraceError) -> None:
        """Tell those that still wait; nothing more is computed."""


class Drain:
    """Waits until every request of a version is answered."""

    def __init__(self, statistics: VersionStatistics) -> None:
        self._statistics = statistics
        self._empty = asyncio.Event()
        self.waiting = False

    def settled(self) -> None:
        """A request was answered, while `waiting`."""
        if not self._statistics.in_flight:
            self._empty.set()

    async def wait(self, grace_seconds: float) -> None:
        """Return when all are answered, or when the time is over."""
        if self._statistics.in_flight:
            self.waiting = True
            try:
                async with asyncio.timeout(grace_seconds):
                    await self._empty.wait()
            except TimeoutError:
                pass


class ModelVersion:
    """A loaded version. See `repository.contract.LoadedVersion` for what the repository asks of it."""

    def __init__(
        self,
        config: ModelConfig,
        version: int,
        statistics: VersionStatistics,
        scheduler: Scheduler,
        delay: Delay,
        *,
        labels: Mapping[str, Sequence[str]],
        cache: ResponseCache | None = None,
        close: Callable[[], None],
        runners: Sequence[Runner] = (),
    ) -> None:
        self.name = config.name
        self.version = version
        self.version_text = str(version)
        self.config = config
        self._statistics = statistics
        self.labels = labels
        """The words for the numbers of an output, line by line of its label file."""
        self.delay = delay
        self._checker = RequestChecker(config)
        self._key = self._checker.key if self._checker.by_shape and config.scheduling is not None else None
        self._check = self._checker.check
        self._scheduler = scheduler
        # A model with a memory may answer the same question differently.
        stateful = isinstance(config.scheduling, SequenceBatching)
        self._cache = cache if config.response_cache and not stateful else None
        self._cache_prefix = b"%d/" % next(_copies)
        self._close = close
        self._drain = Drain(statistics)
        self._auto = delay if isinstance(delay, AutoDelay) else None
        self._special = config.decoupled or self._key is not None or self._cache is not None
        self.follows = self._auto is not None or self._cache is not None
        self.express = express_for(self, config, scheduler, runners, statistics)
        """Answers plain requests at once; None when there is no such way."""
        self._usual = (self._special, self.follows, self.express)
        """The ways of requests while nobody watches."""
        self.watch: Watch | None = None
        self._alone = runners[0].alone if runners else None

    @property
    def waiting(self) -> int:
        """Requests that were received and are not being computed yet."""
        return self._scheduler.waiting

    @property
    def statistics(self) -> VersionStatistics:
        """What it has done so far: always the same object, brought up to date by looking."""
        if self._alone is not None:
            self._statistics.take_in(self._alone)
        return self._statistics

    def infer(self, request: InferRequest, done: Done) -> Pending:
        """Compute a request. Raises at once for a wrong one; otherwise `done` gets the answer, later."""
        arrived_ns = monotonic_ns()
        try:
            rows = self._check(request)
        except InvalidArgument as error:
            self._refused(request, error, arrived_ns)
            raise
        pending = Pending(self, request, rows, None, done, arrived_ns)
        if self._special:
            return self._add_special(pending)
        self._add(pending)
        return pending

    def infer_stream(self, request: InferRequest, answered: Answered) -> Pending:
        """Compute a request that may have any number of answers, none of them before this returns."""
        arrived_ns = monotonic_ns()
        try:
            rows = self._check(request)
        except InvalidArgument as error:
            self._refused(request, error, arrived_ns)
            raise
        return self._add_special(StreamPending(self, request, rows, None, answered, arrived_ns))

    def watched_by(self, watch: Watch | None) -> None:
        """Let every request be noted from now on, or (None) none any more.

        Requests are sent ways that are looked at anyway, those of special and of followed ones, so that nobody who is not
        watched pays for it.
        """
        self.watch = watch
        self._special, self.follows, self.express = self._usual if watch is None else (True, True, None)

    def _refused(self, request: InferRequest, error: InvalidArgument, arrived_ns: int) -> None:
        self._statistics.failed(0, error, 0)
        if self.watch is not None:
            self.watch.refused(request, self.version_text, error, arrived_ns)

    def _add_special(self, pending: Pending) -> Pending:
        """Add a request that is a stream's, is watched, or of a model that is decoupled, compares shapes, or has a cache."""
        if self.config.decoupled and not isinstance(pending, StreamPending):
            raise Unimplemented(
                f"model '{self.name}' is decoupled: it may answer several times or not at all. Use a streaming call"
            )
        if self.watch is not None:
            pending = self.watch.take(pending, "taken from the cache")
        if self._key is not None:
            pending.key = self._key(pending.request)
        if self._cache is None or not self._answered_from_cache(pending, self._cache):
            self._add(pending)
        return pending

    def _add(self, pending: Pending) -> None:
        self._statistics.received += 1
        try:
            self._scheduler.add(pending)
        except HeadraceError as error:
            self._statistics.settled += 1
            self._statistics.failed(pending.rows, error, monotonic_ns() - pending.arrived_ns)
            if self.watch is not None:
                self.watch.refused(pending, self.version_text, error, pending.arrived_ns)
            raise

    def settle(self, pending: Pending, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """See `Owner.settle`."""
        now_ns = monotonic_ns()
        error = outputs if isinstance(outputs, BaseException) else None
        stats = self._statistics.answered(pending.rows, error, now_ns - pending.arrived_ns)
        if pending.cache_key is not None and self._cache is not None and isinstance(outputs, Sequence):
            self._cache.put(pending.cache_key, outputs)
            kept_ns = monotonic_ns() - now_ns
            stats.miss_ns += kept_ns
            if self._statistics.summaries is not None:
                self._statistics.summaries.miss.observe((pending.looked_ns + kept_ns) / 1000)
        if self._auto is not None:
            self._auto.review(monotonic_ns())
        if self._drain.waiting:
            self._drain.settled()

    def _answered_from_cache(self, pending: Pending, cache: ResponseCache) -> bool:
        if isinstance(pending.request, StepRequest):
            pending.request = pending.request.on_host()  # what is kept takes no memory of a device
        key = key_of(self._cache_prefix, pending.request)
        outputs = cache.get(key, fresh=pending.request.fresh)
        stats = self._statistics.of_rows(pending.rows)
        looked_ns = monotonic_ns() - pending.arrived_ns
        if outputs is None:
            stats.miss += 1
            stats.miss_ns += looked_ns
            pending.cache_key = key
            pending.looked_ns = looked_ns
            return False
        self._statistics.received += 1

        def hit() -> None:
            if not pending.cancelled:
                stats.hit += 1
                stats.hit_ns += looked_ns
                if self._statistics.summaries is not None:
                    self._statistics.summaries.hit.observe(looked_ns / 1000)
                pending.reply(outputs)

        # Not at once: streams count on it, and a caller that asks again from its answer would pile up on the stack.
        asyncio.get_running_loop().call_soon(hit)
        return True

    async def retire(self, grace_seconds: float) -> None:
        """Finish what is in flight, for as long as `grace_seconds`; then free everything."""
        self.follows = True
        self.express = None
        self._usual = (self._special, True, None)
        if self._alone is not None:
            self._statistics.take_in(self._alone)  # who keeps the numbers of a version that is gone looks no more
        await self._drain.wait(grace_seconds)
        self._scheduler.close(Unavailable(f"model '{self.name}' version {self.version_text} was unloaded"))
        if self._cache is not None:
            self._cache.forget(self._cache_prefix)
        await asyncio.to_thread(self._close)
