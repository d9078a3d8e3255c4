# SPDX-License-Identifier: Apache-2.0
"""Decode a ModelInferRequest from bytes and encode a ModelInferResponse, without copying tensors.

Protobuf would copy every tensor twice in each direction. So for a large request the raw tensors are located in the received
bytes and viewed there, and protobuf parses the rest. A response is its cached prefix (names, types, shapes) followed by the
tensors in place. Since clients repeat a request with other numbers, the bytes before the numbers are compared with cached
ones instead of parsed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.shared_memory import Placement, RegionReader, SharedMemory
from headrace.api.v2.grpc_messages import inference_schema
from headrace.api.v2.outputs import REGION, mark_special, placement_parameters, read_input
from headrace.api.v2.requests import NAME_LENGTH, RequestLayout, check_parameters, has_layout
from headrace.core.dtypes import BYTES, DType, dtype_named
from headrace.core.errors import InvalidArgument
from headrace.core.limits import TENSOR_COUNT
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters, RequestedOutput
from headrace.core.tensors import Buffer, Tensor, tensor_from_buffer, tensor_from_values
from headrace.core.wire_format import (
    DELIMITED,
    TAG_BYTES,
    VARINT,
    InvalidMessage,
    TruncatedMessage,
    decode_varint,
    encode_varint,
)

_SPLIT_BYTES = 8 * 1024
"""A request above this size is split by `split_raw_inputs`; below it protobuf's copies are cheaper."""

_CACHED_LAYOUTS = 1024
_CACHED_BYTES = 4096
"""Maximum size of a cached request prefix."""

_MAX_FIELDS = 8 * TENSOR_COUNT
"""Maximum inputs, outputs, parameters and raw tensors together: each becomes an object, however small."""

_RAW_INPUT_TAG = 7 << 3 | 2
_RAW_OUTPUT_TAG = bytes((6 << 3 | 2,))
_ID_TAG = bytes((3 << 3 | 2,))


_MOST_INT64 = (1 << 63) - 1
_PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]
_GROUP = {3: 1, 4: -1}
_FIXED_BYTES = {1: 8, 5: 4}


