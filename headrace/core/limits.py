# SPDX-License-Identifier: Apache-2.0
"""How much of anything a caller may send. One class, so that every limit has one name, one default and one reason."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB

TENSOR_RANK = 32
"""Dimensions of one tensor. Not a setting: numpy itself stops at 64."""

TENSOR_COUNT = 1024
"""Inputs, or requested outputs, of one request. Not a setting: no model comes near it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on requests. Every one is enforced before the memory or time it guards is spent."""

    header_bytes: int = 64 * KIB
    """Request line and headers together (HTTP/1.1), or one decoded header list (HTTP/2)."""

    header_count: int = 256
    """Header fields in one request."""

    body_bytes: int = 64 * MIB
    """One HTTP request body, after inflation. 64 MiB is Triton's `--http-max-input-size`."""

    message_bytes: int = 64 * MIB
    """One gRPC or WebSocket message, after inflation."""

    chunk_count: int = 65_536
    """Chunks in one chunked HTTP/1.1 body."""

    pipelined_requests: int = 64
    """Complete HTTP/1.1 requests waiting on one connection; reading stops there until some are answered."""

    concurrent_streams: int = 1024
    """Open HTTP/2 streams on one connection."""

    stream_window_bytes: int = 4 * MIB
    """HTTP/2 flow-control window of one stream: what a client may send before we have taken it."""

    connection_window_bytes: int = 16 * MIB
    """HTTP/2 flow-control window of one connection."""

    header_seconds: float = 10.0
    """From a connection's or request's first byte to the end of its headers."""

    body_idle_seconds: float = 60.0
    """The longest silence inside a request body."""

    write_idle_seconds: float = 60.0
    """The longest a client may leave a response unread."""

    idle_seconds: float = 120.0
    """A connection with no request in flight."""
