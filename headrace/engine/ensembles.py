# SPDX-License-Identifier: Apache-2.0
"""Ensembles: a graph of models behind one name. Each step is a request that goes through the queue of its own model.

The model loader opens an ensemble as a version like any other. Tensors pass from step to step without a copy; between models
that support it, in device memory. An optional tensor that is left out stays left out for steps whose models can do without
it; steps that need it do not run. A step with a decoupled model may have several responses: the rest of the graph then runs
once for each response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from time import monotonic_ns
from typing import Protocol

import numpy as np

from headrace.backends.contract import Answer, EngineServices
from headrace.core.errors import HeadraceError, Internal, InvalidArgument, Unavailable, with_message
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput, StepRequest
from headrace.core.tensors import Tensor
from headrace.engine.request_validation import RequestValidator
from headrace.engine.scheduling.dynamic_batcher import FixedDelay
from headrace.engine.scheduling.pending_request import (
    ANSWERED,
    PendingRequest,
    PendingStream,
    ResponseCallback,
    StreamCallback,
)
from headrace.engine.scheduling.request_timeline import TimelineRecorder
from headrace.engine.statistics import ResponseTimer, VersionStatistics
from headrace.engine.versions import Drain
from headrace.models.config.types import EnsembleScheduling, EnsembleStep, ModelConfig


class EnsembleServices(EngineServices, Protocol):
    """What an ensemble needs from the engine: to call its models, and to know which inputs they need."""

    def optional_inputs(self, model_name: str, model_version: str) -> Set[str]:
        """Return the names of the inputs that a model can do without."""


def step_version(step: EnsembleStep) -> str:
    """Return the version of a step's model; "" for the one that its model serves by default."""
    return "" if step.model_version < 0 else str(step.model_version)


