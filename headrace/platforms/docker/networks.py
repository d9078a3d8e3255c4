# SPDX-License-Identifier: Apache-2.0
"""The network that services share: made by the first that needs it, removed by the last if it was made here.

Called by `driver`. Several drivers, in several processes, may do both at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

from headrace.platforms.docker.engine import Engine
from headrace.platforms.docker.words import MADE_LABEL, network_to_make


class Network:
    """One network of an engine, by its name."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._alone = asyncio.Lock()
        self._users = 0
        """Starts of this process between the network's being there and the container's."""

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """It is there, and nobody of this process takes it away."""
        self._users += 1
        try:
            await self.make()
            yield
        finally:
            self._users -= 1

    async def make(self) -> None:
        """It is there now."""
        if not network_to_make(self._name):
            return
        async with self._alone:
            if await self._ids():
                return
            words = ("network", "create", "--label", f"{MADE_LABEL}=1", self._name)
            done = await self._engine.run(*words)
            if done.code != 0:
                if "already exists" not in done.err:
                    await self._engine.must(f"the network {self._name} cannot be made", *words)
                return
            await self._keep_the_oldest(done.out.strip())

    async def drop_unused(self) -> None:
        """Remove it if a driver has made it and no container, running or not, is in it."""
        if not network_to_make(self._name):
            return
        async with self._alone:
            if self._users:
                return
            ids = await self._ids()
            for found in await self._engine.inspect("network", *ids) if ids else ():
                if MADE_LABEL not in (found.get("Labels") or {}):
                    continue
                there = await self._engine.run("ps", "--all", "--quiet", "--filter", f"network={self._name}")
                if there.code == 0 and not there.out.strip():
                    # Refused where a container has come meanwhile: then it is not unused.
                    await self._engine.run("network", "rm", found["Id"])

    async def _ids(self) -> list[str]:
        """Of all networks of this name: inspecting by a name that two have fails."""
        words = ("network", "ls", "--no-trunc", "--quiet", "--filter", f"name=^{re.escape(self._name)}$")
        return (await self._engine.must("networks cannot be listed", *words)).split()

    async def _keep_the_oldest(self, mine: str) -> None:
        """Engines allow two networks of one name, and then find neither: the younger goes."""
        ids = await self._ids()
        if len(ids) < 2:
            return
        found = await self._engine.inspect("network", *ids)
        oldest = min(found, key=lambda each: (str(each.get("Created", "")), each["Id"]))
        if oldest["Id"] != mine:
            await self._engine.run("network", "rm", mine)
