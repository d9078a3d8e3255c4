# SPDX-License-Identifier: Apache-2.0
"""The operation of one loaded model: tensor names, types and sizes, and an example request that works.

`describe_model` runs once for each configuration; the result is JSON bytes for the document. The example is the
smallest request that the configuration allows, of zeros and short strings. A large one keeps only its JSON part and the
number of zero bytes that follow, so that an example is never larger than a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any

import numpy as np
import orjson

from headrace.api.openapi.operations import Operation, Schema, ref
from headrace.api.openapi.schemas import array_schema, object_schema
from headrace.api.openapi.v2_routes import LENGTH_FIELD, generate_operation, infer_operation
from headrace.core.dtypes import BF16, BYTES, FP32, DType
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec, SequenceBatching

TAG = "Loaded models"
MODEL_FIELD = "x-headrace-model"
EXAMPLE_FIELD = "x-headrace-example"
_LARGEST = 1 << 48


_MOST_ELEMENTS = 256
"""Maximum elements of all inputs together in a JSON example; a larger one has binary tensors."""
_ANY_SIZE = 4
_SEQUENCE, _SEQUENCE_TEXT = 2_000_000_011, "example"
"""A sequence id that clients are unlikely to use; the number fits every type that a model may declare for it."""
_BYTES_ITEM = 4
"""Bytes of an empty BYTES element: its length."""


def describe_model(config: ModelConfig, server: str) -> tuple[str, bytes]:
    """Return the path of a model's operation, and its path item as JSON."""
    example = example_request(config)
    operation = _generate(config, example) if config.decoupled else _infer(config, example)
    operation["tags"] = [TAG]
    operation["summary"] = f"Ask {config.name}"
    operation["operationId"] = f"model.{config.name}"
    operation["description"] = _description(config)
    operation[MODEL_FIELD] = {
        "name": config.name,
        "platform": config.platform or config.backend,
        "max_batch_size": config.max_batch_size,
        "inputs": [_tensor_summary(config, spec) for spec in config.client_inputs()],
        "outputs": [_tensor_summary(config, spec) for spec in config.outputs],
    }
    if example is not None:
        operation[EXAMPLE_FIELD] = example.as_json()
        operation["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": example.curl(server)}]
    method = "generate_stream" if config.decoupled else "infer"
    return f"/v2/models/{config.name}/{method}", orjson.dumps({"post": operation})


def _infer(config: ModelConfig, example: ExampleRequest | None) -> Operation:
    inputs = config.client_inputs()
    needed = [spec for spec in inputs if not spec.optional]
    tensors: Schema = {"type": "array", "minItems": max(1, len(needed)), "maxItems": max(1, len(inputs))}
    if inputs:
        tensors["items"] = {"anyOf": [_input(config, spec) for spec in inputs]}
    outputs = [{"type": "object", "required": ["name"], "properties": _output_choice(spec)} for spec in config.outputs]
    request = object_schema(
        {
            "id": {"type": "string"},
            "parameters": ref("InferParameters"),
            "inputs": tensors,
            "outputs": array_schema({"anyOf": outputs} if outputs else {}, maxItems=len(outputs)),
        },
        ("inputs",),
    )
    response = object_schema(
        {
            "model_name": {"const": config.name},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": array_schema({"anyOf": [_output(config, spec) for spec in config.outputs] or [True]}),
        },
        ("model_name", "model_version", "outputs"),
    )
    more = {"example": example.body} if example is not None and not example.zero_bytes else {}
    return infer_operation(request, response, **more)


def _generate(config: ModelConfig, example: ExampleRequest | None) -> Operation:
    inputs = config.client_inputs()
    request = object_schema(
        {spec.name: _members(spec) for spec in inputs},
        tuple(spec.name for spec in inputs if not spec.optional),
        additionalProperties=ref("ParameterValue"),
    )
    more = {"example": example.body} if example is not None else {}
    return generate_operation(request, ref("GenerateResponse"), stream=True, **more)


