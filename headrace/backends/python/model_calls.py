# SPDX-License-Identifier: Apache-2.0
"""Calls from a Python model to the server: run another model, load or unload one, report metrics, log."""

from __future__ import annotations

import logging
import sys
from collections import Counter as Count
from collections.abc import Callable
from typing import Any

from headrace.backends.contract import Answer, EngineServices
from headrace.backends.python.process import Process
from headrace.backends.python.protocol import Buffer, Frame, Kind, Meta, Unpacker, pack
from headrace.core.errors import (
    AlreadyExists,
    Cancelled,
    Code,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
)
from headrace.core.requests import InferRequest, InferResponse, RequestedOutput
from headrace.core.telemetry.metrics import Counter, Family, Gauge, Histogram, Registry, check_bounds

# Triton's numbers: unknown, internal, not found, invalid argument, unavailable, unsupported, already exists, cancelled.
_CLASSES: tuple[type[HeadraceError], ...] = (
    Internal,
    Internal,
    NotFound,
    InvalidArgument,
    Unavailable,
    Unimplemented,
    AlreadyExists,
    Cancelled,
)
_INTERNAL, _INVALID, _UNAVAILABLE = 1, 3, 4
_NUMBERS = {
    Code.NOT_FOUND: 2,
    Code.INVALID_ARGUMENT: _INVALID,
    Code.TOO_LARGE: _INVALID,
    Code.UNAVAILABLE: _UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: _UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: _UNAVAILABLE,
    Code.FAILED_PRECONDITION: _UNAVAILABLE,
    Code.UNIMPLEMENTED: 5,
    Code.ALREADY_EXISTS: 6,
    Code.CANCELLED: 7,
}


def error_of(number: int, message: str) -> HeadraceError:
    """Return the exception for a model's error code and message."""
    return (_CLASSES[number] if 0 <= number < len(_CLASSES) else Internal)(message)


def code_of(error: HeadraceError) -> int:
    """Return Triton's code for an error."""
    return _NUMBERS.get(error.code, _INTERNAL)


def log_from_model(log: logging.Logger, meta: Meta) -> None:
    """Log a line of a model's process: `text`, and `trace` below it if there is one."""
    level: int = meta.get("level", logging.ERROR)
    if log.isEnabledFor(level):
        trace = meta.get("trace") or None
        log.handle(log.makeRecord(log.name, level, "", 0, "%s", (meta["text"],), None, sinfo=trace))


_Labels = tuple[tuple[str, str], ...]
_Key = tuple[str, _Labels]
_Series = Counter | Gauge | Histogram