class GrpcCodec:
    """Decodes requests and caches their layouts. Without `memory`, shared memory is disabled."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self._memory = memory or SharedMemory()
        self._request = inference_schema().message("inference.ModelInferRequest")
        self._layouts: dict[int, tuple[bytes, RequestLayout]] = {}

    def decode_request(self, message: Buffer) -> InferRequest:
        """Parse a ModelInferRequest."""
        cached = self._layouts.get(len(message))
        if cached is not None:
            prefix, layout = cached
            start = len(prefix)
            if message[:start] == prefix:
                return layout.request(message, start)
        text: Buffer = message
        raw: list[memoryview] | None = None
        try:
            if len(message) > _SPLIT_BYTES:
                text, raw = split_raw_inputs(message)
            parsed = self._request.FromString(text)
        except (DecodeError, InvalidMessage):
            raise InvalidArgument("the message is not a ModelInferRequest") from None
        contents: Sequence[Buffer] = parsed.raw_input_contents if raw is None else raw
        outputs = parsed.outputs
        request = InferRequest(
            parsed.model_name,
            _decode_inputs(parsed.model_name, parsed.inputs, contents, self._memory),
            parsed.model_version,
            parsed.id,
            mark_special([RequestedOutput(o.name, _parameters(o.parameters)) for o in outputs]) if outputs else (),
            _parameters(parsed.parameters),
        )
        if request.parameters is not NO_PARAMETERS:
            check_parameters(request.parameters)
        if len(contents) == 1 and has_layout(request):
            self._cache_layout(message, request, len(contents[0]))
        return request

    def _cache_layout(self, message: Buffer, request: InferRequest, raw_bytes: int) -> None:
        """Cache a request with one raw tensor at its end, which is how clients write it."""
        start = len(message) - raw_bytes
        if start > _CACHED_BYTES:
            return
        ending = bytes((_RAW_INPUT_TAG,)) + encode_varint(raw_bytes)
        prefix = bytes(message[:start])
        if not prefix.endswith(ending):
            return
        try:
            # Verify that the tensor starts there: the message without it must parse to the same input and no tensor.
            without_tensor = self._request.FromString(prefix[: -len(ending)])
        except DecodeError:
            return
        if len(without_tensor.inputs) == 1 and not without_tensor.raw_input_contents:
            if len(self._layouts) >= _CACHED_LAYOUTS:
                self._layouts.clear()
            self._layouts[len(message)] = (prefix, RequestLayout(request, raw_bytes))


def encode_response(response: InferResponse, placed: Mapping[str, Placement] | None = None) -> list[Buffer]:
    """Encode a ModelInferResponse as buffers, without copying tensors.

    Outputs that are `placed` in shared memory are listed and not sent.
    """
    outputs = response.outputs
    if len(outputs) == 1 and not response.id and response.parameters is NO_PARAMETERS and placed is None:
        # The usual response: all but the numbers is cached.
        tensor = outputs[0]
        if tensor.dtype is not BYTES:
            shape = tensor.array.shape
            start = _single_response(response.model_name, response.model_version, tensor.name, tensor.dtype, shape)
            return [start, tensor.to_buffer()]
    layout = tuple([(tensor.name, tensor.dtype.name, tensor.array.shape) for tensor in outputs])
    pieces: list[Buffer] = [_response_prefix(response.model_name, response.model_version, layout)]
    if response.id:
        text = response.id.encode()
        pieces.append(_ID_TAG + encode_varint(len(text)) + text)
    if response.parameters is not NO_PARAMETERS:
        pieces.append(encode_parameters(response.parameters))
    if placed is not None:
        return _encode_placed(response, pieces, placed)
    for tensor in outputs:
        data = tensor.to_buffer()
        pieces.append(_RAW_OUTPUT_TAG + encode_varint(len(data)))
        pieces.append(data)
    return pieces


def _encode_placed(response: InferResponse, pieces: list[Buffer], placed: Mapping[str, Placement]) -> list[Buffer]:
    """Encode a response with outputs in shared memory, which have parameters and empty raw contents."""
    message = inference_schema().message("inference.ModelInferResponse")
    entries = message(model_name=response.model_name, model_version=response.model_version)
    for tensor in response.outputs:
        output = entries.outputs.add(name=tensor.name, datatype=tensor.dtype.name, shape=tensor.shape)
        if tensor.name in placed:
            _fill_parameters(output.parameters, placement_parameters(placed[tensor.name]))
    pieces[0] = entries.SerializeToString()
    for tensor in response.outputs:
        data = b"" if tensor.name in placed else tensor.to_buffer()
        pieces += (_RAW_OUTPUT_TAG + encode_varint(len(data)), data)
    return pieces


def encode_parameters(parameters: Parameters) -> bytes:
    """Encode the parameters of a ModelInferResponse as a piece of it."""
    message = inference_schema().message("inference.ModelInferResponse")()
    _fill_parameters(message.parameters, parameters)
    encoded: bytes = message.SerializeToString()
    return encoded


def _fill_parameters(target: Any, parameters: Parameters) -> None:
    for name, value in parameters.items():
        field = "uint64_param" if type(value) is int and value > _MOST_INT64 else _PARAMETER_FIELDS[type(value)]
        setattr(target[name], field, value)


@lru_cache(maxsize=4096)
def _single_response(model_name: str, model_version: str, name: str, dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return all that comes before the numbers of a response with one tensor of fixed-size elements."""
    prefix = _response_prefix(model_name, model_version, ((name, dtype.name, shape),))
    return prefix + _RAW_OUTPUT_TAG + encode_varint(math.prod(shape) * dtype.item_bytes)


