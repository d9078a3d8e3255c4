# SPDX-License-Identifier: Apache-2.0
"""What the engine does for models: they may call other models, load and unload them, and report measures.

Given to every backend when it loads a model; see `backends.contract.EngineServices`. Calls go through the data plane like
anyone's, so they wait in the same queues and are counted alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.backends.contract import Answer
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, Internal, Unavailable
from headrace.core.handing import HandingSettings
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.telemetry.registry import Registry

if TYPE_CHECKING:
    from headrace.engine.dataplane import DataPlane

log = logging.getLogger("headrace.engine")


class ModelServices:
    """The services of one engine. `plane` is set once there is one: it needs the models, which need this."""

    def __init__(self, metrics: Registry, handing: HandingSettings | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.metrics = metrics
        self.handing = handing or HandingSettings()
        self.plane: DataPlane | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, request: InferRequest, answered: Callable[[Answer, bool], None]) -> Callable[[], None]:
        """See `EngineServices.infer`."""

        def told(answer: InferResponse | BaseException | None, final: bool) -> None:
            answered(_for_models(answer) if isinstance(answer, BaseException) else answer, final)

        return self._known_plane().infer_stream(request, told).cancel

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """See `EngineServices.is_ready`."""
        return self._known_plane().is_ready(model_name, model_version)

    def labels(self, model_name: str, model_version: str) -> Mapping[str, Sequence[str]]:
        """What the numbers of a model's classifying outputs are called, by output. See `engine.labels.LabelsOf`."""
        version = self._known_plane().find(model_name, model_version)
        return version.labels if version is not None else {}

    def load(
        self, model_name: str, config_json: str, files: Mapping[str, bytes], done: Callable[[Answer], None]
    ) -> None:
        """See `EngineServices.load`."""
        self._begin(self._known_plane().load(model_name, config_json or None, files or None), done)

    def unload(self, model_name: str, done: Callable[[Answer], None]) -> None:
        """See `EngineServices.unload`."""
        self._begin(self._known_plane().unload(model_name), done)

    def _known_plane(self) -> DataPlane:
        if self.plane is None:
            raise Unavailable("the engine is starting: models can be called once it has started")
        return self.plane

    def _begin(self, work: Coroutine[Any, Any, None], done: Callable[[Answer], None]) -> None:
        async def follow() -> None:
            try:
                await work
            except Exception as error:
                done(_for_models(error))
            else:
                done(None)

        task = self.loop.create_task(follow())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _for_models(error: BaseException) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    log.error("a call between models failed", exc_info=error)
    return Internal(INTERNAL_TEXT)
