# SPDX-License-Identifier: Apache-2.0
"""v2 over gRPC, message bytes to messages and back.

Protobuf would copy every tensor twice on the way in and twice on the way out. So for a large request the raw tensors are
found in the received bytes and viewed there, and protobuf parses what is left; and a response is written as the part
that repeats (names, types, shapes: remembered) followed by the tensors as they lie in memory. And since a client writes
the same request again and again with other numbers, everything before the numbers is recognised instead of parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from headrace.api.shared_memory.regions import Placement, RegionReader, SharedMemory
from headrace.api.v2.layouts import NAME_LENGTH, RequestLayout, can_be_learnt
from headrace.api.v2.outputs import REGION, placed_parameters, read_input, requested
from headrace.api.v2.parameters import check
from headrace.api.v2.schema import inference_schema
from headrace.core.dtypes import DType, dtype_named
from headrace.core.errors import InvalidArgument
from headrace.core.limits import TENSOR_COUNT
from headrace.core.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameters, RequestedOutput
from headrace.core.tensors import Buffer, Tensor, tensor_from_buffer, tensor_from_values

_SPLIT_BYTES = 8 * 1024
"""A request over this size is split by hand; below it protobuf's own copies cost less."""

_REMEMBERED_LAYOUTS = 1024
_REMEMBERED_BYTES = 4096
"""What surrounds the numbers of a request is remembered up to this size."""

_MAX_FIELDS = 8 * TENSOR_COUNT
"""Inputs, outputs, parameters and raw tensors together: each becomes an object, however small it is."""

_RAW_INPUT_TAG = 7 << 3 | 2
_RAW_OUTPUT_TAG = bytes((6 << 3 | 2,))
_ID_TAG = bytes((3 << 3 | 2,))

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Which field of InferTensorContents carries a data type; FP16 and BF16 travel raw only."""


class GrpcCodec:
    """Holds the message classes, and the layouts of requests seen before. Without `memory`, there is no shared memory."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self._memory = memory or SharedMemory()
        self._request = inference_schema().message("inference.ModelInferRequest")
        self._layouts: dict[int, tuple[bytes, RequestLayout]] = {}

    def decode_request(self, message: Buffer) -> InferRequest:
        """Parse a ModelInferRequest."""
        known = self._layouts.get(len(message))
        if known is not None:
            prefix, layout = known
            start = len(prefix)
            if message[:start] == prefix:
                return layout.request(message, start)
        text: Buffer = message
        raw: list[memoryview] | None = None
        if len(message) > _SPLIT_BYTES:
            text, raw = split_raw_inputs(message)
        try:
            parsed = self._request.FromString(text)
        except DecodeError:
            raise _not_a_request() from None
        contents: Sequence[Buffer] = parsed.raw_input_contents if raw is None else raw
        outputs = parsed.outputs
        request = InferRequest(
            parsed.model_name,
            _decode_inputs(parsed.inputs, contents, self._memory),
            parsed.model_version,
            parsed.id,
            requested([RequestedOutput(o.name, _parameters(o.parameters)) for o in outputs]) if outputs else (),
            _parameters(parsed.parameters),
        )
        if request.parameters is not NO_PARAMETERS:
            check(request.parameters)
        if len(contents) == 1 and can_be_learnt(request):
            self._learn(message, request, len(contents[0]))
        return request

    def _learn(self, message: Buffer, request: InferRequest, raw_bytes: int) -> None:
        """Remember a request with one raw tensor at its very end, which is how clients write them."""
        start = len(message) - raw_bytes
        if start > _REMEMBERED_BYTES:
            return
        ending = bytes((_RAW_INPUT_TAG,)) + varint(raw_bytes)
        prefix = bytes(message[:start])
        if not prefix.endswith(ending):
            return
        try:
            # The tensor must really begin there: the same message without it must parse to the same inputs and no tensor.
            alone = self._request.FromString(prefix[: -len(ending)])
        except DecodeError:
            return
        if len(alone.inputs) == 1 and not alone.raw_input_contents:
            if len(self._layouts) >= _REMEMBERED_LAYOUTS:
                self._layouts.clear()
            self._layouts[len(message)] = (prefix, RequestLayout(request, raw_bytes))


def encode_response(response: InferResponse, placed: Mapping[str, Placement] | None = None) -> list[Buffer]:
    """Write a ModelInferResponse as buffers, tensors uncopied.

    Outputs that are `placed` in shared memory are named and not sent.
    """
    outputs = response.outputs
    layout = tuple([(tensor.name, tensor.dtype.name, tensor.array.shape) for tensor in outputs])
    pieces: list[Buffer] = [_response_prefix(response.model_name, response.model_version, layout)]
    if response.id:
        text = response.id.encode()
        pieces.append(_ID_TAG + varint(len(text)) + text)
    if response.parameters is not NO_PARAMETERS:
        pieces.append(encoded_parameters(response.parameters))
    if placed is not None:
        return _encode_placed(response, pieces, placed)
    for tensor in outputs:
        data = tensor.to_buffer()
        pieces.append(_RAW_OUTPUT_TAG + varint(len(data)))
        pieces.append(data)
    return pieces


