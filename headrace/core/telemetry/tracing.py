# SPDX-License-Identifier: Apache-2.0
"""Trace spans: the interface that code uses, and a tracer that does nothing.

A program passes `NO_TRACING` or the result of `open_tracing`. Parents are passed explicitly, because the infer path runs in
callbacks that share one context. OpenTelemetry is imported (`opentelemetry_spans`) only when tracing is switched on.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, urlsplit

from headrace.core.extras import MissingExtra

AttributeValue = str | bool | int | float


class Span(Protocol):
    """A span. End it once; as a context manager it ends itself, marked as failed after an exception."""

    traceparent: bytes
    """The W3C header that makes work elsewhere a child of this span; empty when tracing is off."""

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute."""

    def end(self, failure: str = "", at: float | None = None) -> None:
        """End the span; `failure` says what went wrong and marks it as failed. `at`: see `Tracer.start`."""

    def __enter__(self) -> Span:
        """Begin a block that ends the span."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the span."""


class Tracer(Protocol):
    """Starts spans."""

    enabled: bool
    """False when tracing is off, so that a hot path can skip its spans."""

    def start(self, name: str, parent: Span | bytes | None = None, at: float | None = None) -> Span:
        """Start a span below another one, below a client's `traceparent` header, or at the root.

        `at`: start time in seconds since the epoch, for work that has begun earlier.
        """

    def close(self) -> None:
        """Export the remaining spans and stop."""


class _NoSpan:
    __slots__ = ()
    traceparent = b""

    def set(self, name: str, value: AttributeValue) -> None: ...

    def end(self, failure: str = "", at: float | None = None) -> None: ...

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _NoTracer:
    __slots__ = ()
    enabled = False

    def start(self, name: str, parent: Span | bytes | None = None, at: float | None = None) -> Span:
        return _NO_SPAN

    def close(self) -> None: ...


_NO_SPAN: Span = _NoSpan()
NO_TRACING: Tracer = _NoTracer()
"""The tracer of a server that does not trace."""


def open_tracing(endpoint: str, service_name: str, *, sample_ratio: float = 1.0) -> Tracer:
    """Return a tracer that exports to an OTLP/HTTP collector such as `http://localhost:4318`.

    A request with a `traceparent` is traced if its caller traces it; a share `sample_ratio` of the others is traced.
    """
    address = checked_endpoint(endpoint)
    if not 0 <= sample_ratio <= 1:
        raise ValueError(f"tracing sample ratio {sample_ratio} is not allowed: use a number from 0 to 1")
    return cast("Tracer", import_exporter().exporting_tracer(address.geturl(), service_name, sample_ratio))


def import_exporter() -> Any:
    """Import the module that exports spans with OpenTelemetry. Raises MissingExtra."""
    try:
        return importlib.import_module("headrace.core.telemetry.opentelemetry_spans")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise MissingExtra("tracing", "trace") from error


def checked_endpoint(endpoint: str) -> SplitResult:
    """Return the collector's URL, with the default path `/v1/traces`. Raises ValueError."""
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"tracing endpoint {endpoint!r} is not allowed: use a URL such as http://localhost:4318")
    return address._replace(path="/v1/traces") if address.path in ("", "/") else address
