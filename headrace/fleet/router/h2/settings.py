# SPDX-License-Identifier: Apache-2.0
"""What the gRPC half of a router can be told beside `router.settings`. Read by the modules of this room."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.limits import KIB, MIB


@dataclass(frozen=True, slots=True)
class GrpcProxySettings:
    """Connections to backends, and what is kept of a call."""

    connections: int = 4
    """The most connections to one backend. Several reach the several workers behind one port."""
    spread_calls: int = 32
    """Calls on each connection from which on another one is opened, as long as there are fewer than `connections`."""
    waiting_calls: int = 4096
    """Calls that may wait for one backend: for its connection, or for others to end when it allows no more at once."""
    replay_bytes: int = 256 * KIB
    """What is kept of a request until its answer begins, to send it again when a backend has not looked at it."""
    stream_window_bytes: int = 1 * MIB
    """What a backend may send of one answer before the client has taken it."""
    connection_window_bytes: int = 256 * MIB
    """The same for all calls on a connection: large, so that clients which do not read cannot hold up the others."""
    header_bytes: int = 64 * KIB
    """One header block of a backend, decoded."""
