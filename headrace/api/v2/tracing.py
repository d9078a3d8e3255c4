# SPDX-License-Identifier: Apache-2.0
"""An infer request as a span, for servers that trace. Called by `http` and `grpc` instead of the data plane's `submit`."""

from __future__ import annotations

from headrace.core.messages import InferRequest, InferResponse
from headrace.engine.batching import Done
from headrace.engine.dataplane import DataPlane
from headrace.telemetry.tracing import Tracer
from headrace.wire.http.heads import RequestHead


def submit_traced(plane: DataPlane, tracer: Tracer, head: RequestHead, request: InferRequest, done: Done) -> None:
    """Submit a request under a span that ends with its answer; a `traceparent` of the caller's is its parent."""
    span = tracer.start("infer", head.get(b"traceparent"))
    span.set("model", request.model_name)
    if request.id:
        span.set("request_id", request.id)

    def answered(result: InferResponse | BaseException) -> None:
        if isinstance(result, InferResponse):
            span.set("version", result.model_version)
            span.end()
        else:
            span.end(type(result).__name__)
        done(result)

    try:
        plane.submit(request, answered)
    except Exception as error:
        span.end(type(error).__name__)
        raise
