# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 header blocks: decodes a client's into a checked `RequestHead`, and encodes ours.

The `hpack` package does the decoding. A cache makes it fast: a client repeats the same block for the same request, and
a block that did not change the dynamic table means the same until the table changes. Decoding, checking and routing
are then one dictionary look-up. Our blocks do not use the dynamic table, so they never depend on what was sent before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import encode_integer
from hpack.table import HeaderTable

from headrace.core.limits import Limits
from headrace.net.http.heads import Field, RequestHead, ResponseHead, check_field
from headrace.net.http2.frames import ErrorCode, Http2ConnectionError, StreamError

_REMEMBERED_BYTES = 256 * 1024
_FIELD_COST = 64
"""Memory of a remembered field beside its bytes. Clients choose both, so the sum is bounded."""
_LENGTH_DIGITS = 18
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_PADDED = re.compile(rb"\A[ \t]|[ \t]\Z")
_BAD_PSEUDO = re.compile(rb"[\0- \x7f]")
"""Stricter than RFC 9113: a space or control character here would split a line of HTTP/1.1, or of a log."""
_CONNECTION_FIELDS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_SIZE_UPDATES = frozenset(bytes([first]) for first in range(0x20, 0x40))
_STATIC_STATUS = {200: b"\x88", 204: b"\x89", 206: b"\x8a", 304: b"\x8b", 400: b"\x8c", 404: b"\x8d", 500: b"\x8e"}


class _CountingTable(HeaderTable):
    """A dynamic table that counts its changes."""

    changes = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.changes += 1
        super().add(name, value)


class HeaderReader:
    """Decodes the header blocks of one connection."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._table = _CountingTable()
        self._decoder = Decoder(max_header_list_size=limits.header_bytes)
        self._decoder.header_table = self._table
        self._remembered: dict[bytes, RequestHead] = {}
        self._remembered_bytes = 0

    def request(self, block: bytes) -> RequestHead:
        """Decode the head of a new request; raise `StreamError` if it is malformed, after the table was updated."""
        head = self._remembered.get(block)
        if head is None:
            fields, stable = self._decode(block)
            head = _checked_request(fields)
            if stable:
                self._remember(block, head)
        return head

    def trailers(self, block: bytes) -> list[Field]:
        """Decode the fields after a body."""
        fields, _ = self._decode(block)
        for name, value in fields:
            _check_field(name, value)
            if name.startswith(b":"):
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "pseudo-header in trailers")
        return fields

    def skip(self, block: bytes) -> None:
        """Decode a block whose fields are not needed: it may change the table."""
        self._decode(block)

    def _remember(self, block: bytes, head: RequestHead) -> None:
        cost = 2 * len(block) + _FIELD_COST * len(head.fields)
        if cost > _REMEMBERED_BYTES // 4:
            return
        self._remembered_bytes += cost
        if self._remembered_bytes > _REMEMBERED_BYTES:
            self._remembered.clear()
            self._remembered_bytes = cost
        self._remembered[block] = head

    def _decode(self, block: bytes) -> tuple[list[Field], bool]:
        """Return the fields of a block, and whether the block left the dynamic table unchanged."""
        table = self._table
        before = table.changes
        try:
            fields: list[Field] = list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, f"header list over {self._limits.header_bytes} bytes"
            ) from None
        except (HPACKError, IndexError, UnicodeDecodeError, ValueError):
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "header block is not HPACK") from None
        if len(fields) > self._limits.header_count + len(_PSEUDO):
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, f"more than {self._limits.header_count} header fields"
            )
        # A block may begin with table size updates, which evict entries even if the final size is the same.
        stable = table.changes == before and block[:1] not in _SIZE_UPDATES
        if not stable:
            # Indices into the table have moved: remembered blocks are no longer valid.
            self._remembered.clear()
            self._remembered_bytes = 0
        return fields, stable


def _checked_request(decoded: list[Field]) -> RequestHead:
    pseudo: dict[bytes, bytes] = {}
    fields: list[Field] = []
    for name, value in decoded:
        if name[:1] == b":":
            if fields:
                raise _malformed("pseudo-header after a regular field")
            if name not in _PSEUDO or name in pseudo:
                raise _malformed("unknown or repeated pseudo-header")
            pseudo[name] = bytes(value)
            if _BAD_PSEUDO.search(value):
                raise _malformed("pseudo-header with a forbidden character")
        else:
            _check_field(name, value)
            fields.append((bytes(name), bytes(value)))
    method = pseudo.get(b":method")
    path = pseudo.get(b":path")
    if method == b"CONNECT" or not method or not path or not pseudo.get(b":scheme"):
        raise _malformed("a request needs :method, :scheme and :path")
    if path[:1] != b"/" and not (path == b"*" and method == b"OPTIONS"):
        raise _malformed(":path must begin with /")
    authority = pseudo.get(b":authority", b"")
    fields = _joined_cookies(_with_host(_trimmed(fields), authority))
    head = RequestHead(method, path, fields, version="2", scheme=pseudo[b":scheme"], authority=authority)
    length = head.get(b"content-length")
    if length is not None:
        same = all(value == length for name, value in fields if name == b"content-length")
        if not same or not length.isdigit() or len(length) > _LENGTH_DIGITS:
            raise _malformed("content-length is not one number")
        head.content_length = int(length)
    return head


def _trimmed(fields: list[Field]) -> list[Field]:
    """Return a gRPC request's fields without spaces around values, as grpcio takes them; HTTP/2 forbids those (8.2.1)."""
    if not any(_PADDED.search(value) for _, value in fields):
        return fields
    if not any(name == b"content-type" and value.startswith(b"application/grpc") for name, value in fields):
        raise _malformed("field value with spaces around it")
    return [(name, value.strip(b" \t")) for name, value in fields]


