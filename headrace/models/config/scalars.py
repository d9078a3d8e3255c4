# SPDX-License-Identifier: Apache-2.0
"""One written value held against the type of its field.

Called by `fitting`. A value that does not fit is answered with what to write instead.
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from typing import Any, Literal

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor

from headrace.models.config.trees import Scalar

Syntax = Literal["text", "json", "yaml"]

_RANGES = {
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
}
_TRUE, _FALSE = ("true", "True", "t", "1"), ("false", "False", "f", "0")
_OCTAL = re.compile(r"(-?)0([0-9]+)")
_QUOTED_NUMBERS = re.compile(r"\s*\[?\s*-?[0-9]+(?:[\s,]+-?[0-9]+)*[\s,]*\]?\s*")
_NEVER_A_NUMBER = 5000
"""More digits than Python turns into a number, or anybody writes."""

_TYPE_WORDS = {
    "FLOAT": "FP32", "FLOAT32": "FP32", "F32": "FP32", "SINGLE": "FP32",
    "FLOAT16": "FP16", "HALF": "FP16", "F16": "FP16",
    "FLOAT64": "FP64", "DOUBLE": "FP64", "F64": "FP64",
    "BFLOAT16": "BF16", "BFLOAT": "BF16",
    "INT": "INT32", "INTEGER": "INT32", "LONG": "INT64", "SHORT": "INT16", "BYTE": "UINT8", "CHAR": "INT8",
    "BYTES": "STRING", "STR": "STRING", "TEXT": "STRING", "OBJECT": "STRING",
    "BOOLEAN": "BOOL",
}  # fmt: skip
"""What other programs call our data types."""


class Misfit(Exception):
    """The value does not fit; the text says what would."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def read_scalar(field: FieldDescriptor, scalar: Scalar, syntax: Syntax) -> Any:
    """The value as protobuf's JSON has it."""
    if field.type in _RANGES:
        return _whole(field, scalar, syntax)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return _number(scalar, syntax)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return _bool(field, scalar, syntax)
    if field.enum_type is not None:
        return _enum(field, field.enum_type, scalar, syntax)
    if scalar.kind != "text":
        raise Misfit(f'write "{shown(scalar.text)}" in quotes')
    return scalar.text


def shown(text: str) -> str:
    """A value, short enough to be part of a message."""
    return text if len(text) <= 40 else text[:40] + "..."


def nearest(word: str, known: list[str]) -> str | None:
    """The known word that somebody who wrote `word` most likely meant."""
    close = get_close_matches(word[:64], known, 1, 0.6)
    return close[0] if close else None


def _whole(field: FieldDescriptor, scalar: Scalar, syntax: Syntax) -> int:
    text = scalar.text
    if scalar.kind == "text" and (syntax == "text" or not re.fullmatch(r"-?[0-9]+", text)):
        if not _QUOTED_NUMBERS.fullmatch(text[:1000]):
            raise Misfit(f"takes a whole number, not the text '{shown(text)}'")
        numbers = re.findall(r"-?[0-9]+", text[:1000])
        meant = f"[ {', '.join(numbers)} ]" if field.is_repeated else numbers[0]
        raise Misfit(f"takes whole numbers, not a text: write {field.name}: {shown(meant)} without quotes")
    value = _int(text, syntax)
    if value is None or scalar.kind not in ("number", "text"):
        raise Misfit(f"takes a whole number, not '{shown(text)}'")
    low, high = _RANGES[field.type]
    if low == 0 and value < 0:
        raise Misfit(f"takes no negative numbers, and {shown(text)} is one")
    if not low <= value <= high:
        raise Misfit(f"takes numbers from {low} to {high}, and {shown(text)} is not")
    return value


def _int(text: str, syntax: Syntax) -> int | None:
    if len(text) > _NEVER_A_NUMBER:
        return None
    octal = _OCTAL.fullmatch(text) if syntax == "text" else None
    try:
        return int(f"{octal[1]}0o{octal[2]}" if octal else text, 0)
    except ValueError:
        pass
    if syntax == "text":
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else None


def _number(scalar: Scalar, syntax: Syntax) -> float | str:
    text = scalar.text
    words = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}
    value = words.get(text.lower().removeprefix("."))
    if value is None and scalar.kind == "number" and len(text) <= _NEVER_A_NUMBER:
        try:
            value = float(text.rstrip("fF") if syntax == "text" and not text.lower().startswith("0x") else text)
        except ValueError:
            value = None
    if value is None or (syntax == "text" and scalar.kind == "text"):
        quoted = " without quotes" if scalar.kind == "text" else ""
        raise Misfit(f"takes a number{quoted}, not '{shown(text)}'")
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _bool(field: FieldDescriptor, scalar: Scalar, syntax: Syntax) -> bool:
    fits = scalar.kind in ("word", "number") if syntax == "text" else scalar.kind == "bool"
    if not fits or scalar.text not in _TRUE + _FALSE:
        word = scalar.text.lower()
        meant = word if word in ("true", "false") else "true or false"
        raise Misfit(f"write {field.name}: {meant}" + (", without quotes" if scalar.kind == "text" else ""))
    return scalar.text in _TRUE


def _enum(field: FieldDescriptor, enum: EnumDescriptor, scalar: Scalar, syntax: Syntax) -> str:
    text = scalar.text
    what = field.name.replace("_", " ")
    if scalar.kind == "number":
        number = _int(text, syntax)
        value = None if number is None else enum.values_by_number.get(number)
        if value is None:
            raise Misfit(f"{shown(text)} is not a {what}; write one of {_names(enum)}")
        return value.name
    if text in enum.values_by_name and (syntax != "text" or scalar.kind == "word"):
        return text
    if text in enum.values_by_name:
        raise Misfit(f"write {text} without quotes")
    meant = _meant(enum, text)
    if meant is None:
        raise Misfit(f"{shown(text)} is not a {what}; write one of {_names(enum)}")
    raise Misfit(f"{shown(text)} is not a {what}; did you mean {meant}?")


def _meant(enum: EnumDescriptor, text: str) -> str | None:
    names = list(enum.values_by_name)
    word = text[:64].upper().replace("-", "_")
    if enum.name == "DataType":
        bare = word.removeprefix("TYPE_").removeprefix("DT_")
        names.remove("TYPE_INVALID")
        if f"TYPE_{_TYPE_WORDS.get(bare, bare)}" in names:
            return f"TYPE_{_TYPE_WORDS.get(bare, bare)}"
    if word in names:
        return word
    ending = [name for name in names if name.endswith(f"_{word}")]
    return ending[0] if len(ending) == 1 else nearest(word, names)


def _names(enum: EnumDescriptor) -> str:
    return ", ".join(name for name in enum.values_by_name if name != "TYPE_INVALID")
