# SPDX-License-Identifier: Apache-2.0
"""Encode and decode the messages of v2 over gRPC. Needs protobuf, not grpcio."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from headrace.client.errors import invalid_response
from headrace.client.inference import Inference, Result
from headrace.core.dtypes import dtype_named
from headrace.core.errors import InvalidArgument
from headrace.core.protobuf import Schema
from headrace.core.requests import ParameterValue
from headrace.core.tensors import Tensor, tensor_from_buffer, tensor_from_values

_INT64 = 1 << 63
_FIRST_EXTENSION_NUMBER = 1001
"""Field numbers from here on are Headrace's extensions."""


@cache
def schema() -> Schema:
    """Load the schema at first use."""
    return Schema((files("headrace.client") / "_generated" / "inference.binpb").read_bytes())


@cache
def message(name: str) -> Any:
    """Return a message class of the protocol."""
    return schema().message(f"inference.{name}")


def encode_inference(inference: Inference) -> bytes:
    """Encode a ModelInferRequest."""
    request = message("ModelInferRequest")(model_name=inference.model, model_version=inference.version, id=inference.id)
    _set_parameters(request.parameters, inference.parameters)
    for tensor, parameters in inference.inputs:
        entry = request.inputs.add(name=tensor.name, datatype=tensor.dtype.name, shape=tensor.shape)
        _set_parameters(entry.parameters, parameters)
        request.raw_input_contents.append(bytes(tensor.to_buffer()))
    for output in inference.outputs:
        entry = request.outputs.add(name=output.name)
        _set_parameters(entry.parameters, output.parameters)
        if output.classes:
            entry.parameters["classification"].int64_param = output.classes
    serialized: bytes = request.SerializeToString()
    return serialized


def parse(name: str, data: bytes) -> Any:
    """Decode a message of the server."""
    try:
        return message(name).FromString(data)
    except DecodeError:
        raise invalid_response(name) from None


def decode_result(response: Any, request_id: str) -> Result:
    """Decode a ModelInferResponse. Tensors are views of the message's bytes."""
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        raise invalid_response("the number of outputs")
    tensors = [_tensor(output, raw[index] if raw else None) for index, output in enumerate(response.outputs)]
    parameters = {name: _value(parameter) for name, parameter in response.parameters.items()}
    return Result(response.model_name, response.model_version, tensors, response.id or request_id, parameters)


def _tensor(output: Any, raw: bytes | None) -> Tensor:
    try:
        dtype, shape = dtype_named(output.datatype), list(output.shape)
        if raw is not None:
            return tensor_from_buffer(output.name, dtype, shape, raw)
        return tensor_from_values(output.name, dtype, shape, list(getattr(output.contents, dtype.contents_field)))
    except (AttributeError, InvalidArgument):
        raise invalid_response(f"output '{output.name}'") from None


def _set_parameters(target: Any, parameters: Mapping[str, ParameterValue]) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            if not -_INT64 <= value < 2 * _INT64:
                raise InvalidArgument(f"parameter '{name}' is a number that does not fit 64 bits")
            if value < _INT64:
                target[name].int64_param = value
            else:
                target[name].uint64_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        else:
            target[name].string_param = value


def _value(parameter: Any) -> ParameterValue:
    choice = parameter.WhichOneof("parameter_choice")
    value: ParameterValue = getattr(parameter, choice) if choice else ""
    return value


def message_to_dict(value: Any) -> dict[str, Any]:
    """Return a message as in v2 over HTTP: the schema's names, with defaults, enums by name, numbers as numbers."""
    document: dict[str, Any] = {}
    for field in value.DESCRIPTOR.fields:
        if field.has_presence and not value.HasField(field.name):
            continue
        content = getattr(value, field.name)
        if field.number >= _FIRST_EXTENSION_NUMBER and not content:
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            value_field = inner.fields_by_name["value"]
            document[field.name] = {str(key): _value_to_json(value_field, item) for key, item in content.items()}
        elif not isinstance(content, str | bytes) and hasattr(content, "__len__"):
            document[field.name] = [_value_to_json(field, item) for item in content]
        else:
            document[field.name] = _value_to_json(field, content)
    return document


def _value_to_json(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return message_to_dict(value)
    if field.enum_type is not None:
        enum_value = field.enum_type.values_by_number.get(value)
        return enum_value.name if enum_value is not None else value
    return value
