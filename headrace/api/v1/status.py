# SPDX-License-Identifier: Apache-2.0
"""The server's status and health, the counters of requests, and the RequestStatus of every response.

One `V1Statistics` serves `V1Http` and `V1Grpc` together. One ServerStatus message serves both generations: the older
one skips the newer fields.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from headrace.api.v1.messages import message_class, one_line
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import INTERNAL_TEXT, Code, HeadraceError, InvalidArgument, NotFound, Unimplemented
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.control import IndexEntry
from headrace.engine.statistics import RequestStats, VersionStatistics
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

_STATS_FIELDS = {
    "status": "status_stats",
    "profile": "profile_stats",
    "health": "health_stats",
    "model_control": "model_control_stats",
    "shm": "shm_control_stats",
    "repository": "repository_stats",
}


log = logging.getLogger("headrace.api.v1")
_MOST_CHARACTERS = 2048
"""Maximum length of an error message, which is sent in a header field."""
_CODES = {
    Code.INVALID_ARGUMENT: "INVALID_ARG",
    Code.TOO_LARGE: "INVALID_ARG",
    Code.NOT_FOUND: "NOT_FOUND",
    Code.ALREADY_EXISTS: "ALREADY_EXISTS",
    Code.UNAVAILABLE: "UNAVAILABLE",
    Code.RESOURCE_EXHAUSTED: "UNAVAILABLE",
    Code.DEADLINE_EXCEEDED: "UNAVAILABLE",
    Code.CANCELLED: "UNAVAILABLE",
    Code.UNIMPLEMENTED: "UNSUPPORTED",
    Code.FAILED_PRECONDITION: "UNSUPPORTED",
    Code.PERMISSION_DENIED: "UNSUPPORTED",
    Code.UNAUTHENTICATED: "UNSUPPORTED",
    Code.INTERNAL: "INTERNAL",
}
"""Every error code as a RequestStatusCode."""


def server_status(plane: DataPlane, statistics: V1Statistics, model: str = "") -> Any:
    """Return the status of the server with all models, or one."""
    settings = statistics.settings
    status = message_class("ServerStatus")(
        id=settings.server_id, version=settings.version, uptime_ns=statistics.uptime_ns, ready_state=_ready_state(plane)
    )
    for kind, member in _STATS_FIELDS.items():
        counter = statistics.counters[kind]
        if counter.count:
            _set_counter(getattr(status, member).success, counter)
    models: dict[str, list[IndexEntry]] = {}
    for entry in plane.states():
        if model in ("", entry.name):
            models.setdefault(entry.name, []).append(entry)
    if model and not models:
        raise NotFound(f"no status available for unknown model '{model[:256]}'")
    for name, entries in models.items():
        _describe(status.model_status[name], plane, name, entries)
    return status


def _ready_state(plane: DataPlane) -> str:
    if not plane.accepting:
        return "SERVER_EXITING"
    return "SERVER_READY" if plane.started else "SERVER_INITIALIZING"


def _describe(status: Any, plane: DataPlane, name: str, entries: list[IndexEntry]) -> None:
    newest = plane.find(name)
    if newest is None:
        status.config.name = name
    else:
        _write_config(status.config, newest.config)
    # A model that failed before its versions were known has an entry without a version, used if there is no other.
    numbered = [entry for entry in entries if entry.version]
    for entry in numbered or entries:
        version = status.version_status[int(entry.version or 0)]
        version.ready_state = f"MODEL_{entry.state.value}" if entry.state is not None else "MODEL_UNKNOWN"
        if entry.reason:
            version.ready_state_reason.message = entry.reason
        serving = plane.find(name, entry.version) if entry.version else None
        if serving is not None:
            _set_statistics(version, serving.statistics)


def _set_statistics(version: Any, statistics: VersionStatistics) -> None:
    version.model_execution_count = statistics.executions
    version.model_inference_count = statistics.inferences
    version.last_inference_timestamp_milliseconds = statistics.last_inference_ms
    for rows, stats in statistics.by_rows.items():
        _set_stats(version.infer_stats[rows], stats)


def _set_stats(entry: Any, stats: RequestStats) -> None:
    computed = stats.computed
    durations = (
        (entry.success, stats.success, stats.success_ns),
        (entry.failed, stats.fail, stats.fail_ns),
        (entry.compute, computed, stats.input_ns + stats.infer_ns + stats.output_ns),
        (entry.queue, computed, stats.queue_ns),
        (entry.compute_input, computed, stats.input_ns),
        (entry.compute_infer, computed, stats.infer_ns),
        (entry.compute_output, computed, stats.output_ns),
    )
    for duration, count, nanoseconds in durations:
        if count:
            duration.count = count
            duration.total_time_ns = nanoseconds


def _set_counter(duration: Any, counter: RequestCounter) -> None:
    duration.count = counter.count
    duration.total_time_ns = counter.total_ns


def _write_config(message: Any, config: ModelConfig) -> None:
    if config.proto is not None:
        message.ParseFromString(config.proto.SerializeToString())
        return
    # A built-in model has no configuration file.
    message.name = config.name
    message.platform = config.platform or config.backend
    message.max_batch_size = config.max_batch_size
    for key, value in config.parameters.items():
        message.parameters[key].string_value = value
    for tensors, specs in ((message.input, config.inputs), (message.output, config.outputs)):
        for spec in specs:
            _write_tensor(tensors.add(name=spec.name), spec)


def _write_tensor(tensor: Any, spec: InputSpec | OutputSpec) -> None:
    if spec.dtype is not None:
        tensor.data_type = spec.dtype.config_name
    tensor.dims.extend(spec.dims or ())


_LAST_OLD_TYPE = 12
"""TYPE_FP64: clients of 0.7 know no later data type."""


def leave_out_new_types(status: Any) -> None:
    """Leave out the data types that a client of 0.7 does not know: in text, one unknown name makes it read nothing."""
    for model in status.model_status.values():
        for tensor in (*model.config.input, *model.config.output):
            if tensor.data_type > _LAST_OLD_TYPE:
                tensor.ClearField("data_type")


class UnknownMode(InvalidArgument):
    """An unknown health mode or command: the only errors with the protocol's code UNKNOWN."""

    code = Code.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class V1Settings:
    """Settings of this protocol."""

    server_id: str = "inference:0"
    """The server's name in every status: `--id`."""

    version: str = ""
    """The server's version in the status."""

    clock: Clock = field(default_factory=SystemClock)
    """Measures the uptime, from the creation of `V1Statistics`, and the durations of requests."""

    allow_profiling: bool = False
    """Answer `profile` with success without profiling, as 1.x did."""


