# SPDX-License-Identifier: Apache-2.0
"""Decode v2 requests from HTTP bodies and encode responses: JSON, or JSON followed by binary tensors.

A binary tensor becomes a view of the received body, and a binary output is sent from the model's array. FP16 and BF16
are numbers in JSON; NaN, Infinity and -Infinity are written by these names, as Python's json does. A raw request
(`Inference-Header-Content-Length: 0`) is only the one tensor of a model with one input, whose type and shape come from
the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from headrace.api.shared_memory import Placement, RegionReader, SharedMemory
from headrace.api.v2.outputs import REGION, mark_special, read_input
from headrace.api.v2.requests import NAME_LENGTH, JsonLayout, RequestLayout, checked_parameters, has_layout
from headrace.core.dtypes import BF16, BOOL, BYTES, DType, bf16_to_float32, dtype_named
from headrace.core.errors import InvalidArgument, with_message
from headrace.core.limits import TENSOR_COUNT
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters, RequestedOutput
from headrace.core.tensors import (
    Buffer,
    Tensor,
    WrongElementCount,
    WrongElementType,
    tensor_from_buffer,
    tensor_from_values,
)
from headrace.engine.dataplane import DataPlane
from headrace.net.http.exchange import Exchange
from headrace.net.http.heads import CONTENT_TYPE, JSON, ResponseHead

NOT_A_STRING = "attempt to access JSON non-string as string"
"""Triton's words."""
_CACHED_BYTES = 4096
"""Maximum size of a cached JSON header, with the names in its path."""
_CACHED_LAYOUTS = 1024
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_LETTER_N = ord("n")
"""Occurs in the null that orjson writes for NaN and the infinities, and in no number."""


_ALL_BINARY = {"binary_data_output": True}


class HttpCodec:
    """Decodes requests and caches their layouts. Without `memory` and `raw` it refuses requests that need them."""

    def __init__(self, memory: SharedMemory | None = None, raw: RawRequestDecoder | None = None) -> None:
        self._memory = memory or SharedMemory()
        self._raw = raw
        self._layouts: dict[tuple[str, str, bytes], RequestLayout] = {}
        self._json_layouts: dict[tuple[str, str, bytes], JsonLayout] = {}
        """By the text before the numbers."""

    def decode_request(
        self, model_name: str, model_version: str, body: Buffer, header_length: bytes | None
    ) -> InferRequest:
        """Decode a request body; `header_length` is the value of `Inference-Header-Content-Length`."""
        if header_length is None:
            return self._decode_json(model_name, model_version, body)
        size = _header_size(header_length, len(body))
        text = body[:size] if type(body) is bytes else bytes(memoryview(body)[:size])
        key = (model_name, model_version, text)
        layout = self._layouts.get(key)
        if layout is not None and layout.size == len(body) - size:
            return layout.request(body, size)
        binary = memoryview(body)[size:]
        if not size and self._raw is not None:
            return self._raw.decode(model_name, model_version, body)
        request = _decode(model_name, model_version, text, binary, self._memory)
        key_bytes = size + len(model_name) + len(model_version)
        if key_bytes <= _CACHED_BYTES and len(binary) and has_layout(request):
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = RequestLayout(request, len(binary))
        return request

    def _decode_json(self, model_name: str, model_version: str, body: Buffer) -> InferRequest:
        if type(body) is not bytes or (data := body.find(b'"data":', 0, _CACHED_BYTES)) < 0:
            return _decode(model_name, model_version, body, b"", self._memory)
        start = body.find(b"[", data)
        key = (model_name, model_version, body[:start])
        layout = self._json_layouts.get(key)
        if layout is not None:
            known = layout.request(body, start)
            if known is not None:
                return known
        request = _decode(model_name, model_version, body, b"", self._memory)
        if layout is None and has_layout(request):
            self._cache_json_layout(key, body, request)
        return request

    def _cache_json_layout(self, key: tuple[str, str, bytes], body: bytes, request: InferRequest) -> None:
        """Cache a request whose one tensor has its numbers in a flat list."""
        begin = key[2]
        rest = body[body.find(b"]", len(begin)) + 1 :]
        dtype = request.inputs[0].dtype
        if not rest or len(begin) + len(rest) > _CACHED_BYTES or not dtype.struct_code or dtype is BOOL:
            return
        # Verify that the tensor was read from this list: another list in its place must be found there.
        try:
            inputs = orjson.loads(begin + b'["here"]' + rest)["inputs"]
        except (orjson.JSONDecodeError, KeyError):
            return
        if not isinstance(inputs[0], dict) or inputs[0].get("data") != ["here"]:
            return
        if len(self._json_layouts) >= _CACHED_LAYOUTS:
            self._json_layouts.clear()
        self._json_layouts[key] = JsonLayout(request, rest)


