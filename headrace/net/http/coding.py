# SPDX-License-Identifier: Apache-2.0
"""Content coding: request bodies that come compressed, and whether and how to compress a response.

Called by `http1` and `http2` around a handler. Pure: bytes in, bytes out; knows no exchange and no socket.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidArgument, TooLarge

if TYPE_CHECKING:
    from headrace.net.http.exchange import Buffer

GZIP = b"gzip"
DEFLATE = b"deflate"

_GZIP_BITS = 31
_ZLIB_BITS = 15
_RAW_BITS = -15
_LEVEL = 1
"""The fastest: a response is compressed in the loop's thread."""

_WINDOW_BYTES = 64 * 1024
"""zlib copies what follows the end of a member; fed in windows, many small members do not cost n squared."""

_MEMBERS = 16_384
"""gzip members in one body. bgzip makes one per 64 KiB; each costs microseconds, so they may not be millions."""

_REMEMBERED = 256
_REMEMBERED_BYTES = 200
"""Accept-Encoding values that are remembered: clients use a handful, all of them short."""

_QUALITY = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")


def inflate(encoding: bytes, body: Buffer, limit: int) -> bytes:
    """Undo a request's Content-Encoding; more than `limit` bytes are neither returned nor made."""
    name = encoding.strip().lower()
    if name in (b"", b"identity"):
        if len(body) > limit:
            raise _too_large(limit)
        return bytes(body)
    if name not in (GZIP, b"x-gzip", DEFLATE):
        raise InvalidArgument("Content-Encoding must be one of gzip, deflate, identity: send the body in one of these")
    if not len(body):
        return b""
    inflater = _Inflater(memoryview(body).cast("B"), limit)
    if name == DEFLATE:
        inflater.member(inflater.deflate_bits())
    else:
        inflater.members()
    if not inflater.at_end():
        raise InvalidArgument("the request body goes on after the end of its compressed data")
    return inflater.result()


def choose_coding(accept: bytes) -> bytes | None:
    """The coding a response should have, for an Accept-Encoding value: `gzip`, `deflate`, or None for no coding."""
    return _choose_remembered(accept) if len(accept) <= _REMEMBERED_BYTES else _choose(accept)


def deflate(coding: bytes, buffers: Iterable[Buffer]) -> bytes:
    """Compress `buffers` as one body, with a coding that `choose_coding` gave. The same input gives the same bytes."""
    if coding not in (GZIP, DEFLATE):
        raise ValueError(f"{coding!r} is not a coding this server makes")
    # zlib's gzip header has a modification time of 0; and "deflate" in HTTP means the zlib format (RFC 9110, 8.4.1.2).
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_BITS if coding == GZIP else _ZLIB_BITS)
    pieces = [packer.compress(buffer) for buffer in buffers]
    pieces.append(packer.flush())
    return b"".join(pieces)


class _Inflater:
    """Inflates one body, member by member, and counts what it makes."""

    def __init__(self, body: memoryview, limit: int) -> None:
        self._body = body
        self._limit = limit
        self._left = limit
        self._position = 0
        self._pieces: list[bytes] = []

    def deflate_bits(self) -> int:
        # RFC 9110 wants the zlib format, but some clients send bare deflate data. No encoder begins bare data with
        # a low nibble of 8 (a stored block with a padding bit set), so the zlib header can be told apart.
        start = bytes(self._body[:2])
        zlib_header = len(start) == 2 and start[0] & 15 == 8 and int.from_bytes(start, "big") % 31 == 0
        return _ZLIB_BITS if zlib_header else _RAW_BITS

    def members(self) -> None:
        for _ in range(_MEMBERS):
            self.member(_GZIP_BITS)
            if bytes(self._body[self._position : self._position + 2]) != b"\x1f\x8b":
                return
        raise TooLarge(f"the gzip body has more than {_MEMBERS} members: compress it as one")

    def member(self, bits: int) -> None:
        unpacker = zlib.decompressobj(bits)
        while not unpacker.eof:
            window = self._body[self._position : self._position + _WINDOW_BYTES]
            if not len(window):
                raise InvalidArgument("the compressed request body is cut short")
            try:
                # One byte over what is left, because a max_length of 0 would mean no limit, and to see the excess.
                piece = unpacker.decompress(window, self._left + 1)
            except zlib.error:
                raise InvalidArgument("the request body is not what its Content-Encoding says") from None
            if len(piece) > self._left:
                raise _too_large(self._limit)
            self._left -= len(piece)
            self._position += len(window) - len(unpacker.unused_data)
            if piece:
                self._pieces.append(piece)

    def at_end(self) -> bool:
        return self._position == len(self._body)

    def result(self) -> bytes:
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the request body is over the limit of {limit} bytes after inflation")


def _choose(accept: bytes) -> bytes | None:
    qualities: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        qualities[b"gzip" if name == b"x-gzip" else name] = _quality(parameters)
    others = qualities.get(b"*", 0.0)
    gzip = qualities.get(GZIP, others)
    zlib_ = qualities.get(DEFLATE, others)
    best = max(gzip, zlib_)
    # No coding is always possible; it wins only where the client says that it likes it better.
    if best == 0 or best < qualities.get(b"identity", 0.0):
        return None
    return GZIP if gzip == best else DEFLATE


def _quality(parameters: list[bytes]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            value = value.strip()
            return float(value) if _QUALITY.fullmatch(value) else 0.0
    return 1.0


_choose_remembered = lru_cache(maxsize=_REMEMBERED)(_choose)
