# SPDX-License-Identifier: Apache-2.0
"""Models loaded and unloaded on request, in every worker of a server alike.

The worker that is asked does it first, since what fails there would fail everywhere; then it has the others do it, and
answers when all have. What was asked for stands in a file per model, for a worker that starts later. One model is changed by
one worker at a time.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from headrace.core.errors import HeadraceError, retold
from headrace.core.names import check_name
from headrace.engine.dataplane import DataPlane
from headrace.programs.serve.siblings import Away, Siblings, write_whole

log = logging.getLogger("headrace.apps")

_QUESTION = "model"
_MOST_SECONDS = 3600.0
"""Large models take their time to load."""
_LOOK_SECONDS = 0.02


class LoadEverywhere:
    """One worker's part in it."""

    def __init__(self, siblings: Siblings, own: DataPlane) -> None:
        self._siblings = siblings
        self._own = own
        self._caught_up = asyncio.Event()

    def start(self) -> None:
        """Do what other workers were asked to, from now on; first of all comes `catch_up`."""
        self._siblings.answer(_QUESTION, self._asked)

    async def catch_up(self) -> None:
        """Do what was asked of the server before this worker started. After its own first loading."""
        for path in sorted(self._siblings.folder.glob("*.wish")):
            try:
                await self._do(orjson.loads(path.read_bytes()))
            except HeadraceError as error:
                log.error("this worker cannot follow the others: %s", error.message)
            except FileNotFoundError:
                continue
        self._caught_up.set()

    async def load(self, name: str, config_json: str | None, files: Mapping[str, bytes] | None) -> None:
        """Load a model everywhere."""
        encoded = {each: base64.b64encode(content).decode() for each, content in (files or {}).items()}
        await self._everywhere({"name": check_name(name), "load": True, "config": config_json, "files": encoded})

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a model everywhere."""
        await self._everywhere({"name": check_name(name), "load": False, "dependents": unload_dependents})

    async def _everywhere(self, wish: dict[str, Any]) -> None:
        await self._caught_up.wait()
        # Not by its name: with something behind it, that may be too long for a file.
        place = self._siblings.folder / sha256(wish["name"].encode()).hexdigest()
        async with only_one(place.with_suffix(".lock")):
            await self._do(wish)
            # Before the others are told: one that starts meanwhile finds it here.
            write_whole(place.with_suffix(".wish"), orjson.dumps(wish))
            answers = await self._siblings.ask_all(_QUESTION, wish, seconds=_MOST_SECONDS)
        for index, answer in answers.items():
            if isinstance(answer, Away):
                log.warning("worker %d is away and will follow when it is back", index)
            elif isinstance(answer, HeadraceError):
                raise retold(answer, f"{answer.message} (in worker {index}; the model may serve in others)")

    async def _asked(self, wish: Any) -> None:
        await self._caught_up.wait()
        await self._do(wish)

    async def _do(self, wish: dict[str, Any]) -> None:
        if wish["load"]:
            files = {each: base64.b64decode(text) for each, text in wish["files"].items()}
            await self._own.load(wish["name"], wish["config"], files or None)
        else:
            await self._own.unload(wish["name"], unload_dependents=wish["dependents"])


@asynccontextmanager
async def only_one(path: Path) -> AsyncIterator[None]:
    """Keep other workers out; the lock of one that dies is free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Looked at again and again: a thread that waits could be one that the holder needs.
                await asyncio.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(descriptor)
