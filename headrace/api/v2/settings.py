# SPDX-License-Identifier: Apache-2.0
"""What a server can be told about its v2 protocol. Filled by the command line, given to `shared`."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.api.v2.restrictions import Restriction


@dataclass(frozen=True, slots=True)
class TraceDefaults:
    """The trace settings a server starts with, by Triton's names."""

    level: tuple[str, ...] = ("OFF",)
    rate: int = 1000
    """Of how many requests one is traced."""
    count: int = -1
    """How many are traced at most; -1 for all."""
    log_frequency: int = 0
    mode: str = "triton"


@dataclass(frozen=True, slots=True)
class V2Settings:
    """See the module."""

    server_id: str = "headrace"
    """What the server calls itself: `--id`."""

    allow_client_shm: bool = False
    """Whether clients may register shared memory: `--allow-client-shm`."""

    http_header_forward_pattern: str = ""
    """HTTP fields whose whole name matches this pattern become request parameters; "" for none."""

    grpc_header_forward_pattern: str = ""
    """The same for gRPC metadata."""

    http_restrictions: tuple[Restriction, ...] = ()
    """`--http-restricted-api`, one for each; see `Restriction.parse`."""

    grpc_restrictions: tuple[Restriction, ...] = ()
    """`--grpc-restricted-protocol`."""

    trace: TraceDefaults | None = None
    """None: off, or every request where the server was given a collector."""

    stream_unread_bytes: int = field(default=256 * 1024 * 1024)
    """What may wait for a client that does not read its stream of answers; over it, the stream is broken off."""
