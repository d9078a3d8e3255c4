# SPDX-License-Identifier: Apache-2.0
"""Check a parsed configuration against the ModelConfig schema: unknown fields and values of the wrong type."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from headrace.core.names import nearest
from headrace.models.config.syntax import Block, Entry, Items, Node, Scalar

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
_MAX_DIGITS = 5000
"""More digits than Python converts to a number."""

_TYPE_SYNONYMS = {
    "FLOAT": "FP32", "FLOAT32": "FP32", "F32": "FP32", "SINGLE": "FP32",
    "FLOAT16": "FP16", "HALF": "FP16", "F16": "FP16",
    "FLOAT64": "FP64", "DOUBLE": "FP64", "F64": "FP64",
    "BFLOAT16": "BF16", "BFLOAT": "BF16",
    "INT": "INT32", "INTEGER": "INT32", "LONG": "INT64", "SHORT": "INT16", "BYTE": "UINT8", "CHAR": "INT8",
    "BYTES": "STRING", "STR": "STRING", "TEXT": "STRING", "OBJECT": "STRING",
    "BOOLEAN": "BOOL",
}  # fmt: skip
"""Names of data types in other programs."""


class TypeMismatch(Exception):
    """Raised when a value does not fit its field; the text says what would."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def read_scalar(field: FieldDescriptor, scalar: Scalar, syntax: Syntax) -> Any:
    """Return the value as protobuf's JSON writes it."""
    if field.type in _RANGES:
        return _read_int(field, scalar, syntax)
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return _read_float(scalar, syntax)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return _read_bool(field, scalar, syntax)
    if field.enum_type is not None:
        return _read_enum(field, field.enum_type, scalar, syntax)
    if scalar.kind != "text":
        raise TypeMismatch(f'write "{shown(scalar.text)}" in quotes')
    return scalar.text


def shown(text: str) -> str:
    """Shorten a value for a message."""
    return text if len(text) <= 40 else text[:40] + "..."


def _read_int(field: FieldDescriptor, scalar: Scalar, syntax: Syntax) -> int:
    text = scalar.text
    if scalar.kind == "text" and (syntax == "text" or not re.fullmatch(r"-?[0-9]+", text)):
        if not _QUOTED_NUMBERS.fullmatch(text[:1000]):
            raise TypeMismatch(f"takes a whole number, not the text '{shown(text)}'")
        numbers = re.findall(r"-?[0-9]+", text[:1000])
        suggestion = f"[ {', '.join(numbers)} ]" if field.is_repeated else numbers[0]
        raise TypeMismatch(f"takes whole numbers, not a text: write {field.name}: {shown(suggestion)} without quotes")
    value = _parse_int(text, syntax)
    if value is None or scalar.kind not in ("number", "text"):
        raise TypeMismatch(f"takes a whole number, not '{shown(text)}'")
    low, high = _RANGES[field.type]
    if low == 0 and value < 0:
        raise TypeMismatch(f"takes no negative numbers, and {shown(text)} is one")
    if not low <= value <= high:
        raise TypeMismatch(f"takes numbers from {low} to {high}, and {shown(text)} is not")
    return value


def _parse_int(text: str, syntax: Syntax) -> int | None:
    if len(text) > _MAX_DIGITS:
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


def _read_float(scalar: Scalar, syntax: Syntax) -> float | str:
    text = scalar.text
    words = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}
    value = words.get(text.lower().removeprefix("."))
    if value is None and scalar.kind == "number" and len(text) <= _MAX_DIGITS:
        try:
            value = float(text.rstrip("fF") if syntax == "text" and not text.lower().startswith("0x") else text)
        except ValueError:
            value = None
    if value is None or (syntax == "text" and scalar.kind == "text"):
        quoted = " without quotes" if scalar.kind == "text" else ""
        raise TypeMismatch(f"takes a number{quoted}, not '{shown(text)}'")
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _read_bool(field: FieldDescriptor, scalar: Scalar, syntax: Syntax) -> bool:
    fits = scalar.kind in ("word", "number") if syntax == "text" else scalar.kind == "bool"
    if not fits or scalar.text not in _TRUE + _FALSE:
        text = scalar.text.lower()
        suggestion = text if text in ("true", "false") else "true or false"
        raise TypeMismatch(f"write {field.name}: {suggestion}" + (", without quotes" if scalar.kind == "text" else ""))
    return scalar.text in _TRUE


