# SPDX-License-Identifier: Apache-2.0
"""Limits on what a caller may send or have kept: each has one name, one default and one reason."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
DAY_SECONDS = 86_400.0

TENSOR_RANK = 32
"""Maximum dimensions of a tensor. Not a setting: numpy's own limit is 64."""

TENSOR_COUNT = 1024
"""Maximum inputs, or requested outputs, of a request. Not a setting: no model has nearly as many."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on requests. Each is enforced before the memory or time it protects is spent."""

    header_bytes: int = 64 * KIB
    """Request line and headers together (HTTP/1.1), or one decoded header list (HTTP/2)."""

    header_count: int = 256
    """Header fields in one request."""

    body_bytes: int = 64 * MIB
    """One HTTP request body, after inflation. 64 MiB is Triton's `--http-max-input-size`."""

    message_bytes: int = 64 * MIB
    """One gRPC or WebSocket message, after inflation."""

    unfinished_bytes: int = 1024 * MIB
    """Request bodies and messages that have arrived in part, of all connections together; at least four of the largest."""

    connection_unfinished_bytes: int = 256 * MIB
    """The same, of one HTTP/2 connection; at least two of the largest."""

    chunk_count: int = 65_536
    """Chunks in one chunked HTTP/1.1 body."""

    pipelined_requests: int = 64
    """Complete HTTP/1.1 requests waiting on one connection; above that, the server stops reading until some are answered."""

    pipelined_bytes: int = 4 * MIB
    """The same for the bodies of waiting requests."""

    concurrent_streams: int = 1024
    """Open HTTP/2 streams on one connection."""

    stream_window_bytes: int = 4 * MIB
    """HTTP/2 flow-control window of one stream: bytes that a client may send before the server consumes them."""

    connection_window_bytes: int = 16 * MIB
    """HTTP/2 flow-control window of one connection."""

    header_seconds: float = 10.0
    """From a connection's or request's first byte to the end of its headers."""

    body_idle_seconds: float = 60.0
    """Longest pause inside a request body."""

    write_idle_seconds: float = 60.0
    """Longest time that a client may leave a response unread."""

    idle_seconds: float = 120.0
    """How long a connection may stay open without a request in flight."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits on `/v1/files` and `/v1/batches`. A server without API keys counts all callers as one."""

    file_bytes: int = 200 * MIB
    """One uploaded file. 200 MiB is about what OpenAI takes for a batch."""

    uploads: int = 16
    """Uploads that one worker process takes at the same time; others are answered with 429."""

    line_bytes: int = 4 * MIB
    """One line of the input of a batch."""

    lines: int = 50_000
    """Lines of one batch, as in OpenAI's API."""

    output_bytes: int = 4096 * MIB
    """All results of one batch; lines that are left above it are not computed."""

    key_files: int = 1000
    """Files of one API key, results included."""

    key_bytes: int = 8192 * MIB
    """The same in bytes."""

    total_files: int = 10_000
    """Files of all API keys."""

    total_bytes: int = 32_768 * MIB
    """The same in bytes."""

    key_batches: int = 100
    """Batches of one API key that are not finished."""

    total_batches: int = 10_000
    """Batches of all API keys, finished ones included until their records are removed."""

    running_batches: int = 4
    """Batches that one worker process computes at the same time; others wait."""

    file_seconds: float = 30 * DAY_SECONDS
    """Age at which a file is removed, unless its `expires_after` says otherwise."""

    batch_seconds: float = DAY_SECONDS
    """Age at which a batch expires: its completion window."""

    record_seconds: float = 30 * DAY_SECONDS
    """How long a finished batch is still listed."""
