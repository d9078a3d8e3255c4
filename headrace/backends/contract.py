# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a backend, and what a backend may ask of the engine.

    Backend --load--> Model (one version) --open--> instance (one execution context)

There are two kinds of instance. A `ComputeInstance` turns arrays into arrays and returns: the engine joins requests into
a batch, chooses the thread (the event loop's own when the model is quick enough) and cuts the result apart. A
`RequestInstance` takes the requests themselves, because it is a process of its own, answers out of order, or answers
several times: it replies to each when it likes, from the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy.typing as npt

from headrace.core.errors import HeadraceError
from headrace.core.handing import HandingSettings
from headrace.core.messages import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.telemetry.registry import Registry
from headrace.core.tensors import Tensor
from headrace.models.config.types import ModelConfig

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a version's files are."""

    model_folder: Path
    """`<repository>/<model>`."""
    version: int
    version_folder: Path
    """`<repository>/<model>/<version>`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an instance is to run."""

    name: str
    """`<group>_<i>_cpu`, `<group>_<i>_gpu<g>`; shown to people."""
    kind: Literal["cpu", "gpu", "model"] = "cpu"
    device: int = 0
    """The GPU, for kind "gpu"."""


Answer = InferResponse | HeadraceError | None
"""One response, or the error that ends the request, or nothing more to come."""


class EngineServices(Protocol):
    """What the engine does for models: they may call other models and report measures."""

    loop: asyncio.AbstractEventLoop
    metrics: Registry
    handing: HandingSettings
    """The server's part where prefill and decode are apart; without a role, where they are not."""

    def infer(self, request: InferRequest, answered: Callable[[Answer, bool], None]) -> Callable[[], None]:
        """Compute a request with another model; from the loop's thread, as the answers are: (answer, is it the last).

        Returns a function that cancels it.
        """

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Whether a request for it would be served now. From any thread."""

    def load(
        self, model_name: str, config_json: str, files: Mapping[str, bytes], done: Callable[[Answer], None]
    ) -> None:
        """Load a model as if an operator had asked; `done` gets None or the error, in the loop's thread."""

    def unload(self, model_name: str, done: Callable[[Answer], None]) -> None:
        """Unload a model as if an operator had asked."""


class Work(Protocol):
    """A request as a `RequestInstance` gets it: checked, complete, waiting for its answer."""

    @property
    def request(self) -> InferRequest:
        """With every input the model is to see, control inputs and state among them."""

    @property
    def cancelled(self) -> bool:
        """Nobody waits any more: the work may be dropped, a last `reply` is still due."""

    def reply(
        self,
        outputs: Sequence[Tensor] | HeadraceError | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Answer, from the loop's thread. An error is always final. None and `final`: no (more) responses.

        Only decoupled models may reply more than once, or only with None.
        """


@runtime_checkable
class ComputeInstance(Protocol):
    """Computes joined tensors. Called by one thread at a time, not always the same."""

    def compute(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """Compute the `wanted` outputs (more may be given); with the batch dimension first if the model batches.

        Raise a `HeadraceError` for what callers should read; the text of other exceptions goes to the log only.
        """

    def close(self) -> None:
        """Free everything, the memory of the device too."""


@runtime_checkable
class DeviceComputing(Protocol):
    """A `ComputeInstance` that can leave tensors in the memory of its device, for the next step of an ensemble.

    What it leaves there is an object with the `shape`, `dtype`, `reshape` and slices of a numpy array, which
    `np.concatenate` joins on the device (by `__array_function__`) and `np.asarray` copies to the host. Both of its ways
    to compute take such objects, also those of another instance.
    """

    def compute_on_device(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> Mapping[str, Array]:
        """As `compute`; what it returns lies on the device and is finished."""


class RequestInstance(Protocol):
    """Computes requests as they are."""

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        """Take a batch, from the loop's thread, without blocking.

        Reply to each work; then, or before, call `finished` (from the loop's thread, once): another batch may come.
        """

    def close(self) -> None:
        """End it. Called from a loader thread when no work is left, or when the server has no more patience."""


class Model(Protocol):
    """One loaded version of a model."""

    def open(self, placement: Placement) -> ComputeInstance | RequestInstance:
        """Make an execution context. May block: called from a loader thread."""

    def close(self) -> None:
        """Free what the instances shared. Called after the last instance is closed."""


class Backend(Protocol):
    """One format of models. Stateless; made once per process, when first needed."""

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """What the model's files tell that the configuration may leave out: a ModelConfig message to be merged under it.

        None when they tell nothing. May block. Raises `InvalidArgument` where the two contradict each other.
        """

    def usable_gpus(self, present: int) -> int:
        """How many of the machine's GPUs it can use, as it is installed here: where KIND_AUTO goes depends on it."""

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> Model:
        """Load a version. May block: called from a loader thread."""


@runtime_checkable
class Abandoning(Protocol):
    """A backend that can end a load that is under way. For others the server waits, when it closes."""

    def abandon(self, model_folder: Path) -> None:
        """Let `complete` and `open` of this model's versions fail soon. From the loop's thread."""
