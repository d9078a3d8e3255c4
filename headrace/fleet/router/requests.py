# SPDX-License-Identifier: Apache-2.0
"""The head of a request as a backend gets it: framed anew, without what belongs to the client's connection alone.

`forwarding` asks `plan_of` once for each distinct head; the wire keeps heads that clients repeat, and the plan with them.
Nothing of the client's framing is passed on: lengths and codings are written here, from what the wire has read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.handing import HEADER

if TYPE_CHECKING:
    from headrace.fleet.router.settings import RouterSettings
    from headrace.net.http.heads import Fields, RequestHead

VIA_NAME = b"headrace-router"
JOIN_BYTES = 16 * 1024
"""A request up to this size is joined and written in one piece."""
_MOST_HOPS = 8
"""Routers in a row. More are a circle: a router that has itself for a backend."""

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
"""Of the connection, and not of the message (RFC 9110, 7.6.1)."""

_OWN = frozenset((b"host", b"content-length", b"expect", b"x-forwarded-for"))
"""Written here, if at all. The wire has said "100 Continue" itself by the time a body comes."""
_FORWARDED = frozenset((b"forwarded", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"x-real-ip"))
"""What only a proxy of ours may say."""

_TICKETS = frozenset((HEADER,))
"""What a router says that pairs backends, and no client."""

_NONE: frozenset[bytes] = frozenset()
_NEVER = HOP_BY_HOP | _OWN
_UNTRUSTED = _NEVER | _FORWARDED

_TARGET = re.compile(rb"[\x21-\x7e\x80-\xff]+")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(rb"[A-Za-z0-9._~:\[\]%-]{0,255}")
_ADDRESSES = re.compile(rb"[A-Za-z0-9 ,.:;\[\]_-]{0,1024}")
_IDEMPOTENT = frozenset((b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS"))
_BODY_METHODS = frozenset((b"POST", b"PUT", b"PATCH"))
_INFERENCE = re.compile(
    rb"/v2/models/[^/]+(/versions/[^/]+)?/infer|/predict(/[^/]+)?|/v1/models/[^/]+(/versions/[^/]+)?:predict"
)


class RequestPlan:
    """What is known of a request before a backend is chosen. Shared by all requests with the same head."""

    __slots__ = (
        "hostless",
        "is_short",
        "length",
        "repeatable",
        "silent",
        "streamed",
        "upgrade",
        "whole",
        "whole_length",
    )

    def __init__(self, whole: bytes, streamed: bytes, length: int) -> None:
        self.whole = whole
        """The head for a body that is sent in one piece, up to the client's address in X-Forwarded-For."""
        self.streamed = streamed
        """The same for a body that is sent as it comes."""
        self.length = length
        """The body's length by its head; -1 where it is not told (and 0 if there is no body)."""
        self.whole_length = max(length, 0)
        """How long a body that is sent in one piece has to be."""
        self.repeatable = False
        """Whether a backend may get it twice."""
        self.upgrade = False
        """Whether it asks for a WebSocket."""
        self.silent = False
        """Whether its answer has no body: it is HEAD."""
        self.hostless = False
        """Whether the client named no host."""
        self.is_short = False
        """Whether nothing about it is unusual: it names a host, wants no WebSocket, and is written in one piece."""


def plan_of(head: RequestHead, settings: RouterSettings) -> RequestPlan:
    """Work out what a backend gets. Raises `InvalidArgument` for what must not be passed on."""
    method, path, by_name = head.method, head.path, head.by_name
    target = b"%b?%b" % (path, head.query) if head.query else path
    if not _TARGET.fullmatch(target) or not _METHOD.fullmatch(method):
        raise InvalidArgument("the request line has characters that may not be there: percent-encode them")
    host = by_name.get(b"host", b"") or head.authority
    if not _HOST.fullmatch(host):
        raise InvalidArgument("the Host header is not a host name or an address, with or without a port")
    upgrade = _asks_for_websocket(head)
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    if settings.keep_host and host:
        lines.append(b"host: " + host)
    forwarded_for = _pass_on(head, settings, lines)
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
        # The wire lets no such thing through; but one that came would be a request of its own.
        raise InvalidArgument("a header field has characters that may not be there")
    length = _length_of(head)
    # The addresses last, for the one that follows is the client's.
    told = b"\r\ncontent-length: %d" % length if length >= 0 else b"\r\ntransfer-encoding: chunked"
    whole = told if length > 0 else b"\r\ncontent-length: 0" if method in _BODY_METHODS else b""
    repeatable = method in _IDEMPOTENT or (
        settings.retries.inference and method == b"POST" and _INFERENCE.fullmatch(path) is not None
    )
    plan = RequestPlan(
        b"%b%b\r\nx-forwarded-for: %b" % (text, whole, forwarded_for),
        b"%b%b\r\nx-forwarded-for: %b" % (text, told, forwarded_for),
        length,
    )
    plan.repeatable = repeatable and not upgrade
    plan.upgrade = upgrade
    plan.silent = method == b"HEAD"
    plan.hostless = not host
    plan.is_short = bool(host) and not upgrade and plan.whole_length <= JOIN_BYTES
    return plan


def _length_of(head: RequestHead) -> int:
    by_name = head.by_name
    if b"transfer-encoding" in by_name:
        return -1
    # The wire has refused lengths that differ, or that are no numbers.
    length = by_name.get(b"content-length")
    if length is None:
        return -1 if head.version == "2" else 0
    return int(length)


def _pass_on(head: RequestHead, settings: RouterSettings, lines: list[bytes]) -> bytes:
    """Add the fields for the backend; returns the addresses that came in X-Forwarded-For, each with a comma after it."""
    left_out = _NEVER if settings.trust_forwarded else _UNTRUSTED
    if settings.paired:
        left_out = left_out | _TICKETS
    if b"connection" in head.by_name:
        left_out = left_out | nominated_fields(head.by_name[b"connection"], head.fields)
    forwarded_for = b""
    hops = 0
    for name, value in head.fields:
        if name in left_out:
            if name == b"x-forwarded-for":
                addresses = value.strip(b" ,")
                if addresses and _ADDRESSES.fullmatch(addresses):
                    forwarded_for += addresses + b", "
            continue
        # Some servers read `_` as `-`: what may not be said with one may not be said with the other.
        if b"_" in name and name.replace(b"_", b"-") in left_out:
            continue
        if name == b"via":
            hops += value.count(VIA_NAME)
        lines.append(b"%b: %b" % (name, value))
    if hops >= _MOST_HOPS:
        raise FailedPrecondition("the request goes in a circle: a router has itself among its backends")
    return forwarded_for


def nominated_fields(connection: bytes | None, fields: Fields) -> frozenset[bytes]:
    """The fields that `Connection` names: they are meant for the next hop alone."""
    if connection is None:
        return _NONE
    named: set[bytes] = set()
    for name, value in fields:
        if name == b"connection":
            named.update(each.strip().lower() for each in value.split(b","))
    return frozenset(named)


def _asks_for_websocket(head: RequestHead) -> bool:
    by_name = head.by_name
    upgrade = by_name.get(b"upgrade")
    if upgrade is None or upgrade.lower() != b"websocket" or head.version != "1.1" or head.method != b"GET":
        return False
    if by_name.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in by_name:
        return False
    return b"upgrade" in nominated_fields(by_name.get(b"connection"), head.fields)
