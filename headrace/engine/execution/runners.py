# SPDX-License-Identifier: Apache-2.0
"""Runners: each holds one instance of a model, computes the batches it is given and answers their requests.

Called by the schedulers in the loop's thread; answers are given there too. A `ComputeRunner` computes in that thread or
in one of its own, as its `Pace` says. `request_runner` has the other kind, for instances that answer by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from time import monotonic_ns

import numpy as np

from headrace.backends.contract import Array, ComputeInstance, DeviceComputing, Placement
from headrace.core.errors import HeadraceError, Internal
from headrace.core.messages import StepRequest
from headrace.core.tensors import Tensor
from headrace.engine.execution.joining import Answers, Joiner
from headrace.engine.scheduling.batches import BatchRecord
from headrace.engine.scheduling.delay import Delay
from headrace.engine.scheduling.pace import Pace
from headrace.engine.scheduling.pending import ANSWERED, Pending
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import Resource

log = logging.getLogger("headrace.engine")

Free = Callable[[Runner], None]
Compute = Callable[[Mapping[str, Array], Collection[str]], Mapping[str, Array]]


Outcome = tuple[Sequence[Pending], Answers | HeadraceError, int, int, int, int]
"""What became of (a part of) a batch, and when it was started, joined, computed and cut apart."""


class RunnerBase:
    """What the limiter and people need to know of a runner."""

    def __init__(self, placement: Placement, resources: tuple[Resource, ...], priority: int) -> None:
        self.name = placement.name
        self.device = f"{placement.kind}{placement.device}"
        self.resources = resources
        self.priority = priority
        self.alone = BatchRecord("one at a time", 1, 1, 0, 0, placement.name)
        self.idle = BatchRecord("idle instance", 1, 1, 0, 0, placement.name)


class ComputeRunner(RunnerBase):
    """Joins, computes, cuts apart."""

    def __init__(
        self,
        instance: ComputeInstance,
        placement: Placement,
        joiner: Joiner,
        statistics: VersionStatistics,
        delay: Delay,
        pace: Pace,
        *,
        resources: tuple[Resource, ...] = (),
        priority: int = 0,
        alone_again: bool = True,
    ) -> None:
        super().__init__(placement, resources, priority)
        self._instance = instance
        self.compute = instance.compute
        self.joiner = joiner
        self.on_device: DeviceComputing | None = None
        """The instance, if it can compute with tensors of its device and leave them there."""
        if isinstance(instance, DeviceComputing) and type(joiner) is Joiner:
            self.on_device = instance
        self._statistics = statistics
        self._delay = delay
        self.pace = pace
        self._alone_again = alone_again
        """Whether the requests of a failed batch are computed again one by one, so that only the guilty fail; not for
        models with a memory."""
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Sequence[Pending], Free] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, batch: Sequence[Pending], free: Free) -> None:
        """See `Runner.run`."""
        if self.pace.inline:
            if len(batch) == 1 and not batch[0].request.inside:
                self._run_alone(batch[0])
                free(self)
            else:
                self._finish(self._compute(batch), free)
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put((batch, free))

    def _run_alone(self, pending: Pending) -> None:
        """The shortest way, for one request in the loop's thread: what `_compute` and `_answer` do, without the batch."""
        joiner, pace, request = self.joiner, self.pace, pending.request
        started_ns = monotonic_ns()
        try:
            arrays = joiner.join((pending,))
            result = self.compute(arrays, joiner.wanted((pending,)) if request.outputs else joiner.all_names)
            computed_ns = monotonic_ns()
            outputs = joiner.split_alone(pending, result)
        except Exception as error:
            self._tell(pending, told(error, self.name, (pending,)))
            return
        split_ns = monotonic_ns()
        if pending.owner.follows or type(pending) is not Pending:
            self._count((pending,), started_ns, started_ns, computed_ns, split_ns)
            if pending.owner.watch is not None:
                pending.owner.watch.computed((pending,), started_ns, started_ns, computed_ns, split_ns)
            self._tell(pending, outputs)
            return
        if split_ns - started_ns > pace.slow_ns or pace.strikes:
            pace.took(split_ns - started_ns, pending.rows)
        self._statistics.answered_alone(pending.rows, pending.arrived_ns, started_ns, computed_ns, split_ns)
        try:
            pending.deliver(outputs)
        except Exception:
            log.exception("an answer could not be delivered")

    def close(self) -> None:
        """End the thread and the instance. From a loader thread, when nothing runs."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._instance.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, free = job
            outcomes = self._compute(batch)
            # Let go before waiting for the next, or the last batch would stay in memory until then.
            del job, batch
            self._loop.call_soon_threadsafe(self._finish, outcomes, free)
            del outcomes, free

    def _compute(self, batch: Sequence[Pending]) -> list[Outcome]:
        """In the computing thread: the batch's outcome, or that of each request alone when the batch failed."""
        joiner = self.joiner
        started_ns = joined_ns = computed_ns = monotonic_ns()
        try:
            compute = self._way_of(batch)
            inputs = joiner.join(batch)
            joined_ns = monotonic_ns()
            result = compute(inputs, joiner.wanted(batch))
            computed_ns = monotonic_ns()
            parts = joiner.split(batch, result)
            answers: Answers | HeadraceError = parts if compute is self.compute else _brought_home(batch, parts)
        except Exception as error:
            if len(batch) > 1 and self._alone_again:
                return [outcome for pending in batch for outcome in self._compute((pending,))]
            answers = told(error, self.name, batch)
        return [(batch, answers, started_ns, joined_ns, computed_ns, monotonic_ns())]

    def _way_of(self, batch: Sequence[Pending]) -> Compute:
        """How to compute a batch: so that its tensors stay on the device, if a member may have them there."""
        inside = [pending for pending in batch if pending.request.inside]
        if not inside:
            return self.compute
        if self.on_device is None:
            for pending in inside:
                if isinstance(pending.request, StepRequest):
                    pending.request = pending.request.on_host()
            return self.compute
        stays = any(pending.request.stays_on_device for pending in inside)
        return self.on_device.compute_on_device if stays else self.compute

    def _finish(self, outcomes: list[Outcome], free: Free) -> None:
        if self.pace.inline:
            # Here a free runner computes at once, and later requests would have their answers before these.
            for outcome in outcomes:
                self._answer(*outcome)
            free(self)
        else:
            free(self)
            for outcome in outcomes:
                self._answer(*outcome)

    def _answer(
        self,
        batch: Sequence[Pending],
        answers: Answers | HeadraceError,
        started_ns: int,
        joined_ns: int,
        computed_ns: int,
        split_ns: int,
    ) -> None:
        if isinstance(answers, HeadraceError):
            self.pace.took(split_ns - started_ns, len(batch))
            for pending in batch:
                self._tell(pending, answers)
            return
        self._count(batch, started_ns, joined_ns, computed_ns, split_ns)
        if batch[0].owner.follows or type(batch[0]) is not Pending:
            watch = batch[0].owner.watch
            if watch is not None:
                watch.computed(batch, started_ns, joined_ns, computed_ns, split_ns)
            for pending, outputs in zip(batch, answers, strict=True):
                self._tell(pending, outputs)
        else:
            self._deliver(batch, answers, split_ns)

    def _deliver(self, batch: Sequence[Pending], answers: Answers, split_ns: int) -> None:
        """Tell callers and count them together, for a version that need not see each."""
        delivered = []
        for pending, outputs in zip(batch, answers, strict=True):
            # Looked at one by one: a caller that is told may cancel others of the batch, which are counted by that.
            if pending.state != ANSWERED:
                delivered.append(pending)
                try:
                    pending.deliver(outputs)
                except Exception:  # of the caller: it must not cost the others their answers
                    log.exception("an answer could not be delivered")
        if delivered:
            self._statistics.answered_together(delivered, split_ns)

    def _tell(self, pending: Pending, outputs: Sequence[Tensor] | HeadraceError) -> None:
        if pending.state != ANSWERED:
            try:
                pending.finish(outputs)
            except Exception:  # of the caller: it must not cost the others their answers
                log.exception("an answer could not be delivered")

    def _count(
        self, batch: Sequence[Pending], started_ns: int, joined_ns: int, computed_ns: int, split_ns: int
    ) -> None:
        """Count an execution."""
        statistics = self._statistics
        input_ns, infer_ns, output_ns = joined_ns - started_ns, computed_ns - joined_ns, split_ns - computed_ns
        # Not those that nobody waits for: they were cancelled, or only fill the slots of silent sequences.
        counted = [pending for pending in batch if pending.state != ANSWERED]
        sizes = [pending.rows for pending in counted]
        queues_ns = [started_ns - pending.arrived_ns for pending in counted]
        rows = sum(sizes)
        self.pace.took(split_ns - started_ns, rows)
        if rows:
            statistics.computed_together(sizes, queues_ns, input_ns, infer_ns, output_ns)
            statistics.executed(rows, input_ns, infer_ns, output_ns)
        if self._delay.learns:
            self._delay.finished([split_ns - pending.arrived_ns for pending in batch], rows, split_ns - started_ns)


def _brought_home(batch: Sequence[Pending], answers: Answers) -> Answers:
    """Of outputs on a device, copies on the host for those that are not to have them there."""
    return [
        outputs
        if pending.request.stays_on_device
        else [Tensor(tensor.name, tensor.dtype, np.asarray(tensor.array)) for tensor in outputs]
        for pending, outputs in zip(batch, answers, strict=True)
    ]


def told(error: Exception, instance: str, batch: Sequence[Pending]) -> HeadraceError:
    """What callers are told of a failed execution; everything else goes to the log."""
    if isinstance(error, Internal):
        log.error("instance '%s': %s", instance, error.message)
    if isinstance(error, HeadraceError):
        # Its frames hold the batch; and they hold it: a circle that would stay until it is looked for.
        error.__context__ = None
        return error.with_traceback(None)
    log.error("instance '%s' failed on a batch of %d request(s)", instance, len(batch), exc_info=error)
    return Internal(f"model '{batch[0].owner.name}' failed; the server's log has the details")
