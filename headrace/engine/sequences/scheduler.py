# SPDX-License-Identifier: Apache-2.0
"""The sequence batcher: passes the requests of sequences to the instances of a stateful model.

Each version of a stateful model owns one, in the event loop's thread. A sequence starts with START and gets a slot of one
instance, or waits in the backlog; its requests are computed there one after the other. It gives up its slot when its END is
answered, when it is idle too long, or when one of its queued requests is cancelled or waits longer than its `timeout`: later
requests would be computed without it, so the rest of the sequence fails too. A request that is cancelled while it is
computed, or that fails, does not affect the sequence. START for an open sequence restarts it, in the same slot, after the
queued requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic_ns

from headrace.backends.contract import Array
from headrace.core.errors import Cancelled, HeadraceError, Unavailable, Unimplemented, with_message
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Tensor
from headrace.engine.execution.runners import RequestRunner
from headrace.engine.scheduling.pending_request import RUNNING, BatchLog, BatchRecord, PendingRequest
from headrace.engine.scheduling.rate_limiter import RateLimiter
from headrace.engine.scheduling.scheduler import Runner, StartDelay
from headrace.engine.sequences.controls import ControlInputs, SequenceId, batch_size_error, read_flags, start_flag_error
from headrace.engine.sequences.implicit_state import ImplicitState, zeros
from headrace.engine.sequences.sequence import (
    ActiveSequence,
    BatchPlan,
    DirectSlots,
    InstanceSlots,
    OldestSlots,
    QueuedRequest,
    SequenceRequest,
)
from headrace.engine.sequences.slots import SequenceSlots
from headrace.models.config.types import DirectStrategy, ModelConfig, SequenceBatching


class SequenceScheduler:
    """The scheduler of stateful models: requests depend on earlier requests of their sequence."""

    def __init__(
        self,
        config: ModelConfig,
        sequences: SequenceBatching,
        runners: Sequence[Runner],
        log: BatchLog,
        *,
        limiter: RateLimiter,
        initial_states: Mapping[str, Array] | None = None,
    ) -> None:
        if sequences.iterative:
            raise Unimplemented(
                f"model '{config.name}' has iterative_sequence, which is not offered: remove it from sequence_batching, "
                "and let a decoupled model give its responses one by one"
            )
        self._loop = asyncio.get_running_loop()
        self._name = config.name
        self._log = log
        self._limiter = limiter
        self._builder = ModelRequestBuilder(config, sequences, initial_states or {})
        strategy = sequences.strategy
        self._instances: list[InstanceSlots]
        if isinstance(strategy, DirectStrategy):
            self._instances = [DirectSlots(runner, config, strategy) for runner in runners]
        else:
            self._instances = [OldestSlots(runner, config, strategy) for runner in runners]
        self._needs_fillers = isinstance(strategy, DirectStrategy)
        self._slots = SequenceSlots(self._instances, sequences.max_sequence_idle_microseconds * 1000, self._review)
        self._numbers = 0
        self.waiting = 0
        """Number of requests that are not being computed yet."""
        self._dispatch_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed: HeadraceError | None = None

    @property
    def active_sequences(self) -> int:
        """Number of open sequences."""
        return sum(1 for _ in self._slots.all())

    def add(self, pending: PendingRequest) -> None:
        """Queue a request; raise if it belongs to no sequence."""
        if self._closed is not None:
            raise with_message(self._closed, self._closed.message)
        if pending.rows > 1:
            raise batch_size_error(self._name)
        flags = read_flags(pending.request, self._name)
        sequence = self._start_sequence(flags.id) if flags.start else self._slots.find_open(flags.id)
        if sequence is None:
            raise start_flag_error(flags.id, self._name)
        self._numbers += 1
        self.waiting += 1
        pending.on_cancel = partial(self._cancelled, sequence)
        timeout = pending.request.parameters.get("timeout")
        timer = None
        if timeout and isinstance(timeout, int):
            timer = self._loop.call_later(timeout / 1e6, self._expired, sequence)
        sequence.queue.append(QueuedRequest(pending, flags, self._numbers, timer))
        sequence.closed = flags.end
        self._review(sequence)

    def close(self, reason: HeadraceError) -> None:
        """Cancel all queued requests and start no more."""
        self._closed = reason
        self._slots.close()
        self._stop_timer()
        for sequence in self._slots.all():
            self._cancel_queue(sequence, reason)

    def _start_sequence(self, id: SequenceId) -> ActiveSequence:
        sequence = self._builder.new_sequence(id)
        previous = self._slots.add(sequence)
        if previous is not None:
            self._review(previous)
        return sequence

    def _review(self, sequence: ActiveSequence) -> None:
        """Decide what a changed sequence can do next. Extra calls are harmless."""
        sequence.idle_since_ns = None
        instance = sequence.slots
        if sequence.running is None and sequence.queue:
            if instance is not None and self._closed is None:
                if sequence.next_request is None:
                    sequence.next_request = self._next_request(sequence)
                instance.ready.add(sequence)
                self._wake()
            return
        if instance is not None:
            instance.ready.discard(sequence)
        if sequence.running is not None:
            return
        if sequence.closed:
            self._slots.remove(sequence)
        elif instance is not None:
            sequence.idle_since_ns = monotonic_ns()
            self._slots.start_idle_timer()

    def _next_request(self, sequence: ActiveSequence) -> SequenceRequest:
        """Return the first request of a queue, with a key for the state that it will be computed with."""
        pending, flags, number, _ = sequence.queue[0]
        key = self._builder.states.key(pending.key, sequence.state)
        return SequenceRequest(
            pending.owner,
            pending.request,
            key,
            pending.arrived_ns,
            self._request_finished,
            sequence=sequence,
            caller_request=pending,
            flags=flags,
            number=number,
        )

    def _request_finished(self, request: SequenceRequest) -> None:
        """Continue a sequence after the model is done with a request, successfully or not."""
        sequence = request.sequence
        if sequence is not None:
            sequence.running = None
            self._review(sequence)

    def _cancelled(self, sequence: ActiveSequence) -> None:
        sequence.closed = True
        self._cancel_queue(
            sequence,
            Cancelled(f"another request of sequence {sequence.id} was cancelled, which ends it: START it again"),
        )
        self._review(sequence)

    def _expired(self, sequence: ActiveSequence) -> None:
        """End a sequence of which a request waited too long."""
        sequence.closed = True
        # The first part is Triton's message.
        self._cancel_queue(
            sequence,
            Unavailable(
                f"timeout of the corresponding sequence has been expired: sequence {sequence.id} is ended, START it again"
            ),
        )
        self._review(sequence)

    def _cancel_queue(self, sequence: ActiveSequence, reason: HeadraceError) -> None:
        queued = list(sequence.queue)
        self.waiting -= len(queued)
        sequence.queue.clear()
        sequence.next_request = None
        for pending, _, _, timer in queued:
            if timer is not None:
                timer.cancel()
            pending.on_cancel = None
            pending.cancel(reason)

    def _wake(self) -> None:
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Start the next batch of every idle instance."""
        self._dispatch_scheduled = False
        if self._closed is not None:
            return
        wait_ns = 0
        now_ns = monotonic_ns()
        for instance in self._instances:
            if not instance.idle or not instance.ready:
                continue
            plan = instance.next_batch(now_ns)
            if not plan.requests:
                wait_ns = min(wait_ns or plan.wait_ns, plan.wait_ns)
            elif self._limiter.acquire(instance.runner, self._wake):
                self._start(instance, plan, now_ns)
        self._stop_timer()
        if wait_ns:
            self._timer = self._loop.call_later(wait_ns / 1e9, self._on_timer)

    def _start(self, instance: InstanceSlots, plan: BatchPlan, now_ns: int) -> None:
        instance.idle = False
        count = len(plan.requests)
        self.waiting -= count
        waited_ns = now_ns - min(request.arrived_ns for request in plan.requests)
        record = BatchRecord(plan.reason, count, count, self.waiting, waited_ns, instance.runner.name)
        self._log.add(record)
        for request in plan.requests:
            self._start_request(request, instance, record)
        batch = plan.requests
        if self._needs_fillers and not isinstance(instance.runner, RequestRunner):
            batch = self._with_fillers(batch, now_ns)
        instance.runner.run(batch, partial(self._free, instance))

    def _start_request(self, request: SequenceRequest, instance: InstanceSlots, record: BatchRecord) -> None:
        self._builder.add_inputs(request)
        sequence, caller_request = request.sequence, request.caller_request
        if sequence is not None:
            timer = sequence.queue.popleft().timer
            if timer is not None:
                timer.cancel()
            sequence.next_request = None
            sequence.running = request
            instance.ready.discard(sequence)
        request.state = RUNNING
        request.batch_record = record
        if caller_request is not None:
            caller_request.state = RUNNING
            caller_request.batch_record = record
            caller_request.on_cancel = None
            if instance.order is not None:
                instance.order.track(caller_request)

    def _with_fillers(self, requests: Sequence[SequenceRequest], now_ns: int) -> list[SequenceRequest]:
        """Return the requests in the rows of their slots, with fillers in the other rows."""
        rows: dict[int, SequenceRequest] = {
            request.sequence.slot: request for request in requests if request.sequence is not None
        }
        return [rows.get(slot) or self._builder.filler(requests[0], now_ns) for slot in range(max(rows) + 1)]

    def _free(self, instance: InstanceSlots, runner: Runner) -> None:
        # Not immediately: a runner is free before it has answered, and the sequences of its batch continue only then.
        if self._closed is not None:
            self._limiter.release(runner)
            return
        instance.idle = True
        self._limiter.release(runner, self._wake if instance.ready else None)
        if instance.ready:
            self._wake()

    def _on_timer(self) -> None:
        self._timer = None
        self._wake()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ModelRequestBuilder:
    """Turns a caller's request into the request for the model: with control inputs and implicit state."""

    def __init__(self, config: ModelConfig, sequences: SequenceBatching, initial: Mapping[str, Array]) -> None:
        batched = config.max_batch_size > 0
        self._controls = ControlInputs(sequences.controls, config.name, batched=batched)
        self.states = ImplicitState(sequences.states, initial, batched=batched)

    def new_sequence(self, id: SequenceId) -> ActiveSequence:
        """Create a sequence; raise if the id does not fit the model's control input."""
        return ActiveSequence(id, self._controls.corrid(id), self.states.initial())

    def add_inputs(self, request: SequenceRequest) -> None:
        """Add the inputs that the caller did not send."""
        sequence, flags = request.sequence, request.flags
        if sequence is None or flags is None:
            return
        inputs = [*request.request.inputs, *self._controls.of(start=flags.start, end=flags.end)]
        if sequence.corrid is not None:
            inputs.append(sequence.corrid)
        inputs += self.states.tensors(sequence.state)
        request.request = self._with_inputs(request.request, inputs)

    def filler(self, like: SequenceRequest, now_ns: int) -> SequenceRequest:
        """Return a filler for a slot without a request: zeros in the shapes of another row of the batch."""
        controls = {tensor.name for tensor in self._controls.filler}
        inputs = [
            Tensor(tensor.name, tensor.dtype, zeros(tensor.dtype, tensor.shape))
            for tensor in like.request.inputs
            if tensor.name not in controls
        ]
        outputs = like.caller_request.request.outputs if like.caller_request is not None else ()
        request = InferRequest(like.request.model_name, [*inputs, *self._controls.filler], outputs=outputs)
        return SequenceRequest(like.owner, request, like.key, now_ns, like.on_finished)

    def _with_inputs(self, request: InferRequest, inputs: list[Tensor]) -> InferRequest:
        outputs = request.outputs
        if outputs and self.states.output_names:
            requested = {output.name for output in outputs}
            outputs = [
                *outputs,
                *(RequestedOutput(name) for name in self.states.output_names if name not in requested),
            ]
        return InferRequest(request.model_name, inputs, request.model_version, request.id, outputs, request.parameters)


