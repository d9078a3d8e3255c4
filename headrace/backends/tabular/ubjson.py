# SPDX-License-Identifier: Apache-2.0
"""A reader and writer of the subset of UBJSON that XGBoost writes.

XGBoost's own reader goes past the end of a truncated file and crashes the process; this one raises `ValueError`. Arrays
of one type are numpy arrays, other arrays are lists.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.backends.contract import Array

DEEPEST = 64
_MANY = 256

_HERE = b"here"
_OBJECT, _ARRAY, _TEXT = b"{[S"

_NUMBERS: dict[int, tuple[struct.Struct, np.dtype[Any]]] = {
    ord("i"): (struct.Struct(">b"), np.dtype(">i1")),
    ord("U"): (struct.Struct(">B"), np.dtype(">u1")),
    ord("I"): (struct.Struct(">h"), np.dtype(">i2")),
    ord("l"): (struct.Struct(">i"), np.dtype(">i4")),
    ord("L"): (struct.Struct(">q"), np.dtype(">i8")),
    ord("d"): (struct.Struct(">f"), np.dtype(">f4")),
    ord("D"): (struct.Struct(">d"), np.dtype(">f8")),
}
_CONSTANTS: dict[int, bool | None] = {ord("T"): True, ord("F"): False, ord("Z"): None}
_MARKERS = {dtype.newbyteorder("="): bytes([marker]) for marker, (_, dtype) in _NUMBERS.items()}
_LENGTH = struct.Struct(">cq")
_BELOW = (127, 2**15 - 1, 2**31 - 1)
"""The largest integers that XGBoost writes with one, two and four bytes."""

Packer = Callable[[bytearray, int, int], tuple[Any, int] | None]
"""Reads a list in another way: from the data, the start of its items and their count to a value and the end position."""


@dataclass(frozen=True, slots=True)
class EncodedList:
    """A list that was not decoded: where its items are in the data."""

    begin: int
    end: int
    count: int


def decode(data: bytearray, packers: Mapping[str, Packer] | None = None) -> Any:
    """Decode the value that fills `data` exactly. A packer reads the members of its name, unless it returns None."""
    reader = _Reader(data, packers or {})
    value = reader.value(0)
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes are left after the end")
    return value


def encode(value: Any) -> bytearray:
    """Encode objects, lists, strings, numbers and numpy arrays as XGBoost reads them."""
    pieces: list[bytes] = []
    _write(value, pieces)
    return bytearray().join(pieces)


def encode_around(data: bytearray, kept: EncodedList, value: Any) -> bytearray:
    """Encode a value that contains the kept list, in place in `data`: a copy would take longer than all the rest."""
    pieces: list[bytes] = []
    _write(value, pieces)
    # Compared by identity: a string may have the same content.
    place = next(index for index, piece in enumerate(pieces) if piece is _HERE)
    data[kept.end :] = b"".join(pieces[place + 1 :])
    data[: kept.begin] = b"".join(pieces[:place])
    return data


class _Reader:
    def __init__(self, data: bytearray, packers: Mapping[str, Packer]) -> None:
        self._data = data
        self._packers = packers
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        marker = self._take(1)[0]
        if marker in _NUMBERS:
            return self._number(marker)
        if marker == _OBJECT:
            return self._object(depth)
        if marker == _ARRAY:
            return self._array(depth)
        if marker == _TEXT:
            return self._text()
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        raise ValueError(f"byte {self.position - 1} begins no value")

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while self._peek() != b"}":
            name = self._text()
            if name in members:
                raise ValueError("a name is there twice")
            if name not in self._packers or not self._packed(name, members):
                members[name] = self.value(depth + 1)
        self.position += 1
        return members

    def _packed(self, name: str, members: dict[str, Any]) -> bool:
        begin = self.position
        if self._take(2) == b"[#":
            packed = self._packers[name](self._data, self.position + 9, self._length())
            if packed is not None:
                members[name], self.position = packed
                return True
        self.position = begin
        return False

    def _array(self, depth: int) -> Any:
        if self._peek() == b"$":
            kind = self._take(3)
            if kind[1] not in _NUMBERS or kind[2:] != b"#":
                raise ValueError("an array's type is not known")
            dtype = _NUMBERS[kind[1]][1]
            raw = self._take(self._length() * dtype.itemsize)
            return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
        if self._peek() == b"#":
            self.position += 1
            return self._counted(self._length(), depth)
        items = []
        while self._peek() != b"]":
            items.append(self.value(depth + 1))
        self.position += 1
        return items

    def _counted(self, count: int, depth: int) -> list[Any]:
        items: list[Any] = []
        # Each value takes at least one byte, so a wrong count ends with the data.
        while len(items) < count:
            if count - len(items) < _MANY or not (alike := self._alike(count - len(items))):
                alike = [self.value(depth + 1)]
            items += alike
        return items

    def _alike(self, most: int) -> list[Any]:
        """Read consecutive numbers of one type together: some lists have one number per tree."""
        marker = self._data[self.position : self.position + 1]
        if not marker or marker[0] not in _NUMBERS:
            return []
        dtype = _NUMBERS[marker[0]][1]
        pair = np.dtype([("marker", "S1"), ("value", dtype)])
        count = min(most, _MANY, (len(self._data) - self.position) // pair.itemsize)
        pairs = np.frombuffer(self._data, pair, count, self.position)
        others = np.flatnonzero(pairs["marker"] != bytes(marker))
        count = int(others[0]) if others.size else count
        self.position += count * pair.itemsize
        read: list[Any] = pairs["value"][:count].tolist()
        return read

    def _text(self) -> str:
        return self._take(self._length()).decode()

    def _length(self) -> int:
        # XGBoost writes each length as 64 bits and reads nothing else.
        marker, length = _LENGTH.unpack(self._take(9))
        if marker != b"L":
            raise ValueError(f"byte {self.position - 9} begins no length")
        return int(length)

    def _number(self, marker: int) -> int | float:
        layout = _NUMBERS[marker][0]
        number: int | float = layout.unpack(self._take(layout.size))[0]
        return number

    def _peek(self) -> bytearray:
        return self._data[self.position : self.position + 1]

    def _take(self, count: int) -> bytearray:
        end = self.position + count
        if count < 0 or end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, in the middle of a value")
        taken = self._data[self.position : end]
        self.position = end
        return taken


def _write(value: Any, pieces: list[bytes]) -> None:
    if isinstance(value, dict):
        pieces.append(b"{")
        for name, member in value.items():
            _write_text(name, pieces)
            _write(member, pieces)
        pieces.append(b"}")
    elif isinstance(value, list):
        _write_list(value, pieces)
    elif isinstance(value, EncodedList):
        pieces.extend((b"[#", _LENGTH.pack(b"L", value.count), _HERE))
    elif isinstance(value, np.ndarray):
        pieces.extend((b"[$", _MARKERS[value.dtype], b"#", _LENGTH.pack(b"L", value.size)))
        pieces.append(value.astype(value.dtype.newbyteorder(">")).tobytes())
    elif isinstance(value, str):
        pieces.append(b"S")
        _write_text(value, pieces)
    elif isinstance(value, bool):
        pieces.append(b"T" if value else b"F")
    elif isinstance(value, int):
        pieces.append(_LENGTH.pack(b"L", value))
    elif isinstance(value, float):
        pieces.append(b"d" + struct.pack(">f", value))
    else:
        raise TypeError(f"{type(value).__name__} has no form in UBJSON")


def _write_list(items: list[Any], pieces: list[bytes]) -> None:
    pieces.extend((b"[#", _LENGTH.pack(b"L", len(items))))
    if set(map(type, items)) == {int}:
        _write_numbers(np.array(items), pieces)
        return
    for item in items:
        _write(item, pieces)


def _write_numbers(numbers: Array, pieces: list[bytes]) -> None:
    """A list with one number per tree. It takes as few bytes as XGBoost writes, so that the data read never has to grow."""
    sizes = np.searchsorted(_BELOW, numbers, side="right")
    begins = np.flatnonzero(np.diff(sizes, prepend=-1))
    if numbers.min() < 0 or begins.size > _MANY:
        begins, sizes = begins[:1], np.full_like(sizes, len(_BELOW))
    for begin, end in pairwise((*begins.tolist(), numbers.size)):
        marker = b"iIlL"[sizes[begin]]
        written = np.empty(end - begin, [("marker", "S1"), ("value", _NUMBERS[marker][1])])
        written["marker"], written["value"] = bytes([marker]), numbers[begin:end]
        pieces.append(written.tobytes())


def _write_text(text: str, pieces: list[bytes]) -> None:
    raw = text.encode()
    pieces.extend((_LENGTH.pack(b"L", len(raw)), raw))
