# SPDX-License-Identifier: Apache-2.0
"""Metrics and log lines of a model: reported here, stored and written by the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.session import current
from headrace.backends.python.protocol import Kind, Meta

_FLUSH_AT = 256


class MetricKind(IntEnum):
    """The kind of a metric."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


def ask(meta: Meta, pieces: Sequence[bytes] = ()) -> Any:
    """Call the server and wait for the result; raise an exception if it fails."""
    channel = current().channel
    reply = channel.next_reply(channel.call(meta, pieces))
    if reply is None:
        raise TritonModelException("the server gave no answer")
    if reply.meta.get("error"):
        raise TritonModelException(reply.meta["error"][1])
    return reply.meta.get("value")


class Metric:
    """One metric series."""

    def __init__(self, kind: MetricKind, number: int) -> None:
        self._kind = kind
        self._number = number
        self._channel = current().channel

    def increment(self, value: float) -> None:
        """Increase a counter or a gauge."""
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("a histogram cannot be incremented: use observe")
        if self._kind is MetricKind.COUNTER and value < 0:
            raise TritonModelException(f"a counter only grows: it cannot be incremented by {value}")
        self._report("add", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        if self._kind is not MetricKind.GAUGE:
            raise TritonModelException(f"a {self._kind.name.lower()} cannot be set")
        self._report("set", value)

    def observe(self, value: float) -> None:
        """Observe a value in a histogram."""
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException(f"a {self._kind.name.lower()} does not observe: use increment or set")
        if value != value:  # noqa: PLR0124  # NaN, without an import
            raise TritonModelException("a histogram cannot observe NaN")
        self._report("observe", value)

    def value(self) -> float:
        """Return the value of a counter or gauge, over all instances."""
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("a histogram has no single value")
        return float(ask({"op": "value", "metric": self._number}))

    def __del__(self) -> None:
        """Release the series in the server, unless others use it; sent with the next frame."""
        self._channel.metric_updates.append([self._number, "drop", 0.0])

    def _report(self, action: str, value: float) -> None:
        session = current()
        session.channel.metric_updates.append([self._number, action, float(value)])
        # While the model computes, a response follows soon and carries it.
        if not session.busy or len(session.channel.metric_updates) >= _FLUSH_AT:
            session.channel.send(Kind.NOTE, {})


class MetricFamily:
    """A metric family."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._kind = MetricKind(kind)
        self._name = name
        self._description = description
        ask({"op": "family", "name": name, "help": description, "kind": self._kind.name.lower()})

    def Metric(  # noqa: N802  # models know it by this name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Create a series with these labels; a histogram needs buckets."""
        if self._kind is MetricKind.HISTOGRAM and buckets is None:
            raise TritonModelException(f"histogram {self._name} needs buckets")
        if self._kind is not MetricKind.HISTOGRAM and buckets is not None:
            raise TritonModelException(f"{self._kind.name.lower()} {self._name} has no buckets")
        number = ask(
            {
                "op": "metric",
                "name": self._name,
                "help": self._description,
                "kind": self._kind.name.lower(),
                "labels": {str(key): str(value) for key, value in (labels or {}).items()},
                "buckets": [float(bound) for bound in buckets or ()],
            }
        )
        return Metric(self._kind, number)


class LogLevel(IntEnum):
    """The severity of a log line."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_PYTHON_LEVELS = {LogLevel.INFO: 20, LogLevel.WARNING: 30, LogLevel.ERROR: 40, LogLevel.VERBOSE: 10}


def log_with_trace(message: str, level: int, trace: str) -> None:
    """Log a line, with the traceback of an exception below it."""
    session = current()
    number = _PYTHON_LEVELS[LogLevel(level)]
    if number >= session.log_level:
        session.channel.send(Kind.LOG, {"level": number, "text": str(message), "trace": trace})


class Logger:
    """Writes to the server's log."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Log a line."""
        log_with_trace(message, level, "")

    @staticmethod
    def log_info(message: str) -> None:
        """Log an info line."""
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log a warning."""
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Log an error."""
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log a debug line."""
        Logger.log(message, LogLevel.VERBOSE)
