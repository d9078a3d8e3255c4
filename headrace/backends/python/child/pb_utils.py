# SPDX-License-Identifier: Apache-2.0
"""The module that models import as `triton_python_backend_utils`: only the names of Triton's module."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.backends.python.child.configs import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from headrace.backends.python.child.errors import TritonError, TritonModelException
from headrace.backends.python.child.metrics import Logger, LogLevel, Metric, MetricFamily, MetricKind, ask
from headrace.backends.python.child.requests import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ResponseIterator,
)
from headrace.backends.python.child.responses import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
)
from headrace.backends.python.child.session import current
from headrace.backends.python.child.tensors import Tensor
from headrace.backends.python.child.types import (
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request, or None."""
    return next((tensor for tensor in inference_request.inputs() if tensor.core.name == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response, or None."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_model_dir() -> str:
    """Return the folder of `model.py`."""
    return current().model_folder


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model; raise an error if the server cannot."""
    given = {name: bytes(content) for name, content in (files or {}).items()}
    sizes = [[name, len(content)] for name, content in given.items()]
    ask({"op": "load", "model": model_name, "config": config, "files": sizes}, list(given.values()))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; raise an error if the server cannot."""
    ask({"op": "unload", "model": model_name, "dependents": bool(unload_dependents)})


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether the server would accept a request for the model now."""
    return bool(ask({"op": "ready", "model": model_name, "version": str(model_version)}))
