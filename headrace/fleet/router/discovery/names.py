# SPDX-License-Identifier: Apache-2.0
"""Backends behind one name: an address each, asked of the system's resolver now and then. Followed by `discoverer`."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.settings import BackendAddress

log = logging.getLogger("headrace.router")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a name to addresses; raises OSError."""


class NameSource:
    """See the module."""

    def __init__(self, text: str, interval_seconds: float, resolve: Resolve | None = None) -> None:
        self._address = BackendAddress.parse(text)
        if self._address.scheme != "http":
            raise InvalidArgument(f"discovery.dns {text!r}: only http is spoken to addresses found by name")
        self._seconds = interval_seconds
        self._resolve = resolve or _resolve

    def __str__(self) -> str:
        return f"the name {self._address.host}"

    async def follow(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """See `discoverer.Source`."""
        while True:
            try:
                yield await self._look()
            except OSError as error:
                log.debug("cannot resolve %s: %s", self._address.host, error)
                yield InvalidArgument("it has no address, or the name server does not answer")
            await asyncio.sleep(self._seconds)

    async def _look(self) -> list[BackendAddress]:
        named = self._address
        hosts = await self._resolve(named.host, named.port)
        return [_at(named, host) for host in sorted(set(hosts))]


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]


def _at(named: BackendAddress, host: str) -> BackendAddress:
    shown = f"[{host}]" if ":" in host else host
    grpc_host = host if named.grpc_host == named.host else named.grpc_host
    return replace(named, url=f"{named.scheme}://{shown}:{named.port}", host=host, grpc_host=grpc_host)
