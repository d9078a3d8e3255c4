# SPDX-License-Identifier: Apache-2.0
"""Ensembles: a graph of models behind one name. Each step goes through the queue of its own model, like anyone's request.

Opened by `opening` as a version among others. Tensors pass from step to step as they are, without a copy; between models
that can, in the memory of their device. A step whose model is decoupled may answer several times: the rest of the graph
then runs once for each answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns

import numpy as np

from headrace.backends.contract import Answer, EngineServices
from headrace.core.errors import HeadraceError, Internal, InvalidArgument, Unavailable, retold
from headrace.core.messages import InferRequest, InferResponse, RequestedOutput, StepRequest
from headrace.core.tensors import Tensor
from headrace.engine.checking import RequestChecker
from headrace.engine.responses import ResponseWatch
from headrace.engine.scheduling.delay import FixedDelay
from headrace.engine.scheduling.pending import ANSWERED, Answered, Done, Pending, StreamPending
from headrace.engine.scheduling.watching import Watch
from headrace.engine.statistics import VersionStatistics
from headrace.engine.versions import Drain
from headrace.models.config.types import EnsembleScheduling, ModelConfig


class EnsembleVersion:
    """A version that computes nothing itself."""

    express = None
    """See `ModelVersion.express`."""

    def __init__(
        self,
        config: ModelConfig,
        scheduling: EnsembleScheduling,
        version: int,
        services: EngineServices,
        labels: Mapping[str, Sequence[str]],
    ) -> None:
        self.name = config.name
        self.version = version
        self.version_text = str(version)
        self.config = config
        self.labels = labels
        self.statistics = VersionStatistics()
        self.delay = FixedDelay(0)
        self.follows = True
        self.watch: Watch | None = None
        self.steps = scheduling.steps
        taken = {name for step in self.steps for name in step.input_map.values()}
        self.passes_on = [any(name in taken for name in step.output_map.values()) for step in self.steps]
        """Whether a step's outputs are for other steps."""
        self.services = services
        self._most = scheduling.max_inflight_requests
        self._running = 0
        self._waiting: deque[Pending] = deque()
        self._checker = RequestChecker(config)
        self._drain = Drain(self.statistics)

    def infer(self, request: InferRequest, done: Done) -> Pending:
        """See `ModelVersion.infer`."""
        return self._add(Pending(self, request, self._rows(request), None, done, monotonic_ns()))

    def infer_stream(self, request: InferRequest, answered: Answered) -> Pending:
        """See `ModelVersion.infer_stream`."""
        return self._add(StreamPending(self, request, self._rows(request), None, answered, monotonic_ns()))

    def settle(self, pending: Pending, outputs: Sequence[Tensor] | BaseException | None) -> None:
        """See `Owner.settle`."""
        took_ns = monotonic_ns() - pending.arrived_ns
        error = outputs if isinstance(outputs, BaseException) else None
        stats = self.statistics.answered(pending.rows, error, took_ns)
        if error is None:
            stats.infer_ns += took_ns
            self.statistics.waited((0,), 0, took_ns, 0)
            self.statistics.executed(pending.rows, 0, took_ns, 0)
        if self._drain.waiting:
            self._drain.settled()

    @property
    def waiting(self) -> int:
        """See `ModelVersion.waiting`."""
        return sum(pending.state != ANSWERED for pending in self._waiting)

    async def retire(self, grace_seconds: float) -> None:
        """See `ModelVersion.retire`."""
        await self._drain.wait(grace_seconds)
        for pending in list(self._waiting):
            pending.cancel(Unavailable(f"model '{self.name}' version {self.version_text} was unloaded"))

    def ended(self) -> None:
        """A run is over: the next may begin."""
        self._running -= 1
        while self._waiting and self._running < self._most:
            pending = self._waiting.popleft()
            if pending.state != ANSWERED:
                self._start(pending)

    def _rows(self, request: InferRequest) -> int:
        try:
            return self._checker.check(request)
        except InvalidArgument as error:
            self.statistics.failed(0, error, 0)
            if self.watch is not None:
                self.watch.refused(request, self.version_text, error, monotonic_ns())
            raise

    def watched_by(self, watch: Watch | None) -> None:
        """See `ModelVersion.watched_by`. What its steps do is theirs to tell."""
        self.watch = watch

    def _add(self, pending: Pending) -> Pending:
        if self.watch is not None:
            pending = self.watch.take(pending, "computed by its steps")
        self.statistics.received += 1
        if self._most and self._running >= self._most:
            self._waiting.append(pending)
        else:
            self._start(pending)
        return pending

    def _start(self, pending: Pending) -> None:
        self._running += 1
        run = _Run(self, pending)
        pending.on_cancel = run.cancel
        # Not at once: a first step may refuse at once, and callers count on `infer` returning before they are told.
        self.services.loop.call_soon(run.start)


