# SPDX-License-Identifier: Apache-2.0
"""WebSocket close codes: the one table from our error codes to them, and close reasons that fit a frame.

Only codes from the IANA registry are used (https://www.iana.org/assignments/websocket), so that any client has a name
for them; the 4000s stay free for what runs on top.
"""

from __future__ import annotations

from headrace.core.errors import Code

NORMAL = 1000
GOING_AWAY = 1001
UNSUPPORTED_DATA = 1003
ABNORMAL = 1006
"""Never sent: what `on_close` is told when the connection broke without a close frame."""
INVALID_DATA = 1007
POLICY = 1008
TOO_BIG = 1009
INTERNAL = 1011
TRY_AGAIN_LATER = 1013
UNAUTHORIZED = 3000
FORBIDDEN = 3003
TIMEOUT = 3008

CLOSE_CODE: dict[Code, int] = {
    Code.INVALID_ARGUMENT: POLICY,
    Code.NOT_FOUND: POLICY,
    Code.ALREADY_EXISTS: POLICY,
    Code.UNAUTHENTICATED: UNAUTHORIZED,
    Code.PERMISSION_DENIED: FORBIDDEN,
    Code.FAILED_PRECONDITION: POLICY,
    Code.TOO_LARGE: TOO_BIG,
    Code.RESOURCE_EXHAUSTED: TRY_AGAIN_LATER,
    Code.DEADLINE_EXCEEDED: TIMEOUT,
    Code.CANCELLED: GOING_AWAY,
    Code.UNIMPLEMENTED: UNSUPPORTED_DATA,
    Code.UNAVAILABLE: TRY_AGAIN_LATER,
    Code.INTERNAL: INTERNAL,
}
"""Every error code as a close code. 1008 is RFC 6455's word for "no, and there is no better code"."""

_REASON_BYTES = 123
"""A control frame carries 125 bytes, two of which are the code."""

_SENDABLE = frozenset((1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014))


def may_be_sent(code: int) -> bool:
    """Whether a close frame may carry this code."""
    return code in _SENDABLE or 3000 <= code < 5000


def fit_reason(reason: str) -> str:
    """The reason, cut at a character so that it fits a close frame."""
    data = reason.encode("utf-8", "replace")
    return data[:_REASON_BYTES].decode("utf-8", "ignore")
