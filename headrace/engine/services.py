# SPDX-License-Identifier: Apache-2.0
"""Services of the engine for models: call other models, load and unload them, and report metrics.

Every backend gets them when it loads a model (`backends.contract.EngineServices`). Calls go through the data plane, so they
wait in the same queues as other requests and are counted alike.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from typing import Any

from headrace.backends.contract import Answer, Nodes
from headrace.core.errors import INTERNAL_TEXT, HeadraceError, Internal, Unavailable
from headrace.core.kept_memory import KeptMemory
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.requests import InferRequest, InferResponse
from headrace.core.telemetry.metrics import Registry
from headrace.engine.dataplane import DataPlane
from headrace.models.adapters import AdapterCatalog

log = logging.getLogger("headrace.engine")


class ModelServices:
    """The services of one engine. `plane` is set later: the data plane needs models, and models need these services."""

    def __init__(
        self,
        metrics: Registry,
        kv_transfer: KvTransferSettings | None = None,
        nodes: Nodes | None = None,
        kept_memory: KeptMemory | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.metrics = metrics
        self.kv_transfer = kv_transfer or KvTransferSettings()
        self.nodes = nodes
        self.kept_memory = kept_memory
        self.adapters = AdapterCatalog()
        self.plane: DataPlane | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, request: InferRequest, on_response: Callable[[Answer, bool], None]) -> Callable[[], None]:
        """Send a request to another model; return the function that cancels it."""

        def callback(answer: InferResponse | BaseException | None, final: bool) -> None:
            on_response(_error_for_models(answer) if isinstance(answer, BaseException) else answer, final)

        return self._started_plane().infer_stream(request, callback).cancel

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Return whether a model and version serve requests."""
        return self._started_plane().is_ready(model_name, model_version)

    def labels(self, model_name: str, model_version: str) -> Mapping[str, Sequence[str]]:
        """Return a model's class labels by output (`engine.labels.LabelLookup`)."""
        version = self._started_plane().find(model_name, model_version)
        return version.labels if version is not None else {}

    def optional_inputs(self, model_name: str, model_version: str) -> Set[str]:
        """Return the names of the inputs that a model can do without (`engine.ensembles.EnsembleServices`)."""
        version = self._started_plane().find(model_name, model_version)
        return frozenset(spec.name for spec in version.config.inputs if spec.optional) if version is not None else set()

    def load(
        self, model_name: str, config_json: str, files: Mapping[str, bytes], done: Callable[[Answer], None]
    ) -> None:
        """Load a model in the background; `done` gets None or the error."""
        self._begin(self._started_plane().load(model_name, config_json or None, files or None), done)

    def unload(self, model_name: str, done: Callable[[Answer], None]) -> None:
        """Unload a model in the background; `done` gets None or the error."""
        self._begin(self._started_plane().unload(model_name), done)

    def _started_plane(self) -> DataPlane:
        if self.plane is None:
            raise Unavailable("the engine is starting: models can be called once it has started")
        return self.plane

    def _begin(self, work: Coroutine[Any, Any, None], done: Callable[[Answer], None]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception as error:
                done(_error_for_models(error))
            else:
                done(None)

        task = self.loop.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _error_for_models(error: BaseException) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    log.error("A call between models failed.", exc_info=error)
    return Internal(INTERNAL_TEXT)
