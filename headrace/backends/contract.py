# SPDX-License-Identifier: Apache-2.0
"""The interface between the engine and a backend.

    Backend --load--> Model (one version) --open--> instance (one execution context)

There are two kinds of instance. A `ComputeInstance` turns arrays into arrays and returns: the engine joins requests
into a batch, chooses the thread (the event loop's own if the model is fast enough) and splits the result. A
`RequestInstance` takes the requests themselves, because it is a separate process, answers out of order, or answers
several times: it replies to each request at any time, from the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy.typing as npt

from headrace.core.errors import HeadraceError
from headrace.core.kept_memory import KeptMemory
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.requests import NO_PARAMETERS, InferRequest, InferResponse, Parameters
from headrace.core.telemetry.metrics import Registry
from headrace.core.tensors import Tensor
from headrace.models.adapters import AdapterCatalog
from headrace.models.config.types import ModelConfig

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The folders of one model version."""

    model_folder: Path
    """`<repository>/<model>`."""
    version: int
    version_folder: Path
    """`<repository>/<model>/<version>`."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The device that an instance runs on."""

    name: str
    """`<group>_<i>_cpu` or `<group>_<i>_gpu<g>`; for logs and messages."""
    kind: Literal["cpu", "gpu", "model"] = "cpu"
    device: int = 0
    """The GPU index, for kind "gpu"."""


Answer = InferResponse | HeadraceError | None
"""One response, or the error that ends the request, or None when no more responses follow."""


class Nodes(Protocol):
    """The machines of a server on several. `llm.tensor_parallel.node_pool.NodePool`, for the backend `llm`."""

    count: int


class EngineServices(Protocol):
    """Functions of the engine that models may use: calls to other models, and metrics."""

    loop: asyncio.AbstractEventLoop
    metrics: Registry
    kv_transfer: KvTransferSettings
    """The role of this server in disaggregated prefill and decode; no role when the two are not separate."""
    adapters: AdapterCatalog
    """Where the LoRA adapters of all models are found."""
    nodes: Nodes | None
    """The other nodes of a server on several machines; None for a server on one."""
    kept_memory: KeptMemory | None
    """What may be kept of unloaded models for the next ones; None if nothing may, because no model loads on demand."""

    def infer(self, request: InferRequest, on_response: Callable[[Answer, bool], None]) -> Callable[[], None]:
        """Run a request on another model and pass each (answer, is_last) to the callback. Call from the loop's thread.

        The callback also runs in the loop's thread. Returns a function that cancels the request.
        """

    def is_ready(self, model_name: str, model_version: str) -> bool:
        """Return whether the server would accept a request for this model now. Safe from any thread."""

    def load(
        self, model_name: str, config_json: str, files: Mapping[str, bytes], done: Callable[[Answer], None]
    ) -> None:
        """Load a model as the repository API does; `done` gets None or the error, in the loop's thread."""

    def unload(self, model_name: str, done: Callable[[Answer], None]) -> None:
        """Unload a model as the repository API does."""


class Work(Protocol):
    """A validated request that a `RequestInstance` has to answer."""

    @property
    def request(self) -> InferRequest:
        """All inputs of the model, control inputs and state included."""

    @property
    def cancelled(self) -> bool:
        """The client has cancelled: the work may be dropped, but a final `reply` is still due."""

    def reply(
        self,
        outputs: Sequence[Tensor] | HeadraceError | None,
        *,
        final: bool = True,
        parameters: Parameters = NO_PARAMETERS,
    ) -> None:
        """Send a response, from the loop's thread. An error is always final. None with `final`: no (more) responses.

        Only decoupled models may reply more than once, or reply with None alone.
        """


@runtime_checkable
class ComputeInstance(Protocol):
    """Runs batches of tensors. One thread calls it at a time, but not always the same thread."""

    def compute(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Compute the `requested` outputs (it may return more); the batch dimension comes first if the model batches.

        Raise a `HeadraceError` for errors that clients should see; the text of other exceptions goes to the log only.
        """

    def close(self) -> None:
        """Free all memory, device memory included."""


@runtime_checkable
class DeviceComputeInstance(Protocol):
    """A `ComputeInstance` that can leave its outputs in device memory, for the next step of an ensemble.

    Such an output is an object with the `shape`, `dtype`, `reshape` and slices of a numpy array. `np.concatenate` joins
    such objects on the device (by `__array_function__`) and `np.asarray` copies them to the host. `compute` and
    `compute_on_device` both accept them as inputs, also those of another instance.
    """

    def compute_on_device(self, inputs: Mapping[str, Array], requested: Collection[str]) -> Mapping[str, Array]:
        """Compute as `compute` does, but return finished outputs in device memory."""


class RequestInstance(Protocol):
    """Runs requests one by one instead of as joined tensors."""

    def execute(self, batch: Sequence[Work], finished: Callable[[], None]) -> None:
        """Take a batch, from the loop's thread, without blocking.

        Reply to each request. Call `finished` once, from the loop's thread, before or after that: another batch may
        follow.
        """

    def close(self) -> None:
        """Stop the instance. A loader thread calls this when no work is left, or when the shutdown timeout expires."""


class Model(Protocol):
    """One loaded version of a model."""

    def open(self, placement: Placement) -> ComputeInstance | RequestInstance:
        """Create an execution context. May block: the engine calls it from a loader thread."""

    def close(self) -> None:
        """Free what the instances shared. The engine calls it after the last instance is closed."""


SleepLevel = Literal[1, 2]
"""How deep a model sleeps. 1: its weights are in host memory. 2: its weights are dropped, and are read again.

In both, its KV cache is released.
"""


@runtime_checkable
class SleepableModel(Model, Protocol):
    """A model that can give its memory back and take it again, without being loaded again.

    The engine calls both methods from a loader thread, one at a time, while no request is in flight; a batch whose
    request was cancelled may still be computed, and the model waits for that. `close` may be called while it sleeps.
    """

    def sleep(self, level: SleepLevel) -> Mapping[str, int]:
        """Give memory back; return the bytes by place: "host", "gpu0". May be called again to sleep deeper.

        Raise `FailedPrecondition`, and change nothing, if this model cannot sleep so deep.
        """

    def wake(self) -> None:
        """Take the memory again. If it fails, the model sleeps on, and this may be called again."""


class Backend(Protocol):
    """A model format. Stateless; created once per process, on first use."""

    def complete(self, config: ModelConfig, files: ModelFiles) -> Any | None:
        """Return what the model files say and the configuration may omit: a ModelConfig message to merge under it.

        Return None if the files say nothing. May block. Raise `InvalidArgument` if the two contradict each other.
        """

    def usable_gpus(self, present: int) -> int:
        """Return how many of the `present` GPUs this installation can use. KIND_AUTO depends on it."""

    def load(self, config: ModelConfig, files: ModelFiles, services: EngineServices) -> Model:
        """Load a version. May block: the engine calls it from a loader thread."""


@runtime_checkable
class AbortableBackend(Protocol):
    """A backend that can abort a load in progress. For other backends, the server waits for the load when it stops."""

    def abandon(self, model_folder: Path) -> None:
        """Make `complete` and `open` of this model's versions fail soon. Call from the loop's thread."""
