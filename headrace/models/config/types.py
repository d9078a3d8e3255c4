# SPDX-License-Identifier: Apache-2.0
"""The typed model configuration that the engine and the backends use: frozen, with defaults.

`messages.typed_config` creates it from a ModelConfig message, which stays in `ModelConfig.proto`. Names are the schema's
and include units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.core.dtypes import DType

Dims = tuple[int, ...]
"""Sizes without the batch dimension; -1 for any size."""


def fits(shape: tuple[int, ...], dims: Dims) -> bool:
    """Return whether the dims allow a shape."""
    if len(shape) != len(dims):
        return False
    for size, dim in zip(shape, dims, strict=True):  # noqa: SIM110  # called for every request: a generator is slower
        if dim not in (size, -1):
            return False
    return True


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input, as the configuration declares it."""

    name: str
    dtype: DType | None
    """None: any type (built-in models only)."""
    dims: Dims | None
    """None: any rank and size (built-in models only)."""
    reshape: Dims | None = None
    """The shape that the model expects, if it differs from that of the request."""
    optional: bool = False
    allow_ragged_batch: bool = False
    pad_value: float | None = None
    """Headrace's own: batch requests of different sizes, padding the smaller ones with this value."""
    finite: bool = False
    """Headrace's own: refuse NaN and infinities."""
    is_shape_tensor: bool = False


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One output, as the configuration declares it."""

    name: str
    dtype: DType | None
    dims: Dims | None
    reshape: Dims | None = None
    """The shape that the model returns, if it differs from that of the response."""
    label_filename: str = ""
    padded_like: str = ""
    """Headrace's own: trim variable sizes to those that this input had before padding."""
    is_shape_tensor: bool = False


BatchInputKind = Literal[
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
]


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input that describes the batch; the engine creates it for ragged batches."""

    kind: BatchInputKind
    target_names: tuple[str, ...]
    dtype: DType
    source_input: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs that are split by the shapes of an input (`BATCH_SCATTER_WITH_INPUT_SHAPE`)."""

    target_names: tuple[str, ...]
    source_input: str


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which version folders to serve."""

    kind: Literal["latest", "all", "specific"] = "latest"
    latest: int = 1
    specific: tuple[int, ...] = ()

    def choose(self, present: set[int]) -> set[int]:
        """Return the versions to serve, of those that exist."""
        if self.kind == "all":
            return set(present)
        if self.kind == "specific":
            return present & set(self.specific)
        return set(sorted(present)[-self.latest :])


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that executions need a number of, shared by all models that name it (`rate_limiter.resources`)."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """Instances of one kind. After normalisation `kind` is never "auto" and `name` never empty."""

    name: str
    kind: Literal["auto", "cpu", "gpu", "model"] = "cpu"
    count: int = 1
    gpus: tuple[int, ...] = ()
    passive: bool = False
    resources: tuple[Resource, ...] = ()
    priority: int = 0
    """`rate_limiter.priority`: 1 goes first; 0 is not set, and counts as 1."""
    runs: Literal["auto", "inline", "thread"] = "auto"
    """Headrace's own: where a model runs that does not need a process of its own."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Limits of one priority level of the queue."""

    timeout_action: Literal["reject", "delay"] = "reject"
    default_timeout_microseconds: int = 0
    """0: none."""
    allow_timeout_override: bool = False
    max_queue_size: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """Dynamic batching."""

    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    """0: no priorities. Otherwise 1 is the highest."""
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policies: Mapping[int, QueuePolicy] = field(default_factory=dict)
    auto_delay: bool = False
    """Headrace's own: `max_queue_delay_microseconds: auto`."""
    latency_target_ms: float = 0.0
    """Headrace's own: the 99th percentile of latency that the automatic delay aims at."""


ControlKind = Literal["start", "end", "ready", "corrid"]


@dataclass(frozen=True, slots=True)
class ControlInput:
    """A control input: the position of a request in its sequence, for stateful models."""

    name: str
    kind: ControlKind
    dtype: DType
    """For start, end and ready: INT32, FP32 or BOOL; for corrid: an integer type or BYTES."""
    false_value: float = 0
    true_value: float = 1


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state of a sequence before its first request."""

    name: str
    dtype: DType
    dims: Dims
    zero: bool
    data_file: str = ""
    """A file in `initial_state/` of the model's folder, if not `zero`."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Implicit state: an output of one request that is an input of the next one in its sequence."""

    input_name: str
    output_name: str
    dtype: DType
    dims: Dims
    initial: tuple[InitialState, ...] = ()
    use_same_buffer: bool = False
    use_growable_memory: bool = False


@dataclass(frozen=True, slots=True)
class DirectStrategy:
    """The direct strategy: each sequence has a slot of one instance."""

    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class OldestStrategy:
    """The oldest strategy: sequences of one instance are batched dynamically, the oldest requests first."""

    max_candidate_sequences: int = 0
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    """Sequence batching, for stateful models."""

    strategy: DirectStrategy | OldestStrategy = DirectStrategy()
    max_sequence_idle_microseconds: int = 1_000_000
    controls: tuple[ControlInput, ...] = ()
    states: tuple[StateSpec, ...] = ()
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One model of an ensemble. The maps are from the model's tensor names to the ensemble's."""

    model_name: str
    model_version: int = -1
    """-1: the newest."""
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnsembleScheduling:
    """A graph of models."""

    steps: tuple[EnsembleStep, ...]
    max_inflight_requests: int = 0
    """0: no limit."""


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One input of a warm-up request."""

    dtype: DType
    dims: Dims
    source: Literal["zero", "random", "file"]
    data_file: str = ""
    """A file in `warmup/` of the model's folder."""


@dataclass(frozen=True, slots=True)
class Warmup:
    """A request that is run before the model is ready."""

    name: str
    batch_size: int
    inputs: Mapping[str, WarmupInput]
    count: int = 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of one model."""

    name: str
    backend: str
    """A name in `backends.table`, also if the file says `platform`; "ensemble" for ensembles."""
    platform: str = ""
    """As written in the file; only shown by protocols."""
    max_batch_size: int = 0
    """0: the model takes one request at a time and has no batch dimension."""
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[OutputSpec, ...] = ()
    version_policy: VersionPolicy = VersionPolicy()
    instance_groups: tuple[InstanceGroup, ...] = ()
    scheduling: DynamicBatching | SequenceBatching | EnsembleScheduling | None = None
    """None: one request after the other."""
    decoupled: bool = False
    response_cache: bool = False
    default_model_filename: str = ""
    cc_model_filenames: Mapping[str, str] = field(default_factory=dict)
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    warmups: tuple[Warmup, ...] = ()
    proto: Any = field(default=None, compare=False, repr=False)
    """The ModelConfig message of this configuration."""

    def internal_inputs(self) -> set[str]:
        """Return the inputs that the engine adds and callers do not send: controls, states and batch inputs."""
        names = {name for batch_input in self.batch_inputs for name in batch_input.target_names}
        if isinstance(self.scheduling, SequenceBatching):
            names |= {control.name for control in self.scheduling.controls}
            names |= {state.input_name for state in self.scheduling.states}
        return names

    def client_inputs(self) -> list[InputSpec]:
        """Return the inputs that callers send."""
        internal = self.internal_inputs()
        return [spec for spec in self.inputs if spec.name not in internal]
