# SPDX-License-Identifier: Apache-2.0
"""Spans for who asks for them: the words rooms use, and the silence that stands in when tracing is off.

Rooms take a `Tracer` and start spans on it; a composition root passes `NO_TRACING`, or what `open_tracing` gives.
Parents are passed by hand, because the infer path runs in callbacks that share one context. Must not know
OpenTelemetry: `spans` does, and is imported only when tracing is opened.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Protocol, cast
from urllib.parse import SplitResult, urlsplit

from headrace.core.errors import FailedPrecondition

AttributeValue = str | bool | int | float


class Span(Protocol):
    """A stretch of work. End it once; as a context manager it ends itself, marked failed if an exception passes."""

    traceparent: bytes
    """The W3C header that makes work elsewhere a child of this span; empty when tracing is off."""

    def set(self, name: str, value: AttributeValue) -> None:
        """Attach a fact."""

    def end(self, failure: str = "", at: float | None = None) -> None:
        """Stop the watch; `failure` says what went wrong, and marks the span as failed. `at`: see `Tracer.start`."""

    def __enter__(self) -> Span:
        """Begin a block that ends the span."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the span."""


class Tracer(Protocol):
    """Starts spans."""

    enabled: bool
    """False when nobody listens: a hot path may then skip the work of naming things."""

    def start(self, name: str, parent: Span | bytes | None = None, at: float | None = None) -> Span:
        """Start a span under another one, under a client's `traceparent` header, or under nothing.

        `at`: seconds since the epoch, for what has begun before it is told.
        """

    def close(self) -> None:
        """Send what is left, and stop."""


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
    """Send spans to an OTLP/HTTP collector such as `http://localhost:4318`.

    A request that comes with a `traceparent` is traced if its caller traces it; of the others, `sample_ratio` are.
    """
    address = checked_endpoint(endpoint)
    if not 0 <= sample_ratio <= 1:
        raise ValueError(f"tracing sample ratio {sample_ratio} is not allowed: use a number from 0 to 1")
    try:
        spans = importlib.import_module("headrace.core.telemetry.spans")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("opentelemetry"):
            raise
        raise FailedPrecondition("tracing needs OpenTelemetry: pip install 'headrace[trace]'") from error
    return cast("Tracer", spans.exporting_tracer(address.geturl(), service_name, sample_ratio))


def checked_endpoint(endpoint: str) -> SplitResult:
    """Where spans go, with a collector's path unless another is told. Raises ValueError that says what to write."""
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError(f"tracing endpoint {endpoint!r} is not allowed: use a URL such as http://localhost:4318")
    return address._replace(path="/v1/traces") if address.path in ("", "/") else address
