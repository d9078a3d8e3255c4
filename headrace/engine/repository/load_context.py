# SPDX-License-Identifier: Apache-2.0
"""What the lifecycles of all models share: directory, states, threads, the limit on parallel loads, background tasks.

With it: model files that came with a load request, in a private temporary folder until no copy of the model needs them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any, TypeVar

from headrace.backends.table import backend_named
from headrace.core.clock import Clock
from headrace.core.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    Internal,
    InvalidArgument,
    Unavailable,
)
from headrace.core.telemetry.load_stages import TRIAL, stage
from headrace.core.telemetry.progress import Progress, ProgressEvent, Reporter
from headrace.engine.repository.directory import Directory, LoadedVersion, LoadVersion
from headrace.engine.repository.load_plan import ReadLoadPlan
from headrace.engine.repository.scan import scan_model
from headrace.engine.repository.settings import RepositorySettings
from headrace.engine.repository.states import States
from headrace.engine.repository.trial import Trial, TrialLoads

log = logging.getLogger("headrace.engine.repository")

Result = TypeVar("Result")

ABANDONED_LOADS = 16
"""Loads that took too long may keep so many threads, and others still have one."""


class LoadContext:
    """Shared by the lifecycles of one `RepositoryControl`."""

    def __init__(
        self,
        load_version: LoadVersion,
        read_plan: ReadLoadPlan,
        settings: RepositorySettings,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self.load_version = load_version
        self.read_plan = read_plan
        self.settings = settings
        self.clock = clock
        self.directory = Directory()
        self.trials = TrialLoads(settings)
        self.states = States(clock)
        self.loading = asyncio.Semaphore(settings.model_load_thread_count)
        self._progress = progress
        self._loaders = ThreadPoolExecutor(settings.model_load_thread_count + ABANDONED_LOADS, "headrace-load")
        # Its own thread, so that scans do not wait for models that take long to load.
        self._files = ThreadPoolExecutor(1, "headrace-repository")
        # Its own thread, so that scans do not wait for a slow download.
        self._refreshing = ThreadPoolExecutor(1, "headrace-refresh")
        self.closing = False
        """Whether no new work may start."""
        self._closed = False
        self._scratch: Path | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def run_in_loader(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run blocking work on a model in a loader thread."""
        if self._closed:
            raise Unavailable("the server is closing")
        return await asyncio.get_running_loop().run_in_executor(self._loaders, work, *arguments)

    async def run_with_files(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run short work on files in the thread for it."""
        if self._closed:
            raise Unavailable("the server is closing")
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *arguments)

    async def refresh(self) -> None:
        """Run the configured refresh of mirrored repositories."""
        if self._closed:
            raise Unavailable("the server is closing")
        if self.settings.refresh is not None:
            await asyncio.get_running_loop().run_in_executor(self._refreshing, self.settings.refresh)

    async def try_first(self, trial: Trial, reporter: Reporter) -> None:
        """Load a version in a child process first, if the settings ask for that. Raise if it fails there."""
        if not self.trials.is_wanted(trial):
            return
        reporter.update(message="trial load")
        stop = Event()
        # Both processes import the backend's packages, which takes most of the time, so they do it at the same time.
        trying = self.run_in_loader(self.trials.run, trial, stop)
        importing = self.run_in_loader(backend_named, trial.backend)
        try:
            with stage(TRIAL):
                problem, _ = await asyncio.gather(trying, importing, return_exceptions=True)
        except asyncio.CancelledError:
            stop.set()
            raise
        if isinstance(problem, BaseException):
            raise problem
        # What was tried must be what the server loads: a mirror may have replaced a file meanwhile.
        folder = trial.files.model_folder
        scanned = await self.run_with_files(scan_model, (folder.parent,), folder.name)
        if scanned is None or scanned.fingerprints(trial.files.version) != trial.fingerprints:
            raise FailedPrecondition(
                f"the files of model '{folder.name}' version {trial.files.version} changed during its trial load: "
                "load it again"
            )
        self.trials.passed(trial)

    async def within_load_time(self, load: Coroutine[Any, Any, LoadedVersion], what: str) -> LoadedVersion:
        """Wait for a load. Raise DeadlineExceeded if it takes too long; what it loads nevertheless is closed then."""
        limit = self.settings.load_seconds or None
        task = asyncio.get_running_loop().create_task(load)
        try:
            async with asyncio.timeout(limit) as timeout:
                return await asyncio.shield(task)
        except TimeoutError:
            if not timeout.expired():
                raise
            self.background(self._abandon(task))
            raise DeadlineExceeded(
                f"model {what} was not loaded within {limit:g} s: see the server's log, or allow more with "
                "--model-load-timeout"
            ) from None
        except asyncio.CancelledError:
            await self._abandon(task)
            raise

    async def _abandon(self, load: asyncio.Task[LoadedVersion]) -> None:
        """Cancel a load and wait until it has cleaned up."""
        load.cancel()
        await asyncio.wait({load})
        if not load.cancelled() and load.exception() is None:
            await load.result().retire(0)

    def reporter(self, name: str, version: int) -> Reporter:
        """Return a reporter that writes the load progress of a version to its state and to the engine's progress."""

        def progress(event: ProgressEvent) -> None:
            entry = self.states.get(name, version)
            if entry is not None:
                entry.progress = event
            self._progress(event)

        return Reporter(progress, self.clock, f"load {name} version {version}")

    def retire(
        self, loaded: LoadedVersion, override: Override | None, retired: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """Retire a version that has left the directory, in the background."""

        async def work() -> None:
            name, version = loaded.config.name, loaded.version
            try:
                await loaded.retire(self.settings.retire_seconds)
            except Exception:  # a model's own clean-up may raise anything
                log.exception("Model '%s' version %d did not retire cleanly", name, version)
            self.release_override(override)
            if retired is not None:
                retired()

        return self.background(work())

    def write_override(self, name: str, files: Mapping[str, bytes]) -> Override:
        """Write files from a load request to a temporary folder. Blocks: call it through `run_with_files`."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="headrace-models-"))
        return write_override(self._scratch, name, files)

    def release_override(self, override: Override | None) -> None:
        """Release a temporary folder; remove it after its last user."""
        if override is not None and override.release() and not self._closed:
            self.background(self.run_with_files(override.remove))

    def background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a background task; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def wait_idle(self) -> None:
        """Return when no background task runs."""
        while self._background:
            await asyncio.wait(self._background)

    async def close(self, grace_seconds: float) -> None:
        """Wait up to `grace_seconds` for background tasks, then cancel them."""
        try:
            async with asyncio.timeout(grace_seconds):
                await self.wait_idle()
        except TimeoutError:
            log.warning("%d versions did not retire in %g s", len(self._background), grace_seconds)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._scratch is not None:
            await self.run_with_files(shutil.rmtree, self._scratch, True)  # True: ignore missing files
            self._scratch = None
        self._closed = True
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._files.shutdown(wait=False)
        self._refreshing.shutdown(wait=False, cancel_futures=True)


def reportable_error(error: Exception, doing: str) -> HeadraceError:
    """Log an error and return one that may be shown: its own message if it is ours, otherwise a reference to the log."""
    if isinstance(error, HeadraceError):
        log.warning("%s: %s", doing, error.message)
        return error
    log.error("%s", doing, exc_info=error)
    return internal_error(error, doing)


def internal_error(error: Exception, doing: str) -> Internal:
    """Return an error that refers to the log, where the exception itself must be."""
    if isinstance(error, OSError) and error.strerror:
        return Internal(f"{error.strerror} while {doing}; the server's log has the details")
    return Internal(f"{type(error).__name__} while {doing}; the server's log has the details")


PREFIX = "file:"
_PART_BYTES = 255
_PARTS = 16


class Override:
    """A temporary model folder with a count of its users."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self.folder = folder
        self._users = 0

    def acquire(self) -> None:
        """Add a user."""
        self._users += 1

    def release(self) -> bool:
        """Remove a user; return whether the folder has no more users and should be removed."""
        self._users -= 1
        return self._users == 0

    def remove(self) -> None:
        """Delete the folder. Blocks."""
        shutil.rmtree(self._root, ignore_errors=True)


def relative_path(key: str) -> PurePosixPath:
    """Return the path of a parameter `file:<path>` inside the model's folder; reject paths that leave it."""
    path = key.removeprefix(PREFIX)
    parts = path.split("/")
    is_invalid = (
        not key.startswith(PREFIX)
        or len(parts) > _PARTS
        or "\\" in path
        or not path.isprintable()
        or any(part in {"", ".", ".."} or len(os.fsencode(part)) > _PART_BYTES for part in parts)
    )
    if is_invalid:
        raise InvalidArgument(
            f"file parameter {key[:128]!a} is not allowed: use 'file:<version>/<name>', such as file:1/model.onnx, "
            "without '..' and empty parts"
        )
    return PurePosixPath(*parts)


def write_override(scratch: Path, name: str, files: Mapping[str, bytes]) -> Override:
    """Write the files to a new folder below `scratch`, named like the model. Blocks. `name` has been checked."""
    by_path = {relative_path(key): content for key, content in files.items()}
    root = Path(tempfile.mkdtemp(dir=scratch))
    try:
        folder = root / name
        folder.mkdir()
        for path, content in by_path.items():
            target = folder / path
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise InvalidArgument(f"file parameter {str(path)[:128]!a} is a file and a folder at once") from None
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Override(root, folder)
