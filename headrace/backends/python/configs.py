# SPDX-License-Identifier: Apache-2.0
"""A model's configuration as the JSON that models know, and back to a message. Called by `launch` and `backend`."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from headrace.core.errors import InvalidArgument
from headrace.models.config.showing import to_json
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec


def config_json(config: ModelConfig) -> str:
    """The configuration as `initialize` gets it, defaults included."""
    return json.dumps(_from_types(config) if config.proto is None else to_json(config.proto))


def config_message(config: ModelConfig, completed: dict[str, Any]) -> Any:
    """What `auto_complete_config` made of it, as a message of the same class."""
    try:
        return ParseDict(completed, type(config.proto)())
    except ParseError as error:
        raise InvalidArgument(
            f"auto_complete_config of model '{config.name}' gave a configuration that is not valid: {error}"
        ) from None


def _from_types(config: ModelConfig) -> dict[str, Any]:
    """For configurations that never were a message."""
    return {
        "name": config.name,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": [_tensor(spec) for spec in config.inputs],
        "output": [_tensor(spec) for spec in config.outputs],
        "model_transaction_policy": {"decoupled": config.decoupled},
        "parameters": {name: {"string_value": value} for name, value in config.parameters.items()},
    }


def _tensor(spec: InputSpec | OutputSpec) -> dict[str, Any]:
    kind = "INVALID" if spec.dtype is None else spec.dtype.name.replace("BYTES", "STRING")
    return {"name": spec.name, "data_type": f"TYPE_{kind}", "dims": list(spec.dims or ())}
