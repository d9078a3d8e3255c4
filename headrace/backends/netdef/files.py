# SPDX-License-Identifier: Apache-2.0
"""Reads the two files of a model: `model.netdef`, which computes, and `init_model.netdef`, which has the weights.

Called by the backend and by `headrace models convert`. Turns bytes into `Operator`s; runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from headrace.backends.contract import Array
from headrace.backends.netdef.operator import Operator
from headrace.backends.netdef.schema import caffe2_message
from headrace.backends.netdef.wire import Weights, set_weights_aside
from headrace.core.errors import FailedPrecondition, InvalidArgument

DEFAULT_FILENAME = "model.netdef"
INIT_PREFIX = "init_"
"""The file with the weights is always called this and then as the other one."""

_MAX_BYTES = 2**31 - 1
_TEXT_STARTS = (b"name:", b"op {", b"op{", b"type:", b"external_", b"device_option", b"arg {", b"#", b"//", b"{", b"<")


@dataclass(frozen=True, slots=True)
class Net:
    """One file."""

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
    """Where the weights of the net at `path` are."""
    return path.with_name(INIT_PREFIX + path.name)


def read_pair(path: Path) -> Pair:
    """Read the net and its weights."""
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
    """Read the bytes of one file; `file` is its name, for errors."""
    if content.lstrip().startswith(_TEXT_STARTS):
        raise InvalidArgument(
            f"'{file}' is text, and a NetDef is served from its binary form: parse it with Caffe2's schema and write "
            "SerializeToString()"
        )
    try:
        light, weights = set_weights_aside(content)
        message = caffe2_message("NetDef").FromString(light)
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
        # Of two with one name the last stands, with its weights or without.
        arguments[name] = argument
        own.pop(name, None)
        if (index, number) in weights:
            own[name] = weights[index, number]
    return Operator(index, file, kind, _names(file, message.input), _names(file, message.output), arguments, own)


def _names(file: str, given: Iterable[Any]) -> tuple[str, ...]:
    names = tuple(given)
    # Protobuf hands out the bytes of a name that is not UTF-8.
    if not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"'{file}' has a name that is not UTF-8 text: it is damaged, or no NetDef. Copy it again")
    return names