@lru_cache(maxsize=1024)
def _response_prefix(model_name: str, model_version: str, layout: Layout) -> bytes:
    message = inference_schema().message("inference.ModelInferResponse")
    response = message(model_name=model_name, model_version=model_version)
    for name, datatype, shape in layout:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
    encoded: bytes = response.SerializeToString()
    return encoded


def split_raw_inputs(message: Buffer) -> tuple[bytes, list[memoryview]]:
    """Split an encoded ModelInferRequest into the message without `raw_input_contents`, and views of these.

    Raises InvalidMessage.
    """
    view = memoryview(message)
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    position, kept, end = 0, 0, len(view)
    fields = depth = 0
    while position < end:
        start = position
        fields += 1
        if fields > _MAX_FIELDS:
            raise InvalidArgument(f"the request has more than {_MAX_FIELDS} fields")
        tag, position = decode_varint(view, position, end, TAG_BYTES)
        kind = tag & 7
        if kind == DELIMITED:
            length, position = decode_varint(view, position, end, TAG_BYTES)
            position += length
            if tag == _RAW_INPUT_TAG and not depth:
                raw.append(view[position - length : position])
                rest.append(view[kept:start])
                kept = position
        elif kind in _GROUP:
            # Groups are obsolete, but protobuf skips them as unknown fields.
            depth += _GROUP[kind]
        elif kind == VARINT:
            _, position = decode_varint(view, position, end)
        else:
            position += _FIXED_BYTES.get(kind, end)
        if position > end:
            raise TruncatedMessage
    rest.append(view[kept:end])
    return b"".join(rest), raw


def _decode_inputs(model: str, entries: Any, raw: Sequence[Buffer], memory: SharedMemory) -> list[Tensor]:
    if len(entries) > TENSOR_COUNT:
        raise InvalidArgument(f"at most {TENSOR_COUNT} inputs are allowed")
    # With raw contents for every input none is in shared memory; checking all parameters would cost time.
    maybe_shared = len(raw) != len(entries)
    if maybe_shared and raw:
        shared = sum(REGION in entry.parameters for entry in entries)
        if len(raw) != len(entries) - shared:
            raise InvalidArgument(
                f"raw_input_contents has {len(raw)} entries for {len(entries) - shared} inputs: give one for each, or none"
            )
    tensors = []
    used = 0
    reader: RegionReader | None = None
    for entry in entries:
        name, dtype, shape = entry.name, dtype_named(entry.datatype), tuple(entry.shape)
        if len(name) > NAME_LENGTH:
            raise InvalidArgument(f"the name of an input may have at most {NAME_LENGTH} characters")
        if maybe_shared and REGION in entry.parameters:
            reader = reader or memory.reader()
            tensors.append(tensor_from_buffer(name, dtype, shape, _shared(entry, reader), model))
        elif raw:
            if entry.HasField("contents"):
                raise InvalidArgument(
                    f"contents field must not be specified when using raw_input_contents for input '{name}'"
                )
            tensors.append(tensor_from_buffer(name, dtype, shape, raw[used], model))
            used += 1
        else:
            tensors.append(tensor_from_values(name, dtype, shape, _typed_values(name, dtype, entry.contents)))
    return tensors


def _shared(entry: Any, reader: RegionReader) -> Buffer:
    if entry.HasField("contents"):
        raise InvalidArgument(f"input '{entry.name}' has shared memory and contents: give one")
    return read_input(reader, entry.name, _parameters(entry.parameters))


def _typed_values(name: str, dtype: DType, contents: Any) -> list[Any]:
    if not dtype.contents_field:
        raise InvalidArgument(f"input '{name}' of {dtype.name} must be sent in raw_input_contents")
    return list(getattr(contents, dtype.contents_field))


def _parameters(mapping: Any) -> Parameters:
    if not mapping:
        return NO_PARAMETERS
    return {key: getattr(value, value.WhichOneof("parameter_choice") or "bool_param") for key, value in mapping.items()}