def _input(config: ModelConfig, spec: InputSpec) -> Schema:
    return object_schema(
        {
            "name": {"const": spec.name},
            "datatype": {"const": spec.dtype.name} if spec.dtype else ref("DataType"),
            "shape": _shape(config, spec),
            "data": _data(config, spec),
            "parameters": ref("Parameters"),
        },
        ("name", "datatype", "shape"),
    )


def _output(config: ModelConfig, spec: OutputSpec) -> Schema:
    # A classification is BYTES, whatever the output's own type and shape are.
    types = list(dict.fromkeys((spec.dtype.name, BYTES.name))) if spec.dtype else None
    return object_schema(
        {
            "name": {"const": spec.name},
            "datatype": {"enum": types} if types else ref("DataType"),
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "description": f"{_tensor_summary(config, spec)['shape']}; -1: any size.",
            },
            "data": {"type": "array"},
            "parameters": ref("Parameters"),
        },
        ("name", "datatype", "shape"),
    )


def _output_choice(spec: OutputSpec) -> dict[str, Schema]:
    parameters = {
        "binary_data": {"type": "boolean"},
        "classification": {"type": "integer", "minimum": 1, "maximum": 1_000_000},
    }
    return {
        "name": {"const": spec.name},
        "parameters": object_schema(parameters, additionalProperties=ref("ParameterValue")),
    }


def _shape(config: ModelConfig, spec: InputSpec) -> Schema:
    batch = [{"type": "integer", "minimum": 1, "maximum": config.max_batch_size}] if config.max_batch_size else []
    if spec.dims is None:
        return {"type": "array", "prefixItems": batch, "minItems": len(batch)} if batch else ref("Shape")
    sizes: list[Schema] = [*batch, *(_size(size) for size in spec.dims)]
    rank = {"minItems": len(sizes), "maxItems": len(sizes)}
    return {"type": "array", "prefixItems": sizes, **rank} if sizes else {"type": "array", "maxItems": 0}


def _size(size: int) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": _LARGEST} if size < 0 else {"const": size}


def _data(config: ModelConfig, spec: InputSpec) -> Schema:
    """Return the schema of the elements: flat, with the length if it is fixed; or nested, which only the server checks."""
    flat: Schema = {"type": "array", "items": element_schema(spec.dtype)}
    if spec.dims is not None and -1 not in spec.dims:
        size = math.prod(spec.dims)
        flat |= {"minItems": size, "maxItems": size * max(1, config.max_batch_size)}
    nested = {"type": "array", "items": {"type": "array"}, "description": "Nested as the shape is."}
    return {"anyOf": [flat, nested]}


def _members(spec: InputSpec) -> Schema:
    return {"anyOf": [element_schema(spec.dtype), {"type": "array"}]}


def element_schema(dtype: DType | None) -> Schema:
    """Return the schema of one element."""
    if dtype is None:
        return {"type": ["boolean", "integer", "number", "string"]}
    kind = dtype.numpy.kind
    if dtype is BYTES:
        return {"type": "string"}
    if kind == "b":
        return {"type": "boolean"}
    if kind == "f" or dtype is BF16:
        return {"type": "number"}
    limits = np.iinfo(dtype.numpy)
    return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}


def _tensor_summary(config: ModelConfig, spec: InputSpec | OutputSpec) -> dict[str, Any]:
    batch: Sequence[int] = (-1,) if config.max_batch_size else ()
    summary: dict[str, Any] = {
        "name": spec.name,
        "datatype": spec.dtype.name if spec.dtype else "any",
        "shape": "any" if spec.dims is None else [*batch, *spec.dims],
    }
    if isinstance(spec, InputSpec) and spec.optional:
        summary["optional"] = True
    return summary


def _description(config: ModelConfig) -> str:
    lines = [f"Platform `{config.platform or config.backend}`."]
    if config.max_batch_size:
        lines.append(f"The first dimension of every tensor is the batch, 1 to {config.max_batch_size}.")
    if config.decoupled:
        lines.append("It sends any number of responses: use `generate_stream` or gRPC.")
    lines.append("For binary requests and single versions, see the routes for all models.")
    return " ".join(lines)


