# SPDX-License-Identifier: Apache-2.0
"""A ModelConfig message as people and protocols read it.

`to_json` is the answer to `/v2/models/M/config` and to BLS models; `to_text` is for files and for `headrace models`.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

_FIRST_OWN_NUMBER = 1001
_WIDE = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_UINT64)


def to_json(message: Any) -> dict[str, Any]:
    """With the schema's names and with defaults, as Triton's clients expect it; numbers are numbers."""
    values = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _as_clients_expect(values, message.DESCRIPTOR)


def to_text(message: Any) -> str:
    """As a `config.pbtxt`."""
    return text_format.MessageToString(message, as_utf8=True)


def _as_clients_expect(values: dict[str, Any], descriptor: Descriptor) -> dict[str, Any]:
    """Protobuf writes 64-bit numbers as strings, Triton does not. Our own fields show only where they are used."""
    shown: dict[str, Any] = {}
    for name, value in values.items():
        field = descriptor.fields_by_name[name]
        if field.number >= _FIRST_OWN_NUMBER and _is_default(field, value):
            continue
        shown[name] = _value(field, value)
    return shown


def _is_default(field: FieldDescriptor, value: Any) -> bool:
    if field.has_presence:
        return False
    if field.enum_type is not None:
        return bool(value == field.enum_type.values_by_number[0].name)
    return not value


def _value(field: FieldDescriptor, value: Any) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        inner = message.fields_by_name["value"]
        return {key: _value(inner, each) for key, each in value.items()}
    if isinstance(value, list):
        return [_one(field, message, each) for each in value]
    return _one(field, message, value)


def _one(field: FieldDescriptor, message: Descriptor | None, value: Any) -> Any:
    if message is not None:
        return _as_clients_expect(value, message)
    return int(value) if field.type in _WIDE else value
