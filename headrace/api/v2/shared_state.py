# SPDX-License-Identifier: Apache-2.0
"""State that v2 over HTTP and v2 over gRPC share: shared memory, trace and log settings, decode times.

One `V2State` serves `V2Http` and `V2Grpc` together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic_ns
from typing import Any, ParamSpec

from headrace.api.shared_memory import SharedMemory
from headrace.api.v2.outputs import OutputPlanner
from headrace.api.v2.settings import GRPC_PREFIX, Gate, V2Settings
from headrace.api.v2.trace import TraceControl, infer_stream_traced
from headrace.core.errors import InvalidArgument
from headrace.core.requests import InferRequest
from headrace.core.telemetry.logs import LogLevels, change_log_levels, log_levels
from headrace.core.telemetry.tracing import NO_TRACING, Tracer
from headrace.engine.dataplane import DataPlane
from headrace.engine.scheduling.pending_request import PendingRequest, StreamCallback
from headrace.net.http.heads import RequestHead

_EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""As Triton does, shared memory is listed whether or not --allow-client-shm allows it."""


FORMATS = ("default", "ISO8601")
"""Triton's time formats. This server writes ISO 8601 for both."""
_FLAGS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_NAMES = (*_FLAGS, "log_verbose_level", "log_format")
_MOST_VERBOSE = (1 << 31) - 1
P = ParamSpec("P")
Switch = Callable[[bool], None]


class V2State:
    """The shared state of both transports."""

    def __init__(
        self,
        plane: DataPlane,
        settings: V2Settings | None = None,
        tracer: Tracer = NO_TRACING,
        memory: SharedMemory | None = None,
    ) -> None:
        settings = settings or V2Settings()
        self.plane = plane
        self.settings = settings
        self.memory = memory or SharedMemory(allowed=settings.allow_client_shm)
        self.tracing = TraceControl(plane, tracer, settings.trace)
        self.decode_times = DecodeTimes()
        self.logs = LogControl()
        self.outputs = OutputPlanner(plane, self.memory)
        self.http_gate = Gate(settings.http_restrictions)
        self.grpc_gate = Gate(settings.grpc_restrictions, "protocol", GRPC_PREFIX)
        self.extensions = _EXTENSIONS
        """Triton's extensions that this server supports."""

    def infer_stream(self, head: RequestHead, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Call `DataPlane.infer_stream`, with a trace if the settings select this request."""
        if self.tracing.enabled and self.tracing.wants(request.model_name):
            return infer_stream_traced(self.plane, self.tracing.tracer, head, request, on_response)
        return self.plane.infer_stream(request, on_response)


class LogControl:
    """Triton's log settings, which apply to this process."""

    def __init__(self) -> None:
        self._format = FORMATS[0]

    def to_json(self) -> dict[str, Any]:
        """Return the settings by Triton's names."""
        levels = log_levels()
        return {
            "log_file": "",
            "log_info": levels.info,
            "log_warning": levels.warning,
            "log_error": levels.error,
            "log_verbose_level": levels.verbose,
            "log_format": self._format,
        }

    def change(self, changes: Mapping[str, Any]) -> None:
        """Apply all changes, or none if one is invalid. None leaves a setting unchanged."""
        levels, form = log_levels(), self._format
        for name, value in changes.items():
            if value is None and name in _NAMES:
                continue
            if name == "log_format":
                if value not in FORMATS:
                    raise InvalidArgument(f"log_format must be one of {', '.join(FORMATS)}")
                form = value
            else:
                levels = _change_level(levels, name, value)
        self._format = form
        change_log_levels(levels)


def _change_level(levels: LogLevels, name: str, value: Any) -> LogLevels:
    if name == "log_file":
        raise InvalidArgument("log file location can not be updated through network protocol")
    if name in _FLAGS:
        if type(value) is not bool:
            raise InvalidArgument(f"log setting '{name}' must be true or false")
        return replace(levels, **{_FLAGS[name]: value})
    if name == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= _MOST_VERBOSE:
            raise InvalidArgument("log setting 'log_verbose_level' must be an integer of 0 or more")
        return replace(levels, verbose=value)
    raise InvalidArgument(f"unknown log setting {name[:64]!a}: use one of {', '.join(_NAMES)}")


class DecodeTimes:
    """When the last request was received, for the console's request timelines.

    `V2Http` and `V2Grpc` decode with a timed function only while the console watches requests, so it costs nothing
    otherwise. Only the last request is kept: the console reads it before the next one arrives.
    """

    def __init__(self) -> None:
        self._switches: list[Switch] = []
        self._last: tuple[InferRequest, int] | None = None

    def subscribe(self, switch: Switch) -> None:
        """Call `switch` with whether to use `timed` from now on."""
        self._switches.append(switch)

    def switch(self, on: bool) -> None:
        """Start or stop timing."""
        for switch in self._switches:
            switch(on)
        self._last = None  # it holds the tensors of a request

    def timed(self, decode: Callable[P, InferRequest]) -> Callable[P, InferRequest]:
        """Return a decode function that records when it started."""

        def decode_timed(*args: P.args, **kwargs: P.kwargs) -> InferRequest:
            received_ns = monotonic_ns()
            request = decode(*args, **kwargs)
            self._last = (request, received_ns)
            return request

        return decode_timed

    def received_ns(self, request: InferRequest) -> int | None:
        """Return when this request was received; None if it is not the last one, or not of v2."""
        return self._last[1] if self._last is not None and self._last[0] is request else None
