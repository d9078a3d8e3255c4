# SPDX-License-Identifier: Apache-2.0
"""The two background steps of a service: its files are brought, then its model is loaded. Run by `service`, once.

What a step is about to do, has done or could not do is told to the `Lifecycle`; the causes of failures are kept as they are.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.telemetry.progress import ProgressEvent
from headrace.engine.engine import Engine
from headrace.jobs.microservice.kinds.contract import Kind
from headrace.jobs.microservice.model_folder import Staged, place_of, stage
from headrace.jobs.microservice.opening import engine_for, kind_for, load, open_video, told
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.microservice.state_file import own_folder
from headrace.jobs.microservice.states import Lifecycle, Stage
from headrace.jobs.microservice.threads import call_in, in_thread
from headrace.jobs.microservice.times import iso
from headrace.models.media.reader import MediaReader
from headrace.models.storage.bringing import bring
from headrace.models.storage.locations import LocalPlace

log = logging.getLogger("headrace.microservice")

BeforeLoad = Callable[[], Awaitable[None]]


class Steps:
    """From a model's path to a kind that answers."""

    def __init__(
        self,
        settings: MicroserviceSettings,
        lifecycle: Lifecycle,
        clock: Clock,
        moved: Callable[[], None],
        *,
        opened: Callable[[Engine], None] | None = None,
        before_load: BeforeLoad | None = None,
    ) -> None:
        self._settings = settings
        self._lifecycle = lifecycle
        self._clock = clock
        self._moved = moved
        """Called after every move of the lifecycle."""
        self._opened = opened
        """Called with the engine before it loads its model."""
        self._before_load = before_load
        self._cancelled = threading.Event()
        self._repository: Path | None = None
        self.engine: Engine | None = None

    async def run(self) -> Kind | None:
        """Both steps; None if one failed, which the lifecycle then says."""
        lifecycle = self._lifecycle
        try:
            path, base = await self._bring()
        except Exception as error:
            self._log("the model's files cannot be had", error)
            cause = self._settings.secrets.hide(told(error, "downloading the model's files"))
            lifecycle.initialization_failed(cause, self._now())
            self._moved()
            return None
        lifecycle.initialized()
        self._moved()
        if self._before_load is not None:
            await self._before_load()
        lifecycle.loading(self._now())
        self._moved()
        try:
            kind = await self._load(path, base)
        except Exception as error:
            self._log("the model cannot be loaded", error)
            await self._let_go(0)
            cause = self._settings.secrets.hide(told(error, "loading the model"))
            lifecycle.load_failed(cause, self._now())
            self._moved()
            return None
        return kind

    def cancel(self) -> None:
        """Bring no more."""
        self._cancelled.set()

    async def close(self, grace_seconds: float) -> None:
        """Let go of the engine and its folder."""
        self.cancel()
        await self._let_go(grace_seconds)

    async def _let_go(self, grace_seconds: float) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close(grace_seconds)
        if self._repository is not None:
            shutil.rmtree(self._repository, ignore_errors=True)

    async def _bring(self) -> tuple[Path | None, Path | None]:
        """The model, and the one that it adapts."""
        settings = self._settings
        if not settings.model_path:
            return None, None  # the pipeline knows its weights by a key
        model = await self._bring_one(settings.model_path)
        base = await self._bring_one(settings.base_model_path) if settings.base_model_path else None
        return model, base

    async def _bring_one(self, text: str) -> Path:
        settings = self._settings
        place = await in_thread(lambda: place_of(text, settings), "headrace-place")
        if isinstance(place, LocalPlace):
            return place.path.absolute()
        self._lifecycle.report("downloading_model", f"Downloading {place}", self._now())
        self._moved()
        loop = asyncio.get_running_loop()

        def progress(event: ProgressEvent) -> None:
            call_in(loop, self._downloading, event)

        def work() -> Path:
            folder = own_folder(settings.folder)
            return bring(place, folder, settings.credentials, progress, self._cancelled.is_set)

        return await in_thread(work, "headrace-download")

    async def _load(self, path: Path | None, base: Path | None) -> Kind:
        settings = self._settings
        if settings.profile.kinds == ("video",) or settings.task == "video":
            return await in_thread(lambda: open_video(path, settings, self._reader), "headrace-pipeline-load")
        if path is None:
            raise RuntimeError("a model without a path is for a pipeline")
        repository = self._repository = Path(tempfile.mkdtemp(prefix="headrace-microservice-"))
        staged: Staged = await in_thread(lambda: stage(path, base, settings, repository), "headrace-stage")
        loop = asyncio.get_running_loop()

        def progress(event: ProgressEvent) -> None:
            call_in(loop, self._report, "loading_model", event)

        self.engine = engine_for(repository, progress)
        if self._opened is not None:
            self._opened(self.engine)
        await load(self.engine, staged.name)
        return kind_for(staged, self.engine.plane, settings, self._reader)

    def _reader(self) -> MediaReader:
        return MediaReader(self._settings.media, self._settings.credentials)

    def _downloading(self, event: ProgressEvent) -> None:
        self._report("downloading_file", event)

    def _report(self, stage: Stage, event: ProgressEvent) -> None:
        phase = self._lifecycle.flags
        # Events of a step that has just ended may come late.
        if (phase.server_initializing and stage != "loading_model") or (
            phase.model_loading and stage == "loading_model"
        ):
            details = {"task": event.task, "done": event.done, "total": event.total, "unit": event.unit}
            self._lifecycle.report(stage, event.message or event.task, self._now(), details)

    def _now(self) -> str:
        return iso(self._clock.wall())

    def _log(self, what: str, error: Exception) -> None:
        if isinstance(error, HeadraceError):
            log.error("%s: %s", what, error.message)
        else:
            log.error("%s", what, exc_info=error)
