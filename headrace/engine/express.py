# SPDX-License-Identifier: Apache-2.0
"""The express path: compute a request with one fixed-shape tensor at once on an idle instance of a fast model.

The data plane's `answer` calls it. One function does what validation, queue, runner, statistics and a callback do in a dozen
calls, because for a model of a few microseconds those calls were most of a request's cost (`make bench`, overhead). All
other requests take the regular path, which handles every case and has the message for every error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import cast

from headrace.core.requests import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.execution.concatenation import BatchConcatenator, single_fixed_output
from headrace.engine.execution.runners import ComputeRunner, error_for_callers
from headrace.engine.request_validation import single_fixed_input
from headrace.engine.scheduling.pending_request import Owner, PendingRequest
from headrace.engine.scheduling.scheduler import BatchScheduler, Runner
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ModelConfig

Express = Callable[[InferRequest], InferResponse | None]
"""Returns the response to a request; None, without any effect, if the request must take the regular path."""


def express_for(
    owner: Owner, config: ModelConfig, scheduler: object, runners: Sequence[Runner], statistics: VersionStatistics
) -> Express | None:
    """Return the express path of a version; None for models with batching, sequences, or other than one fixed tensor."""
    only_input, only_output = single_fixed_input(config), single_fixed_output(config)
    if only_input is None or only_output is None:
        return None
    if not isinstance(scheduler, BatchScheduler) or not scheduler.one_at_a_time:
        return None
    if config.decoupled or config.response_cache:
        return None
    if not all(
        isinstance(runner, ComputeRunner) and type(runner.concatenator) is BatchConcatenator for runner in runners
    ):
        return None
    return _express(owner, config, scheduler, statistics)


def _express(  # noqa: PLR0915  # one function on purpose
    owner: Owner, config: ModelConfig, scheduler: BatchScheduler, statistics: VersionStatistics
) -> Express:
    # Everything is a closure variable: attributes of an object would be looked up for every request.
    (spec,), (result_spec,) = config.inputs, config.outputs
    name, dtype, dims = spec.name, spec.dtype, spec.dims
    output_name, output_dtype, output_dims = result_spec.name, result_spec.dtype, result_spec.dims
    if dims is None or output_dtype is None or output_dims is None:
        raise TypeError("a fixed tensor has a type and dims")
    output_numpy = output_dtype.numpy
    output_names = (output_name,)
    max_rows = config.max_batch_size
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
        tensor = inputs[0]
        array = tensor.array
        shape = array.shape
        if not execution.inline or tensor.dtype is not dtype or tensor.name != name:
            return None
        if not max_rows:
            rows = 1
            if shape != dims:
                return None
        else:
            rows = shape[0] if shape else 0
            if shape[1:] != dims or not 0 < rows <= max_rows:
                return None
        started_ns = monotonic_ns()
        try:
            result = runner.compute({name: array}, output_names)
            output_array = result.get(output_name)
            if (
                output_array is not None
                and output_array.dtype is output_numpy
                and output_array.shape == ((rows, *output_dims) if max_rows else output_dims)
            ):
                outputs: Sequence[Tensor] = (Tensor(output_name, output_dtype, output_array),)
            else:
                outputs = runner.concatenator.split_single(as_pending(request, rows, started_ns), result)
        except Exception as error:
            failure = error_for_callers(error, runner.name, (as_pending(request, rows, started_ns),))
            statistics.received += 1
            statistics.answered(rows, failure, monotonic_ns() - started_ns, started_ns, request.id)
            raise failure from None
        ended_ns = monotonic_ns()
        took_ns = ended_ns - started_ns
        add_recent((started_ns, took_ns, rows, request.id))
        if took_ns > execution.slow_ns or execution.strikes:
            execution.record(took_ns, rows)
        if rows == 1 and took_ns <= statistics.quick_ns:
            tally.count += 1
            tally.took_ns += took_ns
            tally.last_ns = ended_ns
        else:
            statistics.answered_at_once(rows, took_ns, ended_ns)
            statistics.log.add(runner.single_record if rows == 1 else runner.single_record._replace(rows=rows))
        return InferResponse(model_name, version_text, outputs, request.id)

    def as_pending(request: InferRequest, rows: int, started_ns: int) -> PendingRequest:
        return PendingRequest(owner, request, rows, None, _ignore, started_ns)

    return express


def _ignore(result: InferResponse | BaseException) -> None:
    """The callback of a request that was never queued."""
