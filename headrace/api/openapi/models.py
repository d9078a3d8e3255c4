# SPDX-License-Identifier: Apache-2.0
"""What one loaded model takes and gives, as an operation of its own: names, types, lengths, and a request that works.

Called by `service`, once for each configuration; the result is bytes, ready to be put into a document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from headrace.api.openapi.describing import Operation, Schema, ref
from headrace.api.openapi.examples import Example, example_of, inputs_of
from headrace.api.openapi.schemas import list_of, thing
from headrace.api.openapi.v2_routes import generate_operation, infer_operation
from headrace.core.dtypes import BF16, BYTES, DType
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

TAG = "Loaded models"
MODEL_FIELD = "x-headrace-model"
EXAMPLE_FIELD = "x-headrace-example"
_LARGEST = 1 << 48


def describe(config: ModelConfig, server: str) -> tuple[str, bytes]:
    """The path of a model's operation, and its path item as JSON."""
    example = example_of(config)
    made = _generate(config, example) if config.decoupled else _infer(config, example)
    made["tags"] = [TAG]
    made["summary"] = f"Ask {config.name}"
    made["operationId"] = f"model.{config.name}"
    made["description"] = _text(config)
    made[MODEL_FIELD] = {
        "name": config.name,
        "platform": config.platform or config.backend,
        "max_batch_size": config.max_batch_size,
        "inputs": [_told(config, spec) for spec in inputs_of(config)],
        "outputs": [_told(config, spec) for spec in config.outputs],
    }
    if example is not None:
        made[EXAMPLE_FIELD] = example.as_json()
        made["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": example.curl(server)}]
    door = "generate_stream" if config.decoupled else "infer"
    return f"/v2/models/{config.name}/{door}", orjson.dumps({"post": made})


def _infer(config: ModelConfig, example: Example | None) -> Operation:
    inputs = inputs_of(config)
    needed = [spec for spec in inputs if not spec.optional]
    tensors: Schema = {"type": "array", "minItems": max(1, len(needed)), "maxItems": max(1, len(inputs))}
    if inputs:
        tensors["items"] = {"anyOf": [_input(config, spec) for spec in inputs]}
    outputs = [{"type": "object", "required": ["name"], "properties": _output_choice(spec)} for spec in config.outputs]
    request = thing(
        {
            "id": {"type": "string"},
            "parameters": ref("InferParameters"),
            "inputs": tensors,
            "outputs": list_of({"anyOf": outputs} if outputs else {}, maxItems=len(outputs)),
        },
        ("inputs",),
    )
    response = thing(
        {
            "model_name": {"const": config.name},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": list_of({"anyOf": [_output(config, spec) for spec in config.outputs] or [True]}),
        },
        ("model_name", "model_version", "outputs"),
    )
    more = {"example": example.body} if example is not None and not example.zero_bytes else {}
    return infer_operation(request, response, **more)


def _generate(config: ModelConfig, example: Example | None) -> Operation:
    inputs = inputs_of(config)
    request = thing(
        {spec.name: _members(spec) for spec in inputs},
        tuple(spec.name for spec in inputs if not spec.optional),
        additionalProperties=ref("ParameterValue"),
    )
    more = {"example": example.body} if example is not None else {}
    return generate_operation(request, ref("GenerateResponse"), stream=True, **more)


def _input(config: ModelConfig, spec: InputSpec) -> Schema:
    return thing(
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
    # A classification is text, whatever the output's own type is; its shape is another, too.
    types = list(dict.fromkeys((spec.dtype.name, BYTES.name))) if spec.dtype else None
    return thing(
        {
            "name": {"const": spec.name},
            "datatype": {"enum": types} if types else ref("DataType"),
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "description": f"{_told(config, spec)['shape']}; -1 is any size.",
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
    return {"name": {"const": spec.name}, "parameters": thing(parameters, additionalProperties=ref("ParameterValue"))}


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
    """Flat, with its length where that is fixed; or nested, which is checked by the server alone."""
    flat: Schema = {"type": "array", "items": leaf(spec.dtype)}
    if spec.dims is not None and -1 not in spec.dims:
        size = math.prod(spec.dims)
        flat |= {"minItems": size, "maxItems": size * max(1, config.max_batch_size)}
    nested = {"type": "array", "items": {"type": "array"}, "description": "Nested as the shape is."}
    return {"anyOf": [flat, nested]}


def _members(spec: InputSpec) -> Schema:
    return {"anyOf": [leaf(spec.dtype), {"type": "array"}]}


def leaf(dtype: DType | None) -> Schema:
    """One element, as JSON."""
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


def _told(config: ModelConfig, spec: InputSpec | OutputSpec) -> dict[str, Any]:
    batch: Sequence[int] = (-1,) if config.max_batch_size else ()
    told: dict[str, Any] = {
        "name": spec.name,
        "datatype": spec.dtype.name if spec.dtype else "any",
        "shape": "any" if spec.dims is None else [*batch, *spec.dims],
    }
    if isinstance(spec, InputSpec) and spec.optional:
        told["optional"] = True
    return told


def _text(config: ModelConfig) -> str:
    lines = [f"Platform `{config.platform or config.backend}`."]
    if config.max_batch_size:
        lines.append(f"The first dimension of every tensor is the batch, of 1 to {config.max_batch_size}.")
    if config.decoupled:
        lines.append("Answers any number of times, so it is asked by `generate_stream` or over gRPC.")
    lines.append("For binary requests and for single versions see the routes for all models.")
    return " ".join(lines)
