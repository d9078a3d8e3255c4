# SPDX-License-Identifier: Apache-2.0
"""Reads and writes UBJSON, the part of it that XGBoost writes. Called by `xgboost_file`; knows no model.

XGBoost's own reader goes past the end of a file that was cut short and takes the process with it; this one raises
`ValueError`. Arrays of one type are numpy arrays, other arrays are lists.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

DEEPEST = 64

_NUMBERS: dict[bytes, tuple[struct.Struct, np.dtype[Any]]] = {
    b"i": (struct.Struct(">b"), np.dtype(">i1")),
    b"U": (struct.Struct(">B"), np.dtype(">u1")),
    b"I": (struct.Struct(">h"), np.dtype(">i2")),
    b"l": (struct.Struct(">i"), np.dtype(">i4")),
    b"L": (struct.Struct(">q"), np.dtype(">i8")),
    b"d": (struct.Struct(">f"), np.dtype(">f4")),
    b"D": (struct.Struct(">d"), np.dtype(">f8")),
}
_CONSTANTS: dict[bytes, bool | None] = {b"T": True, b"F": False, b"Z": None}
_MARKERS = {dtype.newbyteorder("="): marker for marker, (_, dtype) in _NUMBERS.items()}
_LENGTH = struct.Struct(">cq")


def decode(data: bytes) -> Any:
    """The value that fills `data` exactly."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes are left after the end")
    return value


def encode(value: Any) -> bytes:
    """Objects, lists, text, numbers and numpy arrays as XGBoost reads them."""
    pieces: list[bytes] = []
    _write(value, pieces)
    return b"".join(pieces)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        marker = self._take(1)
        if marker == b"{":
            return self._object(depth)
        if marker == b"[":
            return self._array(depth)
        if marker == b"S":
            return self._text()
        if marker in _NUMBERS:
            return self._number(marker)
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        raise ValueError(f"byte {self.position - 1} begins no value")

    def _object(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while self._peek() != b"}":
            name = self._text()
            if name in members:
                raise ValueError("a name is there twice")
            members[name] = self.value(depth + 1)
        self.position += 1
        return members

    def _array(self, depth: int) -> Any:
        if self._peek() == b"$":
            self.position += 1
            kind = self._take(1)
            if kind not in _NUMBERS or self._take(1) != b"#":
                raise ValueError("an array's type is not known")
            dtype = _NUMBERS[kind][1]
            raw = self._take(self._length() * dtype.itemsize)
            return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))
        if self._peek() == b"#":
            self.position += 1
            # Each value takes a byte at least, so a count that lies ends with the data.
            return [self.value(depth + 1) for _ in range(self._length())]
        items = []
        while self._peek() != b"]":
            items.append(self.value(depth + 1))
        self.position += 1
        return items

    def _text(self) -> str:
        return self._take(self._length()).decode()

    def _length(self) -> int:
        # XGBoost writes each length as 64 bits, and reads no other.
        if self._take(1) != b"L":
            raise ValueError(f"byte {self.position - 1} begins no length")
        return int(self._number(b"L"))

    def _number(self, marker: bytes) -> int | float:
        layout = _NUMBERS[marker][0]
        number: int | float = layout.unpack(self._take(layout.size))[0]
        return number

    def _peek(self) -> bytes:
        return self._data[self.position : self.position + 1]

    def _take(self, count: int) -> bytes:
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
        pieces.extend((b"[#", _LENGTH.pack(b"L", len(value))))
        for item in value:
            _write(item, pieces)
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


def _write_text(text: str, pieces: list[bytes]) -> None:
    raw = text.encode()
    pieces.extend((_LENGTH.pack(b"L", len(raw)), raw))
