# SPDX-License-Identifier: Apache-2.0
"""Startup of a microservice in two background steps: download the model's files, then load the model.

Each step is recorded in the `Lifecycle`, with the cause of a failure.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.clock import Clock
from headrace.core.errors import HeadraceError
from headrace.core.telemetry.progress import ProgressEvent
from headrace.engine.engine import Engine
from headrace.jobs.concurrency import call_in_loop, run_in_thread
from headrace.jobs.microservice.lifecycle import Lifecycle, Stage
from headrace.jobs.microservice.model_kinds.contract import ModelKind
from headrace.jobs.microservice.model_loader import (
    StagedModel,
    engine_for,
    failure_text,
    fetch_model,
    kind_for,
    load_model,
    locate_model,
    open_video,
    stage_model,
)
from headrace.jobs.microservice.settings import MicroserviceSettings
from headrace.jobs.records import iso
from headrace.models.media.reader import MediaReader
from headrace.models.storage.locations import LocalLocation

if TYPE_CHECKING:
    from headrace.backends.llm.tensor_parallel.node_pool import NodePool

log = logging.getLogger("headrace.microservice")

BeforeLoad = Callable[[], Awaitable[None]]


class Startup:
    """Turns a model path into a loaded model kind."""

    def __init__(
        self,
        settings: MicroserviceSettings,
        lifecycle: Lifecycle,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        on_engine: Callable[[Engine], None] | None = None,
        before_load: BeforeLoad | None = None,
        nodes: NodePool | None = None,
    ) -> None:
        self._nodes = nodes
        self._settings = settings
        self._lifecycle = lifecycle
        self._clock = clock
        self._on_change = on_change
        """Called after every transition of the lifecycle."""
        self._on_engine = on_engine
        """Called with the engine before it loads the model."""
        self._before_load = before_load
        self._cancelled = threading.Event()
        self._repository: Path | None = None
        self.engine: Engine | None = None

    async def run(self) -> ModelKind | None:
        """Run both steps; None if one failed, with the cause in the lifecycle."""
        lifecycle = self._lifecycle
        try:
            path, base = await self._download_all()
        except Exception as error:
            self._log("Could not download the model", error)
            cause = self._settings.secrets.redact(failure_text(error, "downloading the model's files"))
            lifecycle.initialization_failed(cause, self._now())
            self._on_change()
            return None
        lifecycle.initialized()
        self._on_change()
        if self._before_load is not None:
            await self._before_load()
        lifecycle.loading(self._now())
        self._on_change()
        try:
            kind = await self._load(path, base)
        except Exception as error:
            self._log("Could not load the model", error)
            await self._release(0)
            cause = self._settings.secrets.redact(failure_text(error, "loading the model"))
            lifecycle.load_failed(cause, self._now())
            self._on_change()
            return None
        return kind

    def cancel(self) -> None:
        """Cancel downloads, and do not wait for other nodes."""
        self._cancelled.set()
        if self._nodes is not None:
            self._nodes.stop_waiting()

    async def close(self, grace_seconds: float) -> None:
        """Close the engine and remove its folder."""
        self.cancel()
        await self._release(grace_seconds)

    async def _release(self, grace_seconds: float) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await engine.close(grace_seconds)
        if self._repository is not None:
            shutil.rmtree(self._repository, ignore_errors=True)

    async def _download_all(self) -> tuple[Path | None, Path | None]:
        """Return the paths of the model and of its base model."""
        settings = self._settings
        if not settings.model_path:
            return None, None  # the pipeline finds its weights by a key
        model = await self._download(settings.model_path)
        base = await self._download(settings.base_model_path) if settings.base_model_path else None
        return model, base

    async def _download(self, text: str) -> Path:
        settings = self._settings
        location = await run_in_thread(lambda: locate_model(text, settings), "headrace-place")
        if isinstance(location, LocalLocation):
            return location.path.absolute()
        self._lifecycle.report("downloading_model", f"Downloading {location}", self._now())
        self._on_change()
        loop = asyncio.get_running_loop()

        def progress(event: ProgressEvent) -> None:
            call_in_loop(loop, self._report_download, event)

        def work() -> Path:
            return fetch_model(text, settings, progress, self._cancelled.is_set)

        return await run_in_thread(work, "headrace-download")

    async def _load(self, path: Path | None, base: Path | None) -> ModelKind:
        settings = self._settings
        if settings.profile.kinds == ("video",) or settings.task == "video":
            return await run_in_thread(lambda: open_video(path, settings, self._reader), "headrace-pipeline-load")
        if path is None:
            raise RuntimeError("only a pipeline can have a model without a path")
        repository = self._repository = Path(tempfile.mkdtemp(prefix="headrace-microservice-"))
        staged: StagedModel = await run_in_thread(
            lambda: stage_model(path, base, settings, repository), "headrace-stage"
        )
        loop = asyncio.get_running_loop()

        def progress(event: ProgressEvent) -> None:
            call_in_loop(loop, self._report, "loading_model", event)

        self.engine = engine_for(repository, progress, self._nodes)
        if self._on_engine is not None:
            self._on_engine(self.engine)
        await load_model(self.engine, staged.name)
        return kind_for(staged, self.engine.plane, settings, self._reader)

    def _reader(self) -> MediaReader:
        return MediaReader(self._settings.media, self._settings.credentials)

    def _report_download(self, event: ProgressEvent) -> None:
        self._report("downloading_file", event)

    def _report(self, stage: Stage, event: ProgressEvent) -> None:
        flags = self._lifecycle.flags
        # Events of the previous step may arrive late.
        if (flags.server_initializing and stage != "loading_model") or (
            flags.model_loading and stage == "loading_model"
        ):
            details = {"task": event.task, "done": event.done, "total": event.total, "unit": event.unit}
            self._lifecycle.report(stage, event.message or event.task, self._now(), details)

    def _now(self) -> str:
        return iso(self._clock.wall())

    def _log(self, message: str, error: Exception) -> None:
        if isinstance(error, HeadraceError):
            log.error("%s: %s", message, error.message)
        else:
            log.error("%s", message, exc_info=error)
