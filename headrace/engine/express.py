# SPDX-License-Identifier: Apache-2.0
"""The shortest way through the engine, for the most common request there is: one tensor to a quick model that is idle.

Called by the data plane's `answer`. It does in one function, and returns, what checking, queue, runner, accounts and a
callback do in a dozen calls, because for a model of a few microseconds those were most of a request's cost (`make bench`,
overhead). Whatever is not plain is left to the long way, which knows every case and has the words for every mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import cast

from headrace.core.messages import InferRequest, InferResponse
from headrace.core.tensors import Tensor
from headrace.engine.checking import plain_input
from headrace.engine.execution.joining import Joiner, plain_output
from headrace.engine.execution.runners import ComputeRunner, told
from headrace.engine.scheduling.pending import Owner, Pending
from headrace.engine.scheduling.scheduler import BatchScheduler, Runner
from headrace.engine.statistics import VersionStatistics
from headrace.models.config.types import ModelConfig

Express = Callable[[InferRequest], InferResponse | None]
"""The answer to a request; None, and nothing has been done, if it is to take the long way."""


def express_for(
    owner: Owner, config: ModelConfig, scheduler: object, runners: Sequence[Runner], statistics: VersionStatistics
) -> Express | None:
    """The express of a version; None for models that join requests, remember, or take more than a plain tensor."""
    given, taken = plain_input(config), plain_output(config)
    if given is None or taken is None or not isinstance(scheduler, BatchScheduler) or not scheduler.one_at_a_time:
        return None
    if config.decoupled or config.response_cache:
        return None
    if not all(isinstance(runner, ComputeRunner) and type(runner.joiner) is Joiner for runner in runners):
        return None
    return _express(owner, config, scheduler, statistics)


def _express(  # noqa: PLR0915  # to be one function is the point
    owner: Owner, config: ModelConfig, scheduler: BatchScheduler, statistics: VersionStatistics
) -> Express:
    # Everything is a variable of the closure: attributes of an object would be looked up for every request.
    (spec,), (result_spec,) = config.inputs, config.outputs
    name, dtype, dims = spec.name, spec.dtype, spec.dims
    output_name, output_dtype, output_dims = result_spec.name, result_spec.dtype, result_spec.dims
    if dims is None or output_dtype is None or output_dims is None:
        raise TypeError("a plain tensor has a type and dims")
    output_numpy = output_dtype.numpy
    output_names = (output_name,)
    most = config.max_batch_size
    model_name, version_text = owner.name, owner.version_text
    idle = cast("list[ComputeRunner]", scheduler.idle)
    quick = statistics.quick

    def express(request: InferRequest) -> InferResponse | None:
        inputs = request.inputs
        # `busy` and `awake`: somebody waits already, or is being told and may be asking from there.
        if not idle or scheduler.busy or scheduler.awake or request.outputs or len(inputs) != 1:
            return None
        runner = idle[-1]
        pace = runner.pace
        tensor = inputs[0]
        array = tensor.array
        shape = array.shape
        if not pace.inline or tensor.dtype is not dtype or tensor.name != name:
            return None
        if not most:
            rows = 1
            if shape != dims:
                return None
        else:
            rows = shape[0] if shape else 0
            if shape[1:] != dims or not 0 < rows <= most:
                return None
        started_ns = monotonic_ns()
        try:
            result = runner.compute({name: array}, output_names)
            whole = result.get(output_name)
            if (
                whole is not None
                and whole.dtype is output_numpy
                and whole.shape == ((rows, *output_dims) if most else output_dims)
            ):
                outputs: Sequence[Tensor] = (Tensor(output_name, output_dtype, whole),)
            else:
                outputs = runner.joiner.split_alone(unseen(request, rows, started_ns), result)
        except Exception as error:
            failure = told(error, runner.name, (unseen(request, rows, started_ns),))
            statistics.received += 1
            statistics.answered(rows, failure, monotonic_ns() - started_ns)
            raise failure from None
        ended_ns = monotonic_ns()
        took_ns = ended_ns - started_ns
        if took_ns > pace.slow_ns or pace.strikes:
            pace.took(took_ns, rows)
        if rows == 1 and took_ns <= statistics.quick_ns:
            quick.count += 1
            quick.took_ns += took_ns
            quick.last_ns = ended_ns
        else:
            statistics.answered_at_once(rows, took_ns, ended_ns)
            statistics.log.add(runner.alone if rows == 1 else runner.alone._replace(rows=rows))
        return InferResponse(model_name, version_text, outputs, request.id)

    def unseen(request: InferRequest, rows: int, started_ns: int) -> Pending:
        return Pending(owner, request, rows, None, _nobody, started_ns)

    return express


def _nobody(result: InferResponse | BaseException) -> None:
    """Who is told of a request that never waited."""
