# SPDX-License-Identifier: Apache-2.0
"""A sequence of requests, one request of it as a runner gets it, and the batch slots of the instance it runs on.

A `SequenceRequest` replaces the caller's `PendingRequest` in a batch, so that the scheduler knows when the model is done
with a request even if its caller has cancelled it. With the direct strategy (`DirectSlots`) each sequence has a slot, which
is its row in every batch. With the oldest strategy (`OldestSlots`) sequences are batched dynamically, the oldest first, with
at most one request of each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import NamedTuple

from headrace.backends.contract import Array
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.tensors import Tensor
from headrace.engine.scheduling.dynamic_batcher import BatchRules, choose_batch
from headrace.engine.scheduling.pending_request import ANSWERED, BatchReason, Owner, PendingRequest, ResponseOrder
from headrace.engine.scheduling.scheduler import Runner
from headrace.engine.sequences.controls import SequenceFlags, SequenceId
from headrace.models.config.types import DirectStrategy, ModelConfig, OldestStrategy


class QueuedRequest(NamedTuple):
    """A request that waits for earlier requests of its sequence."""

    pending: PendingRequest
    flags: SequenceFlags
    number: int
    """Its position among all requests of the model."""
    timer: asyncio.TimerHandle | None
    """Ends the wait of a request that has a timeout."""


class ActiveSequence:
    """A sequence from its START until it is finished."""

    __slots__ = (
        "closed",
        "corrid",
        "finished",
        "id",
        "idle_since_ns",
        "next_request",
        "predecessor",
        "queue",
        "running",
        "slot",
        "slots",
        "state",
        "successor",
    )

    def __init__(self, id: SequenceId, corrid: Tensor | None, state: dict[str, Array]) -> None:
        self.id = id
        self.corrid = corrid
        """The control input with the correlation id, if the model has one."""
        self.state = state
        """Implicit state, by the name of its input."""
        self.queue: deque[QueuedRequest] = deque()
        self.next_request: SequenceRequest | None = None
        """The first request of the queue, if it may run now."""
        self.running: SequenceRequest | None = None
        self.closed = False
        """Whether no more requests are accepted: it had its END, was idle too long, was cancelled or restarted."""
        self.finished = False
        """Whether it is closed and all its requests are done."""
        self.predecessor: ActiveSequence | None = None
        """A sequence of the same id that must finish before this one starts."""
        self.successor: ActiveSequence | None = None
        """The sequence that was started with the same id: it inherits the slot."""
        self.slots: InstanceSlots | None = None
        """The slots of its instance; None while it is in the backlog."""
        self.slot = -1
        self.idle_since_ns: int | None = None


class SequenceRequest(PendingRequest):
    """One request of a sequence, or a filler for a slot without a request, as a runner gets it."""

    sequence: ActiveSequence | None

    def __init__(
        self,
        owner: Owner,
        request: InferRequest,
        key: Hashable,
        arrived_ns: int,
        on_finished: Callable[[SequenceRequest], None],
        *,
        sequence: ActiveSequence | None = None,
        caller_request: PendingRequest | None = None,
        flags: SequenceFlags | None = None,
        number: int = 0,
    ) -> None:
        super().__init__(owner, request, 1, key, _ignore_response, arrived_ns)
        self.sequence = sequence
        self.caller_request = caller_request
        """The caller's pending request; None for a filler."""
        self.flags = flags
        self.number = number
        self.on_finished = on_finished
        if caller_request is None:
            # A filler is neither counted nor answered.
            self.state = ANSWERED

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled; the model computes the request nevertheless."""
        return self.caller_request is None or self.caller_request.state == ANSWERED

    def reply(
        self,
        outputs: Sequence[Tensor] | BaseException | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Forward a response to the caller; after the last one the sequence continues."""
        if self.state == ANSWERED or self.caller_request is None:
            return
        if final or isinstance(outputs, BaseException):
            self.state = ANSWERED
            self.on_finished(self)
        self.caller_request.reply(outputs, final=final, parameters=parameters)

    def finish(self, outputs: Sequence[Tensor] | BaseException, parameters: Parameters = NO_PARAMETERS) -> None:
        """Forward the only response."""
        self.reply(outputs, parameters=parameters)