class MetricFamilies:
    """Metric families that models have declared, with reference counts of their series."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._kinds: dict[str, tuple[str, str]] = {}
        self._families: dict[str, Family[Any]] = {}
        self._users: Count[_Key] = Count()

    def name(self, name: str, help: str, kind: str) -> None:
        """Register a metric family; the first help text is kept."""
        known = self._kinds.setdefault(name, (kind, help))
        if known[0] != kind:
            raise InvalidArgument(f"metric {name} is a {known[0]} already: use another name for the {kind}")

    def take(self, meta: Meta) -> tuple[_Key, _Series]:
        """Return a series of the first family of this name; create it if needed."""
        name, labels = meta["name"], meta["labels"]
        # A histogram without buckets only counts and sums; the registry wants one bound.
        buckets = meta["buckets"] or [sys.float_info.max]
        self.name(name, meta["help"], meta["kind"])
        try:
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = self._declared(name, sorted(labels), buckets)
            series: _Series = family.labels(**labels)
            if isinstance(series, Histogram) and tuple(series.bounds) != check_bounds(buckets):
                raise InvalidArgument(f"metric {name} has buckets {list(series.bounds)}; others are not possible")
        except (ValueError, TypeError) as error:
            # The registry's message, about names that the model chose.
            raise InvalidArgument(str(error)) from None
        key = (name, tuple(sorted(labels.items())))
        self._users[key] += 1
        return key, series

    def drop(self, key: _Key) -> None:
        """Drop one reference; remove a series without references."""
        self._users[key] -= 1
        if self._users[key] <= 0:
            del self._users[key]
            self._families[key[0]].remove(**dict(key[1]))

    def _declared(self, name: str, labels: list[str], buckets: list[float]) -> Family[Any]:
        kind, help_text = self._kinds[name]
        if kind == "counter":
            return self._registry.counter(name, help_text, labels)
        if kind == "gauge":
            return self._registry.gauge(name, help_text, labels)
        return self._registry.histogram(name, help_text, labels, buckets=buckets)


class InstanceMetrics:
    """The metric series of one instance, by the numbers that its process uses."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._series: list[tuple[_Key, _Series]] = []
        self._left: list[_Key] = []

    def name(self, meta: Meta) -> None:
        """Register a metric family."""
        self._families.name(meta["name"], meta["help"], meta["kind"])

    def declare(self, meta: Meta) -> int:
        """Create a series and return its number."""
        self._series.append(self._families.take(meta))
        return len(self._series) - 1

    def value(self, number: int) -> float:
        """Return the value of a counter or gauge."""
        series = self._series[number][1]
        return series.sum if isinstance(series, Histogram) else series.value

    def update(self, updates: list[list[Any]]) -> None:
        """Apply metric updates of the model."""
        for number, action, value in updates:
            key, series = self._series[number]
            if action == "drop":
                self._families.drop(key)
                # The number stays reserved but is not used again.
                self._series[number] = (_NONE, Gauge())
            elif isinstance(series, Histogram):
                series.observe(value)
            elif action == "set" and isinstance(series, Gauge):
                series.set(value)
            else:
                series.add(value)

    def process_died(self) -> None:
        """Restart the numbering for the next process; the series stay until the instance is closed."""
        self._left += [key for key, _ in self._series if key != _NONE]
        self._series = []

    def close(self) -> None:
        """Drop the references to all series of this instance."""
        self.process_died()
        for key in self._left:
            self._families.drop(key)
        self._left = []


_NONE: _Key = ("", ())


_log = logging.getLogger(__name__)


