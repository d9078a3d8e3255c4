# SPDX-License-Identifier: Apache-2.0
"""A reader of ONNX files that skips the weights: it returns their names, their external files, and the rest of the graph.

It walks a file field by field, by the field numbers of ONNX's schema, so that 100 MB of weights cost nothing. It knows
protobuf's wire format but not ONNX Runtime: a session decides whether a graph is valid, and gets a file that cannot be
walked unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from io import SEEK_END, FileIO
from pathlib import Path, PurePosixPath

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.wire_format import (
    DELIMITED,
    VARINT,
    InvalidMessage,
    decode_varint,
    encode_delimited,
    encode_varint,
    read_fields,
)
from headrace.models.config.types import ModelConfig

LARGE_BYTES = 4096
"""Constants below this size stay in the outline: output shapes may depend on their values."""

# Field numbers of onnx.proto.
_MODEL_IR_VERSION, _MODEL_GRAPH = 1, 7
_GRAPH_INITIALIZER, _GRAPH_INPUT = 5, 11
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_EXTERNAL, _TENSOR_LOCATION = 1, 2, 8, 13, 14
_ENTRY_KEY, _ENTRY_VALUE = 1, 2
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_TYPE_ELEMENT, _TENSOR_TYPE_SHAPE = 1, 2
_SHAPE_DIMENSION = 1
_DIMENSION_VALUE = 1

_PAGE_BYTES = 1 << 14
_OVERRIDABLE_SINCE = 4
"""The IR version from which callers may override an input that is also an initialiser."""


@dataclass(frozen=True, slots=True)
class External:
    """Weights in an external file."""

    location: str
    end: int
    """The end offset (exclusive)."""


@dataclass(frozen=True, slots=True)
class Outline:
    """A model without its large weights."""

    model: bytes
    """A model whose weights are inputs; its other inputs and outputs are those of the file."""
    weights: frozenset[str]
    """The inputs of `model` that are weights."""
    optional: frozenset[str]
    """The weights that callers may override."""
    external: tuple[External, ...] = ()
    is_complete: bool = True
    """Whether everything is present that shapes may depend on."""


class _Pages:
    """A file that is read page by page. It is not mapped: truncating a mapped file would crash the process."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.size = file.seek(0, SEEK_END)
        self._page = b""
        self._start = 0

    def __getitem__(self, at: int, /) -> int:
        """Return one byte."""
        if not 0 <= at - self._start < len(self._page):
            self._page, self._start = self._read(at, min(_PAGE_BYTES, self.size - at)), at
        return self._page[at - self._start]

    def piece(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`."""
        begin = start - self._start
        if begin >= 0 and end - self._start <= len(self._page):
            return self._page[begin : end - self._start]
        return self._read(start, end - start) if end > start else b""

    def _read(self, at: int, count: int) -> bytes:
        self._file.seek(at)
        read = self._file.read(count)
        if not read or len(read) != count:
            raise InvalidMessage
        return read


@dataclass(slots=True)
class _Tensor:
    name: bytes = b""
    kind: int = 0
    dims: list[int] = field(default_factory=list)
    entries: dict[str, str] = field(default_factory=dict)
    is_external: bool = False


def read_outline(file: Path) -> Outline | None:
    """Read the outline; None for a file that is not an ONNX model or cannot be parsed."""
    try:
        with file.open("rb", buffering=0) as opened:
            return _outline(_Pages(opened))
    except (OSError, UnicodeDecodeError, InvalidMessage):
        return None


def check_external(config: ModelConfig, file: Path, outline: Outline) -> list[Path]:
    """Return the external weight files. Reject files that are missing, truncated, or outside the model's folder."""
    ends: dict[str, int] = {}
    for part in outline.external:
        ends[part.location] = max(part.end, ends.get(part.location, 0))
    paths = []
    for location, end in ends.items():
        path = file.parent / location
        relative = PurePosixPath(location)
        outside = not location or "\0" in location or relative.is_absolute() or ".." in relative.parts
        if outside or not path.resolve().is_relative_to(file.parent.resolve()):
            raise InvalidArgument(
                f"model '{config.name}': '{file.name}' keeps weights in '{location[:128]}', which is outside its folder: "
                "put that file beside it, and export the model again so that it names it there"
            )
        if not path.is_file():
            raise FailedPrecondition(
                f"model '{config.name}': '{file.name}' keeps weights in '{location[:128]}', which is not there: put that "
                "file beside it"
            )
        size = path.stat().st_size
        if size < end:
            raise InvalidArgument(
                f"model '{config.name}': '{location[:128]}' has {size} bytes, and '{file.name}' keeps weights in it up to "
                f"byte {end}: it is damaged or belongs to another model; replace it"
            )
        paths.append(path)
    return paths


def _outline(data: _Pages) -> Outline:
    pieces: list[bytes] = []
    weights: dict[bytes, _Tensor] = {}
    external: list[External] = []
    inputs: set[bytes] = set()
    version, graphs, is_complete = 0, 0, True
    for number, wire, start, at, end in read_fields(data, 0, data.size):
        if number == _MODEL_IR_VERSION and wire == VARINT:
            version = decode_varint(data, at, end)[0]
        if number != _MODEL_GRAPH or wire != DELIMITED:
            pieces.append(data.piece(start, end))
            continue
        graphs += 1
        graph: list[bytes] = []
        for inner, inner_wire, inner_start, inner_at, inner_end in read_fields(data, at, end):
            if inner == _GRAPH_INITIALIZER and inner_wire == DELIMITED:
                tensor = _tensor(data, inner_at, inner_end)
                if tensor.is_external:
                    external.append(_external(tensor))
                    # Small external weights are rare; shapes that depend on them are found by opening the whole file.
                    is_complete = is_complete and _length(tensor) >= LARGE_BYTES
                if tensor.is_external or inner_end - inner_at >= LARGE_BYTES:
                    weights[tensor.name] = tensor
                    continue
            elif inner == _GRAPH_INPUT and inner_wire == DELIMITED:
                inputs.add(_named(data, inner_at, inner_end))
            graph.append(data.piece(inner_start, inner_end))
        graph += [
            encode_delimited(_GRAPH_INPUT, _value_info(value_info))
            for name, value_info in weights.items()
            if name not in inputs
        ]
        pieces.append(encode_delimited(_MODEL_GRAPH, b"".join(graph)))
    if graphs != 1:
        raise InvalidMessage
    given = weights.keys() & inputs if version >= _OVERRIDABLE_SINCE else set()
    names = frozenset(name.decode() for name in weights)
    return Outline(b"".join(pieces), names, frozenset(name.decode() for name in given), tuple(external), is_complete)


def _tensor(data: _Pages, start: int, end: int) -> _Tensor:
    tensor = _Tensor()
    for number, wire, _, at, stop in read_fields(data, start, end):
        if number == _TENSOR_DIMS and wire == VARINT:
            tensor.dims.append(decode_varint(data, at, stop)[0])
        elif number == _TENSOR_DIMS and wire == DELIMITED:
            position = at
            while position < stop:
                size, position = decode_varint(data, position, stop)
                tensor.dims.append(size)
        elif number == _TENSOR_TYPE and wire == VARINT:
            tensor.kind = decode_varint(data, at, stop)[0]
        elif number == _TENSOR_NAME and wire == DELIMITED:
            tensor.name = data.piece(at, stop)
        elif number == _TENSOR_LOCATION and wire == VARINT:
            tensor.is_external = decode_varint(data, at, stop)[0] == 1
        elif number == _TENSOR_EXTERNAL and wire == DELIMITED:
            entry = {
                inner: data.piece(a, b) for inner, kind, _, a, b in read_fields(data, at, stop) if kind == DELIMITED
            }
            tensor.entries[entry.get(_ENTRY_KEY, b"").decode()] = entry.get(_ENTRY_VALUE, b"").decode()
    return tensor


def _external(tensor: _Tensor) -> External:
    return External(tensor.entries.get("location", ""), _number(tensor.entries, "offset") + _length(tensor))


def _length(tensor: _Tensor) -> int:
    return _number(tensor.entries, "length")


def _number(entries: Mapping[str, str], key: str) -> int:
    text = entries.get(key, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidMessage
    return int(text)


def _named(data: _Pages, start: int, end: int) -> bytes:
    for number, wire, _, at, stop in read_fields(data, start, end):
        if number == _VALUE_NAME and wire == DELIMITED:
            return data.piece(at, stop)
    return b""


def _value_info(tensor: _Tensor) -> bytes:
    sizes = [
        encode_delimited(_SHAPE_DIMENSION, bytes((_DIMENSION_VALUE << 3 | VARINT,)) + encode_varint(size))
        for size in tensor.dims
    ]
    kind = bytes((_TENSOR_TYPE_ELEMENT << 3 | VARINT,)) + encode_varint(tensor.kind)
    described = encode_delimited(_TYPE_TENSOR, kind + encode_delimited(_TENSOR_TYPE_SHAPE, b"".join(sizes)))
    return encode_delimited(_VALUE_NAME, tensor.name) + encode_delimited(_VALUE_TYPE, described)
