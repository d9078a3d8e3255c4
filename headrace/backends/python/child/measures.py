# SPDX-License-Identifier: Apache-2.0
"""Metrics and log lines of a model: kept and written by the server, reported from here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from headrace.backends.python.child.errors import TritonModelException
from headrace.backends.python.child.session import current
from headrace.backends.python.frames import Kind, Meta

_FLUSH_AT = 256


class MetricKind(IntEnum):
    """What a metric measures."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


def ask(meta: Meta, pieces: Sequence[bytes] = ()) -> Any:
    """Ask the server and wait for its answer; its refusal is an exception."""
    channel = current().channel
    reply = channel.next_reply(channel.call(meta, pieces))
    if reply is None:
        raise TritonModelException("the server gave no answer")
    if reply.meta.get("error"):
        raise TritonModelException(reply.meta["error"][1])
    return reply.meta.get("value")


class Metric:
    """One series."""

    def __init__(self, kind: MetricKind, number: int) -> None:
        self._kind = kind
        self._number = number
        self._channel = current().channel

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge."""
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
        """Take an observation into a histogram."""
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException(f"a {self._kind.name.lower()} does not observe: use increment or set")
        if value != value:  # noqa: PLR0124  # NaN, without an import
            raise TritonModelException("a histogram cannot observe NaN")
        self._report("observe", value)

    def value(self) -> float:
        """What a counter or a gauge has, all instances together."""
        if self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("a histogram has no single value")
        return float(ask({"op": "value", "metric": self._number}))

    def __del__(self) -> None:
        """The server may forget the series, unless others use it too; told with the next frame."""
        self._channel.measures.append([self._number, "drop", 0.0])

    def _report(self, deed: str, value: float) -> None:
        session = current()
        session.channel.measures.append([self._number, deed, float(value)])
        # While the model computes, an answer will follow and take it along.
        if not session.busy or len(session.channel.measures) >= _FLUSH_AT:
            session.channel.send(Kind.NOTE, {})


class MetricFamily:
    """A metric by name."""

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
        """A series with these labels; a histogram needs buckets."""
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
    """How important a line is."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_PYTHON_LEVELS = {LogLevel.INFO: 20, LogLevel.WARNING: 30, LogLevel.ERROR: 40, LogLevel.VERBOSE: 10}


class Logger:
    """Writes to the server's log."""

    LogLevel = LogLevel
    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Write a line."""
        session = current()
        number = _PYTHON_LEVELS[LogLevel(level)]
        if number >= session.log_level:
            session.channel.send(Kind.LOG, {"level": number, "text": str(message)})

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line people may want to read."""
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a warning."""
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        """Write an error."""
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Write a line for those who look for a fault."""
        Logger.log(message, LogLevel.VERBOSE)
