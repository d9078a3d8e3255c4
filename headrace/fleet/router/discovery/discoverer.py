# SPDX-License-Identifier: Apache-2.0
"""Follows the sources, and tells of all they have found when that has changed. Made by `proxy`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from headrace.core.errors import InvalidArgument
from headrace.fleet.router.discovery.files import FileSource
from headrace.fleet.router.discovery.names import NameSource
from headrace.fleet.router.discovery.settings import DiscoverySettings
from headrace.fleet.router.settings import BackendAddress

log = logging.getLogger("headrace.router")

_FIRST_LOOK_SECONDS = 3.0
_RETRY_SECONDS = 1.0

Tell = Callable[[Sequence[BackendAddress]], None]


class Source(Protocol):
    """Somewhere that backends are found. Its text names it for people."""

    def follow(self) -> AsyncIterator[Sequence[BackendAddress] | InvalidArgument]:
        """What is there now, and again now and then; or why it cannot be said, and then what was said before counts."""


class Discoverer:
    """See the module. Used from the loop's thread only."""

    def __init__(self, named: Sequence[BackendAddress], sources: Sequence[Source], tell: Tell) -> None:
        self._named = tuple(named)
        self._sources = tuple(sources)
        self.tell = tell
        self._found: dict[Source, tuple[BackendAddress, ...]] = {}
        self._failures: dict[Source, str] = {}
        self._told: tuple[BackendAddress, ...] = self._named
        self._heard = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to look. Returns when every source has said something, or after a few seconds."""
        self._tasks = [asyncio.create_task(self._follow(source)) for source in self._sources]
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_LOOK_SECONDS):
                while any(each not in self._found and each not in self._failures for each in self._sources):
                    self._heard.clear()
                    await self._heard.wait()

    def hurry(self) -> None:
        """Somebody has come: files are looked at now. What has to be asked for elsewhere keeps its time."""
        for source in self._sources:
            if isinstance(source, FileSource):
                source.hurry()

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def failures(self) -> dict[str, str]:
        """Sources that cannot be read for now, and why."""
        return {str(source): text for source, text in self._failures.items()}

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                async for found in source.follow():
                    self._hear(source, found)
            except Exception:
                log.exception("looking for backends in %s failed; trying again", source)
            await asyncio.sleep(_RETRY_SECONDS)

    def _hear(self, source: Source, found: Sequence[BackendAddress] | InvalidArgument) -> None:
        if isinstance(found, InvalidArgument):
            if self._failures.get(source) != found.message:
                log.warning("%s: %s; what was found there before counts", source, found.message)
            self._failures[source] = found.message
        else:
            self._failures.pop(source, None)
            self._found[source] = tuple(found)
            self._tell_all()
        self._heard.set()

    def _tell_all(self) -> None:
        everything = {each.url: each for found in self._found.values() for each in found}
        # One that is named as well is as it is named.
        everything |= {each.url: each for each in self._named}
        told = tuple(everything.values())
        if told != self._told:
            self._told = told
            self.tell(told)


def make_sources(settings: DiscoverySettings) -> list[Source]:
    """The sources that the settings name. Raises InvalidArgument, and FailedPrecondition where there is no cluster."""
    sources: list[Source] = []
    every = max(0.05, settings.interval_seconds)
    if settings.file:
        sources.append(FileSource(settings.file, every))
    if settings.dns:
        sources.append(NameSource(settings.dns, every))
    of_roles = (("", settings.pods), ("prefill", settings.prefill_pods), ("decode", settings.decode_pods))
    for role, selector in of_roles:
        if selector:
            from headrace.fleet.router.discovery.pods import connect_pods

            sources.append(connect_pods(selector, settings.namespace, settings.port, every, role=role))
    return sources
