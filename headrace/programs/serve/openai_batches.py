# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` and `/v1/batches` of one server process: their stores, routes and worker."""

from __future__ import annotations

from headrace.api.openai.batch_store import BatchStore
from headrace.api.openai.batches import Batches
from headrace.api.openai.chat import MediaReader
from headrace.api.openai.file_store import FileStore
from headrace.api.openai.files import Files
from headrace.api.openai.http import OpenAiHttp
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.clock import Clock, SystemClock
from headrace.engine.dataplane import BackgroundPlane, DataPlane
from headrace.jobs.openai_batches.worker import BatchWorker
from headrace.net.http.routes import Routes


class OpenAiBatches:
    """Everything that the batch API needs in one process."""

    def __init__(
        self,
        plane: DataPlane,
        settings: OpenAiSettings,
        media: MediaReader | None = None,
        clock: Clock | None = None,
        *,
        poll_seconds: float = 1.0,
    ) -> None:
        if settings.batch_folder is None:
            raise ValueError("the batch API needs a folder")
        clock, limits = clock or SystemClock(), settings.batch_limits
        files = FileStore(settings.batch_folder / "files", limits, clock)
        batches = BatchStore(settings.batch_folder / "batches", files, limits, clock)
        self._plane = plane
        self._handlers = OpenAiHttp(BackgroundPlane(plane), settings, media).line_handlers()
        self.worker = BatchWorker(
            batches, files, limits, clock, lines_at_once=settings.batch_lines, poll_seconds=poll_seconds
        )
        self._resources = (Files(files, limits), Batches(batches, self.worker.wake))

    def add_to(self, routes: Routes) -> None:
        """Register the routes."""
        for resource in self._resources:
            resource.add_to(routes)

    def start(self) -> None:
        """Start the worker: it runs batches once all models were tried."""
        self.worker.start(self._handlers, lambda: self._plane.started)

    def drain(self) -> None:
        """Start no more lines."""
        self.worker.stop()

    async def close(self) -> None:
        """Write all results."""
        await self.worker.close()


def open_batches(plane: DataPlane, settings: OpenAiSettings | None, media: MediaReader | None) -> OpenAiBatches | None:
    """Return the batch API; None if the settings have none."""
    if settings is None or settings.batch_folder is None:
        return None
    return OpenAiBatches(plane, settings, media)
