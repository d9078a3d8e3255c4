# SPDX-License-Identifier: Apache-2.0
"""A page of a process of ours: the status of a router, the metrics of a pod. For `local`, and for `cluster.stepping`.

A plain GET with a bound on time and bytes. No redirects, nothing that a user names: the address is that of a pod.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

ROUTER_STATUS = "/router/status"
_SECONDS = 1.0
_MOST_BYTES = 16 << 20


async def page(host: str, port: int, path: str, seconds: float = _SECONDS) -> bytes | None:
    """What a GET is answered with; None if it is not, or not with 200."""
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            name = f"[{host}]" if ":" in host else host
            # HTTP/1.0: so no server answers in chunks.
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
            answer = bytearray()
            while piece := await reader.read(1 << 16):
                answer += piece
                if len(answer) > _MOST_BYTES:
                    return None
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None


async def router_status(host: str, port: int, seconds: float = _SECONDS) -> dict[str, Any] | None:
    """What a router tells of itself; None if it does not answer."""
    found = await page(host, port, ROUTER_STATUS, seconds)
    try:
        told = json.loads(found) if found else None
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None