class RequestCounter:
    """The number and total time of successful requests of one kind."""

    __slots__ = ("count", "total_ns")

    def __init__(self) -> None:
        self.count = self.total_ns = 0


class V1Statistics:
    """Numbers the requests of both transports and counts the successful ones."""

    def __init__(self, settings: V1Settings | None = None) -> None:
        self.settings = settings or V1Settings()
        self._started = self.settings.clock.monotonic()
        self._last = 0
        self._success = one_line(self.status(0)) + b" request_id: %d"
        self.counters = {
            kind: RequestCounter() for kind in ("status", "profile", "health", "model_control", "shm", "repository")
        }

    @property
    def uptime_ns(self) -> int:
        """Time since the server was created."""
        return int((self.now() - self._started) * 1e9)

    def now(self) -> float:
        """Return the monotonic time in seconds, for `succeeded`."""
        return self.settings.clock.monotonic()

    def next_id(self) -> int:
        """Return the number of a request that has reached the core: 1, 2, ..."""
        self._last += 1
        return self._last

    def succeeded(self, kind: str, since: float) -> None:
        """Count a request that started at `since`."""
        counter = self.counters[kind]
        counter.count += 1
        counter.total_ns += int((self.now() - since) * 1e9)

    def status(self, request_id: int, error: BaseException | None = None) -> Any:
        """Return the RequestStatus of a request; id 0 for one that was refused before it reached the core.

        An unexpected exception is logged with the id that the client gets.
        """
        return message_class("RequestStatus")(
            code=_code_of(error),
            msg=self._text_of(request_id, error),
            server_id=self.settings.server_id,
            request_id=request_id,
        )

    def status_text(self, request_id: int, error: BaseException | None = None) -> bytes:
        """Return the RequestStatus as the text of NV-Status."""
        return one_line(self.status(request_id, error)) if error is not None else self._success % request_id

    def _text_of(self, request_id: int, error: BaseException | None) -> str:
        if error is None:
            return ""
        if isinstance(error, HeadraceError):
            # A message may quote the request; invalid UTF-8 in it must not raise another error.
            return error.message[:_MOST_CHARACTERS].encode(errors="replace").decode()
        log.error("request failed", exc_info=error, extra={"request_id": f"{self.settings.server_id} {request_id}"})
        return INTERNAL_TEXT


def _code_of(error: BaseException | None) -> str:
    if error is None:
        return "SUCCESS"
    if isinstance(error, UnknownMode):
        return "UNKNOWN"
    return _CODES[error.code] if isinstance(error, HeadraceError) else "INTERNAL"


def health(plane: DataPlane, mode: str) -> bool:
    """Return whether the server is `live` or `ready`."""
    if mode == "live":
        return True
    if mode == "ready":
        return plane.ready
    raise UnknownMode(f"unknown health mode '{mode[:64]}'")


def profile(settings: V1Settings, command: str) -> None:
    """Start or stop profiling, which this server does not have: if allowed, it does nothing."""
    if not settings.allow_profiling:
        raise Unimplemented("Profile API not enabled")
    if command not in ("start", "stop"):
        raise InvalidArgument(f"unknown profile command '{command[:64]}': use 'start' or 'stop'")


async def repository_index(plane: DataPlane) -> Any:
    """Return a ModelRepositoryIndex: each model once, loaded or not."""
    names = dict.fromkeys(entry.name for entry in await plane.index())
    message = message_class("ModelRepositoryIndex")()
    for name in names:
        message.models.add(name=name)
    return message
