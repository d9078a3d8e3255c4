# SPDX-License-Identifier: Apache-2.0
"""An infer request as a span, for servers that trace. Called by the handlers in place of the data plane's own methods."""

from __future__ import annotations

from headrace.core.messages import InferRequest, InferResponse
from headrace.core.telemetry.tracing import Span, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Answered, Done, Pending
from headrace.net.http.heads import RequestHead


def infer_traced(plane: DataPlane, tracer: Tracer, head: RequestHead, request: InferRequest, done: Done) -> Pending:
    """Compute a request under a span that ends with its answer; a `traceparent` of the caller's is its parent."""
    span = _span(tracer, "infer", head, request)
    pending: Pending | None = None

    def answered(result: InferResponse | BaseException) -> None:
        if pending is not None and pending.formed is not None:
            span.set("batch", str(pending.formed))
        if isinstance(result, InferResponse):
            span.set("version", result.model_version)
            span.end()
        else:
            span.end(type(result).__name__)
        done(result)

    try:
        pending = plane.infer(request, answered)
    except Exception as error:
        span.end(type(error).__name__)
        raise
    return pending


def infer_stream_traced(
    plane: DataPlane, tracer: Tracer, head: RequestHead, request: InferRequest, answered: Answered
) -> Pending:
    """The same for a request with any number of answers: the span ends with the last."""
    span = _span(tracer, "infer_stream", head, request)
    answers = 0

    def counted(result: InferResponse | BaseException | None, final: bool) -> None:
        nonlocal answers
        if isinstance(result, InferResponse):
            answers += 1
            span.set("version", result.model_version)
        if final:
            span.set("answers", answers)
            span.end(type(result).__name__ if isinstance(result, BaseException) else "")
        answered(result, final)

    try:
        return plane.infer_stream(request, counted)
    except Exception as error:
        span.end(type(error).__name__)
        raise


def _span(tracer: Tracer, name: str, head: RequestHead, request: InferRequest) -> Span:
    span = tracer.start(name, head.get(b"traceparent"))
    span.set("model", request.model_name)
    if request.id:
        span.set("request_id", request.id)
    return span