def _read_enum(field: FieldDescriptor, enum: EnumDescriptor, scalar: Scalar, syntax: Syntax) -> str:
    text = scalar.text
    what = field.name.replace("_", " ")
    if scalar.kind == "number":
        number = _parse_int(text, syntax)
        value = None if number is None else enum.values_by_number.get(number)
        if value is None:
            raise TypeMismatch(f"{shown(text)} is not a {what}; write one of {_names(enum)}")
        return value.name
    if text in enum.values_by_name and (syntax != "text" or scalar.kind == "word"):
        return text
    if text in enum.values_by_name:
        raise TypeMismatch(f"write {text} without quotes")
    suggestion = _suggestion(enum, text)
    if suggestion is None:
        raise TypeMismatch(f"{shown(text)} is not a {what}; write one of {_names(enum)}")
    raise TypeMismatch(f"{shown(text)} is not a {what}; did you mean {suggestion}?")


def _suggestion(enum: EnumDescriptor, text: str) -> str | None:
    names = list(enum.values_by_name)
    word = text[:64].upper().replace("-", "_")
    if enum.name == "DataType":
        bare = word.removeprefix("TYPE_").removeprefix("DT_")
        names.remove("TYPE_INVALID")
        if f"TYPE_{_TYPE_SYNONYMS.get(bare, bare)}" in names:
            return f"TYPE_{_TYPE_SYNONYMS.get(bare, bare)}"
    if word in names:
        return word
    ending = [name for name in names if name.endswith(f"_{word}")]
    return ending[0] if len(ending) == 1 else nearest(word, names)


def _names(enum: EnumDescriptor) -> str:
    return ", ".join(name for name in enum.values_by_name if name != "TYPE_INVALID")


MAX_PROBLEMS = 50
"""Maximum number of problems; each costs a search for the nearest name."""

_FIELD_SYNONYMS = {
    "shape": "dims", "dim": "dims", "type": "data_type", "dtype": "data_type", "datatype": "data_type",
    "inputs": "input", "outputs": "output", "instances": "instance_group", "instance_groups": "instance_group",
    "batch_size": "max_batch_size", "warmup": "model_warmup", "labels": "label_filename", "steps": "step",
    "preferred_batch_sizes": "preferred_batch_size", "version": "version_policy", "model_name": "name",
}  # fmt: skip
"""Common mistakes that a search by letters does not find."""

_DELAY, _AUTO = "max_queue_delay_microseconds", "max_queue_delay_auto"


@dataclass(frozen=True, slots=True)
class SchemaProblem:
    """A problem, without its file."""

    line: int
    field: str
    text: str


