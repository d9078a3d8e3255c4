# SPDX-License-Identifier: Apache-2.0
"""Messages of v2 over gRPC, encoded and decoded. Needs protobuf, not grpcio."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from headrace.client.errors import unreadable_answer
from headrace.client.inference import Inference, Result
from headrace.core.dtypes import dtype_named
from headrace.core.errors import InvalidArgument
from headrace.core.protobuf import Schema
from headrace.core.requests import ParameterValue
from headrace.core.tensors import Tensor, tensor_from_buffer, tensor_from_values

_INT64 = 1 << 63
_OUR_OWN = 1001
"""Field numbers from here on are Headrace's own extensions."""


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
        added = request.inputs.add(name=tensor.name, datatype=tensor.dtype.name, shape=tensor.shape)
        _set_parameters(added.parameters, parameters)
        request.raw_input_contents.append(bytes(tensor.to_buffer()))
    for output in inference.outputs:
        wanted = request.outputs.add(name=output.name)
        _set_parameters(wanted.parameters, output.parameters)
        if output.classes:
            wanted.parameters["classification"].int64_param = output.classes
    serialized: bytes = request.SerializeToString()
    return serialized


def parse(name: str, data: bytes) -> Any:
    """Decode a message of the server."""
    try:
        return message(name).FromString(data)
    except DecodeError:
        raise unreadable_answer(name) from None


def result_of(response: Any, sent_id: str) -> Result:
    """Decode a ModelInferResponse. Tensors are views of the message's bytes."""
    raw = response.raw_output_contents
    if raw and len(raw) != len(response.outputs):
        raise unreadable_answer("the number of outputs")
    tensors = [_tensor(output, raw[place] if raw else None) for place, output in enumerate(response.outputs)]
    parameters = {name: _value(each) for name, each in response.parameters.items()}
    return Result(response.model_name, response.model_version, tensors, response.id or sent_id, parameters)


def _tensor(output: Any, raw: bytes | None) -> Tensor:
    try:
        dtype, shape = dtype_named(output.datatype), list(output.shape)
        if raw is not None:
            return tensor_from_buffer(output.name, dtype, shape, raw)
        return tensor_from_values(output.name, dtype, shape, list(getattr(output.contents, dtype.contents_field)))
    except (AttributeError, InvalidArgument):
        raise unreadable_answer(f"output '{output.name}'") from None


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
    chosen = parameter.WhichOneof("parameter_choice")
    value: ParameterValue = getattr(parameter, chosen) if chosen else ""
    return value


def plain(value: Any) -> dict[str, Any]:
    """Return a message as the JSON that HTTP would carry: schema names, defaults, enums by name, numbers as numbers."""
    shown: dict[str, Any] = {}
    for field in value.DESCRIPTOR.fields:
        if field.has_presence and not value.HasField(field.name):
            continue
        found = getattr(value, field.name)
        if field.number >= _OUR_OWN and not found:
            continue
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            of_map = inner.fields_by_name["value"]
            shown[field.name] = {str(key): _plain_one(of_map, each) for key, each in found.items()}
        elif not isinstance(found, str | bytes) and hasattr(found, "__len__"):
            shown[field.name] = [_plain_one(field, each) for each in found]
        else:
            shown[field.name] = _plain_one(field, found)
    return shown


def _plain_one(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value
