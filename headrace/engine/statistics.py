# SPDX-License-Identifier: Apache-2.0
"""What a version has done: counts and times, per size of request and per size of batch. Plain integers, added up when read.

Written by versions and runners in the loop's thread; read by the protocols' statistics, status and metrics. Times are
nanoseconds. A cache hit is a success and no execution.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.clock import Clock
from headrace.core.errors import Code, HeadraceError, InvalidArgument
from headrace.core.telemetry.metrics import Histogram, check_bounds
from headrace.core.telemetry.summaries import DEFAULT_WINDOW_SECONDS, Summary
from headrace.core.telemetry.tallies import LOAD_EXCESSES, QUICK_NS, SlowTally
from headrace.engine.responses import ByPlace
from headrace.engine.scheduling.batches import BatchLog, BatchRecord
from headrace.engine.scheduling.pending import Pending
from headrace.models.config.types import ModelConfig


class RequestStats:
    """Requests of one size."""

    __slots__ = (
        "fail",
        "fail_ns",
        "hit",
        "hit_ns",
        "infer_ns",
        "input_ns",
        "miss",
        "miss_ns",
        "output_ns",
        "queue_ns",
        "success",
        "success_ns",
    )

    def __init__(self) -> None:
        self.success = self.success_ns = self.fail = self.fail_ns = 0
        self.queue_ns = self.input_ns = self.infer_ns = self.output_ns = 0
        self.hit = self.hit_ns = self.miss = self.miss_ns = 0

    def add(self, other: RequestStats) -> None:
        """Add another's numbers to these."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def computed(self) -> int:
        """Successes that took an execution."""
        return self.success - self.hit