class _Run:
    """One request on its way through the graph."""

    def __init__(self, ensemble: EnsembleVersion, pending: Pending) -> None:
        self.ensemble = ensemble
        self.pending = pending
        self._cancels: dict[int, Callable[[], None]] = {}
        self._numbers = 0
        self._silent = ensemble.statistics.first_answers is not None
        self._watch = ResponseWatch(ensemble.statistics.responses, monotonic_ns()) if self._silent else None
        self._paths = 1
        """Ways through the graph that are still open; more than one after a decoupled step's second answer."""
        self.over = False

    def start(self) -> None:
        """Begin with the steps that need nothing but the request's inputs."""
        if self.over:
            return
        inputs = {tensor.name: tensor for tensor in self.pending.request.inputs}
        _Path(self, inputs, range(len(self.ensemble.steps)), set()).advance()

    def cancel(self) -> None:
        """Nobody waits: let the steps know."""
        if not self.over:
            self.over = True
            for cancel in list(self._cancels.values()):
                cancel()
            if self._watch is not None and self.pending.cancelled:
                self._watch.given(None, monotonic_ns(), cancelled=True)
            self.ensemble.ended()

    def fail(self, error: HeadraceError) -> None:
        """One step failed, and with it the request."""
        if self.over:
            return
        self.cancel()
        self.pending.on_cancel = None
        if self._watch is not None:
            self._watch.given(error, monotonic_ns(), cancelled=False)
        self.pending.reply(retold(error, f"in ensemble '{self.ensemble.name}', {error.message}"))

    def submit(self, step: int, request: InferRequest, path: _Path) -> None:
        """Compute a step."""
        self._numbers += 1
        number = self._numbers

        def answered(answer: Answer, final: bool) -> None:
            if final:
                self._cancels.pop(number, None)
            if not self.over:
                path.answered(step, answer, final)

        try:
            self._cancels[number] = self.ensemble.services.infer(request, answered)
        except HeadraceError as error:
            self.fail(error)

    def fork(self) -> None:
        """One more way through the graph."""
        self._paths += 1

    def arrived(self, tensors: Mapping[str, Tensor] | None) -> None:
        """A way is at its end, with the ensemble's outputs or (None) without any."""
        self._paths -= 1
        final = self._paths == 0
        outputs = None if tensors is None else self._outputs(tensors)
        if self._silent and outputs is not None:
            self._silent = False
            self.ensemble.statistics.first_answer(self.pending.arrived_ns)
        if self._watch is not None and (final or outputs is not None):
            self._watch.given(outputs, monotonic_ns(), cancelled=False)
        if final:
            self.over = True
            self.pending.on_cancel = None
            self.ensemble.ended()
        self.pending.reply(outputs, final=final)

    def wanted(self) -> list[str]:
        """The outputs that the caller asks for, by name."""
        requested = self.pending.request.outputs
        return [output.name for output in requested] or [spec.name for spec in self.ensemble.config.outputs]

    def _outputs(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        chosen = (tensors[name] for name in self.wanted())
        # Without a copy, unless another step took it too and it lay on a device for that.
        return [Tensor(tensor.name, tensor.dtype, np.asarray(tensor.array)) for tensor in chosen]


class _Path:
    """One way through the graph: the tensors there are, the steps that run, and the steps to come (by their place)."""

    def __init__(self, run: _Run, tensors: dict[str, Tensor], waiting: Sequence[int], running: set[int]) -> None:
        self._run = run
        self._tensors = tensors
        self._waiting = waiting
        self._running = running
        self._shared = set(running)
        """Of the steps that run, those that ran before this way began: whoever began them passes their answers on."""
        self._forks: list[_Path] = []
        """Ways that began with one of several answers to a step, while they share a step that runs."""
        self._ended = False

    def advance(self) -> None:
        """Start every step that has its inputs; be done when there is none left."""
        steps = self._run.ensemble.steps
        ready = [n for n in self._waiting if all(name in self._tensors for name in steps[n].input_map.values())]
        self._waiting = [n for n in self._waiting if n not in ready]
        self._running.update(ready)
        for n in ready:
            self._run.submit(n, self._request(n), self)
            if self._run.over:
                return
        if not self._running:
            self._finish()

    def answered(self, n: int, answer: Answer, final: bool) -> None:
        """A step has given an answer; its last one, or one of several."""
        if isinstance(answer, HeadraceError):
            self._run.fail(answer)
            return
        self._pass_on(n, answer, final)
        if self._run.over:
            return
        if not final:
            if not self._ended:  # else another step had no more answers, and nothing comes of this one's
                self._fork(n, answer)
            return
        self._running.discard(n)
        if answer is None:
            # No more answers: this way, which waited for them, leads nowhere.
            if not self._ended:
                self._ended = True
                self._run.arrived(None)
        elif not self._ended:
            self._take(n, answer)
            self.advance()

    def _pass_on(self, n: int, answer: Answer, final: bool) -> None:
        for fork in [fork for fork in self._forks if n in fork._shared]:
            if final:
                fork._shared.discard(n)
            fork.answered(n, answer, final)
            if self._run.over:
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
            tensor = self._tensors[source]
            inputs.append(Tensor(name, tensor.dtype, tensor.array))
        request = self._run.pending.request
        made = StepRequest(
            step.model_name,
            inputs,
            "" if step.model_version < 0 else str(step.model_version),
            request.id,
            [RequestedOutput(name) for name in step.output_map],
            request.parameters,
        )
        made.stays_on_device = self._run.ensemble.passes_on[n]
        return made

    def _finish(self) -> None:
        missing = [name for name in self._run.wanted() if name not in self._tensors]
        left_out = [spec.name for spec in self._run.ensemble.config.inputs if spec.name not in self._tensors]
        if missing and left_out:
            self._run.fail(
                InvalidArgument(
                    f"output '{missing[0]}' cannot be computed without an input that was left out ('{left_out[0]}'): give "
                    "it, or ask for other outputs"
                )
            )
            return
        if missing:
            stuck = ", ".join(f"'{self._run.ensemble.steps[n].model_name}'" for n in self._waiting)
            self._run.fail(
                Internal(f"output '{missing[0]}' was not produced: these steps had no inputs: {stuck or 'none'}")
            )
            return
        self._ended = True
        self._run.arrived(self._tensors)
