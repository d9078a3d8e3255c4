# SPDX-License-Identifier: Apache-2.0
"""What a request says of itself (InferRequestHeader), from protobuf text or bytes of either generation.

Called by `http` with the field NV-InferRequest and by `envelopes` with `meta_data`. v0 is what gives sizes in bytes; read
with the other generation's schema, the bytes of both would mean something else without an error, so v0 is tried first.
Clients say the same again and again, so what was read is remembered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from headrace.api.v1.schema import message_class
from headrace.core.messages import NO_PARAMETERS, Parameters

_REMEMBERED_HEADERS = 256
_REMEMBERED_BYTES = 4096

_SEQUENCE_START, _SEQUENCE_END = 1, 2

_SIZED = re.compile(rb"(?<![a-z_])byte_size")
_NUMBERED = re.compile(rb" id: (0|[1-9][0-9]{0,18})((?: flags: [0-9]{1,9})?)")
"""The end of a header's text as protobuf writes it. With a zero before it, a number would be octal."""
_UNSURE = re.compile(rb"#|(?<![A-Za-z0-9_])id(?![A-Za-z0-9_])")
"""What may make a comment of the end, or a second number, which is an error: the parser tells."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where in a registered region of shared memory a tensor lies, or is to be written."""

    name: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class HeaderInput:
    """One input. What a generation does not say stays at its default."""

    name: str
    byte_size: int = 0
    """v0: of one entry of the batch."""
    dims: tuple[int, ...] = ()
    """v1: without the batch; may be left out where the configuration says all of them."""
    batch_byte_size: int = 0
    """v1: of the whole batch; 0 where it follows from type and dimensions."""
    region: Region | None = None


@dataclass(frozen=True, slots=True)
class HeaderOutput:
    """One output that the client asks for."""

    name: str
    byte_size: int = 0
    """v0: of one entry of the batch."""
    classes: int | None = None
    """How many classes, where it is wanted as a classification."""
    region: Region | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """All of it, in no generation's words."""

    is_v0: bool
    batch_size: int = 0
    inputs: tuple[HeaderInput, ...] = ()
    outputs: tuple[HeaderOutput, ...] = ()
    id: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """Sequence, priority and timeout by the engine's names."""


NO_HEADER = Header(is_v0=True)
"""Of a request without one."""


def header_from_text(text: bytes) -> Header | None:
    """Read protobuf text; None if it is no header."""
    if len(text) > _REMEMBERED_BYTES:
        return _read_text(text)
    # Clients of 1.x number their requests, so that no two headers are the same. Behind the last brace there are no more
    # strings, in which anything might stand.
    before, brace, tail = text.rpartition(b"}")
    numbered = _NUMBERED.fullmatch(tail)
    if numbered is None or _UNSURE.search(before):
        return _remembered_text(text)
    header = _remembered_text(before + brace + numbered[2])
    return None if header is None or header.is_v0 else replace(header, id=int(numbered[1]))


def header_from_bytes(data: bytes) -> Header | None:
    """Read an encoded message; None if it is no header."""
    return _remembered_bytes(data) if len(data) <= _REMEMBERED_BYTES else _read(data, _parse_bytes)


@lru_cache(maxsize=_REMEMBERED_HEADERS)
def _remembered_text(text: bytes) -> Header | None:
    return _read_text(text)


@lru_cache(maxsize=_REMEMBERED_HEADERS)
def _remembered_bytes(data: bytes) -> Header | None:
    return _read(data, _parse_bytes)


def _read_text(text: bytes) -> Header | None:
    if _SIZED.search(text) is None:  # then it is not v0's, which is seen sooner than it is parsed
        newer = _parse_text(message_class("InferRequestHeader"), text)
        return None if newer is None else _from_v1(newer)
    return _read(text, _parse_text)


def _read(data: bytes, parse: Callable[[Any, bytes], Any]) -> Header | None:
    older = parse(message_class("v0.InferRequestHeader"), data)
    if older is not None and any(each.byte_size for each in (*older.input, *older.output)):
        return _from_v0(older)
    newer = parse(message_class("InferRequestHeader"), data)
    if newer is not None:
        return _from_v1(newer)
    return None if older is None else _from_v0(older)


def _parse_text(message: Any, text: bytes) -> Any:
    try:
        return text_format.Parse(text.decode(), message())
    except (text_format.ParseError, ValueError):  # the latter for text that is no UTF-8
        return None


def _parse_bytes(message: Any, data: bytes) -> Any:
    try:
        return message.FromString(data)
    except DecodeError:
        return None


def _from_v0(message: Any) -> Header:
    return Header(
        True,
        message.batch_size,
        tuple(HeaderInput(each.name, each.byte_size) for each in message.input),
        tuple(HeaderOutput(each.name, each.byte_size, _classes(each)) for each in message.output),
        parameters={"sequence_id": message.correlation_id} if message.correlation_id else NO_PARAMETERS,
    )


def _from_v1(message: Any) -> Header:
    return Header(
        False,
        message.batch_size,
        tuple(
            HeaderInput(each.name, 0, tuple(each.dims), each.batch_byte_size, _region(each)) for each in message.input
        ),
        tuple(HeaderOutput(each.name, 0, _classes(each), _region(each)) for each in message.output),
        message.id,
        _parameters(message),
    )


def _classes(output: Any) -> int | None:
    return output.cls.count if output.HasField("cls") else None


def _region(tensor: Any) -> Region | None:
    if not tensor.HasField("shared_memory"):
        return None
    region = tensor.shared_memory
    return Region(region.name, region.offset, region.byte_size)


def _parameters(message: Any) -> Parameters:
    said = {
        "sequence_id": message.correlation_id,
        "sequence_start": bool(message.flags & _SEQUENCE_START),
        "sequence_end": bool(message.flags & _SEQUENCE_END),
        "priority": message.priority,
        "timeout": message.timeout_microseconds,
    }
    return {name: value for name, value in said.items() if value} or NO_PARAMETERS
