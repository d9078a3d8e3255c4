# SPDX-License-Identifier: Apache-2.0
"""Decode an InferRequestHeader and its data into a request of the engine, checked against the model.

The error messages, codes and order of checks are those of 0.8, except for what only v1 has. Sizes are checked here,
since the protocol has no data types and v0 has no shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from headrace.api.v1.headers import Header, HeaderInput, RegionRef
from headrace.api.v1.shared_memory import Placement, Reader, SharedMemory, require_shared_memory
from headrace.api.v1.status import V1Statistics
from headrace.core.dtypes import BYTES, DType
from headrace.core.errors import HeadraceError, Internal, InvalidArgument, NotFound, Unavailable
from headrace.core.limits import TENSOR_COUNT
from headrace.core.requests import InferRequest, RequestedOutput
from headrace.core.tensors import Buffer, Tensor, element_count, tensor_from_buffer
from headrace.engine.dataplane import DataPlane, ServingVersion
from headrace.models.config.types import InputSpec, ModelConfig, fits

_SHOWN = 256
"""Characters of a client's text that an error shows."""


_KINDS = ((b"\xff\xd8\xff", "JPEG"), (b"\x89PNG\r\n\x1a\n", "PNG"))


class RequestNumber:
    """The number of a request; 0 until it has reached the core."""

    __slots__ = ("_statistics", "value")

    def __init__(self, statistics: V1Statistics) -> None:
        self._statistics = statistics
        self.value = 0

    def assign(self) -> None:
        """Take the next number: the request has reached the core."""
        self.value = self._statistics.next_id()


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that can be computed, and what its response needs."""

    request: InferRequest
    header: Header
    serving: ServingVersion
    """The version that computes it."""
    placements: tuple[Placement | None, ...]
    """The shared memory of each requested output; None for an output in the response."""


def decode_request(
    plane: DataPlane,
    number: RequestNumber,
    name: str,
    version: str,
    header: Header | None,
    data: InputData,
    memory: SharedMemory | None,
) -> AcceptedRequest:
    """Return the engine request; raise for an invalid one."""
    if header is None:
        raise InvalidArgument(
            f"unable to parse request for model '{name[:_SHOWN]}': the request header must be an InferRequestHeader, in "
            'text for example: batch_size: 1 input { name: "input" } output { name: "output" cls { count: 3 } }'
        )
    if not header.is_v0:
        number.assign()
    if not header.batch_size:
        raise InvalidArgument(
            "inference request batch-size must be >= 1 for models that support batching, and must be 1 for models that "
            "don't support batching"
        )
    if header.is_v0:
        if data.size is not None and data.size > header.batch_size * sum(entry.byte_size for entry in header.inputs):
            serving = plane.find(name, version)
            specs = [] if serving is None else serving.config.client_inputs()
            raise _additional_data(name, data, specs[0] if specs else None)
        number.assign()
    serving = serving_version(plane, name, version)
    try:
        inputs = _InputDecoder(serving.config, header, data, memory).tensors()
        placements = tuple(_placement(memory, output.region) for output in header.outputs)
    except HeadraceError as error:
        serving.statistics.failed(0, error, 0)
        raise
    outputs = [RequestedOutput(output) for output in dict.fromkeys(entry.name for entry in header.outputs)]
    request = InferRequest(name, inputs, version, str(header.id) if header.id else "", outputs, header.parameters)
    return AcceptedRequest(request, header, serving, placements)


def serving_version(plane: DataPlane, name: str, version: str) -> ServingVersion:
    """Return the version of a request."""
    serving = plane.find(name, version)
    if serving is not None:
        return serving
    if not (plane.started and plane.accepting):
        raise Unavailable("Server not ready")
    if not version or plane.is_ready(name, version):
        plane.check_loaded(name)
    known = [entry for entry in plane.states() if entry.name == name]
    if not known:
        raise InvalidArgument(f"unable to find platform for requested model '{name[:_SHOWN]}'")
    requested = f"Specific({name}, {version[:32]})" if version else f"Latest({name})"
    reasons = [entry.reason for entry in known if entry.reason and version in ("", entry.version)]
    why = f": {reasons[-1]}" if reasons else ""
    raise NotFound(f"Servable not found for request: {requested}{why}")


def _placement(memory: SharedMemory | None, region: RegionRef | None) -> Placement | None:
    return (
        None
        if region is None
        else require_shared_memory(memory).placement(region.name, region.offset, region.byte_size)
    )


class _InputDecoder:
    """Decodes the tensors of one request."""

    def __init__(self, config: ModelConfig, header: Header, data: InputData, memory: SharedMemory | None) -> None:
        self._config = config
        self._name = config.name
        self._header = header
        self._data = data
        self._memory = memory
        self._reader: Reader | None = None
        self._rows = (header.batch_size,) if config.max_batch_size else ()

    def tensors(self) -> list[Tensor]:
        """Return all tensors; raise for the first invalid one."""
        header, data = self._header, self._data
        internal = self._config.internal_inputs()
        specs = {spec.name: spec for spec in self._config.inputs if spec.name not in internal}
        count = len(header.inputs)
        if max(count, len(header.outputs)) > TENSOR_COUNT:
            raise InvalidArgument(f"at most {TENSOR_COUNT} inputs and outputs are allowed")
        if not sum(not spec.optional for spec in specs.values()) <= count <= len(specs):
            raise InvalidArgument(f"expected {len(specs)} inputs but got {count}")
        most = max(self._config.max_batch_size, 1)
        if header.batch_size > most:
            raise InvalidArgument(
                f"unexpected batch size {header.batch_size} for '{self._name}', max allowed is {most}"
            )
        tensors = []
        for entry in header.inputs:
            spec = specs.get(entry.name)
            if spec is None:
                raise InvalidArgument(f"unexpected inference input '{entry.name[:_SHOWN]}' for '{self._name}'")
            tensors.append(self._tensor(spec, entry))
        if data.rest and isinstance(data, RawInputs):
            raise InvalidArgument(
                f"unexpected additional input data for model '{self._name}': give one raw_input for each input"
            )
        if data.rest:
            raise _additional_data(self._name, data, next(iter(specs.values()), None))
        return tensors

    def _tensor(self, spec: InputSpec, entry: HeaderInput) -> Tensor:
        dtype = spec.dtype
        if dtype is None or spec.dims is None:
            raise InvalidArgument(
                f"input '{spec.name}' of model '{self._name}' takes any type and shape, which this protocol cannot declare: "
                f"use v2 (/v2/models/{self._name}/infer)"
            )
        if self._header.is_v0:
            dims = dims_by_size(spec, spec.dims, dtype, entry.byte_size)
            size: int | None = self._header.batch_size * entry.byte_size
        else:
            dims = dims_as_given(self._config, spec, spec.dims, entry)
            count = self._header.batch_size * element_count(spec.name, dims)
            size = size_as_given(self._config, spec, entry, dtype, count)
        piece = self._piece(spec, entry, size)
        return tensor_from_buffer(spec.name, dtype, (*self._rows, *dims), piece)

    def _piece(self, spec: InputSpec, entry: HeaderInput, size: int | None) -> Buffer:
        """Return the bytes of an input."""
        if entry.region is not None:
            return self._shared(spec, entry.region, size)
        piece = self._data.take(size)
        if size is None or len(piece) == size:
            return piece
        hint = image_hint(piece, spec)
        if self._header.is_v0:
            raise Internal(f"expected {size} of data for inference input '{spec.name}', got {len(piece)}{hint}")
        raise InvalidArgument(
            f"unexpected size {len(piece)} for input '{spec.name}', expecting {size} bytes for model '{self._name}'{hint}"
        )

    def _shared(self, spec: InputSpec, region: RegionRef, size: int | None) -> Buffer:
        if size is not None and region.byte_size != size:
            raise InvalidArgument(
                f"unexpected shared-memory size {region.byte_size} for input '{spec.name}', expecting {size} for model "
                f"'{self._name}'"
            )
        if self._reader is None:
            self._reader = require_shared_memory(self._memory).reader()
        return self._reader.read(region.name, region.offset, region.byte_size)


def _additional_data(name: str, data: InputData, spec: InputSpec | None) -> InvalidArgument:
    hint = image_hint(data.start(), spec)
    return InvalidArgument(f"unexpected additional input data for model '{name[:_SHOWN]}'{hint}")


class BodyData:
    """The data of all inputs, concatenated, from an HTTP body."""

    def __init__(self, body: Buffer) -> None:
        self._view = memoryview(body)
        self._position = 0

    @property
    def size(self) -> int | None:
        """Total bytes."""
        return len(self._view)

    @property
    def rest(self) -> int:
        """Bytes that no input has used."""
        return len(self._view) - self._position

    def start(self) -> Buffer:
        """Return all bytes."""
        return self._view

    def take(self, size: int | None) -> Buffer:
        """Return the next input, of this size or what is left."""
        start = self._position
        self._position = len(self._view) if size is None else min(start + size, len(self._view))
        return self._view[start : self._position]


class RawInputs:
    """The data of each input, from a gRPC message."""

    size = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._next = 0

    @property
    def rest(self) -> int:
        """Inputs that are not used yet."""
        return len(self._pieces) - self._next

    def start(self) -> Buffer:
        """Return the first input."""
        return self._pieces[0] if self._pieces else b""

    def take(self, size: int | None) -> Buffer:
        """Return the next input, whatever its size."""
        index = self._next
        self._next += 1
        return self._pieces[index] if index < len(self._pieces) else b""


InputData = BodyData | RawInputs


def dims_by_size(spec: InputSpec, dims: tuple[int, ...], dtype: DType, byte_size: int) -> tuple[int, ...]:
    """v0: return the configuration's dimensions; the size determines one variable dimension."""
    if dtype is BYTES and -1 not in dims:
        return dims
    known = prod(size for size in dims if size >= 0) * dtype.item_bytes
    varying = dims.count(-1)
    if not varying and byte_size != known:
        raise InvalidArgument(f"unexpected size {byte_size} for inference input '{spec.name}', expecting {known}")
    if varying > 1 or (varying and dtype is BYTES):
        raise InvalidArgument(
            f"the shape of inference input '{spec.name}' does not follow from its size: use a client of 0.11 or later, "
            "which sends dims"
        )
    if varying and (not known or byte_size % known):
        raise InvalidArgument(
            f"unexpected size {byte_size} for inference input '{spec.name}', expecting a multiple of {known}"
        )
    return tuple(byte_size // known if size < 0 else size for size in dims) if varying else dims


def dims_as_given(config: ModelConfig, spec: InputSpec, dims: tuple[int, ...], entry: HeaderInput) -> tuple[int, ...]:
    """v1: return the request's dimensions, or the configuration's if it has none."""
    if entry.dims:
        if not fits(entry.dims, dims) or min(entry.dims) < 0:
            raise InvalidArgument(
                f"unexpected shape for input '{spec.name}' for model '{config.name}'. Expected {_format_dims(dims)}, got "
                f"{_format_dims(entry.dims[:16])}"
            )
        return entry.dims
    if -1 in dims:
        raise InvalidArgument(
            f"model supports variable-size for input '{spec.name}', request must specify input shape for model "
            f"'{config.name}'"
        )
    return dims


def size_as_given(config: ModelConfig, spec: InputSpec, entry: HeaderInput, dtype: DType, count: int) -> int | None:
    """v1: return the bytes of the batch; None for strings without a size, which take all the data."""
    if dtype is BYTES:
        if not entry.batch_byte_size and entry.region is None:
            raise InvalidArgument(
                f"batch-byte-size must be specified for input '{spec.name}' with non-fixed-size datatype for model "
                f"'{config.name}'"
            )
        return entry.batch_byte_size or None
    expected = count * dtype.item_bytes
    if entry.batch_byte_size not in (0, expected):
        raise InvalidArgument(
            f"specific batch-byte-size for input '{spec.name}' does not match expected byte-size calculated from shape and "
            f"datatype for model '{config.name}': {entry.batch_byte_size}, expecting {expected}"
        )
    return expected


def _format_dims(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def image_hint(data: Buffer, spec: InputSpec | None) -> str:
    """Return a hint for an error message if the data is an encoded image, the most common mistake; else ""."""
    start = bytes(data[:8])
    kind = next((kind for mark, kind in _KINDS if start.startswith(mark)), None)
    if kind is None:
        return ""
    wanted = "the model's input"
    if spec is not None and spec.dtype is not None and spec.dims is not None:
        shape = "x".join("any" if size < 0 else str(size) for size in spec.dims)
        wanted = f"input '{spec.name}' as {shape} values of {spec.dtype.name}"
        if spec.dtype.item_bytes and min(spec.dims, default=0) > 0:
            wanted += f", {prod(spec.dims) * spec.dtype.item_bytes} bytes for each image of the batch"
    return (
        f". The data is a {kind} file, which the server does not decode: decode and resize the image, scale "
        f"it as the model was trained, and send {wanted} (in Python, array.tobytes())"
    )
