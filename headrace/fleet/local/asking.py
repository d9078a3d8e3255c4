# SPDX-License-Identifier: Apache-2.0
"""A page of a process of this machine: the status of a router, the metrics of a pod. For `routing` and `scaling`."""

from __future__ import annotations

from typing import Any

from headrace.fleet import asking
from headrace.fleet.local.commands import ADDRESS


async def page(port: int, path: str) -> bytes | None:
    """What a GET is answered with; None if it is not, or not with 200."""
    return await asking.page(ADDRESS, port, path)


async def router_status(port: int) -> dict[str, Any] | None:
    """What a router tells of itself; None if it does not answer."""
    return await asking.router_status(ADDRESS, port)
