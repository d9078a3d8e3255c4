# SPDX-License-Identifier: Apache-2.0
"""The express path: compute a request with one tensor at once on an idle instance of a fast model.

A model with batching has it as long as it computes a request more quickly than a batch could be formed.
The data plane's `answer` calls it. One function does what validation, queue, runner, statistics and a callback do in a dozen
calls, because for a model of a few microseconds those calls were most of a request's cost (`make bench`, overhead). All
other requests take the regular path, which handles every case and has the message for every error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import cast

from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator
from headrace.engine.execution.runners import ComputeRunner, error_for_callers
from headrace.engine.request_validation import RequestValidator
from headrace.engine.scheduling.pending_request import Owner, PendingRequest
from headrace.engine.scheduling.scheduler import BatchScheduler, Runner
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ModelConfig

Express = Callable[[InferRequest], InferResponse | None]
"""Returns the response to a request; None, without any effect, if the request must take the regular path."""


_KNOWN_SHAPES = 256


def express_for(
    owner: Owner,
    config: ModelConfig,
    scheduler: object,
    runners: Sequence[Runner],
    statistics: VersionStatistics,
    validator: RequestValidator,
) -> Express | None:
    """Return the express path of a version; None for models with sequences, batching rules, or not one input and output."""
    if len(config.inputs) != 1 or len(config.outputs) != 1 or config.internal_inputs():
        return None
    only_input, only_output = config.inputs[0], config.outputs[0]
    if only_input.reshape is not None or only_output.reshape is not None or only_output.dtype is None:
        return None
    if not isinstance(scheduler, BatchScheduler) or not (scheduler.one_at_a_time or scheduler.may_skip_queue):
        return None
    if config.decoupled or config.response_cache:
        return None
    if not all(
        isinstance(runner, ComputeRunner) and type(runner.concatenator) is BatchConcatenator for runner in runners
    ):
        return None
    return _express(owner, config, scheduler, statistics, validator)


def _express(  # noqa: PLR0915  # one function on purpose
    owner: Owner,
    config: ModelConfig,
    scheduler: BatchScheduler,
    statistics: VersionStatistics,
    validator: RequestValidator,
) -> Express:
    # Everything is a closure variable: attributes of an object would be looked up for every request.
    name, output_name, output_dtype = config.inputs[0].name, config.outputs[0].name, config.outputs[0].dtype
    if output_dtype is None:
        raise TypeError("the output has a type")
    output_numpy = output_dtype.numpy
    output_names = (output_name,)
    accepted = validator.known
    rows_of_shape: dict[tuple[int, ...], int] = {}
    """The rows of a request by the shape of its output, for shapes that were checked."""
    is_batched = not scheduler.one_at_a_time
    model_name, version_text = owner.name, owner.version_text
    idle = cast("list[ComputeRunner]", scheduler.idle)
    tally = statistics.express_tally
    add_recent = statistics.recent.append

    def express(request: InferRequest) -> InferResponse | None:
        inputs = request.inputs
        # While dispatching, other requests wait already, or a callback of a response sends its next request.
        if not idle or scheduler.dispatching or scheduler.dispatch_scheduled or request.outputs or len(inputs) != 1:
            return None
        runner = idle[-1]
        execution = runner.execution
        if not (execution.alone if is_batched else execution.inline):
            return None
        tensor = inputs[0]
        array = tensor.array
        known = accepted.get((tensor.name, tensor.dtype, array.shape))
        if known is None:
            try:
                known = validator.accept(request)
            except InvalidArgument:
                return None  # the regular path counts it and raises this again
        rows = known[0]
        started_ns = monotonic_ns()
        try:
            result = runner.compute({name: array}, output_names)
            output_array = result.get(output_name)
            if (
                output_array is not None
                and output_array.dtype is output_numpy
                and rows_of_shape.get(output_array.shape) == rows
            ):
                outputs: Sequence[Tensor] = (Tensor(output_name, output_dtype, output_array),)
            else:
                outputs = runner.concatenator.split_single(as_pending(request, rows, started_ns), result)
                if len(rows_of_shape) >= _KNOWN_SHAPES:
                    rows_of_shape.clear()
                rows_of_shape[outputs[0].array.shape] = rows
        except Exception as error:
            failure = error_for_callers(error, runner.name, (as_pending(request, rows, started_ns),))
            statistics.received += 1
            statistics.answered(rows, failure, monotonic_ns() - started_ns, started_ns, request.id)
            raise failure from None
        ended_ns = monotonic_ns()
        took_ns = ended_ns - started_ns
        add_recent((started_ns, took_ns, rows, request.id))
        if took_ns > execution.slow_ns or execution.strikes:
            execution.record(took_ns, rows, took_ns)
        if rows == 1 and took_ns <= statistics.quick_ns:
            tally.count += 1
            tally.took_ns += took_ns
            tally.last_ns = ended_ns
        else:
            statistics.answered_at_once(rows, took_ns, ended_ns)
            record = runner.idle_record if is_batched else runner.single_record
            statistics.log.add(record if rows == 1 else record._replace(rows=rows))
        return InferResponse(model_name, version_text, outputs, request.id)

    def as_pending(request: InferRequest, rows: int, started_ns: int) -> PendingRequest:
        return PendingRequest(owner, request, rows, None, _ignore, started_ns)

    return express


def _ignore(result: InferResponse | BaseException) -> None:
    """The callback of a request that was never queued."""
