# SPDX-License-Identifier: Apache-2.0
"""The one door to the models: every protocol brings an `InferRequest` here and gets an `InferResponse` back.

Called by the sub-rooms of `api`, in the loop's thread. Finds the version a request is for and passes it on; answers
questions about models; loads and unloads them. Knows no protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from headrace.core.errors import FailedPrecondition, HeadraceError, NotFound, Unavailable
from headrace.core.messages import InferRequest, InferResponse
from headrace.core.names import check_name
from headrace.engine.ensembles import EnsembleVersion
from headrace.engine.repository.control import IndexEntry, RepositoryControl
from headrace.engine.repository.directory import Directory
from headrace.engine.repository.states import UNLOADED, State
from headrace.engine.scheduling.pending import Answered, Done, Pending
from headrace.engine.versions import ModelVersion
from headrace.models.config.types import InputSpec, ModelConfig, OutputSpec

ServingVersion = ModelVersion | EnsembleVersion


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """An input or output as clients see it: with the batch dimension, -1 for any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What clients ask before they send a request."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class DataPlane:
    """The models of a directory; a repository's control, where there is one, says which."""

    def __init__(self, directory: Directory, control: RepositoryControl | None = None) -> None:
        self._directory = directory
        self._models = directory.models
        self._control = control
        self.strict_readiness = True
        self.accepting = True
        """False once the server has been told to stop."""

    @property
    def directory(self) -> Directory:
        """Who serves."""
        return self._directory

    @property
    def ready(self) -> bool:
        """Whether requests would be served: all models, or (not strict) any."""
        return self.accepting and (self._control is None or self._control.ready(self.strict_readiness))

    @property
    def started(self) -> bool:
        """Whether the first loading of models is over, with or without success."""
        return self._control is None or self._control.started

    def infer(self, request: InferRequest, done: Done) -> Pending:
        """Compute a request. Raises at once for a wrong one; otherwise `done` gets the answer, later.

        The result is the caller's handle: `cancel()` when nobody waits any more.
        """
        model = self._models.get(request.model_name)
        if model is None:
            raise self._unknown(request.model_name)
        version = model.entry if not request.model_version else model.versions.get(request.model_version)
        if version is None:
            raise self._unknown_version(request.model_name, request.model_version)
        return version.infer(request, done)  # type: ignore[attr-defined,no-any-return]  # a cast would be a call

    def answer(self, request: InferRequest) -> InferResponse | None:
        """Compute a request here and now, if it is plain and its model quick and idle; None for others: `infer` them.

        The shortest way (`engine.express`). Raises what the model said of a request that it could not compute.
        """
        model = self._models.get(request.model_name)
        if model is None:
            return None
        version = model.entry if not request.model_version else model.versions.get(request.model_version)
        express = version.express if version is not None else None  # type: ignore[attr-defined]  # a cast would be a call
        return None if express is None else express(request)

    def infer_stream(self, request: InferRequest, answered: Answered) -> Pending:
        """Compute a request that may have any number of answers, each with whether it is the last."""
        model = self._models.get(request.model_name)
        if model is None:
            raise self._unknown(request.model_name)
        version = model.entry if not request.model_version else model.versions.get(request.model_version)
        if version is None:
            raise self._unknown_version(request.model_name, request.model_version)
        return version.infer_stream(request, answered)  # type: ignore[attr-defined,no-any-return]  # as above

    def is_ready(self, name: str, version: str = "") -> bool:
        """Whether a request for this model and version would be served."""
        return self._directory.find(name, version) is not None

    def find(self, name: str, version: str = "") -> ServingVersion | None:
        """The version that a request for this model and version would reach; None if none would serve it."""
        return cast("ServingVersion | None", self._directory.find(name, version))

    def states(self) -> list[IndexEntry]:
        """Where every version stands that was ever heard of, without a look at the repository's folders."""
        if self._control is not None:
            known = self._control.states.all()
            return [IndexEntry(each.name, each.version_text, each.state, each.reason, each.progress) for each in known]
        return [
            IndexEntry(name, version, State.READY)
            for name, model in sorted(self._models.items())
            for version in model.versions
        ]

    def model_names(self) -> list[str]:
        """Every model that serves, for people."""
        return sorted(self._models)

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Names, types and shapes of a model's tensors."""
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
        """A model's configuration, completed."""
        return self._version(name, version).config

    def statistics(self, name: str = "", version: str = "") -> list[ServingVersion]:
        """The versions whose `statistics` (and `delay`) are asked for: one, all of a model's, or all."""
        if not name:
            return [cast("ServingVersion", one) for model in self._models.values() for one in model.versions.values()]
        if version:
            return [self._version(name, version)]
        self._version(name, "")
        return [cast("ServingVersion", one) for one in self._models[name].versions.values()]

    def load_seconds(self, name: str, version: int) -> float:
        """How long the last load of a version took; 0 for the built-in models."""
        entry = self._control.states.get(name, version) if self._control is not None else None
        return (entry.load_seconds or 0.0) if entry is not None else 0.0

    async def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        """Every model of the repository with the state of its versions."""
        return await self._control.index(ready_only) if self._control is not None else self.states()

    async def load(self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model of the repository, or load it anew."""
        await self._controlled().load(check_name(name), config_json, files)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop serving a model and free its memory."""
        await self._controlled().unload(check_name(name), unload_dependents)

    def _controlled(self) -> RepositoryControl:
        if self._control is None:
            raise FailedPrecondition(
                "built-in models are always loaded: serve a folder (headrace serve MODELS) to load and unload models"
            )
        return self._control

    def _version(self, name: str, version: str) -> ServingVersion:
        found = self._directory.find(name, version)
        if found is None:
            raise self._unknown_version(name, version) if name in self._models else self._unknown(name)
        return cast("ServingVersion", found)

    def _unknown(self, name: str) -> HeadraceError:
        check_name(name)
        if not self.accepting:
            return Unavailable("the server is stopping: send the request to another one")
        if (known := self._not_ready(name, "")) is not None:
            return known
        if not self.started:  # "not found" would be for ever, and it may be among those that are not looked at yet
            return Unavailable(
                f"Request for unknown model: '{name}' is not found yet: models are loading, try again soon"
            )
        return NotFound(f"Request for unknown model: '{name}' is not found")

    def _unknown_version(self, name: str, version: str) -> HeadraceError:
        text = f"Request for unknown model: '{name}' version {version[:32]} is not found"
        return self._not_ready(name, version) or NotFound(text)

    def _not_ready(self, name: str, version: str) -> HeadraceError | None:
        """What is the matter with a version that is in the repository and does not serve; None if it is not there."""
        for entry in reversed(self._control.versions_of(name) if self._control is not None else []):
            if version in ("", entry.version_text) and entry.reason != UNLOADED and entry.state is not State.READY:
                # The first part is Triton's.
                of_version = f" version {entry.version_text}" if entry.version_text else ""
                why = f": {entry.reason}" if entry.reason else f": it is {entry.state.value.lower()}"
                return Unavailable(f"Request for unknown model: '{name}'{of_version} is not at ready state{why}")
        return None


def _tensor(spec: InputSpec | OutputSpec, batch: tuple[int, ...]) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.dtype.name if spec.dtype else "", (*batch, *(spec.dims or ())))
