# SPDX-License-Identifier: Apache-2.0
"""Encode and decode the messages of v2 over HTTP: a JSON part, followed by binary tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from headrace.client.errors import invalid_response
from headrace.client.inference import Inference, Result
from headrace.core.dtypes import BF16, BYTES, bf16_to_float32, dtype_named
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Buffer, Tensor, tensor_from_buffer, tensor_from_values

_JSON_TYPES: dict[type, str] = {bool: "BOOL", int: "INT64", str: "BYTES"}
HEADER_LENGTH = "inference-header-content-length"


def encode_inference(inference: Inference) -> tuple[int, list[Buffer]]:
    """Return the length of the JSON part, and the body as buffers: views of the caller's arrays."""
    buffers: list[Buffer] = []
    inputs: list[dict[str, Any]] = []
    for tensor, parameters in inference.inputs:
        data = tensor.to_buffer()
        buffers.append(data)
        inputs.append(
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "datatype": tensor.dtype.name,
                "parameters": {**parameters, "binary_data_size": len(data)},
            }
        )
    document: dict[str, Any] = {"inputs": inputs}
    if inference.id:
        document["id"] = inference.id
    request_parameters: dict[str, Any] = dict(inference.parameters)
    if inference.outputs:
        document["outputs"] = [
            {
                "name": output.name,
                "parameters": {
                    **output.parameters,
                    "binary_data": True,
                    **({"classification": output.classes} if output.classes else {}),
                },
            }
            for output in inference.outputs
        ]
    else:
        request_parameters["binary_data_output"] = True
    if request_parameters:
        document["parameters"] = request_parameters
    text = to_json(document)
    return len(text), [text, *buffers]


def decode_result(fields: Mapping[str, str], body: Buffer, request_id: str) -> Result:
    """Decode the response to infer."""
    size = fields.get(HEADER_LENGTH)
    if size is not None and (not size.isdigit() or int(size) > len(body)):
        raise invalid_response("the length of its JSON part")
    view = memoryview(body)
    text, binary = (view, view[:0]) if size is None else (view[: int(size)], view[int(size) :])
    document = from_json(text)
    if not isinstance(document, dict):
        raise invalid_response("its JSON part")
    tensors = []
    position = 0
    for output in document.get("outputs") or ():
        tensor, position = _tensor(output, binary, position)
        tensors.append(tensor)
    return Result(
        str(document.get("model_name", "")),
        str(document.get("model_version", "")),
        tensors,
        str(document.get("id") or request_id),
        document.get("parameters") or {},
    )


def _tensor(output: Any, binary: memoryview, position: int) -> tuple[Tensor, int]:
    try:
        name, dtype, shape = str(output["name"]), dtype_named(output["datatype"]), list(output["shape"])
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            return tensor_from_values(name, dtype, shape, output["data"]), position
        if not isinstance(size, int) or not 0 <= size <= len(binary) - position:
            raise invalid_response("the size of an output")
        return tensor_from_buffer(name, dtype, shape, binary[position : position + size]), position + size
    except (KeyError, TypeError, AttributeError, InvalidArgument):
        raise invalid_response("an output") from None


def encode_generation(inference: Inference) -> bytes:
    """Encode a request for `generate_stream`: inputs are members of the JSON object."""
    document: dict[str, Any] = {"id": inference.id} if inference.id else {}
    if inference.parameters:
        document["parameters"] = inference.parameters
    for tensor, _ in inference.inputs:
        document[tensor.name] = _json_values(tensor)
    return to_json(document)


def _json_values(tensor: Tensor) -> Any:
    """Return nested lists without leading dimensions of 1, which the server adds; a single element as itself."""
    array = tensor.array
    if tensor.dtype is BYTES:
        try:
            array = np.array([element.decode() for element in array.ravel()], object).reshape(array.shape)
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"input '{tensor.name}' is not UTF-8, which a stream over HTTP cannot carry: use grpc://"
            ) from None
    elif tensor.dtype is BF16:
        array = bf16_to_float32(array)
    if array.size == 1:
        return array.reshape(-1)[0] if tensor.dtype is BYTES else array.item()
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    return array.tolist()


def decode_event(
    document: Any, outputs: Mapping[str, Mapping[str, Any]], inference: Inference, request_id: str
) -> Result:
    """Decode one response of `generate_stream`. `outputs`: the model's metadata, because JSON has no types and shapes."""
    if not isinstance(document, dict):
        raise invalid_response("an event")
    requested = {output.name for output in inference.outputs}
    tensors = []
    for name, value in document.items():
        if name in outputs and (not requested or name in requested):
            tensors.append(_event_tensor(name, value, outputs[name]))
    return Result(
        str(document.get("model_name", inference.model)),
        str(document.get("model_version", "")),
        tensors,
        str(document.get("id") or request_id),
        {
            name: value
            for name, value in document.items()
            if name not in outputs and name not in ("model_name", "model_version", "id")
        },
    )


def _event_tensor(name: str, value: Any, metadata: Mapping[str, Any]) -> Tensor:
    values = value if isinstance(value, list) else [value]
    try:
        # If the model declares no type, use that of the JSON value.
        dtype = dtype_named(metadata["datatype"] or _JSON_TYPES.get(type(values[0]) if values else float, "FP64"))
        return tensor_from_values(name, dtype, _event_shape(len(values), metadata["shape"]), values)
    except (KeyError, TypeError, InvalidArgument):
        raise invalid_response(f"output '{name}'") from None


def _event_shape(count: int, declared: list[int]) -> list[int]:
    """Return the shape for a number of elements: fixed dimensions, and one variable dimension for the rest; else flat."""
    shape = list(declared)
    if shape.count(-1) == 2 and shape[0] == -1:
        shape[0] = 1  # A request of a stream is a batch of one.
    known = math.prod(size for size in shape if size >= 0)
    if shape.count(-1) > 1 or (known == 0) != (count == 0) or (known and count % known):
        return [count]
    if -1 not in shape:
        return shape if known == count else [count]
    return [(count // known if known else 0) if size < 0 else size for size in shape]


def to_json(document: Any) -> bytes:
    """Encode JSON."""
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise InvalidArgument(f"the request cannot be written as JSON: {error}") from None


def from_json(text: Buffer) -> Any:
    """Decode JSON that a server sent."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise invalid_response("its JSON") from None
