# SPDX-License-Identifier: Apache-2.0
"""Runners: each holds one instance of a model, computes its batches and answers their requests.

Schedulers call them in the event loop's thread, and responses are delivered there. A `ComputeRunner` concatenates the inputs
of a batch and computes in the event loop's thread or in its own, as its `ExecutionPlacement` decides. A `RequestRunner` is
for instances that take requests and answer when they are ready: processes and decoupled models. Both check what a model
returns against its configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from time import monotonic_ns

import numpy as np

from headrace.backends.contract import Array, ComputeInstance, DeviceComputeInstance, Placement, RequestInstance
from headrace.core.errors import HeadraceError, Internal
from headrace.core.requests import NO_PARAMETERS, InferRequest, Parameters, StepRequest
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator, BatchOutputs
from headrace.engine.scheduling.dynamic_batcher import QueueDelay
from headrace.engine.scheduling.pending_request import ANSWERED, BatchRecord, PendingRequest
from headrace.engine.scheduling.scheduler import ExecutionPlacement, Runner
from headrace.engine.statistics import ResponseTimer, VersionStatistics
from headrace.models.config.types import Resource

log = logging.getLogger("headrace.engine")

ReleaseCallback = Callable[[Runner], None]
Compute = Callable[[Mapping[str, Array], Collection[str]], Mapping[str, Array]]

Outcome = tuple[Sequence[PendingRequest], BatchOutputs | HeadraceError, int, int, int, int]
"""The result of a batch or a part of it, and when it was started, concatenated, computed and split."""


class RunnerBase:
    """The attributes that schedulers and the rate limiter use."""

    def __init__(self, placement: Placement, resources: tuple[Resource, ...], priority: int) -> None:
        self.name = placement.name
        self.device = f"{placement.kind}{placement.device}"
        self.resources = resources
        self.priority = priority
        self.single_record = BatchRecord("one at a time", 1, 1, 0, 0, placement.name)
        self.idle_record = BatchRecord("idle instance", 1, 1, 0, 0, placement.name)


class ComputeRunner(RunnerBase):
    """Concatenates the inputs of a batch, computes it and splits the result."""

    def __init__(
        self,
        instance: ComputeInstance,
        placement: Placement,
        concatenator: BatchConcatenator,
        statistics: VersionStatistics,
        delay: QueueDelay,
        execution: ExecutionPlacement,
        *,
        resources: tuple[Resource, ...] = (),
        priority: int = 0,
        retry_individually: bool = True,
    ) -> None:
        super().__init__(placement, resources, priority)
        self._instance = instance
        self.compute = instance.compute
        self.concatenator = concatenator
        self.on_device: DeviceComputeInstance | None = None
        """The instance, if it can compute with tensors in device memory and leave the outputs there."""
        if isinstance(instance, DeviceComputeInstance) and type(concatenator) is BatchConcatenator:
            self.on_device = instance
        self._statistics = statistics
        self._delay = delay
        self.execution = execution
        self._alone_again = retry_individually
        """Whether the requests of a failed batch are computed again one by one, so that only faulty ones fail; not for
        models with state."""
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Sequence[PendingRequest], ReleaseCallback] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, batch: Sequence[PendingRequest], free: ReleaseCallback) -> None:
        """Compute a batch and answer its requests; call `free` when the instance can take another."""
        if self.execution.inline:
            if len(batch) == 1 and not batch[0].request.is_ensemble_step:
                self._run_single(batch[0])
                free(self)
            else:
                self._finish(self._compute(batch), free)
            return
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self.name, daemon=True)
            self._thread.start()
        self._jobs.put((batch, free))

    def _run_single(self, pending: PendingRequest) -> None:
        """Compute one request in the event loop's thread: what `_compute` and `_answer` do, without a batch."""
        concatenator, execution, request = self.concatenator, self.execution, pending.request
        started_ns = monotonic_ns()
        try:
            arrays = concatenator.concatenate((pending,))
            result = self.compute(
                arrays, concatenator.requested_outputs((pending,)) if request.outputs else concatenator.all_outputs
            )
            computed_ns = monotonic_ns()
            outputs = concatenator.split_single(pending, result)
        except Exception as error:
            self._finish_request(pending, error_for_callers(error, self.name, (pending,)))
            return
        split_ns = monotonic_ns()
        if pending.owner.tracks_requests or type(pending) is not PendingRequest:
            self._count((pending,), started_ns, started_ns, computed_ns, split_ns)
            if pending.owner.recorder is not None:
                pending.owner.recorder.computed((pending,), started_ns, started_ns, computed_ns, split_ns)
            self._finish_request(pending, outputs)
            return
        if split_ns - started_ns > execution.slow_ns or execution.strikes:
            execution.record(split_ns - started_ns, pending.rows, computed_ns - started_ns)
        self._statistics.answered_single(
            pending.rows, pending.arrived_ns, started_ns, computed_ns, split_ns, request.id
        )
        try:
            pending.deliver(outputs)
        except Exception:
            log.exception("Could not deliver a response.")

    def close(self) -> None:
        """Stop the thread and close the instance. Call from a loader thread, when nothing runs."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._instance.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            batch, free = job
            outcomes = self._compute(batch)
            # Drop the references before waiting, or the last batch would stay in memory until the next one.
            del job, batch
            self._loop.call_soon_threadsafe(self._finish, outcomes, free)
            del outcomes, free

    def _compute(self, batch: Sequence[PendingRequest]) -> list[Outcome]:
        """Compute a batch; if it fails, compute each of its requests alone. Runs in the computing thread."""
        concatenator = self.concatenator
        started_ns = concatenated_ns = computed_ns = monotonic_ns()
        try:
            compute = self._compute_function(batch)
            inputs = concatenator.concatenate(batch)
            concatenated_ns = monotonic_ns()
            result = compute(inputs, concatenator.requested_outputs(batch))
            computed_ns = monotonic_ns()
            parts = concatenator.split(batch, result)
            outputs: BatchOutputs | HeadraceError = parts if compute is self.compute else _copy_to_host(batch, parts)
        except Exception as error:
            if len(batch) > 1 and self._alone_again:
                return [outcome for pending in batch for outcome in self._compute((pending,))]
            outputs = error_for_callers(error, self.name, batch)
        return [(batch, outputs, started_ns, concatenated_ns, computed_ns, monotonic_ns())]

    def _compute_function(self, batch: Sequence[PendingRequest]) -> Compute:
        """Return the function to compute a batch with: on the device, if the outputs of a request may stay there."""
        steps = [pending for pending in batch if pending.request.is_ensemble_step]
        if not steps:
            return self.compute
        if self.on_device is None:
            for pending in steps:
                if isinstance(pending.request, StepRequest):
                    pending.request = pending.request.on_host()
            return self.compute
        keep = any(pending.request.keep_on_device for pending in steps)
        return self.on_device.compute_on_device if keep else self.compute

    def _finish(self, outcomes: list[Outcome], free: ReleaseCallback) -> None:
        if self.execution.inline:
            # A free runner computes immediately here, and later requests would be answered before these.
            for outcome in outcomes:
                self._answer(*outcome)
            free(self)
        else:
            free(self)
            for outcome in outcomes:
                self._answer(*outcome)

    def _answer(
        self,
        batch: Sequence[PendingRequest],
        outputs: BatchOutputs | HeadraceError,
        started_ns: int,
        concatenated_ns: int,
        computed_ns: int,
        split_ns: int,
    ) -> None:
        if isinstance(outputs, HeadraceError):
            self.execution.record(split_ns - started_ns, len(batch))
            for pending in batch:
                self._finish_request(pending, outputs)
            return
        self._count(batch, started_ns, concatenated_ns, computed_ns, split_ns)
        if batch[0].owner.tracks_requests or type(batch[0]) is not PendingRequest:
            recorder = batch[0].owner.recorder
            if recorder is not None:
                recorder.computed(batch, started_ns, concatenated_ns, computed_ns, split_ns)
            for pending, tensors in zip(batch, outputs, strict=True):
                self._finish_request(pending, tensors)
        else:
            self._deliver(batch, outputs, split_ns)

    def _deliver(self, batch: Sequence[PendingRequest], outputs: BatchOutputs, split_ns: int) -> None:
        """Deliver the responses of a batch and count them together, for a version that does not track requests."""
        delivered = []
        for pending, tensors in zip(batch, outputs, strict=True):
            # Check the state of each: a callback may cancel other requests of the batch, and `cancel` counts them.
            if pending.state != ANSWERED:
                delivered.append(pending)
                try:
                    pending.deliver(tensors)
                except Exception:  # an error in one caller's callback must not affect the other responses
                    log.exception("Could not deliver a response.")
        if delivered:
            self._statistics.answered_together(delivered, split_ns)

    def _finish_request(self, pending: PendingRequest, outputs: Sequence[Tensor] | HeadraceError) -> None:
        if pending.state != ANSWERED:
            try:
                pending.finish(outputs)
            except Exception:  # an error in one caller's callback must not affect the other responses
                log.exception("Could not deliver a response.")

    def _count(
        self, batch: Sequence[PendingRequest], started_ns: int, concatenated_ns: int, computed_ns: int, split_ns: int
    ) -> None:
        """Count an execution."""
        statistics = self._statistics
        input_ns, infer_ns, output_ns = (
            concatenated_ns - started_ns,
            computed_ns - concatenated_ns,
            split_ns - computed_ns,
        )
        # Without requests that were cancelled, and fillers for slots of idle sequences.
        counted = [pending for pending in batch if pending.state != ANSWERED]
        sizes = [pending.rows for pending in counted]
        queues_ns = [started_ns - pending.arrived_ns for pending in counted]
        rows = sum(sizes)
        self.execution.record(split_ns - started_ns, rows, infer_ns)
        if rows:
            statistics.computed_together(sizes, queues_ns, input_ns, infer_ns, output_ns)
            statistics.executed(rows, input_ns, infer_ns, output_ns)
        if self._delay.is_adaptive:
            self._delay.batch_finished(
                [split_ns - pending.arrived_ns for pending in batch], rows, split_ns - started_ns
            )


def _copy_to_host(batch: Sequence[PendingRequest], outputs: BatchOutputs) -> BatchOutputs:
    """Copy outputs from device to host memory, except for requests that keep them on the device."""
    return [
        tensors
        if pending.request.keep_on_device
        else [Tensor(tensor.name, tensor.dtype, np.asarray(tensor.array)) for tensor in tensors]
        for pending, tensors in zip(batch, outputs, strict=True)
    ]


def error_for_callers(error: Exception, instance: str, batch: Sequence[PendingRequest]) -> HeadraceError:
    """Return the error for the callers of a failed execution; log the details."""
    if isinstance(error, Internal):
        log.error("instance '%s': %s", instance, error.message)
    if isinstance(error, HeadraceError):
        # Its frames hold the batch, and the batch holds the error: a reference cycle until the next collection.
        error.__context__ = None
        return error.with_traceback(None)
    log.error("instance '%s' failed on a batch of %d request(s)", instance, len(batch), exc_info=error)
    return Internal(f"model '{batch[0].owner.name}' failed; the server's log has the details")


class RequestRunner(RunnerBase):
    """Passes requests to the instance and checks its responses."""

    def __init__(
        self,
        instance: RequestInstance,
        placement: Placement,
        concatenator: BatchConcatenator,
        statistics: VersionStatistics,
        delay: QueueDelay,
        *,
        resources: tuple[Resource, ...] = (),
        priority: int = 0,
    ) -> None:
        super().__init__(placement, resources, priority)
        self.execution = ExecutionPlacement("thread")
        self.instance = instance
        self.concatenator = concatenator
        self.statistics = statistics
        self.delay = delay

    def run(self, batch: Sequence[PendingRequest], free: ReleaseCallback) -> None:
        """Pass a batch to the instance; call `free` when it can take another."""
        for pending in batch:
            if isinstance(pending.request, StepRequest):
                pending.request = pending.request.on_host()
        request_batch = _RequestBatch(self, len(batch))
        works = [_Work(pending, request_batch) for pending in batch]
        freed = False

        def finished() -> None:
            nonlocal freed
            if not freed:  # a second call would start two batches
                freed = True
                free(self)

        try:
            self.instance.execute(works, finished)
        except Exception as error:
            failure = error_for_callers(error, self.name, batch)
            for work in works:
                work.reply(failure)
            finished()

    def close(self) -> None:
        """Close the instance. Call from a loader thread, when nothing runs."""
        self.instance.close()


class _RequestBatch:
    """Requests that were passed to the instance together, until the last one is answered."""

    __slots__ = ("latencies_ns", "left", "rows", "runner", "started_ns")

    def __init__(self, runner: RequestRunner, requests: int) -> None:
        self.runner = runner
        self.left = requests
        self.rows = 0
        """Rows of successful requests."""
        self.started_ns = monotonic_ns()
        self.latencies_ns: list[int] = []

    def settle(self, pending: PendingRequest, *, success: bool) -> None:
        """Count a request that has its last response."""
        now_ns = monotonic_ns()
        took_ns = now_ns - self.started_ns
        statistics = self.runner.statistics
        self.left -= 1
        self.latencies_ns.append(now_ns - pending.arrived_ns)
        # Cancelled requests were counted when they were cancelled.
        if success and not pending.cancelled:
            self.rows += pending.rows
            stats = statistics.of_rows(pending.rows)
            queue_ns = self.started_ns - pending.arrived_ns
            stats.queue_ns += queue_ns
            stats.infer_ns += took_ns
            statistics.waited((queue_ns,), 0, took_ns, 0)
        if not self.left and self.rows:
            statistics.executed(self.rows, 0, took_ns, 0)
            if self.runner.delay.is_adaptive:
                self.runner.delay.batch_finished(self.latencies_ns, self.rows, took_ns)


class _Work:
    """A request that an instance computes: `backends.contract.Work`."""

    __slots__ = ("_awaits_first", "_batch", "_finished", "_pending", "_timer")

    def __init__(self, pending: PendingRequest, batch: _RequestBatch) -> None:
        self._pending = pending
        self._batch = batch
        statistics = batch.runner.statistics
        self._awaits_first = statistics.first_responses is not None
        """Whether its first response is timed and has not arrived."""
        self._timer = ResponseTimer(statistics.responses, batch.started_ns) if self._awaits_first else None
        self._finished = False

    @property
    def request(self) -> InferRequest:
        return self._pending.request

    @property
    def cancelled(self) -> bool:
        return self._pending.cancelled

    def reply(
        self,
        outputs: Sequence[Tensor] | HeadraceError | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        if self._finished:
            return
        pending = self._pending
        given_ns = monotonic_ns() if self._timer is not None else 0
        answer: Sequence[Tensor] | HeadraceError | None = outputs
        if outputs is not None and not isinstance(outputs, HeadraceError):
            try:
                answer = _checked(self._batch.runner.concatenator, pending, outputs)
            except HeadraceError as error:
                answer = error.with_traceback(None)  # the traceback would form a reference cycle with this frame
        failed = isinstance(answer, HeadraceError)
        if self._awaits_first and answer is not None and not failed:
            self._awaits_first = False
            self._batch.runner.statistics.first_response(pending.arrived_ns)
        if self._timer is not None and (final or answer is not None):
            self._timer.record(answer, given_ns, cancelled=pending.cancelled)
        if final or failed:
            self._finished = True
            self._batch.settle(pending, success=not failed)
        try:
            pending.reply(answer, final=final, parameters=parameters)
        except Exception:
            log.exception("Could not deliver a response.")


def _checked(concatenator: BatchConcatenator, pending: PendingRequest, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the requested outputs from what the model returned, checked."""
    if not pending.request.outputs and concatenator.accepts(outputs):
        return outputs
    for tensor in outputs:
        concatenator.check_dtype(tensor)
    by_name = {tensor.name: tensor.array for tensor in outputs}
    return concatenator.split((pending,), by_name)[0]
