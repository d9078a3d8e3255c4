# SPDX-License-Identifier: Apache-2.0
"""gRPC messages and metadata on the wire: length-prefixed messages, `grpc-timeout`, metadata fields.

A message that arrives in pieces is written once, into memory of its final size, however many frames it took. One that is
complete in the received bytes becomes `bytes`: small ones are frequent and must not cost an array each.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterator

from headrace.core.buffers import uninitialised
from headrace.core.errors import Internal, InvalidArgument, TooLarge, Unimplemented
from headrace.net.http.coding import inflate
from headrace.net.http.heads import Buffer, Field, Fields, RequestHead

PREFIX_BYTES = 5


class MessageAssembler:
    """Assembles the messages of one call."""

    __slots__ = ("_compressed", "_limit", "_message", "_prefix", "encoding", "filled")

    def __init__(self, limit: int, encoding: bytes | None) -> None:
        self._limit = limit
        self.encoding = encoding
        self._prefix = b""
        self._message: memoryview | None = None
        self.filled = 0
        """Bytes of an incomplete message that have arrived."""
        self._compressed = False

    @property
    def incomplete(self) -> bool:
        """Whether a message has started and is not complete."""
        return bool(self._prefix) or self._message is not None

    def take(self, data: memoryview) -> bool:
        """Copy bytes from the middle of a large message, which most frames are. False leaves them to `feed`."""
        message = self._message
        end = self.filled + len(data)
        if message is None or end >= len(message):
            return False
        message[self.filled : end] = data
        self.filled = end
        return True

    def feed(self, data: memoryview) -> Iterator[Buffer]:
        """Yield the messages that received bytes complete, each before an error in the bytes after it is raised."""
        position, end = 0, len(data)
        while position < end:
            message = self._message
            if message is None:
                count = min(PREFIX_BYTES - len(self._prefix), end - position)
                self._prefix += data[position : position + count]
                position += count
                if len(self._prefix) < PREFIX_BYTES:
                    break
                size = self._begin()
                if size <= end - position:
                    complete = bytes(data[position : position + size])
                    position += size
                    yield self.decode(complete) if self._compressed else complete
                    continue
                message = self._message = uninitialised(size)
            missing = len(message) - self.filled
            count = min(missing, end - position)
            message[self.filled : self.filled + count] = data[position : position + count]
            self.filled += count
            position += count
            if count == missing:
                self._message = None
                self.filled = 0
                yield self.decode(message) if self._compressed else message

    def decode(self, message: Buffer) -> Buffer:
        """Inflate a compressed message, within the limit."""
        if self.encoding is None or self.encoding == b"identity":
            raise Internal("a message is marked compressed but grpc-encoding names no compression")
        if self.encoding not in (b"gzip", b"deflate"):
            raise Unimplemented("grpc-encoding is not supported: use gzip, deflate or identity")
        return inflate(self.encoding, message, self._limit)

    def _begin(self) -> int:
        """Read a prefix; return the size of the message that follows."""
        flag = self._prefix[0]
        size = int.from_bytes(self._prefix[1:], "big")
        self._prefix = b""
        if flag > 1:
            raise InvalidArgument("a message's first byte must be 0 or 1")
        check_size(size, self._limit)
        self._compressed = flag == 1
        self.filled = 0
        return size


def check_size(size: int, limit: int) -> None:
    """Reject a message over the limit before memory is allocated for it."""
    if size > limit:
        raise TooLarge(f"Received message larger than max ({size} vs. {limit})")


def prefixed(buffers: list[Buffer], size: int) -> list[Buffer]:
    """Return a message with its prefix, not compressed."""
    return [b"\0" + size.to_bytes(4, "big"), *buffers]


def prefixed_gzip(buffers: list[Buffer]) -> list[Buffer]:
    """Return a message with its prefix, compressed by gzip."""
    packer = zlib.compressobj(level=1, wbits=31)
    packed = b"".join([packer.compress(buffer) for buffer in buffers] + [packer.flush()])
    return [b"\1" + len(packed).to_bytes(4, "big"), packed]


_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_RESERVED = frozenset((b"te", b"content-type", b"user-agent", b"host", b"content-length", b"accept-encoding"))


def parse_timeout(value: bytes) -> float:
    """Return the seconds of a `grpc-timeout` value such as `100m`."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidArgument("grpc-timeout is up to eight digits and a unit, as in '100m'")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def custom_metadata(head: RequestHead) -> list[tuple[str, str | bytes]]:
    """Return the client's metadata; keys that end in `-bin` carry bytes."""
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
    """Return metadata as header fields."""
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
