# SPDX-License-Identifier: Apache-2.0
"""Length-prefixed messages: cutting a stream of bytes into them, and writing them.

A message that arrives in pieces is written once, into memory of its final size, however many frames it took. One that
lies whole in what was received becomes `bytes`: small ones come by the thousand and must not cost an array each.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from headrace.core.buffers import uninitialised
from headrace.core.errors import Internal, InvalidArgument, TooLarge, Unimplemented
from headrace.net.http.coding import inflate
from headrace.net.http.exchange import Buffer

PREFIX_BYTES = 5


class MessageAssembler:
    """Puts the messages of one call together."""

    __slots__ = ("_compressed", "_filled", "_limit", "_message", "_prefix", "encoding")

    def __init__(self, limit: int, encoding: bytes | None) -> None:
        self._limit = limit
        self.encoding = encoding
        self._prefix = b""
        self._message: memoryview | None = None
        self._filled = 0
        self._compressed = False

    @property
    def incomplete(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._prefix) or self._message is not None

    def take(self, data: memoryview) -> bool:
        """Take bytes from the middle of a message: most of the frames of a large one. False leaves them to `feed`."""
        message = self._message
        end = self._filled + len(data)
        if message is None or end >= len(message):
            return False
        message[self._filled : end] = data
        self._filled = end
        return True

    def feed(self, data: memoryview) -> Iterator[Buffer]:
        """Take received bytes; the messages they complete, each before anything is said of what comes after it."""
        position, end = 0, len(data)
        while position < end:
            message = self._message
            if message is None:
                taken = min(PREFIX_BYTES - len(self._prefix), end - position)
                self._prefix += data[position : position + taken]
                position += taken
                if len(self._prefix) < PREFIX_BYTES:
                    break
                size = self._begin()
                if size <= end - position:
                    whole = bytes(data[position : position + size])
                    position += size
                    yield self.decode(whole) if self._compressed else whole
                    continue
                message = self._message = uninitialised(size)
            room = len(message) - self._filled
            taken = min(room, end - position)
            message[self._filled : self._filled + taken] = data[position : position + taken]
            self._filled += taken
            position += taken
            if taken == room:
                self._message = None
                yield self.decode(message) if self._compressed else message

    def decode(self, message: Buffer) -> Buffer:
        """Inflate a compressed message, within the limit."""
        if self.encoding is None or self.encoding == b"identity":
            raise Internal("a message is marked compressed but grpc-encoding names no compression")
        if self.encoding not in (b"gzip", b"deflate"):
            raise Unimplemented("grpc-encoding is not supported: use gzip, deflate or identity")
        return inflate(self.encoding, message, self._limit)

    def _begin(self) -> int:
        """Read a prefix; the size of the message that follows."""
        flag = self._prefix[0]
        size = int.from_bytes(self._prefix[1:], "big")
        self._prefix = b""
        if flag > 1:
            raise InvalidArgument("a message's first byte must be 0 or 1")
        check_size(size, self._limit)
        self._compressed = flag == 1
        self._filled = 0
        return size


def check_size(size: int, limit: int) -> None:
    """Refuse a message before memory is taken for it."""
    if size > limit:
        raise TooLarge(f"Received message larger than max ({size} vs. {limit})")


def prefixed(buffers: list[Buffer], size: int) -> list[Buffer]:
    """A message with its prefix, not compressed."""
    return [b"\0" + size.to_bytes(4, "big"), *buffers]


def prefixed_gzip(buffers: list[Buffer]) -> list[Buffer]:
    """A message with its prefix, compressed by gzip."""
    packer = zlib.compressobj(level=1, wbits=31)
    packed = b"".join([packer.compress(buffer) for buffer in buffers] + [packer.flush()])
    return [b"\1" + len(packed).to_bytes(4, "big"), packed]
