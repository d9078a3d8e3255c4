# SPDX-License-Identifier: Apache-2.0
"""Asks a service how it is: GET {url}/api/v1/status. Used by `services`; the address is one that a driver gave."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

AskStatus = Callable[[str, float], Awaitable[Mapping[str, Any] | None]]
"""Of a URL and a time in seconds: what the service says, or None if it does not."""

_MOST_BYTES = 1 << 20


class Asking:
    """By http.client, in threads of its own: services that hang must not hold up anything else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="headrace-ask")

    async def __call__(self, url: str, seconds: float) -> Mapping[str, Any] | None:
        """See `AskStatus`."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, _ask, url, seconds)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _ask(url: str, seconds: float) -> Mapping[str, Any] | None:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        connection.request("GET", "/api/v1/status")
        found = json.loads(connection.getresponse().read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return None
    finally:
        connection.close()
    return found if isinstance(found, dict) else None