class EnsembleVersion:
    """A version that runs the steps of an ensemble."""

    express = None
    """An ensemble has no express path."""
    load_stages = None
    """Nor weights to load."""
    caches_responses = False

    def __init__(
        self,
        config: ModelConfig,
        scheduling: EnsembleScheduling,
        version: int,
        services: EnsembleServices,
        labels: Mapping[str, Sequence[str]],
    ) -> None:
        self.name = config.name
        self.version = version
        self.version_text = str(version)
        self.config = config
        self.labels = labels
        self.statistics = VersionStatistics()
        self.delay = FixedDelay(0)
        self.tracks_requests = True
        self.recorder: TimelineRecorder | None = None
        self.steps = scheduling.steps
        consumed = {name for step in self.steps for name in step.input_map.values()}
        self.feeds_steps = [any(name in consumed for name in step.output_map.values()) for step in self.steps]
        """For each step: whether its outputs are inputs of other steps."""
        self.services = services
        self._max_running = scheduling.max_inflight_requests
        self._running = 0
        self._waiting: deque[PendingRequest] = deque()
        self._validator = RequestValidator(config)
        self._drain = Drain(self.statistics)

    def infer(self, request: InferRequest, done: ResponseCallback) -> PendingRequest:
        """Compute a request. Raise at once if it is invalid; otherwise `done` gets the response later."""
        return self._add(PendingRequest(self, request, self._rows(request), None, done, monotonic_ns()))

    def infer_stream(self, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Compute a request with any number of responses, none of them before this returns."""
        return self._add(PendingStream(self, request, self._rows(request), None, on_response, monotonic_ns()))

    def settle(self, pending: PendingRequest, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """Count a request that has its last response."""
        took_ns = monotonic_ns() - pending.arrived_ns
        error = outputs if isinstance(outputs, BaseException) else None
        stats = self.statistics.answered(pending.rows, error, took_ns, pending.arrived_ns, pending.request.id)
        if error is None:
            stats.infer_ns += took_ns
            self.statistics.waited((0,), 0, took_ns, 0)
            self.statistics.executed(pending.rows, 0, took_ns, 0)
        if self._drain.waiting:
            self._drain.settled()

    @property
    def waiting(self) -> int:
        """Number of requests that wait for others of the ensemble to finish."""
        return sum(pending.state != ANSWERED for pending in self._waiting)

    @property
    def in_use(self) -> bool:
        """Whether a request is in flight."""
        return self.statistics.in_flight > 0

    @property
    def last_used_ns(self) -> int:
        """When the last request ended, by the monotonic clock; 0 if there was none."""
        return self.statistics.last_used_ns

    async def retire(self, grace_seconds: float) -> None:
        """Wait up to `grace_seconds` for requests in flight, then cancel those that wait."""
        await self._drain.wait(grace_seconds)
        for pending in list(self._waiting):
            pending.cancel(Unavailable(f"model '{self.name}' version {self.version_text} was unloaded"))

    def run_finished(self) -> None:
        """Start the next waiting requests after a run has finished."""
        self._running -= 1
        while self._waiting and self._running < self._max_running:
            pending = self._waiting.popleft()
            if pending.state != ANSWERED:
                self._start(pending)

    def _rows(self, request: InferRequest) -> int:
        try:
            return self._validator.check(request)
        except InvalidArgument as error:
            self.statistics.failed(0, error, 0, request.id)
            if self.recorder is not None:
                self.recorder.rejected(request, self.version_text, error, monotonic_ns())
            raise

    def record_timelines(self, recorder: TimelineRecorder | None) -> None:
        """Record the timelines of requests from now on, or (None) stop. The steps' models record their own."""
        self.recorder = recorder

    def _add(self, pending: PendingRequest) -> PendingRequest:
        if self.recorder is not None:
            pending = self.recorder.record(pending, "computed by its steps")
        self.statistics.received += 1
        if self._max_running and self._running >= self._max_running:
            self._waiting.append(pending)
        else:
            self._start(pending)
        return pending

    def _start(self, pending: PendingRequest) -> None:
        self._running += 1
        run = _Run(self, pending)
        pending.on_cancel = run.cancel
        # Not immediately: the first step may reject the request, and `infer` must return before the callback is called.
        self.services.loop.call_soon(run.start)


class _Run:
    """One request that runs through the graph."""

    def __init__(self, ensemble: EnsembleVersion, pending: PendingRequest) -> None:
        self.ensemble = ensemble
        self.pending = pending
        self._cancels: dict[int, Callable[[], None]] = {}
        self._numbers = 0
        self._awaits_first = ensemble.statistics.first_responses is not None
        self._timer = ResponseTimer(ensemble.statistics.responses, monotonic_ns()) if self._awaits_first else None
        self._open_paths = 1
        """Open paths through the graph; more than one after a decoupled step's second response."""
        self.finished = False

    def start(self) -> None:
        """Start the steps that need only the request's inputs."""
        if self.finished:
            return
        inputs = {tensor.name: tensor for tensor in self.pending.request.inputs}
        _Path(self, inputs, range(len(self.ensemble.steps)), set()).advance()

    def cancel(self) -> None:
        """Cancel the steps of a cancelled request."""
        if not self.finished:
            self.finished = True
            for cancel in list(self._cancels.values()):
                cancel()
            if self._timer is not None and self.pending.cancelled:
                self._timer.record(None, monotonic_ns(), cancelled=True)
            self.ensemble.run_finished()

    def fail(self, error: HeadraceError) -> None:
        """Fail the request because a step failed."""
        if self.finished:
            return
        self.cancel()
        self.pending.on_cancel = None
        if self._timer is not None:
            self._timer.record(error, monotonic_ns(), cancelled=False)
        self.pending.reply(with_message(error, f"in ensemble '{self.ensemble.name}', {error.message}"))

    def submit(self, step: int, request: InferRequest, path: _Path) -> None:
        """Send a step's request to its model."""
        self._numbers += 1
        number = self._numbers

        def answered(answer: Answer, final: bool) -> None:
            if final:
                self._cancels.pop(number, None)
            if not self.finished:
                path.answered(step, answer, final)

        try:
            self._cancels[number] = self.ensemble.services.infer(request, answered)
        except HeadraceError as error:
            self.fail(error)

    def fork(self) -> None:
        """Count one more path through the graph."""
        self._open_paths += 1

    def path_finished(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Reply with the outputs of a finished path; None if it has none."""
        self._open_paths -= 1
        final = self._open_paths == 0
        outputs = None if tensors is None else self._outputs(tensors)
        if self._awaits_first and outputs is not None:
            self._awaits_first = False
            self.ensemble.statistics.first_response(self.pending.arrived_ns)
        if self._timer is not None and (final or outputs is not None):
            self._timer.record(outputs, monotonic_ns(), cancelled=False)
        if final:
            self.finished = True
            self.pending.on_cancel = None
            self.ensemble.run_finished()
        self.pending.reply(outputs, final=final)

    def requested_outputs(self) -> list[str]:
        """Return the names of the outputs that the caller requests."""
        requested = self.pending.request.outputs
        return [output.name for output in requested] or [spec.name for spec in self.ensemble.config.outputs]

    def _outputs(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        requested = (tensors[name] for name in self.requested_outputs())
        # Copies only tensors in device memory, which another step used too.
        return [Tensor(tensor.name, tensor.dtype, np.asarray(tensor.array)) for tensor in requested]


class _Path:
    """One path through the graph: the tensors so far, the running steps and the waiting steps (by index)."""

    def __init__(self, run: _Run, tensors: dict[str, Tensor], waiting: Sequence[int], running: set[int]) -> None:
        self._run = run
        self._tensors = tensors
        self._waiting = waiting
        self._running = running
        self._shared = set(running)
        """Running steps that started before this path: the path that started them forwards their responses."""
        self._forks: list[_Path] = []
        """Paths that forked from this one and share a running step with it."""
        self._finished = False

    def advance(self) -> None:
        """Start every step that has its inputs; finish if no step is left."""
        steps = self._run.ensemble.steps
        ready = [n for n in self._waiting if all(name in self._tensors for name in steps[n].input_map.values())]
        if not ready and not self._running and self._waiting:
            ready = self._ready_without_optional()
        self._waiting = [n for n in self._waiting if n not in ready]
        self._running.update(ready)
        for n in ready:
            self._run.submit(n, self._request(n), self)
            if self._run.finished:
                return
        if not self._running:
            self._finish()

    def _ready_without_optional(self) -> list[int]:
        """Return the waiting steps that lack only optional inputs, whose tensors will not come any more."""
        ensemble = self._run.ensemble
        missing: dict[int, list[str]] = {}
        """For each step that may still run: the tensors that it lacks, all of them optional for its model."""
        for n in self._waiting:
            step = ensemble.steps[n]
            lacking = {name: source for name, source in step.input_map.items() if source not in self._tensors}
            optional = ensemble.services.optional_inputs(step.model_name, step_version(step))
            if len(lacking) < len(step.input_map) and lacking.keys() <= optional:
                missing[n] = list(lacking.values())
        coming = {name for n in missing for name in ensemble.steps[n].output_map.values()}
        return [n for n, sources in missing.items() if not coming.intersection(sources)]

    def answered(self, n: int, answer: Answer, final: bool) -> None:
        """Handle a response of a step."""
        if isinstance(answer, HeadraceError):
            self._run.fail(answer)
            return
        self._forward(n, answer, final)
        if self._run.finished:
            return
        if not final:
            if not self._finished:  # otherwise another step had no more responses, and this one's are not used
                self._fork(n, answer)
            return
        self._running.discard(n)
        if answer is None:
            # No more responses: this path, which waited for one, has no outputs.
            if not self._finished:
                self._finished = True
                self._run.path_finished(None)
        elif not self._finished:
            self._take(n, answer)
            self.advance()

    def _forward(self, n: int, answer: Answer, final: bool) -> None:
        for fork in [fork for fork in self._forks if n in fork._shared]:
            if final:
                fork._shared.discard(n)
            fork.answered(n, answer, final)
            if self._run.finished:
                return
        if final:
            self._forks = [fork for fork in self._forks if fork._shared]

    def _fork(self, n: int, answer: Answer) -> None:
        if isinstance(answer, InferResponse):
            fork = _Path(self._run, dict(self._tensors), list(self._waiting), self._running - {n})
            if fork._shared:
                self._forks.append(fork)
            self._run.fork()
            fork._take(n, answer)
            fork.advance()

    def _take(self, n: int, answer: InferResponse) -> None:
        names = self._run.ensemble.steps[n].output_map
        for tensor in answer.outputs:
            name = names.get(tensor.name)
            if name is not None:
                self._tensors[name] = Tensor(name, tensor.dtype, tensor.array)

    def _request(self, n: int) -> InferRequest:
        step = self._run.ensemble.steps[n]
        inputs = []
        for name, source in step.input_map.items():
            tensor = self._tensors.get(source)
            if tensor is not None:
                inputs.append(Tensor(name, tensor.dtype, tensor.array))
        request = self._run.pending.request
        step_request = StepRequest(
            step.model_name,
            inputs,
            step_version(step),
            request.id,
            [RequestedOutput(name) for name in step.output_map],
            request.parameters,
        )
        step_request.keep_on_device = self._run.ensemble.feeds_steps[n]
        return step_request

    def _finish(self) -> None:
        missing = [name for name in self._run.requested_outputs() if name not in self._tensors]
        omitted = [spec.name for spec in self._run.ensemble.config.inputs if spec.name not in self._tensors]
        if missing and omitted:
            self._run.fail(
                InvalidArgument(
                    f"output '{missing[0]}' cannot be computed without an input that was left out ('{omitted[0]}'): send "
                    "it, or request other outputs"
                )
            )
            return
        if missing:
            stuck = ", ".join(f"'{self._run.ensemble.steps[n].model_name}'" for n in self._waiting)
            self._run.fail(
                Internal(f"output '{missing[0]}' was not produced: these steps had no inputs: {stuck or 'none'}")
            )
            return
        self._finished = True
        self._run.path_finished(self._tensors)
