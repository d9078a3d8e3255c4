# SPDX-License-Identifier: Apache-2.0
"""Parse an InferRequestHeader, from protobuf text or bytes of either generation.

HTTP sends it in the field NV-InferRequest, gRPC in `meta_data`. A header with sizes in bytes is v0. Parsed with the other
generation's schema, the bytes of both would give wrong values without an error, so v0 is tried first. Clients send the same
headers again and again, so they are cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from headrace.api.v1.messages import message_class
from headrace.core.requests import NO_PARAMETERS, Parameters

_CACHED_HEADERS = 256
_CACHED_BYTES = 4096

_SEQUENCE_START, _SEQUENCE_END = 1, 2

_SIZED = re.compile(rb"(?<![a-z_])byte_size")
_NUMBERED = re.compile(rb" id: (0|[1-9][0-9]{0,18})((?: flags: [0-9]{1,9})?)")
"""The end of a header's text as protobuf writes it. A number with a leading zero would be octal."""
_AMBIGUOUS = re.compile(rb"#|(?<![A-Za-z0-9_])id(?![A-Za-z0-9_])")
"""A comment, or a second id, which would be an error: leave these to the parser."""


@dataclass(frozen=True, slots=True)
class RegionRef:
    """The part of a registered shared-memory region that holds a tensor."""

    name: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class HeaderInput:
    """One input. Fields that a generation does not have keep their defaults."""

    name: str
    byte_size: int = 0
    """v0: bytes of one entry of the batch."""
    dims: tuple[int, ...] = ()
    """v1: without the batch; optional if the configuration fixes all dimensions."""
    batch_byte_size: int = 0
    """v1: bytes of the whole batch; 0 if type and dimensions determine it."""
    region: RegionRef | None = None


@dataclass(frozen=True, slots=True)
class HeaderOutput:
    """One requested output."""

    name: str
    byte_size: int = 0
    """v0: bytes of one entry of the batch."""
    classes: int | None = None
    """The number of classes, for a classification."""
    region: RegionRef | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """A request header, independent of the generation."""

    is_v0: bool
    batch_size: int = 0
    inputs: tuple[HeaderInput, ...] = ()
    outputs: tuple[HeaderOutput, ...] = ()
    id: int = 0
    parameters: Parameters = field(default_factory=lambda: NO_PARAMETERS)
    """Sequence, priority and timeout, by the engine's names."""


NO_HEADER = Header(is_v0=True)
"""For a request without a header."""


def header_from_text(text: bytes) -> Header | None:
    """Parse protobuf text; return None if it is not a header."""
    if len(text) > _CACHED_BYTES:
        return _read_text(text)
    # Clients of 1.x number their requests, so no two headers are the same: cache the header without its id. After the last
    # brace there are no strings, which could contain anything.
    before, brace, tail = text.rpartition(b"}")
    numbered = _NUMBERED.fullmatch(tail)
    if numbered is None or _AMBIGUOUS.search(before):
        return _cached_text(text)
    header = _cached_text(before + brace + numbered[2])
    return None if header is None or header.is_v0 else replace(header, id=int(numbered[1]))


def header_from_bytes(data: bytes) -> Header | None:
    """Parse an encoded message; return None if it is not a header."""
    return _cached_bytes(data) if len(data) <= _CACHED_BYTES else _parse_either(data, _parse_bytes)


@lru_cache(maxsize=_CACHED_HEADERS)
def _cached_text(text: bytes) -> Header | None:
    return _read_text(text)


@lru_cache(maxsize=_CACHED_HEADERS)
def _cached_bytes(data: bytes) -> Header | None:
    return _parse_either(data, _parse_bytes)


def _read_text(text: bytes) -> Header | None:
    if _SIZED.search(text) is None:  # not v0; searching is faster than parsing
        v1 = _parse_text(message_class("InferRequestHeader"), text)
        return None if v1 is None else _from_v1(v1)
    return _parse_either(text, _parse_text)


def _parse_either(data: bytes, parse: Callable[[Any, bytes], Any]) -> Header | None:
    v0 = parse(message_class("v0.InferRequestHeader"), data)
    if v0 is not None and any(tensor.byte_size for tensor in (*v0.input, *v0.output)):
        return _from_v0(v0)
    v1 = parse(message_class("InferRequestHeader"), data)
    if v1 is not None:
        return _from_v1(v1)
    return None if v0 is None else _from_v0(v0)


def _parse_text(message: Any, text: bytes) -> Any:
    try:
        return text_format.Parse(text.decode(), message())
    except (text_format.ParseError, ValueError):  # ValueError: not UTF-8
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
        tuple(HeaderInput(tensor.name, tensor.byte_size) for tensor in message.input),
        tuple(HeaderOutput(tensor.name, tensor.byte_size, _classes(tensor)) for tensor in message.output),
        parameters={"sequence_id": message.correlation_id} if message.correlation_id else NO_PARAMETERS,
    )


def _from_v1(message: Any) -> Header:
    return Header(
        False,
        message.batch_size,
        tuple(
            HeaderInput(tensor.name, 0, tuple(tensor.dims), tensor.batch_byte_size, _region(tensor))
            for tensor in message.input
        ),
        tuple(HeaderOutput(tensor.name, 0, _classes(tensor), _region(tensor)) for tensor in message.output),
        message.id,
        _parameters(message),
    )


def _classes(output: Any) -> int | None:
    return output.cls.count if output.HasField("cls") else None


def _region(tensor: Any) -> RegionRef | None:
    if not tensor.HasField("shared_memory"):
        return None
    region = tensor.shared_memory
    return RegionRef(region.name, region.offset, region.byte_size)


def _parameters(message: Any) -> Parameters:
    parameters = {
        "sequence_id": message.correlation_id,
        "sequence_start": bool(message.flags & _SEQUENCE_START),
        "sequence_end": bool(message.flags & _SEQUENCE_END),
        "priority": message.priority,
        "timeout": message.timeout_microseconds,
    }
    return {name: value for name, value in parameters.items() if value} or NO_PARAMETERS
