# SPDX-License-Identifier: Apache-2.0
"""A reader of the two files of a Caffe2 model: `model.netdef`, and `init_model.netdef` with the weights.

It removes the weights from the bytes before protobuf parses the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from headrace.backends.contract import Array
from headrace.backends.netdef.operator import Operator
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.protobuf import Schema
from headrace.core.wire_format import DELIMITED, FIXED32, InvalidMessage, WireField, encode_delimited, read_fields


@cache
def caffe2_schema() -> Schema:
    """Return Caffe2's protobuf schema, loaded on first use."""
    return Schema((files("headrace.backends.netdef") / "_generated" / "caffe2.binpb").read_bytes())


def caffe2_message(name: str) -> Any:
    """Return a message class: "NetDef", "OperatorDef" or "Argument"."""
    return caffe2_schema().message(f"caffe2.{name}")


Weights = dict[tuple[int, int], Array]
"""Weights by the indices of operator and argument."""

_LARGE = 4096
"""Bytes. Smaller operators are parsed by protobuf."""

_OPERATOR, _ARGUMENT, _FLOATS = 2, 5, 5
_FLOAT_TAG = _FLOATS << 3 | FIXED32


def extract_weights(content: bytes) -> tuple[bytes, Weights]:
    """Return the NetDef without its large lists of floats, and those lists."""
    weights: Weights = {}
    try:
        return _strip_net(content, weights), weights
    except InvalidMessage:
        return content, {}


def _strip_net(content: bytes, weights: Weights) -> bytes:
    parts: list[bytes] = []
    index = 0
    for field in read_fields(content, 0, len(content)):
        if field.number == _OPERATOR and field.wire_type == DELIMITED:
            if field.end - field.content > _LARGE:
                body = _strip_operator(content, field, index, weights)
                parts.append(encode_delimited(_OPERATOR, body))
            else:
                parts.append(content[field.start : field.end])
            index += 1
        else:
            parts.append(content[field.start : field.end])
    return b"".join(parts)


def _strip_operator(content: bytes, operator: WireField, index: int, weights: Weights) -> bytes:
    parts: list[bytes] = []
    number = 0
    for field in read_fields(content, operator.content, operator.end):
        if field.number == _ARGUMENT and field.wire_type == DELIMITED:
            floats = _floats(content, field) if field.end - field.content > _LARGE else None
            if floats is None:
                parts.append(content[field.start : field.end])
            else:
                begin, weights[index, number] = floats
                head = content[field.content : begin]
                parts.append(encode_delimited(_ARGUMENT, head))
            number += 1
        else:
            parts.append(content[field.start : field.end])
    return b"".join(parts)


def _floats(content: bytes, argument: WireField) -> tuple[int, Array] | None:
    """Return the position of the floats and the floats; None if other data follows them, or there are none."""
    for field in read_fields(content, argument.content, argument.end):
        if field.number != _FLOATS:
            continue
        size = argument.end - field.start
        if field.wire_type == FIXED32 and size % 5 == 0:
            rows: Array = np.frombuffer(content, np.uint8, size, field.start).reshape(-1, 5)
            return (field.start, rows) if bool((rows[:, 0] == _FLOAT_TAG).all()) else None
        if field.wire_type == DELIMITED and field.end == argument.end and (field.end - field.content) % 4 == 0:
            packed: Array = np.frombuffer(content, "<f4", (field.end - field.content) // 4, field.content)
            return field.start, packed
        return None
    return None


DEFAULT_FILENAME = "model.netdef"
INIT_PREFIX = "init_"
"""The prefix of the file with the weights, followed by the other file's name."""

_MAX_BYTES = 2**31 - 1
_TEXT_STARTS = (b"name:", b"op {", b"op{", b"type:", b"external_", b"device_option", b"arg {", b"#", b"//", b"{", b"<")


@dataclass(frozen=True, slots=True)
class Net:
    """One net file."""

    file: str
    operators: tuple[Operator, ...]
    external_inputs: tuple[str, ...]
    external_outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both files of a model."""

    init: Net
    net: Net


def init_path(path: Path) -> Path:
    """Return the path of the weights of the net at `path`."""
    return path.with_name(INIT_PREFIX + path.name)


def read_pair(path: Path) -> Pair:
    """Read a net and its weights."""
    weights = init_path(path)
    if not weights.exists():
        raise FailedPrecondition(
            f"'{path.name}' has no '{weights.name}' beside it: a Caffe2 model is two files, put the one with the weights "
            "there"
        )
    return Pair(read_net(weights), read_net(path))


def read_net(path: Path) -> Net:
    """Read one file."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InvalidArgument(f"'{path.name}' is over 2 GiB, which no NetDef can be")
        content = path.read_bytes()
    except OSError as error:
        raise FailedPrecondition(
            f"'{path.name}' cannot be read ({error.strerror or 'error'}): it must be a file that the server may read"
        ) from None
    return parse_net(content, path.name)


def parse_net(content: bytes, file: str) -> Net:
    """Parse the bytes of one file; `file` is its name, for errors."""
    if content.lstrip().startswith(_TEXT_STARTS):
        raise InvalidArgument(
            f"'{file}' is text, and a NetDef is served from its binary form: parse it with Caffe2's schema and write "
            "SerializeToString()"
        )
    try:
        stripped, weights = extract_weights(content)
        message = caffe2_message("NetDef").FromString(stripped)
    except DecodeError:
        raise InvalidArgument(
            f"'{file}' is damaged, cut short or no NetDef: copy it again from where it was saved"
        ) from None
    operators = tuple(_operator(index, file, operator, weights) for index, operator in enumerate(message.op))
    if not operators:
        raise InvalidArgument(
            f"'{file}' has no operators: it is empty, or no NetDef. Copy it again from where it was saved"
        )
    return Net(file, operators, _names(file, message.external_input), _names(file, message.external_output))


def _operator(index: int, file: str, message: Any, weights: Weights) -> Operator:
    (kind,) = _names(file, [message.type])
    names = _names(file, (argument.name for argument in message.arg))
    arguments: dict[str, Any] = {}
    own: dict[str, Array] = {}
    for number, (name, argument) in enumerate(zip(names, message.arg, strict=True)):
        # Of two arguments with one name the last wins, with its weights or without.
        arguments[name] = argument
        own.pop(name, None)
        if (index, number) in weights:
            own[name] = weights[index, number]
    return Operator(index, file, kind, _names(file, message.input), _names(file, message.output), arguments, own)


def _names(file: str, given: Iterable[Any]) -> tuple[str, ...]:
    names = tuple(given)
    # Protobuf returns a name that is not UTF-8 as bytes.
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"'{file}' has a name that is not UTF-8 text: it is damaged, or no NetDef. Copy it again")
    return names
