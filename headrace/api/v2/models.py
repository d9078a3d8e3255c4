# SPDX-License-Identifier: Apache-2.0
"""Metadata, configuration and statistics of the server and its models, over HTTP and gRPC.

The statistics are Triton's `model_stats` with three more members: `failures`; `batching`, which explains the sizes of
batches; and `load_seconds`, the stages of the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.model_waits import waiting_http
from headrace.api.v2.grpc_messages import UnaryMethods
from headrace.api.v2.http_codec import respond_json
from headrace.api.v2.shared_state import V2State
from headrace.core.names import check_name
from headrace.engine.dataplane import ModelMetadata, ServingVersion, TensorMetadata
from headrace.engine.scheduling.dynamic_batcher import AutoDelay
from headrace.engine.scheduling.pending_request import BatchRecord
from headrace.engine.statistics import BatchStats, ResponseStats, VersionStatistics, response_index_text
from headrace.models.config.messages import new_config, to_json
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec
from headrace.net.grpc.services import Services
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes
from headrace.version import __version__

MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


RECENT_BATCHES = 16


class V2Models:
    """HTTP handlers of metadata and configuration."""

    def __init__(self, shared: V2State) -> None:
        self._plane = shared.plane
        self._shared = shared

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        gate = self._shared.http_gate
        routes.add("GET", "/v2", gate.http("metadata", self.server), scope="read")
        for path in MODEL_PATHS:
            metadata, config = waiting_http(self._plane, self.metadata), waiting_http(self._plane, self.config)
            routes.add("GET", path, gate.http("metadata", metadata), scope="read")
            routes.add("GET", f"{path}/config", gate.http("model-config", config), scope="read")

    def server(self, exchange: Exchange) -> None:
        """Return the server's name, version and protocol extensions."""
        name, extensions = self._shared.settings.server_id, self._shared.extensions
        respond_json(exchange, {"name": name, "version": __version__, "extensions": extensions})

    def metadata(self, exchange: Exchange) -> None:
        """Return the names, types and shapes of a model's tensors."""
        respond_json(exchange, metadata_json(self._plane.metadata(*model_of(exchange))))

    def config(self, exchange: Exchange) -> None:
        """Return a model's completed configuration."""
        respond_json(exchange, config_json(self._plane.config(*model_of(exchange))))


def model_of(exchange: Exchange) -> tuple[str, str]:
    """Return the model and the version of a path; "" for no version."""
    params = exchange.params
    return check_name(params[0]), params[1] if len(params) > 1 else ""


