# SPDX-License-Identifier: Apache-2.0
"""The runner for instances that take requests as they are, and answer when they like: processes, decoupled models.

Called by the schedulers in the loop's thread; the instance answers there too. Holds what comes back against the model's
configuration before a caller gets it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic_ns

from headrace.backends.contract import Placement, RequestInstance
from headrace.core.errors import HeadraceError
from headrace.core.messages import NO_PARAMETERS, InferRequest, Parameters, StepRequest
from headrace.core.tensors import Tensor
from headrace.engine.execution.joining import Joiner
from headrace.engine.execution.runners import Free, RunnerBase, told
from headrace.engine.responses import ResponseWatch
from headrace.engine.scheduling.delay import Delay
from headrace.engine.scheduling.pace import Pace
from headrace.engine.scheduling.pending import Pending
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import Resource

log = logging.getLogger("headrace.engine")


class RequestRunner(RunnerBase):
    """Passes requests on, and checks what comes back."""

    def __init__(
        self,
        instance: RequestInstance,
        placement: Placement,
        joiner: Joiner,
        statistics: VersionStatistics,
        delay: Delay,
        *,
        resources: tuple[Resource, ...] = (),
        priority: int = 0,
    ) -> None:
        super().__init__(placement, resources, priority)
        self.pace = Pace("thread")
        self.instance = instance
        self.joiner = joiner
        self.statistics = statistics
        self.delay = delay

    def run(self, batch: Sequence[Pending], free: Free) -> None:
        """See `Runner.run`."""
        for pending in batch:
            if isinstance(pending.request, StepRequest):
                pending.request = pending.request.on_host()
        together = _RequestBatch(self, len(batch))
        works = [_Work(pending, together) for pending in batch]
        freed = False

        def finished() -> None:
            nonlocal freed
            if not freed:  # else two batches would come at once
                freed = True
                free(self)

        try:
            self.instance.execute(works, finished)
        except Exception as error:
            failure = told(error, self.name, batch)
            for work in works:
                work.reply(failure)
            finished()

    def close(self) -> None:
        """End the instance. From a loader thread, when nothing runs."""
        self.instance.close()


class _RequestBatch:
    """Requests that were passed on together, until the last of them is answered."""

    __slots__ = ("latencies_ns", "left", "rows", "runner", "started_ns")

    def __init__(self, runner: RequestRunner, requests: int) -> None:
        self.runner = runner
        self.left = requests
        self.rows = 0
        """Of those that succeeded."""
        self.started_ns = monotonic_ns()
        self.latencies_ns: list[int] = []

    def settle(self, pending: Pending, *, success: bool) -> None:
        """One of them has had its last answer."""
        now_ns = monotonic_ns()
        took_ns = now_ns - self.started_ns
        statistics = self.runner.statistics
        self.left -= 1
        self.latencies_ns.append(now_ns - pending.arrived_ns)
        # Not those that nobody waits for: they were counted when they were cancelled.
        if success and not pending.cancelled:
            self.rows += pending.rows
            stats = statistics.of_rows(pending.rows)
            queue_ns = self.started_ns - pending.arrived_ns
            stats.queue_ns += queue_ns
            stats.infer_ns += took_ns
            statistics.waited((queue_ns,), 0, took_ns, 0)
        if not self.left and self.rows:
            statistics.executed(self.rows, 0, took_ns, 0)
            if self.runner.delay.learns:
                self.runner.delay.finished(self.latencies_ns, self.rows, took_ns)


class _Work:
    """A request in the hands of an instance. See `contract.Work`."""

    __slots__ = ("_ended", "_pending", "_silent", "_together", "_watch")

    def __init__(self, pending: Pending, together: _RequestBatch) -> None:
        self._pending = pending
        self._together = together
        statistics = together.runner.statistics
        self._silent = statistics.first_answers is not None
        """Whether its first answer is to be timed, and is still to come."""
        self._watch = ResponseWatch(statistics.responses, together.started_ns) if self._silent else None
        self._ended = False

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
        if self._ended:
            return
        pending = self._pending
        given_ns = monotonic_ns() if self._watch is not None else 0
        answer: Sequence[Tensor] | HeadraceError | None = outputs
        if outputs is not None and not isinstance(outputs, HeadraceError):
            try:
                answer = _checked(self._together.runner.joiner, pending, outputs)
            except HeadraceError as error:
                answer = error.with_traceback(None)  # its frames are these: a circle
        failed = isinstance(answer, HeadraceError)
        if self._silent and answer is not None and not failed:
            self._silent = False
            self._together.runner.statistics.first_answer(pending.arrived_ns)
        if self._watch is not None and (final or answer is not None):
            self._watch.given(answer, given_ns, cancelled=pending.cancelled)
        if final or failed:
            self._ended = True
            self._together.settle(pending, success=not failed)
        try:
            pending.reply(answer, final=final, parameters=parameters)
        except Exception:
            log.exception("an answer could not be delivered")


def _checked(joiner: Joiner, pending: Pending, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """What the caller asked for, of what the model returned."""
    if not pending.request.outputs and joiner.takes(outputs):
        return outputs
    for tensor in outputs:
        joiner.check_dtype(tensor)
    by_name = {tensor.name: tensor.array for tensor in outputs}
    return joiner.split((pending,), by_name)[0]
