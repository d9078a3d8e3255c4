# SPDX-License-Identifier: Apache-2.0
"""HTTP GET of a pod or a local replica: the status of a router, the metrics of a server.

Time and size are limited, and redirects are not followed. Addresses come from pods, never from users.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

ROUTER_STATUS = "/router/status"
_TIMEOUT_SECONDS = 1.0
_MAX_BYTES = 16 << 20


async def get_page(host: str, port: int, path: str, seconds: float = _TIMEOUT_SECONDS) -> bytes | None:
    """Return the body of a GET; None without an answer, or for a status other than 200."""
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            name = f"[{host}]" if ":" in host else host
            # HTTP/1.0: the answer is not chunked.
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
            answer = bytearray()
            while piece := await reader.read(1 << 16):
                answer += piece
                if len(answer) > _MAX_BYTES:
                    return None
    except (OSError, TimeoutError, ValueError):
        return None
    finally:
        if writer is not None:
            writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None


async def router_status(host: str, port: int, seconds: float = _TIMEOUT_SECONDS) -> dict[str, Any] | None:
    """Return the status of a router; None if it does not answer."""
    body = await get_page(host, port, ROUTER_STATUS, seconds)
    try:
        status = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None
    return status if isinstance(status, dict) else None