def _decode(model_name: str, model_version: str, text: Buffer, binary: Buffer, memory: SharedMemory) -> InferRequest:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        document = parse_lenient(text, error)
    if not isinstance(document, dict):
        raise InvalidArgument("the request must be a JSON object with 'inputs'")
    inputs = _decode_inputs(model_name, document.get("inputs"), binary, memory)
    outputs = document.get("outputs")
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidArgument(f"{NOT_A_STRING}: 'id' must be a string")
    return InferRequest(
        model_name,
        inputs,
        model_version,
        request_id,
        () if outputs is None else _decode_outputs(outputs),
        checked_parameters(_parameters(document)) if "parameters" in document else NO_PARAMETERS,
    )


def encode_response(
    response: InferResponse, request: InferRequest, placed: Mapping[str, Placement] | None = None
) -> tuple[int | None, list[Buffer]]:
    """Return the response body as buffers, and the length of its JSON part if binary tensors follow it.

    Outputs that are `placed` in shared memory are listed and not sent.
    """
    if len(response.outputs) == 1 and not response.id and response.parameters is NO_PARAMETERS and placed is None:
        # The usual response: all but the numbers is cached.
        tensor = response.outputs[0]
        if not _is_wanted_binary(request, tensor.name):
            start = _json_response(
                response.model_name, response.model_version, tensor.name, tensor.dtype, tensor.array.shape
            )
            return None, [start, json_data(tensor), b"}]}"]
        if tensor.dtype is not BYTES:
            text = _binary_response(
                response.model_name, response.model_version, tensor.name, tensor.dtype, tensor.array.shape
            )
            return len(text), [text, tensor.to_buffer()]
    # The parameter of the request is for requests that list no outputs.
    binary_all = not request.outputs and request.parameters.get("binary_data_output") is True
    wanted = {output.name: output.parameters for output in request.outputs} if request.outputs else None
    start = _response_start(response.model_name, response.model_version)
    if response.id:
        start += b'"id":%b,' % orjson.dumps(response.id)
    if response.parameters is not NO_PARAMETERS:
        start += b'"parameters":%b,' % orjson.dumps(dict(response.parameters))
    described: list[bytes] = []
    buffers: list[Buffer] = []
    for tensor in response.outputs:
        binary = binary_all
        if wanted is not None and tensor.name in wanted:
            binary = wanted[tensor.name].get("binary_data") is True
        output = _output_start(tensor.name, tensor.dtype.name, tensor.array.shape)
        if placed is not None and tensor.name in placed:
            # Without parameters, as in Triton: its C++ client takes an output that has some for binary data.
            described.append(output.removesuffix(b","))
        elif binary:
            data = tensor.to_buffer()
            described.append(b'%b"parameters":{"binary_data_size":%d}' % (output, len(data)))
            buffers.append(data)
        else:
            described.append(b'%b"data":%b' % (output, json_data(tensor)))
    text = b'%b"outputs":[{%b}]}' % (start, b"},{".join(described)) if described else start + b'"outputs":[]}'
    if not buffers:
        return None, [text]
    return len(text), [text, *buffers]


def _is_wanted_binary(request: InferRequest, name: str) -> bool:
    outputs = request.outputs
    if not outputs:
        return request.parameters.get("binary_data_output") is True
    return outputs[0].name == name and outputs[0].parameters.get("binary_data") is True


# The responses of a server differ mostly in their numbers, so the text around the numbers is cached.


@lru_cache(maxsize=4096)
def _binary_response(
    model_name: str, model_version: str, output_name: str, dtype: DType, shape: tuple[int, ...]
) -> bytes:
    return b'%b"outputs":[{%b"parameters":{"binary_data_size":%d}}]}' % (
        _response_start(model_name, model_version),
        _output_start(output_name, dtype.name, shape),
        math.prod(shape) * dtype.item_bytes,
    )


@lru_cache(maxsize=4096)
def _json_response(
    model_name: str, model_version: str, output_name: str, dtype: DType, shape: tuple[int, ...]
) -> bytes:
    return b'%b"outputs":[{%b"data":' % (
        _response_start(model_name, model_version),
        _output_start(output_name, dtype.name, shape),
    )


