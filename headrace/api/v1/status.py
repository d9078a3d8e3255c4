# SPDX-License-Identifier: Apache-2.0
"""ServerStatus: the server, its models with their configurations, and what each version has done so far.

Called by `http` and `grpc`. One message serves both generations: what the newer one has more, the older one skips.
"""

from __future__ import annotations

from typing import Any

from headrace.api.v1.accounts import Tally, V1Accounts
from headrace.api.v1.schema import message_class
from headrace.core.errors import NotFound
from headrace.engine.dataplane import DataPlane
from headrace.engine.repository.control import IndexEntry
from headrace.engine.statistics import RequestStats, VersionStatistics
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

_TALLIES = {
    "status": "status_stats",
    "profile": "profile_stats",
    "health": "health_stats",
    "model_control": "model_control_stats",
    "shm": "shm_control_stats",
    "repository": "repository_stats",
}


def server_status(plane: DataPlane, accounts: V1Accounts, model: str = "") -> Any:
    """The status of the server and of all models, or of one."""
    settings = accounts.settings
    status = message_class("ServerStatus")(
        id=settings.server_id, version=settings.version, uptime_ns=accounts.uptime_ns, ready_state=_ready_state(plane)
    )
    for kind, field in _TALLIES.items():
        tally = accounts.tallies[kind]
        if tally.count:
            _set_tally(getattr(status, field).success, tally)
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
    # A model that failed before its versions were known has an entry without one, which is shown if there is no other.
    numbered = [entry for entry in entries if entry.version]
    for entry in numbered or entries:
        version = status.version_status[int(entry.version or 0)]
        version.ready_state = f"MODEL_{entry.state.value}" if entry.state is not None else "MODEL_UNKNOWN"
        if entry.reason:
            version.ready_state_reason.message = entry.reason
        serving = plane.find(name, entry.version) if entry.version else None
        if serving is not None:
            _count(version, serving.statistics)


def _count(version: Any, statistics: VersionStatistics) -> None:
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


def _set_tally(duration: Any, tally: Tally) -> None:
    duration.count = tally.count
    duration.total_time_ns = tally.total_ns


def _write_config(message: Any, config: ModelConfig) -> None:
    if config.proto is not None:
        message.ParseFromString(config.proto.SerializeToString())
        return
    # A built-in model, which no file describes.
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
        tensor.data_type = f"TYPE_{'STRING' if spec.dtype.name == 'BYTES' else spec.dtype.name}"
    tensor.dims.extend(spec.dims or ())