def is_delayed(sequences: SequenceBatching, delay: StartDelay) -> bool:
    """Return whether the first batch of a model is delayed."""
    return bool(delay.requests or (delay.backlog_requests and isinstance(sequences.strategy, DirectStrategy)))


class DelayedSequenceScheduler(SequenceScheduler):
    """A sequence scheduler that delays the first batch until enough requests are queued, for tests (`StartDelay`).

    The rules are those of Triton. Direct strategy: all instances start together, when there are enough requests of
    sequences with a slot and of sequences in the backlog. Oldest strategy: each instance starts by itself, when enough of
    its sequences have a request; the backlog does not count.
    """

    _delay = StartDelay()
    _delayed: tuple[InstanceSlots, ...] = ()

    def delay_start(self, delay: StartDelay) -> None:
        """Form no batch until this many requests are queued. Call before the first `add`."""
        self._delay = delay
        self._delayed = tuple(self._instances)
        for instance in self._delayed:
            instance.idle = False

    def _review(self, sequence: ActiveSequence) -> None:
        super()._review(sequence)
        if self._delayed:
            still_delayed = tuple(instance for instance in self._delayed if not self._may_start(instance))
            for instance in self._delayed:
                if instance not in still_delayed:
                    instance.idle = True
                    self._wake()
            self._delayed = still_delayed

    def _may_start(self, instance: InstanceSlots) -> bool:
        if not isinstance(instance, DirectSlots):
            return len(instance.ready) >= self._delay.requests
        backlog = self._slots.backlog_requests
        return backlog >= self._delay.backlog_requests and self.waiting - backlog >= self._delay.requests
