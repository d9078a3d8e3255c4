# SPDX-License-Identifier: Apache-2.0
"""What the lives of all models share: the directory, the states, the threads, the bound on loads, the retired.

Made by `control`, used by `lifecycle`. Knows how to do things off the loop and in the background; not when.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError, Internal, Unavailable
from headrace.core.telemetry.progress import Progress, ProgressEvent, Reporter
from headrace.engine.repository.contract import LoadedVersion, OpenVersion, ReadPlan
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.overrides import Override, write_override
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.repository.states import States

log = logging.getLogger("headrace.engine.repository")

Result = TypeVar("Result")


class Workshop:
    """One per repository control."""

    def __init__(
        self,
        open_version: OpenVersion,
        read_plan: ReadPlan,
        settings: RepositorySettings,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self.open_version = open_version
        self.read_plan = read_plan
        self.settings = settings
        self.clock = clock
        self.directory = Directory()
        self.states = States(clock)
        self.loading = asyncio.Semaphore(settings.model_load_thread_count)
        self._progress = progress
        self._loaders = ThreadPoolExecutor(settings.model_load_thread_count, "headrace-load")
        # Its own thread, so that looking at the folders does not wait for models that take long to read.
        self._files = ThreadPoolExecutor(1, "headrace-repository")
        # Nor does whoever looks at the folders wait for one that is being brought up to date from far away.
        self._refreshing = ThreadPoolExecutor(1, "headrace-refresh")
        self.closing = False
        """Nothing new is begun any more."""
        self._closed = False
        self._scratch: Path | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def in_loader(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Read or ask something of a model in one of the loader threads."""
        if self._closed:
            raise Unavailable("the server is closing")
        return await asyncio.get_running_loop().run_in_executor(self._loaders, work, *arguments)

    async def with_files(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do something short with files in the thread that is kept for it."""
        if self._closed:
            raise Unavailable("the server is closing")
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *arguments)

    async def refresh(self) -> None:
        """Let whoever keeps a folder like something else bring it up to date."""
        if self._closed:
            raise Unavailable("the server is closing")
        if self.settings.refresh is not None:
            await asyncio.get_running_loop().run_in_executor(self._refreshing, self.settings.refresh)

    def reporter(self, name: str, version: int) -> Reporter:
        """Who tells how far the load of a version is, to the states and to whoever looks on."""

        def progress(event: ProgressEvent) -> None:
            entry = self.states.get(name, version)
            if entry is not None:
                entry.progress = event
            self._progress(event)

        return Reporter(progress, self.clock, f"load {name} version {version}")

    def retire(
        self, loaded: LoadedVersion, override: Override | None, retired: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """Let a version that has left the directory finish and go, in the background."""

        async def work() -> None:
            name, version = loaded.config.name, loaded.version
            try:
                await loaded.retire(self.settings.retire_seconds)
            except Exception:  # a model's own clean-up may raise anything
                log.exception("model '%s' version %d did not retire cleanly", name, version)
            self.let_go(override)
            if retired is not None:
                retired()

        return self.background(work())

    def write_override(self, name: str, files: Mapping[str, bytes]) -> Override:
        """Put files that came with a request into a temporary folder. Blocks: call it through `with_files`."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="headrace-models-"))
        return write_override(self._scratch, name, files)

    def let_go(self, override: Override | None) -> None:
        """One user fewer of a temporary folder; the last one has it removed."""
        if override is not None and override.release() and not self._closed:
            self.background(self.with_files(override.remove))

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something nobody waits for; it is known, so that closing can wait for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def quiet(self) -> None:
        """Return when nothing runs in the background."""
        while self._background:
            await asyncio.wait(self._background)

    async def close(self, grace_seconds: float) -> None:
        """Give the background this long, then cut it."""
        try:
            async with asyncio.timeout(grace_seconds):
                await self.quiet()
        except TimeoutError:
            log.warning("%d versions did not retire in %g s", len(self._background), grace_seconds)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._scratch is not None:
            await self.with_files(shutil.rmtree, self._scratch, True)  # True: what is gone already is no error
            self._scratch = None
        self._closed = True
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False)
        self._refreshing.shutdown(wait=False, cancel_futures=True)


def told(error: Exception, doing: str) -> HeadraceError:
    """What may be shown of an error: its words if they are ours, otherwise where they are."""
    if isinstance(error, HeadraceError):
        log.warning("%s: %s", doing, error.message)
        return error
    log.error("%s", doing, exc_info=error)
    if isinstance(error, OSError) and error.strerror:
        return Internal(f"{error.strerror} while {doing}; the server's log has the details")
    return Internal(f"{type(error).__name__} while {doing}; the server's log has the details")