def _with_host(fields: list[Field], authority: bytes) -> list[Field]:
    """Return the fields with a Host equal to :authority, for handlers that read only Host (8.3.1)."""
    hosts = [value for name, value in fields if name == b"host"]
    if len(hosts) > 1 or (hosts and authority and hosts[0].lower() != authority.lower()):
        raise _malformed("Host is not the authority")
    return [*fields, (b"host", authority)] if authority and not hosts else fields


def _joined_cookies(fields: list[Field]) -> list[Field]:
    """Return the fields with cookie crumbs joined: HTTP/2 may send them as several fields (8.2.3)."""
    crumbs = [value for name, value in fields if name == b"cookie"]
    if len(crumbs) < 2:
        return fields
    return [*(field for field in fields if field[0] != b"cookie"), (b"cookie", b"; ".join(crumbs))]


def _check_field(name: bytes, value: bytes) -> None:
    if _TOKEN.fullmatch(name) is None and name[:1] != b":":
        raise _malformed("field name with a capital or forbidden character")
    if _BAD_VALUE.search(value):
        raise _malformed("field value with a forbidden character")
    if name in _CONNECTION_FIELDS or (name == b"te" and value.lower() != b"trailers"):
        raise _malformed("connection-specific field")


def _malformed(text: str) -> StreamError:
    return StreamError(ErrorCode.PROTOCOL_ERROR, f"malformed request: {text}")


def encode_field(name: bytes, value: bytes) -> bytes:
    """Return a literal field without indexing and without Huffman coding, valid on every connection."""
    return b"\x00" + _string(name) + _string(value)


def encode_fields(fields: Iterable[Field]) -> bytes:
    """Return several literal fields, checked."""
    pieces = []
    for name, value in fields:
        check_field(name, value)
        pieces.append(encode_field(name, value))
    return b"".join(pieces)


@lru_cache(maxsize=64)
def encode_status(status: int) -> bytes:
    """Return the `:status` pseudo-header."""
    return _STATIC_STATUS.get(status) or encode_field(b":status", b"%d" % status)


def response_block(head: ResponseHead) -> bytes:
    """Return the header block of a response head, encoded once."""
    block = head.http2
    if block is None:
        block = head.http2 = encode_status(head.status) + encode_fields(head.fields)
    return block


def _string(text: bytes) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text
