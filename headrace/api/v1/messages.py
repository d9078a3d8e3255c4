# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of both generations, and their text form.

Formatting a message as text costs more than most small models, and clients send the same requests again and again: the
text of a response header without classes is cached.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from google.protobuf import text_format

from headrace.core.protobuf import Schema

_MOST_FIELD_CHARACTERS = 16 * 1024
_CACHED_TEXTS = 256
_CACHED_BYTES = 4096


PACKAGE = "nvidia.inferenceserver"
SERVICE = f"{PACKAGE}.GRPCService"


def one_line(message: Any) -> bytes:
    """Format a message for a header field: ASCII, without line breaks."""
    text: str = text_format.MessageToString(message, as_one_line=True, as_utf8=False)
    return text.encode("ascii")


def many_lines(message: Any) -> bytes:
    """Format a message on several lines."""
    text: str = text_format.MessageToString(message, as_utf8=False)
    return text.encode("ascii")


def response_field(header: Any) -> bytes:
    """Return the value of NV-InferResponse, from which clients read the size of each output.

    It omits the data type, which clients before 1.12 cannot parse, and classes that would make it too long; the header at
    the end of the body has both.
    """
    return _with_id(header, _cached_field, _field_text, b" id: %d")


def response_lines(header: Any) -> bytes:
    """Return the header as text for the end of the body."""
    return _with_id(header, _cached_lines, many_lines, b"id: %d\n")


def _with_id(header: Any, cached: Any, write: Any, id_form: bytes) -> bytes:
    """Return the text of a header; cached without its id, which differs each time and is last."""
    if any(output.batch_classes for output in header.output):
        text: bytes = write(header)
        return text
    is_v0 = isinstance(header, message_class("v0.InferResponseHeader"))
    number = 0 if is_v0 else header.id
    if number:
        header.id = 0
    data = header.SerializeToString()
    text = cached(is_v0, data) if len(data) <= _CACHED_BYTES else write(header)
    if number:
        header.id = number
        text = (text + id_form % number).lstrip()
    return text


@lru_cache(maxsize=_CACHED_TEXTS)
def _cached_field(is_v0: bool, data: bytes) -> bytes:
    return _field_text(_parse(is_v0, data))


@lru_cache(maxsize=_CACHED_TEXTS)
def _cached_lines(is_v0: bool, data: bytes) -> bytes:
    return many_lines(_parse(is_v0, data))


def _parse(is_v0: bool, data: bytes) -> Any:
    return message_class("v0.InferResponseHeader" if is_v0 else "InferResponseHeader").FromString(data)


def _field_text(header: Any) -> bytes:
    short = type(header)()
    short.CopyFrom(header)
    if isinstance(short, message_class("InferResponseHeader")):
        for output in short.output:
            output.ClearField("data_type")
    text = one_line(short)
    if len(text) <= _MOST_FIELD_CHARACTERS:
        return text
    for output in short.output:
        output.ClearField("batch_classes")
    return one_line(short)


@cache
def nvidia_schema() -> Schema:
    """Return the protobuf schema, loaded at first use."""
    return Schema((files("headrace.api.v1") / "_generated" / "nvidia.binpb").read_bytes())


@cache
def message_class(name: str) -> Any:
    """Return a message class by its name in the package; the prefix `v0.` is for the older generation."""
    return nvidia_schema().message(f"{PACKAGE}.{name}")