def metadata_json(metadata: ModelMetadata) -> dict[str, Any]:
    """Return the metadata in Triton's form."""
    return {
        "name": metadata.name,
        "versions": metadata.versions,
        "platform": metadata.platform,
        "inputs": _tensors(metadata.inputs),
        "outputs": _tensors(metadata.outputs),
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration in Triton's form."""
    return to_json(config_message(config))


def config_message(config: ModelConfig) -> Any:
    """Return a ModelConfig message; for a built-in model, which has no configuration file, a new one."""
    if config.proto is not None:
        return config.proto
    message = new_config(
        name=config.name,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        parameters={key: {"string_value": value} for key, value in config.parameters.items()},
    )
    specs: Sequence[tuple[Any, Sequence[InputSpec | OutputSpec]]] = (
        (message.input, config.inputs),
        (message.output, config.outputs),
    )
    for tensors, declared in specs:
        for spec in declared:
            number = spec.dtype.config_number if spec.dtype else 0
            tensors.add(name=spec.name, data_type=number, dims=spec.dims or ())
    return message


def _tensors(tensors: Sequence[TensorMetadata]) -> list[dict[str, Any]]:
    return [{"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape} for tensor in tensors]


class V2Statistics:
    """HTTP handlers of the statistics."""

    def __init__(self, shared: V2State) -> None:
        self._plane = shared.plane
        self._gate = shared.http_gate

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        all_models = self._gate.http("statistics", self.all_models)
        one_model = self._gate.http("statistics", self.one_model)
        routes.add("GET", "/v2/models/stats", all_models, scope="read", workers="gather")
        for path in MODEL_PATHS:
            routes.add("GET", f"{path}/stats", one_model, scope="read", workers="gather")

    def all_models(self, exchange: Exchange) -> None:
        """Return the statistics of all serving versions."""
        _respond(exchange, self._plane.statistics())

    def one_model(self, exchange: Exchange) -> None:
        """Return the statistics of one version, or all versions, of a model."""
        _respond(exchange, self._plane.statistics(*model_of(exchange)))


def _respond(exchange: Exchange, versions: list[ServingVersion]) -> None:
    respond_json(exchange, {"model_stats": [stats_json(version) for version in versions]})


def stats_json(version: ServingVersion) -> dict[str, Any]:
    """Return one entry of `model_stats`."""
    statistics = version.statistics
    return {
        "name": version.name,
        "version": version.version_text,
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inferences,
        "execution_count": statistics.executions,
        "inference_stats": _inference_stats(statistics),
        "response_stats": {
            response_index_text(index): _response_stats(stats) for index, stats in sorted(statistics.responses.items())
        },
        "batch_stats": [_batch_stats(rows, statistics.batches[rows]) for rows in sorted(statistics.batches)],
        "memory_usage": [],
        "failures": dict(statistics.failures),
        "batching": _batching(version),
        "load_seconds": dict(version.load_stages.seconds) if version.load_stages is not None else {},
    }


def _inference_stats(statistics: VersionStatistics) -> dict[str, dict[str, int]]:
    total = statistics.total()
    computed = total.computed
    return {
        "success": _duration(total.success, total.success_ns),
        "fail": _duration(total.fail, total.fail_ns),
        "queue": _duration(computed, total.queue_ns),
        "compute_input": _duration(computed, total.input_ns),
        "compute_infer": _duration(computed, total.infer_ns),
        "compute_output": _duration(computed, total.output_ns),
        "cache_hit": _duration(total.hit, total.hit_ns),
        "cache_miss": _duration(total.miss, total.miss_ns),
    }


def _batch_stats(rows: int, stats: BatchStats) -> dict[str, Any]:
    return {
        "batch_size": rows,
        "compute_input": _duration(stats.count, stats.input_ns),
        "compute_infer": _duration(stats.count, stats.infer_ns),
        "compute_output": _duration(stats.count, stats.output_ns),
    }


def _response_stats(stats: ResponseStats) -> dict[str, dict[str, int]]:
    """Count like Triton: an empty response has no output time, a cancelled one no compute time either."""
    full = stats.success + stats.fail
    return {
        "compute_infer": _duration(full + stats.empty, stats.infer_ns),
        "compute_output": _duration(full, stats.output_ns),
        "success": _duration(stats.success, stats.success_ns),
        "fail": _duration(stats.fail, stats.fail_ns),
        "empty_response": _duration(stats.empty, stats.empty_ns),
        "cancel": _duration(stats.cancel, stats.cancel_ns),
    }


def _duration(count: int, nanoseconds: int) -> dict[str, int]:
    return {"count": count, "ns": nanoseconds}


def _batching(version: ServingVersion) -> dict[str, Any]:
    delay, log = version.delay, version.statistics.log
    batching: dict[str, Any] = {
        "in_flight": version.statistics.in_flight,
        "reasons": {reason: count for reason, count in log.reasons.items() if count},
        "recent": [_record(record) for record in list(log.recent)[-RECENT_BATCHES:]],
        "delay_microseconds": delay.nanoseconds // 1000,
        "delay_auto": isinstance(delay, AutoDelay),
    }
    if isinstance(delay, AutoDelay):
        batching["p99_ms"] = delay.p99_ns / 1e6
        batching["rows_per_second"] = delay.rows_per_second
    return batching


def _record(record: BatchRecord) -> dict[str, Any]:
    return {
        "reason": record.reason,
        "requests": record.requests,
        "rows": record.rows,
        "left_waiting": record.left_waiting,
        "oldest_waited_microseconds": record.oldest_waited_ns // 1000,
        "instance": record.instance,
    }


class GrpcModels:
    """gRPC methods of metadata, configuration and statistics."""

    def __init__(self, shared: V2State) -> None:
        self._shared = shared
        self._plane = shared.plane

    def add_to(self, services: Services) -> None:
        """Register the methods."""
        methods = UnaryMethods(services, self._shared)
        methods.add("metadata", "ServerMetadata", self.server_metadata, scope="read")
        methods.add("metadata", "ModelMetadata", self.model_metadata, scope="read", needs_model=True)
        methods.add("model-config", "ModelConfig", self.model_config, scope="read", needs_model=True)
        methods.add("statistics", "ModelStatistics", self.model_statistics, scope="read", workers="gather")

    def server_metadata(self, request: Any, response: Any) -> None:
        """Return the server's name, version and protocol extensions."""
        response.name = self._shared.settings.server_id
        response.version = __version__
        response.extensions.extend(self._shared.extensions)

    def model_metadata(self, request: Any, response: Any) -> None:
        """Return the names, types and shapes of a model's tensors."""
        metadata = self._plane.metadata(check_name(request.name), request.version)
        response.name = metadata.name
        response.versions.extend(metadata.versions)
        response.platform = metadata.platform
        _fill_tensors(response.inputs, metadata.inputs)
        _fill_tensors(response.outputs, metadata.outputs)

    def model_config(self, request: Any, response: Any) -> None:
        """Return a model's completed configuration."""
        message = config_message(self._plane.config(check_name(request.name), request.version))
        # Through bytes: the message belongs to another descriptor pool.
        response.config.ParseFromString(message.SerializeToString())

    def model_statistics(self, request: Any, response: Any) -> None:
        """Return the statistics of a version, a model or all models."""
        name = check_name(request.name) if request.name else ""
        for version in self._plane.statistics(name, request.version):
            _fill_statistics(response.model_stats.add(), version)


def _fill_tensors(target: Any, tensors: Sequence[TensorMetadata]) -> None:
    for tensor in tensors:
        target.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


def _fill_statistics(target: Any, version: ServingVersion) -> None:
    stats = stats_json(version)
    for name in ("name", "version", "last_inference", "inference_count", "execution_count"):
        setattr(target, name, stats[name])
    _fill_durations(target.inference_stats, stats["inference_stats"])
    for batch in stats["batch_stats"]:
        size = batch.pop("batch_size")
        _fill_durations(target.batch_stats.add(batch_size=size), batch)
    for index, durations in stats["response_stats"].items():
        _fill_durations(target.response_stats[index], durations)


def _fill_durations(target: Any, durations: dict[str, dict[str, int]]) -> None:
    for name, duration in durations.items():
        field = getattr(target, name)
        field.count, field.ns = duration["count"], duration["ns"]
