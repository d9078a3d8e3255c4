# SPDX-License-Identifier: Apache-2.0
"""Statistics of one version: counts and times by request size and by batch size. Plain integers, summed when read.

Versions and runners write them in the event loop's thread; the protocols' statistics, status and metrics read them. Times
are nanoseconds. A cache hit is a success without an execution. Responses of decoupled models are also counted by their
index: the first response to each request, the second, and so on.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import NamedTuple

from headrace.core.clock import Clock
from headrace.core.errors import Code, HeadraceError, InvalidArgument
from headrace.core.telemetry.metrics import (
    DEFAULT_WINDOW_SECONDS,
    LOAD_EXCESSES,
    QUICK_NS,
    Histogram,
    SlowTally,
    Summary,
    check_bounds,
)
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.pending_request import BatchLog, BatchRecord, PendingRequest
from headrace.models.config.types import ModelConfig


class RequestStats:
    """Requests with the same number of rows."""

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
        """Add the numbers of another object."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def computed(self) -> int:
        """Successful requests that were not cache hits."""
        return self.success - self.hit


class BatchStats:
    """Executions with the same number of rows."""

    __slots__ = ("count", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.count = self.input_ns = self.infer_ns = self.output_ns = 0


class LatencySummaries:
    """Quantiles of a version's times in microseconds; only if configured."""

    __slots__ = ("hit", "infer", "input", "miss", "output", "queue", "request")

    def __init__(self, clock: Clock, quantiles: tuple[float, ...]) -> None:
        def summary() -> Summary:
            return Summary(clock, quantiles, DEFAULT_WINDOW_SECONDS)

        self.request, self.queue, self.input, self.infer, self.output = (summary() for _ in range(5))
        self.hit, self.miss = summary(), summary()

    def computed(self, queues_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Record requests that were computed in one batch."""
        for queue_ns in queues_ns:
            self.queue.observe(queue_ns / 1000)
            self.input.observe(input_ns / 1000)
            self.infer.observe(infer_ns / 1000)
            self.output.observe(output_ns / 1000)


class ExpressTally:
    """Requests of one row on the express path since the statistics were last read: three sums instead of a dozen."""

    __slots__ = ("count", "last_ns", "took_ns")

    def __init__(self) -> None:
        self.count = self.took_ns = self.last_ns = 0


FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
"""Metric name of the histogram of first responses; configurations use it to set its buckets."""

_FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


def first_response_bounds(config: ModelConfig) -> tuple[float, ...]:
    """Return the buckets, in milliseconds, of a decoupled model's first responses: from `model_metrics`, or Triton's."""
    for control in config.proto.model_metrics.metric_control if config.proto is not None else ():
        if control.metric_identifier.family == FIRST_RESPONSE and control.histogram_options.buckets:
            try:
                return check_bounds(control.histogram_options.buckets)
            except ValueError as error:
                raise InvalidArgument(f"model_metrics of model '{config.name}': {error}") from None
    return _FIRST_RESPONSE_BOUNDS_MS


FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_REASONS = {
    Code.UNAVAILABLE: "REJECTED",
    Code.RESOURCE_EXHAUSTED: "REJECTED",
    Code.CANCELLED: "CANCELED",
    Code.DEADLINE_EXCEEDED: "CANCELED",
    Code.INTERNAL: "BACKEND",
}


def failure_reason(error: BaseException) -> str:
    """Return one of Triton's four failure reasons."""
    return _REASONS.get(error.code, "OTHER") if isinstance(error, HeadraceError) else "BACKEND"


MAX_RECENT = 50
"""Requests of a version, and failed requests of it, that are kept for the console."""
_MAX_ERROR = 300

RecentRequest = tuple[int, int, int, str]
"""A successful request: when it arrived, how long it took (nanoseconds), its rows and its id. A plain tuple: it is made for
each request."""


class FailedRequest(NamedTuple):
    """A failed request, without its content."""

    arrived_ns: int
    took_ns: int
    rows: int
    id: str
    code: str
    message: str


@dataclass(slots=True)
class VersionStatistics:
    """All counts of one version."""

    received: int = 0
    """Accepted requests."""
    settled: int = 0
    """Requests that have their last response or error."""
    _last_ns: int = 0
    by_rows: dict[int, RequestStats] = field(default_factory=dict)
    """By number of rows; 0 for requests that were rejected before it was known."""
    batches: dict[int, BatchStats] = field(default_factory=dict)
    """By number of rows of the executed batch."""
    failures: Counter[str] = field(default_factory=Counter)
    log: BatchLog = field(default_factory=BatchLog)
    computed: int = 0
    """Requests with a queue time and a compute time: those in an execution that were not cancelled."""
    quick_ns: int = QUICK_NS
    """A request that took longer is passed to `slow`; -1 to pass all."""
    slow_requests: SlowTally = field(default_factory=SlowTally)
    slow_queues: SlowTally = field(default_factory=SlowTally)
    slow_computes: SlowTally = field(default_factory=SlowTally)
    loads: list[int] = field(default_factory=lambda: [0] * (len(LOAD_EXCESSES) + 1))
    """Requests by the ratio of their latency to their compute time (`LOAD_RATIO_BOUNDS`). The first bucket is incomplete:
    requests that are in no bucket belong there."""
    excess: float = 0.0
    """The sum of (ratio - 1) of all requests."""
    first_responses: Histogram | None = None
    """For a decoupled model: milliseconds from a request to its first response."""
    responses: ResponseStatsByIndex = field(default_factory=dict)
    """For a decoupled model: statistics by response index."""
    summaries: LatencySummaries | None = None
    recent: deque[RecentRequest] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """The last successful requests. Always the same object: `engine.express` keeps its `append`."""
    recent_failures: deque[FailedRequest] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    express_tally: ExpressTally = field(default_factory=ExpressTally)
    """Written by `engine.express`; call `add_express` before reading the statistics."""

    @property
    def last_inference_ms(self) -> int:
        """Unix time in milliseconds; 0 if there was none."""
        if not self._last_ns:
            return 0
        return int(time.time() * 1000) - (time.monotonic_ns() - self._last_ns) // 1_000_000

    @property
    def executions(self) -> int:
        """Number of computed batches."""
        return sum(stats.count for stats in self.batches.values())

    @property
    def inferences(self) -> int:
        """Number of successfully computed rows."""
        return sum(rows * stats.count for rows, stats in self.batches.items())

    @property
    def in_flight(self) -> int:
        """Number of accepted requests without their last response."""
        return self.received - self.settled

    @property
    def last_used_ns(self) -> int:
        """When the last request ended, by the monotonic clock; 0 if there was none.

        Taken from what is recorded anyway, so that requests pay nothing for it.
        """
        ended_ns = max(self._last_ns, self.express_tally.last_ns)
        if self.recent:
            arrived_ns, took_ns, _, _ = self.recent[-1]
            ended_ns = max(ended_ns, arrived_ns + took_ns)
        return ended_ns

    def reset_executions(self) -> None:
        """Reset the counts of executions, after the warm-up."""
        self._last_ns = self.computed = 0
        self.by_rows.clear()
        self.batches.clear()
        self.responses.clear()
        self.recent.clear()
        self.recent_failures.clear()
        self.slow_requests, self.slow_queues, self.slow_computes = SlowTally(), SlowTally(), SlowTally()
        self.loads = [0] * len(self.loads)
        self.excess = 0.0

    def summarise(self, clock: Clock, quantiles: tuple[float, ...]) -> None:
        """Start recording quantiles."""
        self.summaries = LatencySummaries(clock, quantiles)
        self.quick_ns = -1

    def of_rows(self, rows: int) -> RequestStats:
        """Return the statistics of requests with this number of rows."""
        stats = self.by_rows.get(rows)
        if stats is None:
            stats = self.by_rows[rows] = RequestStats()
        return stats

    def of_batch(self, rows: int) -> BatchStats:
        """Return the statistics of executions with this number of rows."""
        stats = self.batches.get(rows)
        if stats is None:
            stats = self.batches[rows] = BatchStats()
        return stats

    def total(self) -> RequestStats:
        """Return the sum over all requests."""
        total = RequestStats()
        for stats in self.by_rows.values():
            total.add(stats)
        return total

    def failed(self, rows: int, error: BaseException, duration_ns: int, request_id: str = "") -> None:
        """Count a request that failed."""
        code, text = (
            (error.code.name, error.message) if isinstance(error, HeadraceError) else (type(error).__name__, "")
        )
        arrived_ns = monotonic_ns() - duration_ns
        self.recent_failures.append(FailedRequest(arrived_ns, duration_ns, rows, request_id, code, text[:_MAX_ERROR]))
        stats = self.of_rows(rows)
        stats.fail += 1
        stats.fail_ns += duration_ns
        self.failures[failure_reason(error)] += 1

    def answered(
        self, rows: int, error: BaseException | None, took_ns: int, arrived_ns: int = 0, request_id: str = ""
    ) -> RequestStats:
        """Count a request that has its last response; return the statistics for its number of rows."""
        self.settled += 1
        stats = self.by_rows.get(rows) or self.of_rows(rows)
        if error is not None:
            self.failed(rows, error, took_ns, request_id)
        else:
            self.recent.append((arrived_ns, took_ns, rows, request_id))
            stats.success += 1
            stats.success_ns += took_ns
            if took_ns > self.quick_ns:
                self.slow(took_ns)
        return stats

    def slow(self, took_ns: int) -> None:
        """Record a successful request that took longer than `quick_ns`."""
        if took_ns > QUICK_NS:
            self.slow_requests.add(took_ns)
        if self.summaries is not None:
            self.summaries.request.observe(took_ns / 1000)

    def computed_together(
        self, sizes: Sequence[int], queues_ns: Sequence[int], input_ns: int, infer_ns: int, output_ns: int
    ) -> None:
        """Count requests that were computed in one batch: their rows and queue times, and the batch's times."""
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
        """Add requests that were computed in one batch to the histograms."""
        self.computed += len(queues_ns)
        compute_ns = input_ns + infer_ns + output_ns
        if compute_ns > QUICK_NS:
            self.slow_computes.add(compute_ns, len(queues_ns))
        # A fast request counts as one that did not wait.
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

    def answered_together(self, batch: Sequence[PendingRequest], now_ns: int) -> None:
        """Count the successful requests of a batch."""
        tooks_ns = [now_ns - pending.arrived_ns for pending in batch]
        self.recent.extend(
            [
                (pending.arrived_ns, took_ns, pending.rows, pending.request.id)
                for pending, took_ns in zip(batch, tooks_ns, strict=True)
            ]
        )
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

    def answered_single(
        self, rows: int, arrived_ns: int, started_ns: int, computed_ns: int, split_ns: int, request_id: str = ""
    ) -> None:
        """Count a successful request that was computed alone."""
        self.settled += 1
        self._last_ns = split_ns
        stats = self.by_rows.get(rows) or self.of_rows(rows)
        took_ns, queue_ns = split_ns - arrived_ns, started_ns - arrived_ns
        self.recent.append((arrived_ns, took_ns, rows, request_id))
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

    def add_express(self, record: BatchRecord) -> None:
        """Add the requests of the express path to the counts; `record` describes the batch of each."""
        tally = self.express_tally
        count = tally.count
        if not count:
            return
        self.received += count
        self.settled += count
        self.computed += count
        self._last_ns = max(self._last_ns, tally.last_ns)
        stats, batch = self.of_rows(1), self.of_batch(1)
        stats.success += count
        stats.success_ns += tally.took_ns
        stats.infer_ns += tally.took_ns
        batch.count += count
        batch.infer_ns += tally.took_ns
        self.log.recent.extend([record] * min(count, self.log.recent.maxlen or 0))
        self.log.reasons[record.reason] += count
        tally.count = tally.took_ns = 0

    def answered_at_once(self, rows: int, took_ns: int, ended_ns: int) -> None:
        """Count a request of the express path: received, computed and answered in one call."""
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

    def first_response(self, arrived_ns: int) -> None:
        """Record the time to a decoupled model's first response."""
        if self.first_responses is not None:
            self.first_responses.observe((time.monotonic_ns() - arrived_ns) / 1e6)

    def executed(self, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count an execution."""
        self._last_ns = time.monotonic_ns()
        stats = self.batches.get(rows) or self.of_batch(rows)
        stats.count += 1
        stats.input_ns += input_ns
        stats.infer_ns += infer_ns
        stats.output_ns += output_ns


MAX_RESPONSE_INDEX = 1000
"""Responses from this index on are counted together: a stream may be endless."""


class ResponseStats:
    """Responses of one index; times are measured since the previous response."""

    __slots__ = (
        "cancel",
        "cancel_ns",
        "empty",
        "empty_ns",
        "fail",
        "fail_ns",
        "infer_ns",
        "output_ns",
        "success",
        "success_ns",
    )

    def __init__(self) -> None:
        self.success = self.success_ns = self.fail = self.fail_ns = 0
        self.empty = self.empty_ns = self.cancel = self.cancel_ns = 0
        self.infer_ns = self.output_ns = 0


ResponseStatsByIndex = dict[int, ResponseStats]


def response_index_text(index: int) -> str:
    """Return the name of a response index in statistics."""
    return f"{MAX_RESPONSE_INDEX}+" if index >= MAX_RESPONSE_INDEX else str(index)


class ResponseTimer:
    """Times the responses to one request."""

    __slots__ = ("_by_index", "_index", "_since_ns")

    def __init__(self, by_index: ResponseStatsByIndex, started_ns: int) -> None:
        self._by_index = by_index
        self._index = 0
        self._since_ns = started_ns

    def record(self, answer: Sequence[Tensor] | HeadraceError | None, given_ns: int, *, cancelled: bool) -> None:
        """Record a response that the model returned at `given_ns` and that is checked now; None for an empty last one."""
        now_ns = monotonic_ns()
        infer_ns, output_ns = given_ns - self._since_ns, now_ns - given_ns
        stats = self._by_index.get(self._index)
        if stats is None:
            stats = self._by_index[self._index] = ResponseStats()
        if cancelled:
            stats.cancel += 1
            stats.cancel_ns += infer_ns + output_ns
        elif answer is None:
            stats.infer_ns += infer_ns
            stats.empty += 1
            stats.empty_ns += infer_ns
        else:
            stats.infer_ns += infer_ns
            stats.output_ns += output_ns
            if isinstance(answer, HeadraceError):
                stats.fail += 1
                stats.fail_ns += infer_ns + output_ns
            else:
                stats.success += 1
                stats.success_ns += infer_ns + output_ns
        self._since_ns = now_ns
        self._index = min(self._index + 1, MAX_RESPONSE_INDEX)
