# SPDX-License-Identifier: Apache-2.0
"""Header blocks of gRPC calls, encoded once for all calls that repeat them.

A client's head becomes a `ProxiedCallPlan`, kept in the head's `memo`; a backend's block becomes a `ResponseBlock`, kept by
the `ResponseHeaderReader`. Both hold the block for the other side, ready to be written.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.fleet.router.backend import Outcome
from headrace.fleet.router.requests import HOP_BY_HOP, VIA_NAME
from headrace.net.grpc.messages import parse_timeout
from headrace.net.grpc.status import Status
from headrace.net.http2.frames import ErrorCode, StreamError
from headrace.net.http2.headers import HeaderReader, encode_field, encode_fields, encode_status

if TYPE_CHECKING:
    from headrace.core.limits import Limits
    from headrace.net.http.heads import Field, RequestHead

# Entries of HPACK's static table.
_POST = b"\x83"
_SCHEMES = {"http": b"\x86", "https": b"\x87"}
_TE = encode_field(b"te", b"trailers")

_MAX_KNOWN_BYTES = 256 * 1024
_FIELD_COST = 64
_MAX_TIMEOUT_MILLISECONDS = 99_999_999
_REFUSED_STATUSES = frozenset((502, 503, 504))
_ERROR_STATUSES = frozenset((Status.UNKNOWN, Status.INTERNAL, Status.DATA_LOSS))
_MAX_HOPS = 8
"""Maximum number of routers that a call passes: chains are useful, loops are not."""
_ADDRESSES = re.compile(rb"[A-Za-z0-9 ,.:;\[\]_-]{1,1024}")
_NEVER = HOP_BY_HOP | {b"host", b"x-forwarded-for", b"grpc-timeout"}
"""Fields of the connection, or written here."""
_UNTRUSTED = _NEVER | {b"forwarded", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip"}


class ProxiedCallPlan:
    """How calls with one head, of one client, are forwarded. Shared by all of them, so it never changes."""

    __slots__ = ("_without_timeout", "block", "error", "names_host", "timeout_seconds")

    def __init__(self, head: RequestHead, client: str, *, keep_host: bool, trust_forwarded: bool) -> None:
        self.error: HeadraceError | None = None
        """Error for all calls with this head; None if they are forwarded."""
        self.timeout_seconds: float | None = None
        self.names_host = keep_host and bool(head.authority)
        """Whether the block has an `:authority`; if not, the backend's own is sent before it."""
        target = head.path + b"?" + head.query if head.query else head.path
        pieces = [_POST, encode_field(b":path", target)]
        if self.names_host:
            pieces.append(encode_field(b":authority", head.authority))
        pieces.append(_TE)
        pieces += [encode_field(name, value) for name, value in _copied_fields(head, trust_forwarded)]
        pieces += [encode_field(name, value) for name, value in _forwarding_fields(head, client, trust_forwarded)]
        self._without_timeout = b"".join(pieces)
        self.block = self._without_timeout
        """The head without the scheme, which depends on the backend."""
        timeout = head.get(b"grpc-timeout")
        try:
            if head.method != b"POST":
                raise InvalidArgument("gRPC calls are POST requests")
            if sum(value.count(VIA_NAME) for name, value in head.fields if name == b"via") >= _MAX_HOPS:
                raise FailedPrecondition("the call goes in a loop: a router is one of its own backends")
            if timeout is not None:
                self.timeout_seconds = parse_timeout(timeout)
                self.block += encode_field(b"grpc-timeout", timeout)
        except HeadraceError as error:
            self.error = error

    def block_after(self, seconds: float) -> bytes:
        """Return the block for a call that has waited: its backend gets the rest of the timeout."""
        if self.timeout_seconds is None:
            return self.block
        milliseconds_left = round(1000 * (self.timeout_seconds - seconds))
        if milliseconds_left > _MAX_TIMEOUT_MILLISECONDS:
            return self.block  # over a day: the wait does not matter
        return self._without_timeout + encode_field(b"grpc-timeout", b"%dm" % max(milliseconds_left, 1))


def _copied_fields(head: RequestHead, trust: bool) -> list[Field]:
    """Return the client's fields that are forwarded."""
    dropped = _NEVER if trust else _UNTRUSTED
    # Some servers read `_` as `-`: both spellings of a dropped field are dropped.
    return [
        (name, value)
        for name, value in head.fields
        if name not in dropped and (b"_" not in name or name.replace(b"_", b"-") not in dropped)
    ]