def _ignore_response(_: InferResponse | BaseException) -> None:
    """The callback of sequence requests: they answer through the caller's request."""


class BatchPlan(NamedTuple):
    """The next batch of an instance; if empty, how long to wait."""

    requests: Sequence[SequenceRequest]
    reason: BatchReason = "sequence"
    wait_ns: int = 0


class InstanceSlots:
    """The batch slots of one instance, and the sequences in them that have a request."""

    order: ResponseOrder | None = None
    """Set if responses must be delivered in the order of execution."""

    def __init__(self, runner: Runner, count: int) -> None:
        self.runner = runner
        self.count = count
        self.idle = True
        self.ready: set[ActiveSequence] = set()
        """Sequences with a request that may run now."""

    def next_batch(self, now_ns: int) -> BatchPlan:
        """Choose the next batch. At least one sequence must be ready."""
        raise NotImplementedError

    def _next_requests(self) -> list[SequenceRequest]:
        return [sequence.next_request for sequence in self.ready if sequence.next_request is not None]


class DirectSlots(InstanceSlots):
    """The direct strategy: the slot of a sequence is its row in every batch."""

    def __init__(self, runner: Runner, config: ModelConfig, strategy: DirectStrategy) -> None:
        super().__init__(runner, max(1, config.max_batch_size))
        self._reason: BatchReason = "sequence" if config.max_batch_size else "one at a time"
        self._min_utilization = strategy.minimum_slot_utilization
        # As in Triton: there is no delay without a minimum utilization.
        self._delay_ns = strategy.max_queue_delay_microseconds * 1000 if self._min_utilization else 0

    def next_batch(self, now_ns: int) -> BatchPlan:
        """Choose all ready requests of the shape of the oldest one."""
        requests = self._next_requests()
        # The shape of the oldest request, so that no shape waits forever.
        oldest = min(requests, key=attrgetter("number"))
        reason = self._reason
        if self._delay_ns and len(requests) / self.count < self._min_utilization:
            waited_ns = now_ns - oldest.arrived_ns
            if waited_ns < self._delay_ns:
                return BatchPlan((), wait_ns=self._delay_ns - waited_ns)
            reason = "delay expired"
        requests = [request for request in requests if request.key == oldest.key]
        requests.sort(key=_slot)
        return BatchPlan(requests, reason)


class OldestSlots(InstanceSlots):
    """The oldest strategy: requests of candidate sequences are batched dynamically, the oldest first."""

    def __init__(self, runner: Runner, config: ModelConfig, strategy: OldestStrategy) -> None:
        super().__init__(runner, strategy.max_candidate_sequences or max(1, config.max_batch_size))
        self._rules = BatchRules(
            max(1, config.max_batch_size), frozenset(strategy.preferred_batch_sizes), by_shape=True
        )
        self._delay_ns = strategy.max_queue_delay_microseconds * 1000
        self._one_at_a_time = config.max_batch_size == 0
        if strategy.preserve_ordering:
            self.order = ResponseOrder()

    def next_batch(self, now_ns: int) -> BatchPlan:
        """Choose a batch by the rules of the dynamic batcher."""
        requests = self._next_requests()
        requests.sort(key=attrgetter("number"))
        if self._one_at_a_time:
            return BatchPlan(requests[:1], "one at a time")
        count, reason, wait_ns = choose_batch(requests, self._rules, self._delay_ns, now_ns)
        return BatchPlan(requests[:count], reason, wait_ns)


def _slot(request: SequenceRequest) -> int:
    return request.sequence.slot if request.sequence is not None else -1