@dataclass(frozen=True, slots=True)
class ExampleRequest:
    """An example request."""

    path: str
    body: dict[str, Any]
    """The JSON, or the JSON before the binary tensors."""
    zero_bytes: int = 0
    """The number of zero bytes that follow the JSON."""

    def as_json(self) -> Schema:
        """Return the example for the page, which can send it."""
        return {"path": self.path, "body": self.body, "zero_bytes": self.zero_bytes}

    def curl(self, server: str) -> str:
        """Return the example as a curl command."""
        text = orjson.dumps(self.body)
        target = quote(f"{server}{self.path}")
        if not self.zero_bytes:
            return f"curl -s {target} -H 'content-type: application/json' -d {quote(text.decode())}"
        # `printf %s`: printf would interpret a `%` or a backslash of the text.
        return (
            f"{{ printf %s {quote(text.decode())}; head -c {self.zero_bytes} /dev/zero; }} |\n"
            f"  curl -s {target} -H 'content-type: application/octet-stream' \\\n"
            f"    -H '{LENGTH_FIELD}: {len(text)}' --data-binary @-"
        )


def example_request(config: ModelConfig) -> ExampleRequest | None:
    """Return an example request; None for a model without inputs."""
    inputs = config.client_inputs()
    # The protocol needs at least one input, even if all are optional.
    chosen = [spec for spec in inputs if not spec.optional] or inputs[:1]
    if not chosen:
        return None
    shapes = [_example_shape(config, spec) for spec in chosen]
    sizes = [math.prod(shape) for shape in shapes]
    types = [spec.dtype or FP32 for spec in chosen]
    path = f"/v2/models/{config.name}"
    tensors = list(zip(chosen, types, shapes, sizes, strict=True))
    small = sum(sizes) <= _MOST_ELEMENTS
    parameters = _parameters(config)
    if config.decoupled:
        if not small:
            return None
        members = {spec.name: _nested(dtype, list(shape)) for spec, dtype, shape, _ in tensors}
        return ExampleRequest(f"{path}/generate_stream", {**members, **parameters})
    body: dict[str, Any] = {"parameters": parameters} if parameters else {}
    body["inputs"] = [
        {"name": spec.name, "datatype": dtype.name, "shape": list(shape)}
        | ({"data": [_zero(dtype)] * size} if small else {"parameters": {"binary_data_size": _zeros(dtype, size)}})
        for spec, dtype, shape, size in tensors
    ]
    zero_bytes = 0 if small else sum(_zeros(dtype, size) for _, dtype, _, size in tensors)
    return ExampleRequest(f"{path}/infer", body, zero_bytes)


def _parameters(config: ModelConfig) -> dict[str, Any]:
    if not isinstance(config.scheduling, SequenceBatching):
        return {}
    texts = any(control.kind == "corrid" and control.dtype is BYTES for control in config.scheduling.controls)
    return {"sequence_id": _SEQUENCE_TEXT if texts else _SEQUENCE, "sequence_start": True, "sequence_end": True}


def _example_shape(config: ModelConfig, spec: InputSpec) -> tuple[int, ...]:
    dims = (_ANY_SIZE,) if spec.dims is None else tuple(max(1, size) for size in spec.dims)
    return (1, *dims) if config.max_batch_size else dims


def _zero(dtype: DType) -> Any:
    if dtype is BYTES:
        return "text"
    return {"b": False, "f": 0.0}.get(dtype.numpy.kind, 0)


def _zeros(dtype: DType, size: int) -> int:
    return size * (dtype.item_bytes or _BYTES_ITEM)


def _nested(dtype: DType, shape: list[int]) -> Any:
    if not shape:
        return _zero(dtype)
    return [_nested(dtype, shape[1:])] * shape[0]
