# SPDX-License-Identifier: Apache-2.0
"""Build the request head for a backend: no hop-by-hop fields, new framing, and forwarding fields.

`plan_request` runs once per distinct head: the server side keeps heads that clients repeat, and their plan with them. The
client's framing is never copied: lengths and transfer codings are written here, from what the HTTP parser has read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.core.continuation import CONTINUATION_HEADER, STREAM_PATHS
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.kv_transfer import TRANSFER_HEADER

if TYPE_CHECKING:
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.heads import Fields, RequestHead

VIA_NAME = b"headrace-router"
JOIN_BYTES = 16 * 1024
"""A request with a body up to this size is joined and written in one piece."""
_MAX_HOPS = 8
"""Routers in a chain. More mean a loop: a router that is its own backend."""

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
"""Fields of the connection, not of the message (RFC 9110, 7.6.1)."""

_OWN = frozenset((b"host", b"content-length", b"expect", b"x-forwarded-for", CONTINUATION_HEADER))
"""Fields that the router writes, if at all. The server side has sent "100 Continue" itself before a body comes."""
_FORWARDED = frozenset((b"forwarded", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip"))
"""Fields that are copied from trusted proxies only."""

_TRANSFER_TOKENS = frozenset((TRANSFER_HEADER,))
"""Fields that only the router itself may send to a decode backend."""

_NONE: frozenset[bytes] = frozenset()
_NEVER = HOP_BY_HOP | _OWN
_UNTRUSTED = _NEVER | _FORWARDED

_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(rb"[A-Za-z0-9._~:\[\]%-]{0,255}")
_ADDRESSES = re.compile(rb"[A-Za-z0-9 ,.:;\[\]_-]{0,1024}")
_IDEMPOTENT = frozenset((b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"))
_BODY_METHODS = frozenset((b"POST", b"PUT", b"PATCH"))
_STREAM_PATHS = frozenset(path.encode() for path in STREAM_PATHS)
_CODINGS = (b"content-encoding", b"transfer-encoding")
_INFERENCE = re.compile(
    rb"/v2/models/[^/]+(/versions/[^/]+)?/infer|/predict(/[^/]+)?|/v1/models/[^/]+(/versions/[^/]+)?:predict"
)


class RequestPlan:
    """How requests with one head are forwarded. Shared by all requests with the same head."""

    __slots__ = (
        "buffered",
        "buffered_length",
        "hostless",
        "is_head",
        "is_short",
        "length",
        "may_stream",
        "repeatable",
        "streamed",
        "upgrade",
    )

    def __init__(self, buffered: bytes, streamed: bytes, length: int) -> None:
        self.buffered = buffered
        """Head for a body that is sent in one piece, up to the client's address in X-Forwarded-For."""
        self.streamed = streamed
        """Head for a body that is streamed."""
        self.length = length
        """Content-Length; -1 if unknown, 0 without a body."""
        self.buffered_length = max(length, 0)
        """Required length of a body that is sent in one piece."""
        self.repeatable = False
        """Whether it may be sent again after a backend may have seen it."""
        self.may_stream = False
        """Whether the response may be a stream that another backend can continue."""
        self.upgrade = False
        """Whether it is a WebSocket handshake."""
        self.is_head = False
        """Whether it is HEAD: the response has no body."""
        self.hostless = False
        """Whether the client sent no host."""
        self.is_short = False
        """Whether it takes the short path: it has a host, is no WebSocket handshake, and is written in one piece."""


