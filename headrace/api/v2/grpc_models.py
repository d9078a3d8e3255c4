# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC: what the server is, what a model takes and gives, how it is configured, and what it has done.

Registered by `grpc`. The same facts as `models` and `statistics` tell over HTTP, as messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.v2.grpc_messages import Methods
from headrace.api.v2.models import config_message
from headrace.api.v2.shared import V2Shared
from headrace.api.v2.statistics import stats_json
from headrace.core.names import check_name
from headrace.engine.dataplane import ServingVersion, TensorMetadata
from headrace.net.grpc.services import Services
from headrace.version import __version__


class GrpcModels:
    """Methods over one data plane."""

    def __init__(self, shared: V2Shared) -> None:
        self._shared = shared
        self._plane = shared.plane

    def add_to(self, services: Services) -> None:
        """Serve the methods."""
        methods = Methods(services, self._shared)
        methods.add("metadata", "ServerMetadata", self.server_metadata)
        methods.add("metadata", "ModelMetadata", self.model_metadata)
        methods.add("model-config", "ModelConfig", self.model_config)
        methods.add("statistics", "ModelStatistics", self.model_statistics)

    def server_metadata(self, request: Any, response: Any) -> None:
        """What this server is and which extensions of the protocol it has."""
        response.name = self._shared.settings.server_id
        response.version = __version__
        response.extensions.extend(self._shared.extensions)

    def model_metadata(self, request: Any, response: Any) -> None:
        """Names, types and shapes of a model's tensors."""
        metadata = self._plane.metadata(check_name(request.name), request.version)
        response.name = metadata.name
        response.versions.extend(metadata.versions)
        response.platform = metadata.platform
        _fill_tensors(response.inputs, metadata.inputs)
        _fill_tensors(response.outputs, metadata.outputs)

    def model_config(self, request: Any, response: Any) -> None:
        """A model's configuration, completed."""
        message = config_message(self._plane.config(check_name(request.name), request.version))
        # Through bytes: the message comes from the pool of another room.
        response.config.ParseFromString(message.SerializeToString())

    def model_statistics(self, request: Any, response: Any) -> None:
        """What one version, all of a model, or all models have done."""
        name = check_name(request.name) if request.name else ""
        for version in self._plane.statistics(name, request.version):
            _fill_statistics(response.model_stats.add(), version)


def _fill_tensors(target: Any, tensors: Sequence[TensorMetadata]) -> None:
    for each in tensors:
        target.add(name=each.name, datatype=each.datatype, shape=each.shape)


def _fill_statistics(target: Any, version: ServingVersion) -> None:
    stats = stats_json(version)
    for name in ("name", "version", "last_inference", "inference_count", "execution_count"):
        setattr(target, name, stats[name])
    _fill_durations(target.inference_stats, stats["inference_stats"])
    for batch in stats["batch_stats"]:
        size = batch.pop("batch_size")
        _fill_durations(target.batch_stats.add(batch_size=size), batch)
    for place, durations in stats["response_stats"].items():
        _fill_durations(target.response_stats[place], durations)


def _fill_durations(target: Any, durations: dict[str, dict[str, int]]) -> None:
    for name, duration in durations.items():
        field = getattr(target, name)
        field.count, field.ns = duration["count"], duration["ns"]