@lru_cache(maxsize=1024)
def _response_start(model_name: str, model_version: str) -> bytes:
    return b'{"model_name":%b,"model_version":%b,' % (orjson.dumps(model_name), orjson.dumps(model_version))


@lru_cache(maxsize=4096)
def _output_start(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    return orjson.dumps({"name": name, "datatype": datatype, "shape": shape})[1:-1] + b","


def _header_size(text: bytes, body_length: int) -> int:
    if not text.isdigit() or len(text) > 12:
        raise InvalidArgument("Inference-Header-Content-Length must be an integer")
    size = int(text)
    if size > body_length:
        raise InvalidArgument(f"Inference-Header-Content-Length is {size}, but the body has only {body_length} bytes")
    return size


def _decode_inputs(model_name: str, described: Any, binary: Buffer, memory: SharedMemory) -> list[Tensor]:
    if not isinstance(described, list) or not described:
        raise InvalidArgument(
            """'inputs' must be a list with at least one tensor, such as """
            """[{"name":"NAME","datatype":"FP32","shape":[1],"data":[0.5]}]"""
        )
    if len(described) > TENSOR_COUNT:
        raise InvalidArgument(f"at most {TENSOR_COUNT} inputs are allowed")
    tensors: list[Tensor] = []
    position = 0
    reader: RegionReader | None = None
    for entry in described:
        try:
            name, datatype, shape = entry["name"], entry["datatype"], entry["shape"]
        except (KeyError, TypeError):
            raise InvalidArgument("each input needs 'name', 'shape' and 'datatype'") from None
        if not (isinstance(name, str) and isinstance(datatype, str)):
            raise InvalidArgument(f"{NOT_A_STRING}: an input's 'name' and 'datatype' must be strings")
        if not isinstance(shape, list):
            raise InvalidArgument("an input's 'shape' must be a list")
        if len(name) > NAME_LENGTH:
            raise InvalidArgument(f"an input's 'name' may have at most {NAME_LENGTH} characters")
        dtype = dtype_named(datatype)
        size: Any = None
        if "parameters" in entry:
            parameters = _parameters(entry)
            size = parameters.get("binary_data_size")
            if REGION in parameters:
                reader = reader or memory.reader()
                data = _shared(entry, reader, parameters)
                tensors.append(tensor_from_buffer(name, dtype, shape, data, model_name))
                continue
        if size is None:
            if "data" not in entry:
                raise InvalidArgument(f"input '{name}' needs 'data', or 'binary_data_size' and binary data")
            tensors.append(tensor_from_json(name, dtype, shape, entry["data"]))
            continue
        if "data" in entry:
            raise InvalidArgument(f"input '{name}' has both 'data' and 'binary_data_size': give one")
        if type(size) is not int or size < 0:
            raise InvalidArgument(f"the 'binary_data_size' of input '{name}' must be an integer of 0 or more")
        if size > len(binary) - position:
            raise InvalidArgument(
                f"input '{name}' has 'binary_data_size' {size}, but {len(binary) - position} bytes are left in the body"
            )
        is_only = position == 0 and size == len(binary)
        piece = binary if is_only else memoryview(binary)[position : position + size]
        tensors.append(tensor_from_buffer(name, dtype, shape, piece, model_name))
        position += size
    if position != len(binary):
        raise InvalidArgument(
            f"unexpected additional input data for model '{model_name[:256]}': "
            f"{len(binary) - position} bytes belong to no input"
        )
    return tensors


def tensor_from_json(name: str, dtype: DType, shape: Sequence[int], values: Any) -> Tensor:
    """Build a tensor from JSON values. Its errors begin with Triton's words."""
    try:
        return tensor_from_values(name, dtype, shape, values)
    except WrongElementCount as error:
        words = "Shape does not match true shape of 'data' field"
        raise with_message(error, f"Unable to parse 'data': {words}: {error.message}") from None
    except WrongElementType as error:
        kind = _JSON_KINDS["f" if dtype is BF16 else dtype.numpy.kind]
        words = f"attempt to access JSON non-{kind} as {kind}"
        raise with_message(error, f"Unable to parse 'data': {words}: {error.message}") from None


_JSON_KINDS = {"b": "boolean", "i": "signed-integer", "u": "unsigned-integer", "f": "double", "O": "string"}


def _shared(entry: dict[str, Any], reader: RegionReader, parameters: Parameters) -> Buffer:
    if "data" in entry or "binary_data_size" in parameters:
        raise InvalidArgument(f"input '{entry['name']}' has shared memory and data: give one")
    return read_input(reader, entry["name"], parameters)


def _decode_outputs(described: Any) -> list[RequestedOutput]:
    if not isinstance(described, list) or len(described) > TENSOR_COUNT:
        raise InvalidArgument(f"'outputs' must be a list of at most {TENSOR_COUNT} outputs")
    outputs = []
    for entry in described:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InvalidArgument("each requested output needs a 'name'")
        outputs.append(RequestedOutput(entry["name"], _parameters(entry)))
    return mark_special(outputs)


def _parameters(entry: dict[str, Any]) -> Parameters:
    parameters = entry.get("parameters")
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, dict):
        raise InvalidArgument("'parameters' must be a JSON object")
    return parameters


