# SPDX-License-Identifier: Apache-2.0
"""Who starts and stops what sleeps, as the activator knows them. `kubernetes` is one, `local` another.

A maker of its own fills in `Scaler`; where it cannot be told of changes, `polled` makes a `watch` of `replicas`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.fleet.router.waking.settings import Target


@dataclass(frozen=True, slots=True)
class Replicas:
    """How it stands with a target."""

    wanted: int
    """As many as there should be."""
    ready: int
    """As many as can answer. One that is being stopped is not among them."""
    started: float = field(default=0.0, compare=False)
    """When the process of one that is ready began, since the epoch; 0 where nobody tells."""
    found: float = field(default=0.0, compare=False)
    """When it was found to be ready, in the same way."""


class ScalerFailed(Exception):
    """It could not be done or found out, for now or for good. The text is for people and tells what to do."""


class Scaler(Protocol):
    """See the module. Called from the loop's thread; everything raises `ScalerFailed`, and may be tried again."""

    async def replicas(self, target: Target) -> Replicas:
        """How it stands now."""

    async def scale(self, target: Target, replicas: int) -> None:
        """There should be so many from now on. Returns when that is known, not when it is so."""

    def watch(self, target: Target) -> AsyncIterator[Replicas]:
        """How it stands now, and again with each change, in order. May end; the caller begins anew."""

    async def close(self) -> None:
        """Let go of what is open. What runs goes on."""


async def polled(
    ask: Callable[[Target], Awaitable[Replicas]], target: Target, seconds: float
) -> AsyncIterator[Replicas]:
    """`Scaler.watch` for one who can only be asked."""
    known: Replicas | None = None
    while True:
        found = await ask(target)
        if found != known:
            known = found
            yield found
        await asyncio.sleep(seconds)