def _encode_placed(response: InferResponse, pieces: list[Buffer], placed: Mapping[str, Placement]) -> list[Buffer]:
    """The same where some outputs are in shared memory: these have parameters, and empty raw contents."""
    message = inference_schema().message("inference.ModelInferResponse")
    described = message(model_name=response.model_name, model_version=response.model_version)
    for tensor in response.outputs:
        output = described.outputs.add(name=tensor.name, datatype=tensor.dtype.name, shape=tensor.shape)
        if tensor.name in placed:
            _fill_parameters(output.parameters, placed_parameters(placed[tensor.name]))
    pieces[0] = described.SerializeToString()
    for tensor in response.outputs:
        data = b"" if tensor.name in placed else tensor.to_buffer()
        pieces += (_RAW_OUTPUT_TAG + varint(len(data)), data)
    return pieces


def encoded_parameters(parameters: Parameters) -> bytes:
    """The parameters of a ModelInferResponse, to be put among its pieces."""
    message = inference_schema().message("inference.ModelInferResponse")()
    _fill_parameters(message.parameters, parameters)
    encoded: bytes = message.SerializeToString()
    return encoded


def _fill_parameters(target: Any, parameters: Parameters) -> None:
    for name, value in parameters.items():
        field = "uint64_param" if type(value) is int and value > _MOST_INT64 else _PARAMETER_FIELDS[type(value)]
        setattr(target[name], field, value)


_MOST_INT64 = (1 << 63) - 1
_PARAMETER_FIELDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}


Layout = tuple[tuple[str, str, tuple[int, ...]], ...]


@lru_cache(maxsize=1024)
def _response_prefix(model_name: str, model_version: str, layout: Layout) -> bytes:
    message = inference_schema().message("inference.ModelInferResponse")
    response = message(model_name=model_name, model_version=model_version)
    for name, datatype, shape in layout:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
    encoded: bytes = response.SerializeToString()
    return encoded


def split_raw_inputs(message: Buffer) -> tuple[bytes, list[memoryview]]:
    """Take `raw_input_contents` out of an encoded ModelInferRequest, as views; return the rest, joined."""
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
        tag, position = _read_varint(view, position, _SHORT_VARINT)
        kind = tag & 7
        if kind == _DELIMITED:
            length, position = _read_varint(view, position, _SHORT_VARINT)
            position += length
            if tag == _RAW_INPUT_TAG and not depth:
                raw.append(view[position - length : position])
                rest.append(view[kept:start])
                kept = position
        elif kind in _GROUP:
            # Nobody writes groups any more, but protobuf reads them as unknown fields: so do we.
            depth += _GROUP[kind]
        elif kind == 0:
            _, position = _read_varint(view, position, _LONG_VARINT)
        else:
            position += _FIXED_BYTES.get(kind, end)
        if position > end:
            raise _not_a_request()
    rest.append(view[kept:end])
    return b"".join(rest), raw


_DELIMITED = 2
_GROUP = {3: 1, 4: -1}
_FIXED_BYTES = {1: 8, 5: 4}
_SHORT_VARINT, _LONG_VARINT = 5, 10
"""How long a number may be, in bytes: in a tag or a length, and in a value."""


def _read_varint(view: memoryview, position: int, longest: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(view[position : position + longest]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, position + shift + 1
    raise _not_a_request()


def _not_a_request() -> InvalidArgument:
    return InvalidArgument("the message is not a ModelInferRequest")


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)


def _decode_inputs(described: Any, raw: Sequence[Buffer], memory: SharedMemory) -> list[Tensor]:
    if len(described) > TENSOR_COUNT:
        raise InvalidArgument(f"at most {TENSOR_COUNT} inputs are allowed")
    # With bytes for every input there is none in shared memory; looking into each one's parameters would cost.
    partly = len(raw) != len(described)
    if partly and raw:
        apart = sum(REGION in entry.parameters for entry in described)
        if len(raw) != len(described) - apart:
            raise InvalidArgument(
                f"raw_input_contents has {len(raw)} entries for {len(described) - apart} inputs: give one for each, or none"
            )
    tensors = []
    used = 0
    reader: RegionReader | None = None
    for entry in described:
        name, dtype, shape = entry.name, dtype_named(entry.datatype), tuple(entry.shape)
        if len(name) > NAME_LENGTH:
            raise InvalidArgument(f"the name of an input may have {NAME_LENGTH} characters")
        if partly and REGION in entry.parameters:
            reader = reader or memory.reader()
            tensors.append(tensor_from_buffer(name, dtype, shape, _shared(entry, reader)))
        elif raw:
            if entry.HasField("contents"):
                raise InvalidArgument(
                    f"contents field must not be specified when using raw_input_contents for input '{name}'"
                )
            tensors.append(tensor_from_buffer(name, dtype, shape, raw[used]))
            used += 1
        else:
            tensors.append(tensor_from_values(name, dtype, shape, _typed_values(name, dtype, entry.contents)))
    return tensors


def _shared(entry: Any, reader: RegionReader) -> Buffer:
    if entry.HasField("contents"):
        raise InvalidArgument(f"input '{entry.name}' is in shared memory and has contents of its own: give one")
    return read_input(reader, entry.name, _parameters(entry.parameters))


def _typed_values(name: str, dtype: DType, contents: Any) -> list[Any]:
    field = _CONTENTS.get(dtype.name)
    if field is None:
        raise InvalidArgument(f"input '{name}' of {dtype.name} must be sent in raw_input_contents")
    return list(getattr(contents, field))


def _parameters(mapping: Any) -> Parameters:
    if not mapping:
        return NO_PARAMETERS
    return {key: getattr(value, value.WhichOneof("parameter_choice") or "bool_param") for key, value in mapping.items()}