def plan_request(head: RequestHead, settings: RouterSettings) -> RequestPlan:
    """Plan how requests with this head are forwarded. Raises `InvalidArgument` for a head that must not be."""
    method, path, by_name = head.method, head.path, head.by_name
    target = b"%b?%b" % (path, head.query) if head.query else path
    if not _TARGET.fullmatch(target) or not _METHOD.fullmatch(method):
        raise InvalidArgument("the request line has invalid characters: percent-encode them")
    host = by_name.get(b"host", b"") or head.authority
    if not _HOST.fullmatch(host):
        raise InvalidArgument("the Host header is not a host name or an address, with or without a port")
    upgrade = _is_websocket_upgrade(head)
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    if settings.keep_host and host:
        lines.append(b"host: " + host)
    forwarded_for = _copy_fields(head, settings, lines)
    if upgrade:
        lines.append(b"connection: upgrade\r\nupgrade: websocket")
    lines.append(b"via: %b %b" % (head.version.encode(), VIA_NAME))
    if not settings.trust_forwarded or b"x-forwarded-proto" not in by_name:
        lines.append(b"x-forwarded-proto: " + head.scheme)
    if host and (not settings.trust_forwarded or b"x-forwarded-host" not in by_name):
        lines.append(b"x-forwarded-host: " + host)
    text = b"\r\n".join(lines)
    breaks = len(lines) - 1 + upgrade
    if text.count(b"\n") != breaks or text.count(b"\r") != breaks or b"\0" in text:
        # The HTTP parser rejects these. If one came through, it would be request smuggling.
        raise InvalidArgument("a header field has invalid characters")
    length = _length_of(head)
    # X-Forwarded-For goes last: the client's address is appended to it.
    framing = b"\r\ncontent-length: %d" % length if length >= 0 else b"\r\ntransfer-encoding: chunked"
    buffered = framing if length > 0 else b"\r\ncontent-length: 0" if method in _BODY_METHODS else b""
    repeatable = method in _IDEMPOTENT or (
        settings.retries.inference and method == b"POST" and _INFERENCE.fullmatch(path) is not None
    )
    plan = RequestPlan(
        b"%b%b\r\nx-forwarded-for: %b" % (text, buffered, forwarded_for),
        b"%b%b\r\nx-forwarded-for: %b" % (text, framing, forwarded_for),
        length,
    )
    plan.repeatable = repeatable and not upgrade
    plan.may_stream = method == b"POST" and path in _STREAM_PATHS and not any(name in by_name for name in _CODINGS)
    plan.upgrade = upgrade
    plan.is_head = method == b"HEAD"
    plan.hostless = not host
    plan.is_short = bool(host) and not upgrade and plan.buffered_length <= JOIN_BYTES
    return plan


def _length_of(head: RequestHead) -> int:
    by_name = head.by_name
    if b"transfer-encoding" in by_name:
        return -1
    # The HTTP parser has rejected lengths that differ or are not numbers.
    length = by_name.get(b"content-length")
    if length is None:
        return -1 if head.version == "2" else 0
    return int(length)


def _copy_fields(head: RequestHead, settings: RouterSettings, lines: list[bytes]) -> bytes:
    """Add the client's fields. Returns the addresses of a trusted client's X-Forwarded-For, each followed by a comma."""
    dropped = _NEVER if settings.trust_forwarded else _UNTRUSTED
    if settings.paired:
        dropped = dropped | _TRANSFER_TOKENS
    if b"connection" in head.by_name:
        dropped = dropped | nominated_fields(head.by_name[b"connection"], head.fields)
    forwarded_for = b""
    hops = 0
    for name, value in head.fields:
        if name in dropped:
            if name == b"x-forwarded-for" and settings.trust_forwarded:
                addresses = value.strip(b" ,")
                if addresses and _ADDRESSES.fullmatch(addresses):
                    forwarded_for += addresses + b", "
            continue
        # Some servers read `_` as `-`: both spellings of a dropped field are dropped.
        if b"_" in name and name.replace(b"_", b"-") in dropped:
            continue
        if name == b"via":
            hops += value.count(VIA_NAME)
        lines.append(b"%b: %b" % (name, value))
    if hops >= _MAX_HOPS:
        raise FailedPrecondition("the request goes in a loop: a router is one of its own backends")
    return forwarded_for


def nominated_fields(connection: bytes | None, fields: Fields) -> frozenset[bytes]:
    """Return the fields that `Connection` names: they are for the next hop only."""
    if connection is None:
        return _NONE
    names: set[bytes] = set()
    for name, value in fields:
        if name == b"connection":
            names.update(field.strip().lower() for field in value.split(b","))
    return frozenset(names)


def _is_websocket_upgrade(head: RequestHead) -> bool:
    by_name = head.by_name
    upgrade = by_name.get(b"upgrade")
    if upgrade is None or upgrade.lower() != b"websocket" or head.version != "1.1" or head.method != b"GET":
        return False
    if by_name.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in by_name:
        return False
    return b"upgrade" in nominated_fields(by_name.get(b"connection"), head.fields)
