# SPDX-License-Identifier: Apache-2.0
"""Content coding (gzip and deflate): inflates request bodies, chooses a coding for a response, compresses it.

Called by `http1` and `http2` around a handler. Pure functions: bytes in, bytes out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from functools import lru_cache

from headrace.core.errors import InvalidArgument, TooLarge
from headrace.net.http.heads import Buffer

GZIP = b"gzip"
DEFLATE = b"deflate"

_GZIP_BITS = 31
_ZLIB_BITS = 15
_RAW_BITS = -15
_LEVEL = 1
"""The fastest level: a response is compressed in the event loop's thread."""

_WINDOW_BYTES = 64 * 1024
"""zlib copies what follows the end of a member; fed in windows, many small members do not take quadratic time."""

_MAX_MEMBERS = 16_384
"""Maximum gzip members in one body. bgzip makes one per 64 KiB; each costs microseconds, so millions are too many."""

_CACHED_VALUES = 256
_CACHED_BYTES = 200
"""Cached Accept-Encoding values: clients use a handful, all of them short."""

_QUALITY = re.compile(rb"0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?")


def inflate(encoding: bytes, body: Buffer, limit: int) -> bytes:
    """Decode a request body by its Content-Encoding; never makes more than `limit` bytes."""
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
    """Return the coding of a response for an Accept-Encoding value: `gzip`, `deflate`, or None."""
    return _choose_cached(accept) if len(accept) <= _CACHED_BYTES else _choose(accept)


def deflate(coding: bytes, buffers: Iterable[Buffer]) -> bytes:
    """Compress `buffers` as one body with a coding from `choose_coding`. Deterministic."""
    if coding not in (GZIP, DEFLATE):
        raise ValueError(f"{coding!r} is not a coding this server makes")
    # zlib writes a modification time of 0; "deflate" in HTTP means the zlib format (RFC 9110, 8.4.1.2).
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_BITS if coding == GZIP else _ZLIB_BITS)
    pieces = [packer.compress(buffer) for buffer in buffers]
    pieces.append(packer.flush())
    return b"".join(pieces)


class _Inflater:
    """Inflates one body, member by member, within a limit."""

    def __init__(self, body: memoryview, limit: int) -> None:
        self._body = body
        self._limit = limit
        self._left = limit
        self._position = 0
        self._pieces: list[bytes] = []

    def deflate_bits(self) -> int:
        # RFC 9110 requires the zlib format, but some clients send raw deflate data. No encoder begins raw data with a
        # low nibble of 8 (a stored block with a padding bit set), so a zlib header can be recognized.
        start = bytes(self._body[:2])
        zlib_header = len(start) == 2 and start[0] & 15 == 8 and int.from_bytes(start, "big") % 31 == 0
        return _ZLIB_BITS if zlib_header else _RAW_BITS

    def members(self) -> None:
        for _ in range(_MAX_MEMBERS):
            self.member(_GZIP_BITS)
            if bytes(self._body[self._position : self._position + 2]) != b"\x1f\x8b":
                return
        raise TooLarge(f"the gzip body has more than {_MAX_MEMBERS} members: compress it as one")

    def member(self, bits: int) -> None:
        unpacker = zlib.decompressobj(bits)
        while not unpacker.eof:
            window = self._body[self._position : self._position + _WINDOW_BYTES]
            if not len(window):
                raise InvalidArgument("the compressed request body is cut short")
            try:
                # One byte over what is left: a max_length of 0 would mean no limit, and the excess must be seen.
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
    return TooLarge(f"{body_too_large(limit)}: it is larger when it is inflated")


def body_too_large(limit: int) -> str:
    """Return the message for a request body that is over the limit, in Triton's words."""
    return f"a body of more than {limit} bytes exceeds the maximum allowed input size of {limit} bytes"


def _choose(accept: bytes) -> bytes | None:
    qualities: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        name, *parameters = (part.strip() for part in item.split(b";"))
        qualities[b"gzip" if name == b"x-gzip" else name] = _quality(parameters)
    others = qualities.get(b"*", 0.0)
    gzip = qualities.get(GZIP, others)
    zlib_ = qualities.get(DEFLATE, others)
    best = max(gzip, zlib_)
    # No coding is always possible; it wins only if the client prefers it.
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


_choose_cached = lru_cache(maxsize=_CACHED_VALUES)(_choose)
