# SPDX-License-Identifier: Apache-2.0
"""Which of the formats that are protobuf messages a file has, by its outermost fields; no schema and no copy is needed.

Called by `detect`. Files may be gigabytes, and may be anything: they are mapped, and lengths are held against the end.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Literal

from headrace.core.errors import InvalidArgument

Message = Literal["onnx", "saved_model", "graphdef", "netdef", "init_netdef", ""]

_MOST_FIELDS = 1_000_000
_MOST_DEPTH = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WORD = re.compile(rb"[A-Za-z0-9_.>]{1,128}")

_Data = mmap.mmap | bytes
_Field = tuple[int, int, int, int]
"""Its number, its wire type, and where its content begins and ends; of a number, the number and 0."""


class _Malformed(Exception):
    """These bytes are no message."""


class _CutOff(_Malformed):
    """They may be the beginning of one."""


def message_of(path: Path) -> Message:
    """The format of a file; "" when it is none of these."""
    with _mapped(path) as data:
        found: list[_Field] = []
        try:
            for field in islice(_fields(data, 0, len(data)), _MOST_FIELDS):
                found.append(field)  # noqa: PERF402  # those before the cut are kept
        except _CutOff:
            pass  # still what it is: its backend says that it is cut off
        except _Malformed:
            return ""
        kinds = {(number, wire) for number, wire, _, _ in found}
        if not found or any(number > 31 or wire in (_FIXED64, _FIXED32) for number, wire in kinds):
            return ""
        if found[0][:2] == (1, _VARINT):
            if kinds & {(7, _BYTES), (8, _BYTES)} and found[0][2] < 1000:
                return "onnx"
            return "saved_model" if (2, _BYTES) in kinds and found[0][2] == 1 else ""
        return _net_of(data, found)


def _net_of(data: _Data, found: list[_Field]) -> Message:
    operators = [field for field in found if field[:2] == (2, _BYTES)]
    types = [_text(data, operator, 4) for operator in operators]
    # A graph's own field 2 is its library, whose parts have no field 4 with a word in it.
    if operators and all(types) and sum(number == 1 for number, *_ in found) <= 1:
        return "init_netdef" if all(each.endswith(b"Fill") for each in types) else "netdef"
    nodes = [field for field in found if field[:2] == (1, _BYTES)]
    if nodes and _text(data, nodes[0], 1) and _text(data, nodes[0], 2):
        return "graphdef"
    return ""


def external_files(path: Path) -> list[str]:
    """The files beside an ONNX model that have its weights, as the model names them."""
    names: dict[str, None] = {}
    with _mapped(path) as data:
        try:
            for number, wire, start, end in _fields(data, 0, len(data)):
                if (number, wire) == (7, _BYTES):
                    _walk_graph(data, start, end, names, 0)
        except _Malformed:
            pass  # the backend says what is wrong with it
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise InvalidArgument(
                f"{path} wants its weights from '{name[:128]}', which is not beside it: save the model again with its "
                "external data in the same folder"
            )
        if not (path.parent / name).is_file():
            raise InvalidArgument(f"{path} keeps its weights in '{name[:128]}', which is not there: put it beside it")
    return list(names)


# The numbers are those of onnx.proto: GraphProto, NodeProto, AttributeProto, TensorProto, StringStringEntryProto.


def _walk_graph(data: _Data, start: int, end: int, names: dict[str, None], depth: int) -> None:
    if depth > _MOST_DEPTH:
        return
    for number, wire, begin, stop in _fields(data, start, end):
        if wire != _BYTES:
            continue
        if number == 1:
            _walk_node(data, begin, stop, names, depth)
        elif number == 5:
            _walk_tensor(data, begin, stop, names)


def _walk_node(data: _Data, start: int, end: int, names: dict[str, None], depth: int) -> None:
    for number, wire, begin, stop in _fields(data, start, end):
        if (number, wire) != (5, _BYTES):
            continue
        for inner, kind, first, last in _fields(data, begin, stop):
            if kind == _BYTES and inner in (5, 10):
                _walk_tensor(data, first, last, names)
            elif kind == _BYTES and inner in (6, 11):
                _walk_graph(data, first, last, names, depth + 1)


def _walk_tensor(data: _Data, start: int, end: int, names: dict[str, None]) -> None:
    for number, wire, begin, stop in _fields(data, start, end):
        if (number, wire) == (13, _BYTES):
            entry = {inner: data[first:last] for inner, _, first, last in _fields(data, begin, stop) if last}
            if entry.get(1) == b"location":
                names[entry.get(2, b"").decode(errors="replace")] = None


def _text(data: _Data, field: _Field, number: int) -> bytes:
    """A word in a message; b"" if there is none."""
    try:
        for inner, wire, start, end in _fields(data, field[2], field[3]):
            if (inner, wire) == (number, _BYTES):
                word = data[start : min(end, start + 200)]
                # Names of nodes have slashes.
                return word if _WORD.fullmatch(word.replace(b"/", b"_").replace(b":", b"_")) else b""
    except _Malformed:
        pass
    return b""


def _fields(data: _Data, start: int, end: int) -> Iterator[_Field]:
    position = start
    while position < end:
        key, position = _varint(data, position, end)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise _Malformed
        if wire == _VARINT:
            value, position = _varint(data, position, end)
            yield number, wire, value, 0
        elif wire == _BYTES:
            length, position = _varint(data, position, end)
            yield number, wire, position, min(end, position + length)
            position += length
        elif wire in (_FIXED64, _FIXED32):
            width = 8 if wire == _FIXED64 else 4
            yield number, wire, position, min(end, position + width)
            position += width
        else:
            raise _Malformed


def _varint(data: _Data, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _CutOff if position >= end else _Malformed


@contextmanager
def _mapped(path: Path) -> Iterator[_Data]:
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            yield b""
            return
        try:
            yield mapped
        finally:
            mapped.close()
