# SPDX-License-Identifier: Apache-2.0
"""The tracer of `tracing` on OpenTelemetry, with a provider of its own.

Imported only by `tracing.open_tracing`: OpenTelemetry is the extra `[trace]`.
"""

from __future__ import annotations

from types import TracebackType

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.core.errors import HeadraceError
from headrace.core.telemetry.tracing import AttributeValue, Span, Tracer

_PROPAGATOR = TraceContextTextMapPropagator()


def exporting_tracer(url: str, service_name: str, sample_ratio: float) -> Tracer:
    """Return a tracer that exports spans to a collector, in a thread of its own."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name}),
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        # The program closes the tracer; an exit hook would wait for the collector a second time.
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return ProviderTracer(provider)


class ProviderTracer:
    """A `Tracer` on an OpenTelemetry provider."""

    enabled = True

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headrace")

    def start(self, name: str, parent: Span | bytes | None = None, at: float | None = None) -> Span:
        """Start a span; a `traceparent` that does not parse is ignored."""
        header = parent if isinstance(parent, bytes | None) else parent.traceparent
        # An empty context: the parent is what was passed, never the current span.
        context = Context()
        if header:
            context = _PROPAGATOR.extract({"traceparent": header.decode("latin-1")}, context)
        return ProviderSpan(self._tracer.start_span(name, context, start_time=_nanoseconds(at)))

    def close(self) -> None:
        """Export the remaining spans and stop."""
        self._provider.shutdown()


class ProviderSpan:
    """A `Span` around one of OpenTelemetry's."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: otel.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, context.trace_flags)

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute."""
        self._span.set_attribute(name, value)

    def end(self, failure: str = "", at: float | None = None) -> None:
        """End the span."""
        if failure:
            self._span.set_status(otel.StatusCode.ERROR, failure)
        self._span.end(_nanoseconds(at))

    def __enter__(self) -> Span:
        """Begin a block that ends the span."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the span. The trace gets the text of a HeadraceError, but only the type of another exception."""
        if error is None:
            self.end()
        else:
            self.end(error.message if isinstance(error, HeadraceError) else type(error).__name__)


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else round(at * 1e9)