class BatchStats:
    """Executions of one size."""

    __slots__ = ("count", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.count = self.input_ns = self.infer_ns = self.output_ns = 0


class LatencySummaries:
    """Quantiles of a version's times, in microseconds; kept only where they are asked for."""

    __slots__ = ("hit", "infer", "input", "miss", "output", "queue", "request")

    def __init__(self, clock: Clock, quantiles: tuple[float, ...]) -> None:
        def summary() -> Summary:
            return Summary(clock, quantiles, DEFAULT_WINDOW_SECONDS)

        self.request, self.queue, self.input, self.infer, self.output = (summary() for _ in range(5))
        self.hit, self.miss = summary(), summary()

    def computed(self, queues_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Requests waited so long each and were computed together."""
        for queue_ns in queues_ns:
            self.queue.observe(queue_ns / 1000)
            self.input.observe(input_ns / 1000)
            self.infer.observe(infer_ns / 1000)
            self.output.observe(output_ns / 1000)


class QuickTally:
    """Requests of one row that were answered at once, until somebody looks: three sums instead of a dozen."""

    __slots__ = ("count", "last_ns", "took_ns")

    def __init__(self) -> None:
        self.count = self.took_ns = self.last_ns = 0


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
"""The name of the histogram of first answers, by which a configuration gives its buckets."""

_FIRST_ANSWER_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


def first_answer_bounds(config: ModelConfig) -> tuple[float, ...]:
    """The buckets, in milliseconds, of a decoupled model's first answers: as its `model_metrics` says, or Triton's."""
    for control in config.proto.model_metrics.metric_control if config.proto is not None else ():
        if control.metric_identifier.family == FIRST_RESPONSE and control.histogram_options.buckets:
            try:
                return check_bounds(control.histogram_options.buckets)
            except ValueError as error:
                raise InvalidArgument(f"model_metrics of model '{config.name}': {error}") from None
    return _FIRST_ANSWER_BOUNDS_MS


FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_REASONS = {
    Code.UNAVAILABLE: "REJECTED",
    Code.RESOURCE_EXHAUSTED: "REJECTED",
    Code.CANCELLED: "CANCELED",
    Code.DEADLINE_EXCEEDED: "CANCELED",
    Code.INTERNAL: "BACKEND",
}


def failure_reason(error: BaseException) -> str:
    """One of Triton's four words."""
    return _REASONS.get(error.code, "OTHER") if isinstance(error, HeadraceError) else "BACKEND"


@dataclass(slots=True)
class VersionStatistics:
    """Everything counted of one version."""

    received: int = 0
    """Requests taken, answered or not."""
    settled: int = 0
    """Requests answered, one way or the other."""
    _last_ns: int = 0
    by_rows: dict[int, RequestStats] = field(default_factory=dict)
    """Per batch size of the request; 0 for those that were refused before it was known."""
    batches: dict[int, BatchStats] = field(default_factory=dict)
    """Per size of the executed batch."""
    failures: Counter[str] = field(default_factory=Counter)
    log: BatchLog = field(default_factory=BatchLog)
    computed: int = 0
    """Requests that took part in an execution and were to have its result: as many queue and compute times there are."""
    quick_ns: int = QUICK_NS
    """A request that took longer is given to `slow`; -1 where all are to be."""
    slow_requests: SlowTally = field(default_factory=SlowTally)
    slow_queues: SlowTally = field(default_factory=SlowTally)
    slow_computes: SlowTally = field(default_factory=SlowTally)
    loads: list[int] = field(default_factory=lambda: [0] * (len(LOAD_EXCESSES) + 1))
    """Requests by how many times as long as their computation they took (`LOAD_RATIO_BOUNDS`); of the first bucket not
    all: what is in no other is there."""
    excess: float = 0.0
    """What all those ratios are over 1, together."""
    first_answers: Histogram | None = None
    """Of a decoupled model: milliseconds from a request to its first response."""
    responses: ByPlace = field(default_factory=dict)
    """Of a decoupled model: what each response to a request took."""
    summaries: LatencySummaries | None = None
    quick: QuickTally = field(default_factory=QuickTally)
    """Written by `engine.express`; to be added up by `take_in` before anything here is read."""

    @property
    def last_inference_ms(self) -> int:
        """By the wall clock, since 1970; 0 for never."""
        if not self._last_ns:
            return 0
        return int(time.time() * 1000) - (time.monotonic_ns() - self._last_ns) // 1_000_000

    @property
    def executions(self) -> int:
        """Batches computed."""
        return sum(stats.count for stats in self.batches.values())

    @property
    def inferences(self) -> int:
        """Rows computed successfully."""
        return sum(rows * stats.count for rows, stats in self.batches.items())

    @property
    def in_flight(self) -> int:
        """Requests taken and not answered yet."""
        return self.received - self.settled

    def forget_executions(self) -> None:
        """Count from the start again: what was computed so far was warm-up."""
        self._last_ns = self.computed = 0
        self.by_rows.clear()
        self.batches.clear()
        self.responses.clear()
        self.slow_requests, self.slow_queues, self.slow_computes = SlowTally(), SlowTally(), SlowTally()
        self.loads = [0] * len(self.loads)
        self.excess = 0.0

    def summarise(self, clock: Clock, quantiles: tuple[float, ...]) -> None:
        """Keep quantiles from now on."""
        self.summaries = LatencySummaries(clock, quantiles)
        self.quick_ns = -1

    def of_rows(self, rows: int) -> RequestStats:
        """The numbers for requests of this size."""
        stats = self.by_rows.get(rows)
        if stats is None:
            stats = self.by_rows[rows] = RequestStats()
        return stats

    def of_batch(self, rows: int) -> BatchStats:
        """The numbers for executions of this size."""
        stats = self.batches.get(rows)
        if stats is None:
            stats = self.batches[rows] = BatchStats()
        return stats

    def total(self) -> RequestStats:
        """All requests together."""
        total = RequestStats()
        for stats in self.by_rows.values():
            total.add(stats)
        return total

    def failed(self, rows: int, error: BaseException, duration_ns: int) -> None:
        """A request had an error for an answer."""
        stats = self.of_rows(rows)
        stats.fail += 1
        stats.fail_ns += duration_ns
        self.failures[failure_reason(error)] += 1

    def answered(self, rows: int, error: BaseException | None, took_ns: int) -> RequestStats:
        """A request has had its last answer. Returns the numbers for its size."""
        self.settled += 1
        stats = self.by_rows.get(rows) or self.of_rows(rows)
        if error is not None:
            self.failed(rows, error, took_ns)
        else:
            stats.success += 1
            stats.success_ns += took_ns
            if took_ns > self.quick_ns:
                self.slow(took_ns)
        return stats

    def slow(self, took_ns: int) -> None:
        """A request that took longer than `quick_ns` was answered well."""
        if took_ns > QUICK_NS:
            self.slow_requests.add(took_ns)
        if self.summaries is not None:
            self.summaries.request.observe(took_ns / 1000)

    def computed_together(
        self, sizes: Sequence[int], queues_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Requests of so many rows each waited so long each and were computed together."""
        if min(sizes) == max(sizes):
            groups = [(sizes[0], len(sizes), sum(queues_ns))]
        else:
            groups = [(rows, 1, queue_ns) for rows, queue_ns in zip(sizes, queues_ns, strict=True)]
        for rows, count, queue_ns in groups:
            stats = self.of_rows(rows)
            stats.queue_ns += queue_ns
            stats.input_ns += count * input_ns
            stats.infer_ns += count * infer_ns
            stats.output_ns += count * output_ns
        self.waited(queues_ns, input_ns, infer_ns, output_ns)

    def waited(self, queues_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Requests waited so long each and were computed together: their share of the histograms."""
        self.computed += len(queues_ns)
        compute_ns = input_ns + infer_ns + output_ns
        if compute_ns > QUICK_NS:
            self.slow_computes.add(compute_ns, len(queues_ns))
        # A quick request counts as one that did not wait: what it waited for is its turn, not others.
        if max(queues_ns) + compute_ns > QUICK_NS:
            long_ns = [queue_ns for queue_ns in queues_ns if queue_ns + compute_ns > QUICK_NS]
            self._waited_long(long_ns, compute_ns or 1)
        if self.summaries is not None:
            self.summaries.computed(queues_ns, input_ns, infer_ns, output_ns)

    def _waited_long(self, queues_ns: Sequence[int], compute_ns: int) -> None:
        self.excess += sum(queues_ns) / compute_ns
        least = bisect_left(LOAD_EXCESSES, min(queues_ns) / compute_ns)
        if least == bisect_left(LOAD_EXCESSES, max(queues_ns) / compute_ns):
            self.loads[least] += len(queues_ns)
        else:
            for queue_ns in queues_ns:
                self.loads[bisect_left(LOAD_EXCESSES, queue_ns / compute_ns)] += 1
        self.slow_queues.add_all(queues_ns)

    def answered_together(self, batch: Sequence[Pending], now_ns: int) -> None:
        """Requests that were computed together are answered well."""
        tooks_ns = [now_ns - pending.arrived_ns for pending in batch]
        self.settled += len(batch)
        sizes = {pending.rows for pending in batch}
        if len(sizes) == 1:
            stats = self.of_rows(sizes.pop())
            stats.success += len(batch)
            stats.success_ns += sum(tooks_ns)
        else:
            for pending, took_ns in zip(batch, tooks_ns, strict=True):
                stats = self.of_rows(pending.rows)
                stats.success += 1
                stats.success_ns += took_ns
        if max(tooks_ns) > QUICK_NS:
            self.slow_requests.add_all(tooks_ns)
        if self.summaries is not None:
            for took_ns in tooks_ns:
                self.summaries.request.observe(took_ns / 1000)

    def answered_alone(self, rows: int, arrived_ns: int, started_ns: int, computed_ns: int, split_ns: int) -> None:
        """A request was computed and is answered, without others and without joining: all that is to be counted."""
        self.settled += 1
        self._last_ns = split_ns
        stats = self.by_rows.get(rows) or self.of_rows(rows)
        took_ns, queue_ns = split_ns - arrived_ns, started_ns - arrived_ns
        stats.success += 1
        stats.success_ns += took_ns
        stats.queue_ns += queue_ns
        infer_ns, output_ns = computed_ns - started_ns, split_ns - computed_ns
        stats.infer_ns += infer_ns
        stats.output_ns += output_ns
        batch = self.batches.get(rows) or self.of_batch(rows)
        batch.count += 1
        batch.infer_ns += infer_ns
        batch.output_ns += output_ns
        if took_ns > self.quick_ns:
            self.slow(took_ns)
            self.waited((queue_ns,), 0, infer_ns, output_ns)
        else:
            self.computed += 1

    def take_in(self, alone: BatchRecord) -> None:
        """Add up what `quick` has counted; each of its requests was a batch as `alone` describes it."""
        quick = self.quick
        count = quick.count
        if not count:
            return
        self.received += count
        self.settled += count
        self.computed += count
        self._last_ns = max(self._last_ns, quick.last_ns)
        stats, batch = self.of_rows(1), self.of_batch(1)
        stats.success += count
        stats.success_ns += quick.took_ns
        stats.infer_ns += quick.took_ns
        batch.count += count
        batch.infer_ns += quick.took_ns
        self.log.recent.extend([alone] * min(count, self.log.recent.maxlen or 0))
        self.log.reasons[alone.reason] += count
        quick.count = quick.took_ns = 0

    def answered_at_once(self, rows: int, took_ns: int, ended_ns: int) -> None:
        """A request was received, computed and answered in one go: nothing to wait for, to join or to cut apart."""
        self.received += 1
        self.settled += 1
        self._last_ns = ended_ns
        stats = self.by_rows.get(rows) or self.of_rows(rows)
        stats.success += 1
        stats.success_ns += took_ns
        stats.infer_ns += took_ns
        batch = self.batches.get(rows) or self.of_batch(rows)
        batch.count += 1
        batch.infer_ns += took_ns
        if took_ns > self.quick_ns:
            self.slow(took_ns)
            self.waited((0,), 0, took_ns, 0)
        else:
            self.computed += 1

    def first_answer(self, arrived_ns: int) -> None:
        """The first of a decoupled model's responses to a request was given."""
        if self.first_answers is not None:
            self.first_answers.observe((time.monotonic_ns() - arrived_ns) / 1e6)

    def executed(self, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """A batch was computed."""
        self._last_ns = time.monotonic_ns()
        stats = self.batches.get(rows) or self.of_batch(rows)
        stats.count += 1
        stats.input_ns += input_ns
        stats.infer_ns += infer_ns
        stats.output_ns += output_ns
