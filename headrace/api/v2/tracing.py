# SPDX-License-Identifier: Apache-2.0
"""An infer request as a span, for servers that trace. Called by `http` and `grpc` instead of the data plane's `infer`."""

from __future__ import annotations

from headrace.core.messages import InferRequest, InferResponse
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending import Done, Pending
from headrace.telemetry.tracing import Tracer
from headrace.wire.http.heads import RequestHead


def infer_traced(plane: DataPlane, tracer: Tracer, head: RequestHead, request: InferRequest, done: Done) -> Pending:
    """Compute a request under a span that ends with its answer; a `traceparent` of the caller's is its parent."""
    span = tracer.start("infer", head.get(b"traceparent"))
    span.set("model", request.model_name)
    if request.id:
        span.set("request_id", request.id)

    pending: Pending | None = None
    early: InferResponse | BaseException | None = None

    def answered(result: InferResponse | BaseException) -> None:
        nonlocal early
        if pending is None:  # a quick model answers before it returns the handle that tells of its batch
            early = result
            return
        if pending.formed is not None:
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
    if early is not None:
        answered(early)
    return pending
