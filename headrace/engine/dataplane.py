# SPDX-License-Identifier: Apache-2.0
"""The data plane: every protocol sends an `InferRequest` here and gets an `InferResponse` back.

The packages of `api` call it in the event loop's thread. It finds the version that a request is for and forwards the
request; it returns metadata, configurations and states of models; it loads and unloads models. It knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from headrace.backends.contract import SleepLevel
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument, NotFound, Unavailable
from headrace.core.generation import in_background
from headrace.core.names import check_name
from headrace.core.requests import InferRequest, InferResponse
from headrace.engine.ensembles import EnsembleVersion
from headrace.engine.repository.control import IndexEntry, RepositoryControl
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.on_demand import OnDemandModels
from headrace.engine.repository.residency import Done, Residency
from headrace.engine.repository.states import UNLOADED, State
from headrace.engine.scheduling.pending_request import PendingRequest, ResponseCallback, StreamCallback
from headrace.engine.sleep import SleepReport
from headrace.engine.versions import ModelVersion
from headrace.engine.waiting_requests import WaitingRequest, WaitingStream
from headrace.models.adapters import FOLDER, HUB, AdapterCatalog, ModelAdapters, adapter_places
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

ServingVersion = ModelVersion | EnsembleVersion


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output as seen by clients: with the batch dimension, -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """Metadata of a model for clients."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class DataPlane:
    """The models of a directory; `control` loads and unloads them, if there is a repository."""

    def __init__(
        self,
        directory: Directory,
        control: RepositoryControl | None = None,
        adapters: AdapterCatalog | None = None,
    ) -> None:
        """`adapters`: the LoRA adapters that models load on demand."""
        self._adapters = adapters or AdapterCatalog()
        self._directory = directory
        self._models = directory.models
        self._control = control
        self._on_demand: OnDemandModels | None = control.on_demand if control is not None else None
        self.strict_readiness = True
        self.accepting = True
        """False once the server is stopping."""

    @property
    def directory(self) -> Directory:
        """The models that serve."""
        return self._directory

    @property
    def ready(self) -> bool:
        """Whether the server is ready for requests: all models are, or (not strict) the server answers."""
        return self.accepting and (self._control is None or self._control.ready(self.strict_readiness))

    @property
    def started(self) -> bool:
        """Whether the initial loading of models has finished, successfully or not."""
        return self._control is None or self._control.started

    def infer(self, request: InferRequest, done: ResponseCallback) -> PendingRequest:
        """Compute a request. Raise at once if it is invalid; otherwise `done` gets the response later.

        The result is the caller's handle: call `cancel()` if the response is no longer needed.
        """
        model = self._models.get(request.model_name)
        if model is None:
            on_demand = self._on_demand_for(request)
            return WaitingRequest(request, done, self.infer).wait(on_demand)
        version = model.default if not request.model_version else model.versions.get(request.model_version)
        if version is None:
            raise self._unknown_version(request.model_name, request.model_version)
        return version.infer(request, done)  # type: ignore[attr-defined,no-any-return]  # a cast would be a call

    def answer(self, request: InferRequest) -> InferResponse | None:
        """Compute a request on the express path (`engine.express`); return None if it must take the path of `infer`.

        Raise the model's error if the computation fails.
        """
        model = self._models.get(request.model_name)
        if model is None:
            return None
        version = model.default if not request.model_version else model.versions.get(request.model_version)
        express = version.express if version is not None else None  # type: ignore[attr-defined]  # a cast would be a call
        return None if express is None else express(request)

    def infer_stream(self, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Compute a request with any number of responses; `on_response` gets each, and whether it is the last."""
        model = self._models.get(request.model_name)
        if model is None:
            on_demand = self._on_demand_for(request)
            return WaitingStream(request, on_response, self.infer_stream).wait(on_demand)
        version = model.default if not request.model_version else model.versions.get(request.model_version)
        if version is None:
            raise self._unknown_version(request.model_name, request.model_version)
        return version.infer_stream(request, on_response)  # type: ignore[attr-defined,no-any-return]  # as above

    def is_ready(self, name: str, version: str = "") -> bool:
        """Return whether requests for a model and version are answered: it serves, or loads when it is asked."""
        if self._directory.find(name, version) is not None:
            return True
        if self._on_demand is None or name in self._models:
            return False
        return self.accepting and self._on_demand.can_serve(name, version)

    def when_loaded(self, name: str, done: Done) -> Callable[[], None]:
        """Load a model that loads on demand (`ModelNotLoaded`) and call `done`; return the function that gives up waiting.

        Raise at once if it cannot be loaded.
        """
        if self._on_demand is None or not self._on_demand.knows(name):
            raise self._unknown(name)
        return self._on_demand.wait(name, done)

    def check_loaded(self, name: str) -> None:
        """Raise for a model that loads on demand and is not loaded: `ModelNotLoaded`, or why it cannot be loaded."""
        if self._on_demand is not None and name not in self._models and self._on_demand.knows(name):
            raise self._unknown(name)

    @property
    def loads_on_demand(self) -> bool:
        """Whether there may be models that load on demand."""
        return self._on_demand is not None

    def residencies(self) -> list[Residency]:
        """Return the models that load on demand: what they take, and why they are in memory or not."""
        return [] if self._on_demand is None else self._on_demand.residencies()

    def find(self, name: str, version: str = "") -> ServingVersion | None:
        """Return the version that serves requests for this model and version; None if there is none."""
        return cast("ServingVersion | None", self._directory.find(name, version))

    def states(self) -> list[IndexEntry]:
        """Return the state of every known version, without scanning the repositories."""
        if self._control is not None:
            states = self._control.states.all()
            return [
                self._with_sleep(IndexEntry(state.name, state.version_text, state.state, state.reason, state.progress))
                for state in states
            ]
        return [
            self._with_sleep(IndexEntry(name, version, State.READY))
            for name, model in sorted(self._models.items())
            for version in model.versions
        ]

    def model_names(self) -> list[str]:
        """Return the names of all models that serve, sorted."""
        return sorted(self._models)

    def known_names(self) -> list[str]:
        """Return the names of all models that serve, or that load when they are asked, sorted."""
        on_demand = self._on_demand
        if on_demand is None:
            return sorted(self._models)
        return sorted({*self._models, *(name for name in on_demand.names if on_demand.can_serve(name))})

    def known_config(self, name: str) -> ModelConfig | None:
        """Return the configuration of a model that serves, or else that of its last load, or else as it is written."""
        serving = self._directory.find(name)
        if serving is not None:
            return serving.config
        return None if self._on_demand is None else self._on_demand.config(name)

    def adapters_of(self, name: str) -> ModelAdapters | None:
        """Return where the LoRA adapters of a model are found that are loaded on demand; None if it has none."""
        adapter = self._adapters.of(name)
        config = self.known_config(name)
        if adapter is not None or config is None or self._on_demand is None or name in self._models:
            return adapter if config is not None else None
        if config.backend != "llm" or not (FOLDER in config.parameters or HUB in config.parameters):
            return None
        scanned = self._on_demand.scanned(name)
        try:
            places = adapter_places(config.parameters, scanned.folder / str(max(scanned.versions, default=1)))
        except InvalidArgument:  # its load says so
            return None
        return ModelAdapters(name, places)

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Return names, types and shapes of a model's tensors."""
        config = self._version(name, version).config
        batch = (-1,) if config.max_batch_size else ()
        return ModelMetadata(
            name,
            tuple(self._models[name].versions),
            config.platform or config.backend,
            tuple(_tensor(spec, batch) for spec in config.inputs),
            tuple(_tensor(spec, batch) for spec in config.outputs),
        )

    def config(self, name: str, version: str = "") -> ModelConfig:
        """Return a model's completed configuration."""
        return self._version(name, version).config

    def statistics(self, name: str = "", version: str = "") -> list[ServingVersion]:
        """Return the versions whose `statistics` and `delay` to read: one, all of a model, or all."""
        if not name:
            models = self._models.values()
            return [cast("ServingVersion", serving) for model in models for serving in model.versions.values()]
        if version:
            if name in self._models and not self.is_ready(name, version):
                raise InvalidArgument(f"requested model version is not available for model '{name}'")  # Triton's
            return [self._version(name, version)]
        self._version(name, "")
        return [cast("ServingVersion", serving) for serving in self._models[name].versions.values()]

    def repository_of(self, name: str) -> str:
        """Return the folder of the repository that a model is from; "" for the built-in models."""
        return self._control.repository_of(name) if self._control is not None else ""

    def load_seconds(self, name: str, version: int) -> float:
        """Return how long the last load of a version took; 0 for the built-in models."""
        entry = self._control.states.get(name, version) if self._control is not None else None
        return (entry.load_seconds or 0.0) if entry is not None else 0.0

    async def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Return every model of the repository with the state of its versions."""
        if self._control is None:
            return self.states()
        return [self._with_sleep(entry) for entry in await self._control.index(ready_only)]

    def _with_sleep(self, entry: IndexEntry) -> IndexEntry:
        """Return an entry of the index with the reason that its version sleeps. It is ready: requests wake it."""
        version = self._directory.find(entry.name, entry.version) if entry.version else None
        gate = version.gate if isinstance(version, ModelVersion) else None
        if gate is None or entry.state is not State.READY or not gate.report.reason:
            return entry
        return replace(entry, reason=gate.report.reason)

    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model of the repository. One that sleeps is awake then."""
        await self._require_control().load(check_name(name), config_json, files)
        model = self._models.get(name)
        versions = list(model.versions.values()) if model is not None else []
        await asyncio.gather(*(version.wake() for version in versions if isinstance(version, ModelVersion)))

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Unload a model and free its memory."""
        await self._require_control().unload(check_name(name), unload_dependents)

    async def sleep(self, name: str, level: SleepLevel) -> dict[str, SleepReport]:
        """Put all versions of a model to sleep; return their reports by version."""
        await asyncio.gather(*(version.sleep(level) for version in self._sleepable(name)))
        return self.sleep_reports(name)

    async def wake(self, name: str) -> dict[str, SleepReport]:
        """Wake all versions of a model; return their reports by version."""
        await asyncio.gather(*(version.wake() for version in self._sleepable(name)))
        return self.sleep_reports(name)

    def sleep_reports(self, name: str) -> dict[str, SleepReport]:
        """Return the sleep of the versions of a model that can sleep; {} for a model that does not serve."""
        model = self._models.get(name)
        versions = {} if model is None else model.versions
        return {
            number: version.gate.report
            for number, version in versions.items()
            if isinstance(version, ModelVersion) and version.gate is not None
        }

    def _sleepable(self, name: str) -> list[ModelVersion]:
        """Return the versions of a model; raise for one that is not loaded or cannot sleep."""
        model = self._models.get(check_name(name))
        if model is None:
            if self.accepting and self._on_demand is not None and self._on_demand.knows(name):
                raise FailedPrecondition(f"model '{name}' is not loaded, so that it has no memory to give back")
            raise self._unknown(name)
        if self._control is not None and self._control.processes > 1:
            raise FailedPrecondition(
                f"model '{name}' cannot sleep: each of the server's processes has a copy of it; start the server without "
                "--workers"
            )
        versions = [version for version in model.versions.values() if isinstance(version, ModelVersion)]
        if len(versions) < len(model.versions):
            raise FailedPrecondition(
                f"model '{name}' is an ensemble and has no memory: put the models of its steps to sleep"
            )
        for version in versions:
            version.check_sleepable()
        return versions

    def _require_control(self) -> RepositoryControl:
        if self._control is None:
            raise FailedPrecondition(
                "built-in models are always loaded: serve a folder (headrace serve MODELS) to load and unload models"
            )
        return self._control

    def _on_demand_for(self, request: InferRequest) -> OnDemandModels:
        """Return what loads the model of a request; raise if the request cannot wait for it."""
        name, version = request.model_name, request.model_version
        if not self.accepting or self._on_demand is None or not self._on_demand.knows(name):
            raise self._unknown(name)
        if version and not self._on_demand.has_version(name, version):
            raise self._unknown_version(name, version)
        return self._on_demand

    def _version(self, name: str, version: str) -> ServingVersion:
        serving = self._directory.find(name, version)
        if serving is None:
            raise self._unknown_version(name, version) if name in self._models else self._unknown(name)
        return cast("ServingVersion", serving)

    def _unknown(self, name: str) -> HeadraceError:
        check_name(name)
        if not self.accepting:
            return Unavailable("the server is stopping: send the request to another one")
        if self._on_demand is not None and self._on_demand.knows(name):
            return self._on_demand.absence(name)
        if (not_ready := self._not_ready(name, "")) is not None:
            return not_ready
        if not self.started:  # "not found" would be permanent, but the model may not have been scanned yet
            return Unavailable(
                f"Request for unknown model: '{name}' is not found yet: models are loading, try again soon"
            )
        return NotFound(f"Request for unknown model: '{name}' is not found")

    def _unknown_version(self, name: str, version: str) -> HeadraceError:
        text = f"Request for unknown model: '{name}' version {version[:32]} is not found"
        if self._on_demand is not None and self._on_demand.knows(name):
            return NotFound(text)
        return self._not_ready(name, version) or NotFound(text)

    def _not_ready(self, name: str, version: str) -> HeadraceError | None:
        """Return why a version of the repository does not serve; None if there is no such version."""
        for entry in reversed(self._control.versions_of(name) if self._control is not None else []):
            if version in ("", entry.version_text) and entry.reason != UNLOADED and entry.state is not State.READY:
                # The first part is Triton's message.
                of_version = f" version {entry.version_text}" if entry.version_text else ""
                why = f": {entry.reason}" if entry.reason else f": it is {entry.state.value.lower()}"
                return Unavailable(f"Request for unknown model: '{name}'{of_version} is not at ready state{why}")
        return None


class BackgroundPlane(DataPlane):
    """The same models, for requests that wait while their model has others."""

    def __init__(self, plane: DataPlane) -> None:
        super().__init__(plane._directory, plane._control, plane._adapters)

    def infer(self, request: InferRequest, done: ResponseCallback) -> PendingRequest:
        """Compute a request in the background."""
        return super().infer(in_background(request), done)

    def answer(self, request: InferRequest) -> None:
        """Return None: the express path computes at once."""

    def infer_stream(self, request: InferRequest, on_response: StreamCallback) -> PendingRequest:
        """Compute a request with any number of responses in the background."""
        return super().infer_stream(in_background(request), on_response)


def _tensor(spec: InputSpec | OutputSpec, batch: tuple[int, ...]) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.dtype.name if spec.dtype else "", (*batch, *(spec.dims or ())))
