# SPDX-License-Identifier: Apache-2.0
"""What the head of a gRPC request says: the deadline, the message encoding, and the caller's metadata.

Worked out once per distinct header block and kept in the head's `memo`.
"""

from __future__ import annotations

import base64
import binascii
import re

from headrace.core.errors import InvalidArgument
from headrace.net.http.heads import Field, Fields, RequestHead

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_RESERVED = frozenset((b"te", b"content-type", b"user-agent", b"host", b"content-length", b"accept-encoding"))


def parse_timeout(value: bytes) -> float:
    """Seconds of a `grpc-timeout` value such as `100m`."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidArgument("grpc-timeout is up to eight digits and a unit, as in '100m'")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def custom_metadata(head: RequestHead) -> list[tuple[str, str | bytes]]:
    """The caller's own metadata; keys that end in `-bin` carry bytes."""
    pairs: list[tuple[str, str | bytes]] = []
    for name, value in head.fields:
        if name in _RESERVED or name.startswith(b"grpc-"):
            continue
        if name.endswith(b"-bin"):
            pairs += [(name.decode(), _from_base64(part)) for part in value.split(b",")]
        else:
            pairs.append((name.decode(), value.decode("latin-1")))
    return pairs


def encode_metadata(pairs: list[tuple[str, str | bytes]]) -> Fields:
    """Metadata of ours as header fields."""
    fields: list[Field] = []
    for key, value in pairs:
        if key.endswith("-bin") != isinstance(value, bytes):
            raise ValueError(f"metadata {key!r}: keys that end in -bin carry bytes, all others text")
        if isinstance(value, bytes):
            fields.append((key.encode(), base64.b64encode(value).rstrip(b"=")))
        else:
            fields.append((key.encode(), value.encode("latin-1")))
    return fields


def _from_base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise InvalidArgument("binary metadata is not base64") from None
