# SPDX-License-Identifier: Apache-2.0
"""Messages as protobuf text: on one line for the fields of a response's head, on many for people.

Writing text costs more than most models that answer with it, and clients ask the same again and again: the text of a
response header without classes is remembered.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf import text_format

from headrace.api.v1.schema import message_class

_MOST_FIELD_CHARACTERS = 16 * 1024
_REMEMBERED_TEXTS = 256
_REMEMBERED_BYTES = 4096


def one_line(message: Any) -> bytes:
    """Text that fits into a field of a head: ASCII, without line breaks."""
    text: str = text_format.MessageToString(message, as_one_line=True, as_utf8=False)
    return text.encode("ascii")


def many_lines(message: Any) -> bytes:
    """Text for people."""
    text: str = text_format.MessageToString(message, as_utf8=False)
    return text.encode("ascii")


def response_field(header: Any) -> bytes:
    """The value of NV-InferResponse. It tells how long each output is; what clients do not need of it is left out.

    That is the data type, a field that clients before 1.12 cannot read; and classes, where they would make it too long.
    All of it is in the header at the end of the body, which is where clients take classes from.
    """
    return _with_id(header, _remembered_field, _field_text, b" id: %d")


def response_lines(header: Any) -> bytes:
    """The header as text for the end of the body."""
    return _with_id(header, _remembered_lines, many_lines, b"id: %d\n")


def _with_id(header: Any, remembered: Any, written: Any, id_form: bytes) -> bytes:
    """The text of a header; remembered without its id, which is another each time and stands at the end."""
    if any(output.batch_classes for output in header.output):
        text: bytes = written(header)
        return text
    is_v0 = isinstance(header, message_class("v0.InferResponseHeader"))
    number = 0 if is_v0 else header.id
    if number:
        header.id = 0
    data = header.SerializeToString()
    text = remembered(is_v0, data) if len(data) <= _REMEMBERED_BYTES else written(header)
    if number:
        header.id = number
        text = (text + id_form % number).lstrip()
    return text


@lru_cache(maxsize=_REMEMBERED_TEXTS)
def _remembered_field(is_v0: bool, data: bytes) -> bytes:
    return _field_text(_parsed(is_v0, data))


@lru_cache(maxsize=_REMEMBERED_TEXTS)
def _remembered_lines(is_v0: bool, data: bytes) -> bytes:
    return many_lines(_parsed(is_v0, data))


def _parsed(is_v0: bool, data: bytes) -> Any:
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
