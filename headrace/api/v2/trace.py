# SPDX-License-Identifier: Apache-2.0
"""Triton's trace extension: which requests are traced, and inference under a span.

The settings apply to all models or to one. Without a trace collector they can be read and changed, and nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.api.v2.settings import TraceDefaults
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.tracing import Span, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending_request import PendingRequest, ResponseCallback, StreamCallback
from headrace.net.http.heads import RequestHead

LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_MOST = (1 << 31) - 1

Changes = Mapping[str, Sequence[str] | None]
"""Settings by name, their values as strings; None resets a setting."""


_FIELDS = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_LEAST = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}


@dataclass(slots=True)
class _TraceCounter:
    """Requests seen and traced under one set of settings."""

    seen: int = 0
    traced: int = 0


class TraceControl:
    """The current trace settings."""

    def __init__(self, plane: DataPlane, tracer: Tracer, initial: TraceDefaults | None = None) -> None:
        self.tracer = tracer
        if initial is None:
            initial = TraceDefaults(("TIMESTAMPS",), 1, mode="opentelemetry") if tracer.enabled else TraceDefaults()
        self._plane = plane
        self._initial = initial
        self._changes: dict[str, dict[str, Any]] = {}
        """Changes by model ("" for all models), by the names of `TraceDefaults`."""
        self._counters: dict[str, _TraceCounter] = {}
        self.enabled = False
        """Whether any request may be traced; the only check on the hot path."""
        self._refresh()

    def wants(self, model_name: str) -> bool:
        """Return whether to trace this request. Call it once per request, and only while `enabled`."""
        # A model with settings of its own is counted separately.
        scope = model_name if model_name in self._changes else ""
        settings = self._settings(scope)
        if settings.level == ("OFF",):
            return False
        counter = self._counters.setdefault(scope, _TraceCounter())
        if 0 <= settings.count <= counter.traced:
            return False
        counter.seen += 1
        if (counter.seen - 1) % settings.rate:
            return False
        counter.traced += 1
        return True

    def to_json(self, model_name: str = "") -> dict[str, list[str]]:
        """Return the settings of a model, or of all models, as strings; `trace_level` may have several."""
        self._check_model(model_name)
        settings = self._settings(model_name)
        return {
            "trace_file": [settings.file],
            "trace_level": list(settings.level),
            "trace_rate": [str(settings.rate)],
            "trace_count": [str(settings.count)],
            "log_frequency": [str(settings.log_frequency)],
            "trace_mode": [settings.mode],
        }

    def change(self, model_name: str, changes: Changes) -> None:
        """Apply all changes, or none if one is invalid."""
        self._check_model(model_name)
        changed = dict(self._changes.get(model_name, {}))
        for name, values in changes.items():
            field, value = _parse(name, values)
            if value is None:
                changed.pop(field, None)
            else:
                changed[field] = value
        if changed:
            self._changes[model_name] = changed
        else:
            self._changes.pop(model_name, None)
        self._counters.pop(model_name, None)
        self._refresh()

    def _settings(self, model_name: str) -> TraceDefaults:
        changed = {**self._changes.get("", {}), **self._changes.get(model_name, {})}
        return replace(self._initial, **changed)

    def _refresh(self) -> None:
        levels = [self._settings(name).level for name in ("", *self._changes)]
        self.enabled = self.tracer.enabled and any(level != ("OFF",) for level in levels)

    def _check_model(self, model_name: str) -> None:
        if model_name:
            self._plane.config(model_name)


def _parse(name: str, values: Sequence[str] | None) -> tuple[str, Any]:
    if name == "trace_file":
        raise InvalidArgument("trace file location can not be updated through network protocol")
    if name == "trace_mode":
        raise InvalidArgument("trace mode can not be updated through network protocol")
    if name not in _FIELDS:
        raise InvalidArgument(f"unknown trace setting {name[:64]!a}: use one of {', '.join(_FIELDS)}")
    if values is None or not values:
        return _FIELDS[name], None
    if name == "trace_level":
        for level in values:
            if level not in LEVELS:
                raise InvalidArgument(f"trace_level {level[:64]!a} is not one of {', '.join(LEVELS)}")
        chosen = tuple(level for level in LEVELS if level in values and level != "OFF")
        return "level", chosen or ("OFF",)
    if len(values) != 1:
        raise InvalidArgument(f"trace setting '{name}' has one value, not {len(values)}")
    text = values[0]
    number = int(text) if text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 11 else None
    if number is None or not _LEAST[name] <= number <= _MOST:
        raise InvalidArgument(f"trace setting '{name}' must be an integer of {_LEAST[name]} or more")
    return _FIELDS[name], number


def infer_traced(
    plane: DataPlane, tracer: Tracer, head: RequestHead, request: InferRequest, done: ResponseCallback
) -> PendingRequest:
    """Run inference under a span that ends with the response; the client's `traceparent` is its parent."""
    span = _span(tracer, "infer", head, request)
    pending: PendingRequest | None = None

    def answered(result: InferResponse | BaseException) -> None:
        if pending is not None and pending.batch_record is not None:
            span.set("batch", str(pending.batch_record))
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
    plane: DataPlane, tracer: Tracer, head: RequestHead, request: InferRequest, on_response: StreamCallback
) -> PendingRequest:
    """Run inference with any number of responses under a span that ends with the last one."""
    span = _span(tracer, "infer_stream", head, request)
    answers = 0

    def callback(result: InferResponse | BaseException | None, final: bool) -> None:
        nonlocal answers
        if isinstance(result, InferResponse):
            answers += 1
            span.set("version", result.model_version)
        if final:
            span.set("answers", answers)
            span.end(type(result).__name__ if isinstance(result, BaseException) else "")
        on_response(result, final)

    try:
        return plane.infer_stream(request, callback)
    except Exception as error:
        span.end(type(error).__name__)
        raise


def _span(tracer: Tracer, name: str, head: RequestHead, request: InferRequest) -> Span:
    span = tracer.start(name, head.get(b"traceparent"))
    span.set("model", request.model_name)
    if request.id:
        span.set("request_id", request.id)
    return span