class Calls:
    """The calls of one instance."""

    def __init__(
        self, services: EngineServices, families: MetricFamilies, model_name: str, self_calls: SelfCalls
    ) -> None:
        self._services = services
        self._self_calls = self_calls
        self._log = logging.getLogger(f"headrace.model.{model_name}")
        self._measures = InstanceMetrics(families)
        self._open: dict[int, Callable[[], None]] = {}

    def frame(self, process: Process, frame: Frame) -> None:
        """Handle a frame of kind CALL or LOG."""
        if frame.kind == Kind.LOG:
            self.log(frame.meta)
        elif frame.kind == Kind.CALL:
            self._call(process, frame)

    def log(self, meta: Meta) -> None:
        """Log a line of the model's process (`log_from_model`)."""
        log_from_model(self._log, meta)

    def measured(self, updates: list[list[Any]]) -> None:
        """Apply the metric updates of a frame."""
        self._measures.update(updates)

    def process_died(self) -> None:
        """Cancel the open calls of a process that died."""
        calls, self._open = self._open, {}
        for cancel in calls.values():
            cancel()
        self._self_calls.process_died(self)
        self._measures.process_died()

    def close(self) -> None:
        """Release everything when the instance is closed."""
        self._measures.close()

    def _call(self, process: Process, frame: Frame) -> None:
        meta = frame.meta
        number: int = meta["call"]
        try:
            action = _HANDLERS[meta["op"]]
            action(self, process, number, meta, Unpacker(frame.payload, process.view))
        except HeadraceError as error:
            _reply_error(process, number, error)
        except Exception:
            _log.exception("a call of a model failed", extra={"op": str(meta.get("op"))})
            _reply_error(process, number, Internal("the call failed; the server's log has the details"))

    def _infer(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        request = InferRequest(
            meta["model"],
            unpacker.tensors(meta["tensors"]),
            meta["version"],
            meta["id"],
            [RequestedOutput(name) for name in meta["outputs"]],
            meta["parameters"],
        )
        ended = False
        waits = bool(meta.get("blocks")) and self._self_calls.is_own(meta["model"], meta["version"])
        own = self._self_calls.begin(self) if waits else None

        def answered(answer: Answer, last: bool) -> None:
            nonlocal ended
            last = last or isinstance(answer, HeadraceError)
            if last and not ended:
                ended = True
                self._self_calls.end(own)
                self._open.pop(number, None)
            if isinstance(answer, HeadraceError):
                _reply_error(process, number, answer)
            else:
                _reply_response(process, number, answer, last)

        try:
            cancel = self._services.infer(request, answered)
        except BaseException:
            self._self_calls.end(own)
            raise
        # The answer may arrive before the call returns.
        if not ended:
            self._open[number] = cancel

    def _cancel(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        cancel = self._open.get(number)
        if cancel is not None:
            cancel()

    def _pace(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, None)

    def _load(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        files = {name: bytes(unpacker.take(size)) for name, size in meta["files"]}
        self._services.load(meta["model"], meta["config"], files, _replier(process, number))

    def _unload(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        self._services.unload(meta["model"], _replier(process, number))

    def _ready(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, self._services.is_ready(meta["model"], meta["version"]))

    def _family(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        self._measures.name(meta)
        _reply_value(process, number, None)

    def _metric(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, self._measures.declare(meta))

    def _value(self, process: Process, number: int, meta: Meta, unpacker: Unpacker) -> None:
        _reply_value(process, number, self._measures.value(meta["metric"]))


_HANDLERS: dict[str, Callable[[Calls, Process, int, Meta, Unpacker], None]] = {
    "infer": Calls._infer,
    "cancel": Calls._cancel,
    "pace": Calls._pace,
    "load": Calls._load,
    "unload": Calls._unload,
    "ready": Calls._ready,
    "family": Calls._family,
    "metric": Calls._metric,
    "value": Calls._value,
}


def _replier(process: Process, number: int) -> Callable[[Answer], None]:
    def done(answer: Answer) -> None:
        if isinstance(answer, HeadraceError):
            _reply_error(process, number, answer)
        else:
            _reply_value(process, number, None)

    return done


def _reply_value(process: Process, number: int, value: Any) -> None:
    process.send(Kind.REPLY, {"call": number, "last": True, "value": value})


def _reply_error(process: Process, number: int, error: HeadraceError) -> None:
    process.send(Kind.REPLY, {"call": number, "last": True, "error": [code_of(error), error.message]})


def _reply_response(process: Process, number: int, answer: InferResponse | None, last: bool) -> None:
    pieces: list[Buffer] = []
    meta: Meta = {"call": number, "last": last}
    if answer is None:
        meta["empty"] = True
    elif not process.over:
        meta["tensors"] = pack(answer.outputs, process.arena, pieces)
        meta["parameters"] = dict(answer.parameters)
    process.send(Kind.REPLY, meta, pieces)


class SelfCalls:
    """Calls of a version to itself that block an instance."""

    def __init__(self, model_name: str, version: int) -> None:
        self._model_name = model_name
        self._version = str(version)
        self._instances: set[object] = set()
        self._waiting: dict[object, object] = {}
        """The blocked instance of each call."""

    def opened(self, instance: object) -> None:
        """Add an instance."""
        self._instances.add(instance)

    def closed(self, instance: object) -> None:
        """Remove an instance."""
        self._instances.discard(instance)

    def is_own(self, model_name: str, version: str) -> bool:
        """Return whether a call is for the version itself."""
        # Without a version it means the latest. While a newer version replaces this one, a call may be rejected needlessly.
        return model_name == self._model_name and version in ("", self._version)

    def begin(self, caller: object) -> object:
        """Register a blocking call; return its handle for `end`. Reject it if all instances would then wait forever."""
        if len({*self._waiting.values(), caller}) >= len(self._instances):
            count = len(self._instances)
            reason = "its only instance is the one that calls" if count == 1 else f"all {count} instances do so"
            raise FailedPrecondition(
                f"model '{self._model_name}' calls itself and waits, but {reason}, so none is left to answer: give it one "
                "more instance (count of instance_group) for each level of calls, or call another model"
            )
        call = object()
        self._waiting[call] = caller
        return call

    def end(self, call: object) -> None:
        """Unregister a call that has its answer."""
        self._waiting.pop(call, None)

    def process_died(self, caller: object) -> None:
        """Unregister the calls of an instance whose process died."""
        self._waiting = {call: other for call, other in self._waiting.items() if other is not caller}
