# SPDX-License-Identifier: Apache-2.0
"""v2 over HTTP: what the server is, what a model takes and gives, and how it is configured.

Registered by `http`. Turns what the data plane knows into the JSON of the protocol; computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.api.v2.documents import answer_json
from headrace.api.v2.shared import V2Shared
from headrace.core.names import check_name
from headrace.engine.dataplane import ModelMetadata, TensorMetadata
from headrace.models.config.schema import new_config
from headrace.models.config.showing import to_json
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec
from headrace.net.http.exchange import Exchange
from headrace.net.http.routes import Routes
from headrace.version import __version__

MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")


class V2Models:
    """Handlers over one data plane."""

    def __init__(self, shared: V2Shared) -> None:
        self._plane = shared.plane
        self._shared = shared

    def add_to(self, routes: Routes) -> None:
        """Serve the paths."""
        gate = self._shared.http_gate
        routes.add("GET", "/v2", gate.http("metadata", self.server))
        for path in MODEL_PATHS:
            routes.add("GET", path, gate.http("metadata", self.metadata))
            routes.add("GET", f"{path}/config", gate.http("model-config", self.config))

    def server(self, exchange: Exchange) -> None:
        """What this server is and which extensions of the protocol it has."""
        name, extensions = self._shared.settings.server_id, self._shared.extensions
        answer_json(exchange, {"name": name, "version": __version__, "extensions": extensions})

    def metadata(self, exchange: Exchange) -> None:
        """Names, types and shapes of a model's tensors."""
        answer_json(exchange, metadata_json(self._plane.metadata(*model_of(exchange))))

    def config(self, exchange: Exchange) -> None:
        """A model's configuration, completed."""
        answer_json(exchange, config_json(self._plane.config(*model_of(exchange))))


def model_of(exchange: Exchange) -> tuple[str, str]:
    """The model and the version that a path names; "" for none."""
    params = exchange.params
    return check_name(params[0]), params[1] if len(params) > 1 else ""


def metadata_json(metadata: ModelMetadata) -> dict[str, Any]:
    """As Triton writes it."""
    return {
        "name": metadata.name,
        "versions": metadata.versions,
        "platform": metadata.platform,
        "inputs": _tensors(metadata.inputs),
        "outputs": _tensors(metadata.outputs),
    }


def config_json(config: ModelConfig) -> dict[str, Any]:
    """As Triton writes it."""
    return to_json(config_message(config))


def config_message(config: ModelConfig) -> Any:
    """A ModelConfig of the schema. Built-in models have none; what they say is told with one made here."""
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
            data_type = f"TYPE_{'STRING' if spec.dtype.name == 'BYTES' else spec.dtype.name}" if spec.dtype else 0
            tensors.add(name=spec.name, data_type=data_type, dims=spec.dims or ())
    return message


def _tensors(tensors: Sequence[TensorMetadata]) -> list[dict[str, Any]]:
    return [{"name": each.name, "datatype": each.datatype, "shape": each.shape} for each in tensors]
