# SPDX-License-Identifier: Apache-2.0
"""The name of the other end of a connection, for logs."""

from __future__ import annotations

import asyncio


def peer_name(transport: asyncio.BaseTransport | None) -> str:
    """`address:port`, `unix` for a UNIX socket, `gone` for a closed one."""
    peer = None if transport is None else transport.get_extra_info("peername")
    if isinstance(peer, tuple) and len(peer) >= 2:
        host = f"[{peer[0]}]" if ":" in peer[0] else peer[0]
        return f"{host}:{peer[1]}"
    return "gone" if transport is None else "unix"
