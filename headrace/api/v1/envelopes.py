# SPDX-License-Identifier: Apache-2.0
"""An InferRequest of either generation from the bytes of a gRPC message, and an InferResponse back to bytes.

Called by `grpc` and `streams`. The envelope is read first, with its header unread; whose header it is shows then. A
response is written around its tensors, which stay where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from headrace.api.v1.headers import Header, header_from_bytes
from headrace.api.v1.schema import message_class
from headrace.core.errors import InvalidArgument
from headrace.core.tensors import Buffer
from headrace.engine.dataplane import DataPlane

_VERSION_FIELD = 2
_DELIMITED = 2
_STATUS_TAG, _HEADER_TAG, _RAW_TAG = (bytes((number << 3 | _DELIMITED,)) for number in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Envelope:
    """A request, its tensors still bytes."""

    model_name: str
    version: str
    """"" for the newest."""
    header: Header | None
    """None if it could not be read."""
    pieces: list[bytes]


def open_envelope(message: Buffer, plane: DataPlane) -> Envelope:
    """Read a message."""
    try:
        envelope = message_class("v0.InferEnvelope").FromString(message)
    except DecodeError:
        raise InvalidArgument("the message is not an InferRequest") from None
    header = header_from_bytes(envelope.meta_data)
    version = _text_version(envelope) if header is not None and header.is_v0 else None
    if version is None:
        version = _number_version(envelope, plane)
    return Envelope(envelope.model_name, version, header, list(envelope.raw_input))


def close_envelope(status: Any, header: Any, raw: list[Buffer]) -> list[Buffer]:
    """Write an InferResponse."""
    pieces: list[Buffer] = [_delimited(_STATUS_TAG, status), _delimited(_HEADER_TAG, header)]
    for data in raw:
        pieces.append(_RAW_TAG + _varint(len(data)))
        pieces.append(data)
    return pieces


def _text_version(envelope: Any) -> str | None:
    """As 0.7 and 0.8 say it; None if they did not. Anything negative is the newest."""
    fields = UnknownFieldSet(envelope)
    for index in range(len(fields)):
        field = fields[index]
        if field.field_number == _VERSION_FIELD and isinstance(field.data, bytes):
            text = field.data.decode(errors="replace").strip()
            return "" if text.startswith("-") else text
    return None


def _number_version(envelope: Any, plane: DataPlane) -> str:
    """As later ones say it: negative is the newest. So is 0, which is also what is not said, unless there is a version 0."""
    number: int = envelope.model_version
    if number < 0 or (number == 0 and plane.find(envelope.model_name, "0") is None):
        return ""
    return str(number)


def _delimited(tag: bytes, message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return tag + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    pieces = bytearray()
    while value > 0x7F:
        pieces.append(value & 0x7F | 0x80)
        value >>= 7
    pieces.append(value)
    return bytes(pieces)