def _forwarding_fields(head: RequestHead, client: str, trust: bool) -> list[Field]:
    """Return the forwarding fields: the client, the original scheme and host, and this router."""
    before = [
        value for name, value in head.fields if trust and name == b"x-forwarded-for" and _ADDRESSES.fullmatch(value)
    ]
    fields = [
        (b"x-forwarded-for", b", ".join([*before, client.encode("latin-1", "replace")])),
        (b"via", b"2 " + VIA_NAME),
    ]
    if not trust or b"x-forwarded-proto" not in head.by_name:
        fields.append((b"x-forwarded-proto", head.scheme))
    if head.authority and (not trust or b"x-forwarded-host" not in head.by_name):
        fields.append((b"x-forwarded-host", head.authority))
    return fields


def opening_blocks(scheme: str, host: str, port: int) -> tuple[bytes, bytes]:
    """Return what is sent before a plan's block: the scheme, and the scheme with the backend's own name."""
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return _SCHEMES[scheme], _SCHEMES[scheme] + encode_field(b":authority", name.encode())


class ResponseBlock:
    """A header block of a backend, encoded for the client."""

    __slots__ = ("block", "grpc_status", "outcome", "status")

    def __init__(self, status: int, fields: list[Field]) -> None:
        self.status = status
        """HTTP status; 0 for trailers."""
        self.grpc_status = -1
        """-1 if the block has none."""
        kept = [(bytes(name), bytes(value)) for name, value in fields if name not in HOP_BY_HOP]
        for name, value in kept:
            if name == b"grpc-status":
                self.grpc_status = int(value) if value.isdigit() and len(value) < 4 else 2
        refused = self.grpc_status == Status.UNAVAILABLE or status in _REFUSED_STATUSES
        erred = self.grpc_status in _ERROR_STATUSES or status >= 500
        self.outcome = Outcome.REFUSED if refused else Outcome.ERRED if erred else Outcome.OK
        """Outcome of the call, for the backend's health."""
        try:
            self.block = (encode_status(status) if status else b"") + encode_fields(kept)
        except ValueError:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "a field of the response is malformed") from None


class ResponseHeaderReader(HeaderReader):
    """Decodes the header blocks of one connection to a backend, and remembers them."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._heads: dict[bytes, ResponseBlock] = {}
        self._tails: dict[bytes, ResponseBlock] = {}
        self._known_bytes = 0

    def response_head(self, block: bytes) -> ResponseBlock:
        """Decode the head of a response."""
        response = self._heads.get(block)
        if response is None:
            fields, stable = self._decode(block)
            names = [name for name, _ in fields]
            if names[:1] != [b":status"] or any(name[:1] == b":" for name in names[1:]):
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "a response starts with one :status")
            status = bytes(fields[0][1])
            if len(status) != 3 or not status.isdigit() or not 100 <= int(status) <= 599:
                raise StreamError(ErrorCode.PROTOCOL_ERROR, ":status is not a status code")
            response = ResponseBlock(int(status), fields[1:])
            if stable:
                self._remember_block(self._heads, block, response, len(fields))
        return response

    def response_trailers(self, block: bytes) -> ResponseBlock:
        """Decode the trailers of a response."""
        response = self._tails.get(block)
        if response is None:
            fields, stable = self._decode(block)
            if any(name[:1] == b":" for name, _ in fields):
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "pseudo-header in trailers")
            response = ResponseBlock(0, fields)
            if stable:
                self._remember_block(self._tails, block, response, len(fields))
        return response

    def known(self, head_block: bytes, tail_block: bytes) -> tuple[ResponseBlock, ResponseBlock] | None:
        """Return head and trailers of a response if both were seen before and the head is not interim."""
        head = self._heads.get(head_block)
        tail = self._tails.get(tail_block)
        return (head, tail) if head is not None and tail is not None and head.status >= 200 else None

    def _remember_block(
        self, blocks: dict[bytes, ResponseBlock], block: bytes, response: ResponseBlock, fields: int
    ) -> None:
        cost = len(block) + len(response.block) + _FIELD_COST * (fields + 2)
        if cost > _MAX_KNOWN_BYTES // 4:
            return
        self._known_bytes += cost
        if self._known_bytes > _MAX_KNOWN_BYTES:
            self._forget()
            self._known_bytes = cost
        blocks[block] = response

    def _forget(self) -> None:
        self._heads.clear()
        self._tails.clear()
        self._known_bytes = 0

    def _decode(self, block: bytes) -> tuple[list[Field], bool]:
        """See `HeaderReader._decode`. We disable the dynamic table; some backends go on to index into one of size 0."""
        entries = self._table.dynamic_entries
        had = len(entries)
        fields, stable = super()._decode(block)
        if stable:
            return fields, True
        if had or entries:
            self._forget()
            return fields, False
        return fields, not 0x20 <= block[0] < 0x40