@dataclass(slots=True)
class CheckResult:
    """The result of checking a tree."""

    problems: list[SchemaProblem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    """Lines by field: `input[0].dims` -> 9."""
    values: dict[str, Any] = field(default_factory=dict)
    """The whole configuration, as protobuf's JSON."""
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    """Replacements in a protobuf text, in order, so that protobuf can parse it."""

    def edited(self, text: str) -> str:
        """Return the text with the replacements. Line numbers stay the same."""
        pieces, position = [], 0
        for start, end, replacement in self.edits:
            pieces += [text[position:start], replacement]
            position = end
        return "".join([*pieces, text[position:]])


class _TooManyProblemsError(Exception):
    """Raised when there are too many problems."""


def check_tree(tree: Block, root: Descriptor, syntax: Syntax) -> CheckResult:
    """Check the tree against the schema."""
    checker = _Checker(root, syntax)
    try:
        checker.result.values = checker.block(tree, root, "", "")
    except _TooManyProblemsError:
        pass
    return checker.result


class _Checker:
    """Checks a tree. `place` is the path of a field (`input[0].dims`), `name` its name in messages (`input.dims`)."""

    def __init__(self, root: Descriptor, syntax: Syntax) -> None:
        self.result = CheckResult()
        self._root = root
        self._syntax = syntax

    def block(self, block: Block, message: Descriptor, place: str, name: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for entry in block.entries:
            field = self._field(entry, message, name)
            if field is None or (self._syntax == "json" and _is_null(entry.value)):
                continue
            inner = f"{place}.{field.name}" if place else field.name
            self.result.lines.setdefault(inner, entry.line)
            if self._clashes(entry, field, seen, name):
                continue
            self._value(entry, field, inner, f"{name}.{field.name}" if name else field.name, values)
        return values

    def _problem(self, line: int, name: str, text: str) -> None:
        self.result.problems.append(SchemaProblem(line, name, text))
        if len(self.result.problems) >= MAX_PROBLEMS:
            raise _TooManyProblemsError

    def _field(self, entry: Entry, message: Descriptor, name: str) -> FieldDescriptor | None:
        field = message.fields_by_name.get(entry.name)
        if field is None and self._syntax != "text":
            field = message.fields_by_camelcase_name.get(entry.name)
        if field is None and entry.name == "tags" and message is self._root:
            self.result.edits.append((entry.start, entry.end, "metric_tags"))
            return message.fields_by_name["metric_tags"]
        if field is None:
            self._problem(
                entry.line, name, f"'{shown(entry.name)}' is not a field here; {self._advice(entry, message)}"
            )
        elif field.name == _DELAY and _AUTO in message.fields_by_name and self._is_auto(entry.value):
            self.result.edits.append((entry.start, entry.end, _AUTO))
            return message.fields_by_name[_AUTO]
        return field

    def _is_auto(self, value: Node) -> bool:
        kind = "word" if self._syntax == "text" else "text"
        return isinstance(value, Scalar) and value.kind == kind and value.text == "auto"

    def _advice(self, entry: Entry, message: Descriptor) -> str:
        if message is not self._root and entry.name in self._root.fields_by_name and entry.name != "name":
            return "it belongs at the top, outside of this block"
        if _FIELD_SYNONYMS.get(entry.name) in message.fields_by_name:
            return f"did you mean '{_FIELD_SYNONYMS[entry.name]}'?"
        for outer in message.fields:
            kind = outer.message_type
            if kind is not None and entry.name in kind.fields_by_name and not kind.GetOptions().map_entry:
                return f"it belongs into '{outer.name}'"
        names = list(message.fields_by_name)
        suggestion = nearest(entry.name, names)
        return f"did you mean '{suggestion}'?" if suggestion else f"fields here are {', '.join(names)}"

    def _clashes(self, entry: Entry, field: FieldDescriptor, seen: dict[str, int], name: str) -> bool:
        """Return whether the field was written before, or one that excludes it."""
        once = not field.is_repeated or self._syntax != "text"
        if once and field.name in seen:
            self._problem(
                entry.line, name, f"'{entry.name}' is written twice, first in line {seen[field.name]}; remove one"
            )
            return True
        choice = field.containing_oneof
        rival = next((f.name for f in choice.fields if f.name in seen), None) if choice is not None else None
        seen.setdefault(field.name, entry.line)
        if rival is not None and rival != field.name:
            self._problem(
                entry.line, name, f"'{field.name}' excludes '{rival}' of line {seen[rival]}; keep one of them"
            )
            return True
        return False

    def _value(self, entry: Entry, field: FieldDescriptor, place: str, name: str, values: dict[str, Any]) -> None:
        value = entry.value
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map and self._syntax != "text":
            values[field.name] = self._map(value, field, place, name)
        elif not field.is_repeated:
            values[field.name] = self._one(value, field, place, name)
        elif isinstance(value, Items):
            items = values.setdefault(field.name, [])
            for item in value.items:
                items.append(self._one(item, field, f"{place}[{len(items)}]", name))
        elif self._syntax == "text":
            items = values.setdefault(field.name, [])
            items.append(self._one(value, field, f"{place}[{len(items)}]", name))
        else:
            self._problem(value.line, name, f"takes a list: write {self._example(field)}")

    def _example(self, field: FieldDescriptor) -> str:
        inside = "{ ... }" if field.message_type is not None else "..."
        return f'"{field.name}": [ {inside} ]' if self._syntax == "json" else f"{field.name}: [ {inside} ]"

    def _map(self, value: Node, field: FieldDescriptor, place: str, name: str) -> dict[str, Any]:
        if not isinstance(value, Block):
            self._problem(value.line, name, "takes names with values, not a list or a single value")
            return {}
        entries: Any = field.message_type
        key, inner = entries.fields_by_name["key"], entries.fields_by_name["value"]
        values: dict[str, Any] = {}
        for entry in value.entries:
            try:
                read_scalar(key, Scalar(entry.line, "text", entry.name), self._syntax)
            except TypeMismatch as mismatch:
                self._problem(entry.line, name, f"'{shown(entry.name)}' cannot stand here: a name here {mismatch.text}")
            if entry.name in values:
                self._problem(entry.line, name, f"'{shown(entry.name)}' is written twice; remove one")
            entry_place = f"{place}.{entry.name}"
            self.result.lines.setdefault(entry_place, entry.line)
            values[entry.name] = self._one(entry.value, inner, entry_place, f"{name}.{shown(entry.name)}")
        return values

    def _one(self, value: Node, field: FieldDescriptor, place: str, name: str) -> Any:
        self.result.lines.setdefault(place, value.line)
        if isinstance(value, Items):
            self._problem(value.line, name, "takes one value, not a list")
        elif field.message_type is not None:
            return self._message(value, field, field.message_type, place, name)
        elif isinstance(value, Block):
            self._problem(value.line, name, "takes a single value, not a block in { }")
        elif value.kind == "null":
            self._problem(value.line, name, "has no value; write one, or remove the line")
        elif field.name == _AUTO and value.text == "auto":
            self.result.edits.append((value.start, value.end, "true"))
            return True
        else:
            try:
                return read_scalar(field, value, self._syntax)
            except TypeMismatch as mismatch:
                self._problem(value.line, name, mismatch.text)
        return None

    def _message(self, value: Node, field: FieldDescriptor, message: Descriptor, place: str, name: str) -> Any:
        if isinstance(value, Block):
            if message.GetOptions().map_entry:
                place = f"{place.rpartition('[')[0]}.{_key(value)}"
                self.result.lines.setdefault(place, value.line)
            return self.block(value, message, place, name)
        if _is_null(value):
            self._problem(value.line, name, f"has no value; write {field.name}: {{}} for all defaults, or remove it")
            return None
        last = place.rpartition(".")[2]
        start = {"text": field.name, "yaml": f"{last}:"}.get(self._syntax, f'"{last}":')
        written = "{ ... }"
        if message.name == "ModelParameter" and isinstance(value, Scalar):
            member = '"string_value"' if self._syntax == "json" else "string_value"
            written = f'{{ {member}: "{shown(value.text)}" }}'
        self._problem(value.line, name, f"takes a block: write {start} {written}")
        return None


def _key(block: Block) -> str:
    for entry in block.entries:
        if entry.name == "key" and isinstance(entry.value, Scalar):
            return entry.value.text
    return ""


def _is_null(value: Node) -> bool:
    return isinstance(value, Scalar) and value.kind == "null"