def json_data(tensor: Tensor) -> bytes:
    """Return a tensor's elements as a flat JSON array."""
    array = tensor.array
    if tensor.dtype is BYTES:
        try:
            return orjson.dumps([element.decode() for element in array.ravel()])
        except UnicodeDecodeError:
            raise InvalidArgument(
                f"output '{tensor.name}' is not UTF-8 and cannot be JSON: request it with binary_data"
            ) from None
    if tensor.dtype is BF16:
        array = bf16_to_float32(array)
    flat = array.ravel()
    text = orjson.dumps(flat, option=_NUMPY)
    return text if _LETTER_N not in text else _with_special_numbers(text, flat)


def _with_special_numbers(text: bytes, flat: Any) -> bytes:
    """Replace each null that orjson wrote by NaN or an infinity."""
    names = [
        b"NaN" if np.isnan(number) else b"Infinity" if number > 0 else b"-Infinity"
        for number in flat[~np.isfinite(flat)]
    ]
    pieces = text.split(b"null")
    return b"".join([piece for pair in zip(pieces, [*names, b""], strict=True) for piece in pair])


class RawRequestDecoder:
    """Decodes raw requests with the type and shape of the model. The messages are Triton's."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def decode(self, model_name: str, model_version: str, body: Buffer) -> InferRequest:
        """Return the request; its response is all binary."""
        config = self._plane.config(model_name, model_version)
        if len(config.inputs) != 1:
            raise InvalidArgument(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.inputs)} inputs in "
                f"'{model_name}' model configuration"
            )
        (spec,) = config.inputs
        if spec.dtype is None or spec.dims is None:
            raise InvalidArgument(f"model '{model_name}' takes any type and shape: send a request that declares them")
        batch = (1,) if config.max_batch_size else ()
        if spec.dtype is BYTES:
            if math.prod(spec.dims) not in (1, -1):
                raise InvalidArgument(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
            text = np.empty(1, object)
            text[0] = bytes(body)
            tensor = Tensor(spec.name, BYTES, text.reshape((*batch, *(abs(size) for size in spec.dims))))
        else:
            dims = _deduce_dims(spec.name, spec.dims, len(body) // spec.dtype.item_bytes)
            tensor = tensor_from_buffer(spec.name, spec.dtype, (*batch, *dims), body, model_name)
        return InferRequest(model_name, [tensor], model_version, "", (), _ALL_BINARY)


def _deduce_dims(name: str, dims: tuple[int, ...], elements: int) -> tuple[int, ...]:
    if dims.count(-1) > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
            "dimension"
        )
    known = math.prod(size for size in dims if size != -1)
    return tuple(elements // max(known, 1) if size == -1 else size for size in dims)


_UNCOMPRESSED_JSON = ResponseHead(200, [(CONTENT_TYPE, JSON)], raw=True)


def respond_json(exchange: Exchange, value: Any) -> None:
    """Respond with a JSON document that is never compressed: `tritonclient.http.aio` inflates inference answers only."""
    exchange.respond(_UNCOMPRESSED_JSON, orjson.dumps(value))


def parse_body(body: Buffer) -> dict[str, Any]:
    """Parse the body as a JSON object; an empty body is an empty object."""
    if not len(body):
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = parse_lenient(body, error)
    if not isinstance(document, dict):
        raise InvalidArgument("the request must be a JSON object")
    return document


def parse_lenient(text: Buffer, error: orjson.JSONDecodeError) -> Any:
    """Parse a document that orjson refused, perhaps only because of NaN, which the standard library accepts."""
    content = bytes(text)
    if b"NaN" in content or b"Infinity" in content:
        try:
            document = json.loads(content)
            orjson.dumps(document)  # raises for invalid text and numbers that orjson cannot write
        except (ValueError, TypeError, RecursionError):
            pass
        else:
            return document
    raise InvalidArgument(f"failed to parse the request JSON: {error}") from None
