# SPDX-License-Identifier: Apache-2.0
"""Which requests are traced: the settings of Triton's trace extension, for all models and for single ones.

Changed over HTTP and gRPC; asked by the infer handlers, and only where the server has a collector to send spans to. On a
server without one the settings can be read and changed, and nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.api.v2.settings import TraceDefaults
from headrace.core.errors import InvalidArgument
from headrace.core.telemetry.tracing import Tracer
from headrace.engine.dataplane import DataPlane

LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_MOST = (1 << 31) - 1

Changes = Mapping[str, Sequence[str] | None]
"""Settings by name, their values as texts; None takes a setting back to what it was."""


@dataclass(slots=True)
class _Counting:
    """How far one set of settings has come."""

    seen: int = 0
    traced: int = 0


class TraceControl:
    """The settings in force."""

    def __init__(self, plane: DataPlane, tracer: Tracer, initial: TraceDefaults | None = None) -> None:
        self.tracer = tracer
        if initial is None:
            initial = TraceDefaults(("TIMESTAMPS",), 1, mode="opentelemetry") if tracer.enabled else TraceDefaults()
        self._plane = plane
        self._initial = initial
        self._changes: dict[str, dict[str, Any]] = {}
        """By model, "" for all of them: what was changed, by the names of `TraceDefaults`."""
        self._counting: dict[str, _Counting] = {}
        self.enabled = False
        """Whether any request may be traced: all that the hot path looks at."""
        self._refresh()

    def wants(self, model_name: str) -> bool:
        """Whether to trace this request. To be asked once for each, and only while `enabled`."""
        # A model with settings of its own is counted by itself.
        scope = model_name if model_name in self._changes else ""
        settings = self._of(scope)
        if settings.level == ("OFF",):
            return False
        counting = self._counting.setdefault(scope, _Counting())
        if 0 <= settings.count <= counting.traced:
            return False
        counting.seen += 1
        if (counting.seen - 1) % settings.rate:
            return False
        counting.traced += 1
        return True

    def shown(self, model_name: str = "") -> dict[str, list[str]]:
        """The settings of a model, or of all, as texts; `trace_level` may be several."""
        self._check_model(model_name)
        settings = self._of(model_name)
        return {
            "trace_file": [""],
            "trace_level": list(settings.level),
            "trace_rate": [str(settings.rate)],
            "trace_count": [str(settings.count)],
            "log_frequency": [str(settings.log_frequency)],
            "trace_mode": [settings.mode],
        }

    def change(self, model_name: str, changes: Changes) -> None:
        """Apply all changes, or none if one is wrong."""
        self._check_model(model_name)
        own = dict(self._changes.get(model_name, {}))
        for name, values in changes.items():
            field, value = _parsed(name, values)
            if value is None:
                own.pop(field, None)
            else:
                own[field] = value
        if own:
            self._changes[model_name] = own
        else:
            self._changes.pop(model_name, None)
        self._counting.pop(model_name, None)
        self._refresh()

    def _of(self, model_name: str) -> TraceDefaults:
        changed = {**self._changes.get("", {}), **self._changes.get(model_name, {})}
        return replace(self._initial, **changed)

    def _refresh(self) -> None:
        levels = [self._of(name).level for name in ("", *self._changes)]
        self.enabled = self.tracer.enabled and any(level != ("OFF",) for level in levels)

    def _check_model(self, model_name: str) -> None:
        if model_name:
            self._plane.config(model_name)


_FIELDS = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count", "log_frequency": "log_frequency"}
_LEAST = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}


def _parsed(name: str, values: Sequence[str] | None) -> tuple[str, Any]:
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
                raise InvalidArgument(f"trace_level {level[:64]!a} is none of {', '.join(LEVELS)}")
        chosen = tuple(level for level in LEVELS if level in values and level != "OFF")
        return "level", chosen or ("OFF",)
    if len(values) != 1:
        raise InvalidArgument(f"trace setting '{name}' has one value, not {len(values)}")
    text = values[0]
    number = int(text) if text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 11 else None
    if number is None or not _LEAST[name] <= number <= _MOST:
        raise InvalidArgument(f"trace setting '{name}' must be a whole number of {_LEAST[name]} or more")
    return _FIELDS[name], number
